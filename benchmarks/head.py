"""Log-probabilities and entropy out of hidden states: ours beside those of kept libraries, as one table.

    pip install liger-kernel cut-cross-entropy && python benchmarks/head.py

Each gets T hidden states, the output matrix and T tokens, and an upstream gradient for each token, as gspo_token needs it
for its advantages. Errors are relative, to float64: of the log-probabilities, and the larger one of the two gradients. Peak
memory is what a forward and a backward pass add, the matrix's gradient (in the weights' precision) among it. A row of what
is not installed, or does not take this GPU or these inputs, tells why.

Not covered: adapters on the output matrix, clipped tokens (ours then computes less).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from workload import Interval, parsed, positive

from gspo.training import logprobs
from gspo.training.logprobs import linear_logprobs

Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Hidden states [T, H], matrix [V, H], tokens [T] to log-probabilities [T], and the entropies where it has them."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to compute them."""

    name: str
    make: Callable[[], Head]
    """Imports what it needs. Raises ImportError."""
    temperature: bool = False
    """Whether it takes a temperature."""
    entropy: bool = False
    """Whether it has entropies."""


def whole() -> Head:
    """As one would write it, with all logits in memory."""

    def head(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor | None]:
        logp_TV = (hidden_TH @ weight_VH.T).float().log_softmax(-1)
        entropy_T = -torch.linalg.vecdot(logp_TV.detach().exp(), logp_TV.detach())
        return logp_TV.gather(1, target_T[:, None])[:, 0], entropy_T

    return head


def ours(*, kernels: bool) -> Head:
    """Chunks of logits, with our kernels between the products or with torch's operations."""

    has = logprobs._has_kernels if kernels else lambda logits_CV: False

    def head(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor | None]:
        logprobs._has_kernels = has
        return linear_logprobs(hidden_TH, weight_VH, target_T, temperature=1.0)

    return head


def liger() -> Head:
    """Liger's cross-entropy by token."""
    from liger_kernel.transformers.functional import (  # pyright: ignore[reportMissingImports]
        liger_fused_linear_cross_entropy as function,
    )

    return lambda hidden, weight, target: (-function(hidden, weight, target, reduction="none"), None)


def liger_scaled() -> Head:
    """Liger's scaled cross-entropy by token, with entropy; on Hopper its CuTe kernels."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearScaledCrossEntropyFunction as Function,
    )

    def head(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor | None]:
        loss_T, entropy_T = Function.apply(hidden_TH, weight_VH, target_T, 1.0, -100, 1, True)
        return -loss_T, entropy_T.detach()

    return head


def cut(filter_eps: str | None) -> Head:
    """Cut cross-entropy by token (Wijmans et al., arXiv:2411.09009); its filter leaves out small gradients."""
    from cut_cross_entropy import linear_cross_entropy as function  # pyright: ignore[reportMissingImports]

    return lambda hidden, weight, target: (
        -function(hidden, weight, target, reduction="none", filter_eps=filter_eps),
        None,
    )


def torchs() -> Head:
    """torch's own, from 2.13 on, in chunks."""
    try:
        from torch.nn import LinearCrossEntropyOptions  # pyright: ignore[reportAttributeAccessIssue]
        from torch.nn.functional import linear_cross_entropy  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        raise ImportError(f"torch {torch.__version__} has none") from error
    options = LinearCrossEntropyOptions()
    return lambda hidden, weight, target: (
        -linear_cross_entropy(hidden, weight, target, reduction="none", options=options),
        None,
    )


CONTENDERS = (
    Contender("all logits in memory", whole, temperature=True, entropy=True),
    Contender("ours", lambda: ours(kernels=True), temperature=True, entropy=True),
    Contender("ours, torch's operations", lambda: ours(kernels=False), temperature=True, entropy=True),
    Contender("Liger, cross-entropy", liger),
    Contender("Liger, scaled cross-entropy", liger_scaled, temperature=True, entropy=True),
    Contender("cut cross-entropy, all gradients", lambda: cut(None)),
    Contender("cut cross-entropy, its default filter", lambda: cut("high")),
    Contender("torch's linear_cross_entropy", torchs),
)


def relative(a: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm, in float64, some rows at a time."""
    parts = [(x.double() - e.double()).square().sum() for x, e in zip(a.split(4096), exact.split(4096), strict=True)]
    return float(torch.stack(parts).sum().sqrt() / exact.double().norm())


def milliseconds(
    work: Callable[[], None], leaves: Sequence[Tensor], interval: Interval, repeats: int
) -> tuple[float, float]:
    """Median over the repeats, after three that are not counted, and the peak GiB beyond what was held."""
    rows = []
    for _ in range(3 + repeats):
        for leaf in leaves:
            leaf.grad = None
        interval.begin()
        work()
        rows.append(interval.end())
    rows = rows[3:]
    return 1e3 * statistics.median(r["seconds"] for r in rows), max(r["peak_gib"] - r["held_gib"] for r in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"tokens": 16384, "width": 1024, "vocabulary": 151936, "repeats": 7}.items():
        parser.add_argument(f"--{name}", type=positive, default=value)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parsed(parser)
    case = Case(args)
    sizes = f"{args.tokens} tokens, width {args.width}, vocabulary {args.vocabulary}, {args.dtype}"
    where = torch.cuda.get_device_name() if args.device == "cuda" else "a CPU"
    print(f"{sizes}; torch {torch.__version__}, {where}\n")
    print("| | forward ms | forward and backward ms | GiB added | error: values | gradients | temperature | entropy |")
    print("|---|---|---|---|---|---|---|---|")
    for contender in CONTENDERS:
        try:
            row = case.measure(contender.make(), args.repeats)
        except Exception as error:  # a library's refusal, whatever it raises
            said = (str(error).strip() or type(error).__name__).splitlines()[0][:150]
            print(f"| {contender.name} | {said} |", flush=True)
            continue
        can = " | ".join("yes" if can else "no" for can in (contender.temperature, contender.entropy))
        print(f"| {contender.name} | {row} | {can} |", flush=True)
    return 0


class Case:
    """Inputs, and what float64 makes of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        dtype, device = getattr(torch, args.dtype), torch.device(args.device)
        hidden_TH = torch.randn(args.tokens, args.width, device=device).to(dtype)
        weight_VH = (torch.randn(args.vocabulary, args.width, device=device) / args.width**0.5).to(dtype)
        self.leaves = [hidden_TH.requires_grad_(), weight_VH.requires_grad_()]
        self.target_T = torch.randint(args.vocabulary, (args.tokens,), device=device)
        self.upstream_T = torch.randn(args.tokens, device=device)
        self.interval = Interval(device)
        exact = [x.detach().double().requires_grad_() for x in self.leaves]
        logp_T, _ = linear_logprobs(*exact, self.target_T, temperature=1.0)  # pyright: ignore[reportCallIssue]
        logp_T.backward(self.upstream_T.double())
        self.exact = [logp_T.detach(), *(x.grad.float() for x in exact if x.grad is not None)]

    def measure(self, head: Head, repeats: int) -> str:
        """The measured cells of a row."""

        def forward() -> None:
            with torch.no_grad():
                head(*self.leaves, self.target_T)  # pyright: ignore[reportCallIssue]

        def both() -> None:
            logp_T, _ = head(*self.leaves, self.target_T)  # pyright: ignore[reportCallIssue]
            logp_T.backward(self.upstream_T.to(logp_T.dtype))

        for leaf in self.leaves:
            leaf.grad = None
        both()
        logp_T = head(*self.leaves, self.target_T)[0].detach()  # pyright: ignore[reportCallIssue]
        found = [logp_T, *(x.grad for x in self.leaves if x.grad is not None)]
        value, *off = (relative(x, e) for x, e in zip(found, self.exact, strict=True))
        del logp_T, found
        alone, _ = milliseconds(forward, self.leaves, self.interval, repeats)
        seconds, peak = milliseconds(both, self.leaves, self.interval, repeats)
        return f"{alone:.1f} | {seconds:.1f} | {peak:.2f} | {value:.1e} | {max(off):.1e}"


if __name__ == "__main__":
    sys.exit(main())
