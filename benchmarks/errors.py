"""How far each fast path is from float64, beside the plain path in the same precision.

    python benchmarks/errors.py [--device cuda] [--rows attention head layers]

Relative errors (norm of the difference over the norm in float64) of the value and of each gradient; of a path their root
mean square, and the largest. In half precision the mean of a fast path may not be larger than that of the plain path in
that precision, but for a tenth: two roundings of one size differ by luck. Of one gradient of 32 numbers they differ by more
than of all: each may be twice as far off as the plain path's own. In float32 none may be off by more than 1e-5. Prints a
row a path and exits with 1 where one is too far.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import scaled_dot_product_attention

from gspo.config import CreateConfig, ModelConfig
from gspo.training import logprobs
from gspo.training.attention import Layout, Segment, packed_attention
from gspo.training.logprobs import linear_logprobs
from gspo.training.policy import Policy, load_policy

LENGTHS = [700, 512, 300, 129, 64, 7, 1]
PROMPTS = {"no": [None] * 7, "a": [None, None, None, None, 3, 3, 3]}
TOKENS, WIDTH, VOCABULARY = 900, 256, 5003
"""Of the rows of log-probabilities."""
LUCK, LUCK_OF_ONE = 1.1, 2.0
FLOAT32_BOUND = 1e-5


def relative(a: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((a.double() - exact).norm() / exact.norm())


def gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The value and the gradient of every input, for an upstream gradient that is the same in every precision."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.device, out.dtype)
    (out * upstream).sum().backward()
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def report(name: str, dtype: torch.dtype, fast: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> bool:
    """One row; whether it is within bounds."""
    mine, theirs = ([relative(a, e) for a, e in zip(xs, exact, strict=True)] for xs in (fast, plain))
    ours, plains = (math.hypot(*some) / math.sqrt(len(some)) for some in (mine, theirs))
    if dtype == torch.float32:
        good = max(mine) <= FLOAT32_BOUND
    else:
        good = ours <= LUCK * plains and all(a <= LUCK_OF_ONE * b for a, b in zip(mine, theirs, strict=True))
    errors = f"fast {ours:.2e} (largest {max(mine):.1e})  plain {plains:.2e} ({max(theirs):.1e})"
    print(f"{name:52} {str(dtype)[6:]:9} {errors}  {'' if good else 'TOO FAR'}", flush=True)
    return good


def attention_rows(device: str) -> list[bool]:
    """Packed attention against one segment after the other, without shared prompts and with one."""
    out = []
    shapes = ((4, 4, 64), (8, 2, 128), (4, 1, 256), (4, 2, 96))
    for (heads, groups, width), (shared, prompts) in itertools.product(shapes, PROMPTS.items()):
        g = torch.Generator().manual_seed(0)
        wide = [torch.randn(1, h, sum(LENGTHS), width, generator=g).to(device) for h in (heads, groups, groups)]
        segments = [Segment(n, prompt) for n, prompt in zip(LENGTHS, prompts, strict=True)]
        packed = functools.partial(packed_rows, Layout.of(segments, device))
        alone = functools.partial(one_by_one, prompts)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            inputs = [x.to(dtype) for x in wide]
            exact = gradients(alone, [x.double() for x in inputs])
            name = f"attention {heads}/{groups} heads of {width}, {shared} shared prompt"
            out.append(report(name, dtype, gradients(packed, inputs), gradients(alone, inputs), exact))
    return out


def packed_rows(layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What training computes."""
    return packed_attention(torch.nn.Module(), q, k, v, None, layout=layout)[0]


def one_by_one(prompts: list[int | None], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each segment alone, after the prompt that it sees."""
    qs, ks, vs = (x.split(LENGTHS, dim=2) for x in (q, k, v))
    out = []
    for i, prompt in enumerate(prompts):
        k, v = (x[i] if prompt is None else torch.cat([x[prompt], x[i]], dim=2) for x in (ks, vs))
        n, total = qs[i].shape[2], k.shape[2]
        seen = torch.arange(total, device=q.device) <= total - n + torch.arange(n, device=q.device)[:, None]
        out.append(scaled_dot_product_attention(qs[i], k, v, seen, enable_gqa=True))
    return torch.cat(out, dim=2).transpose(1, 2)


def head_rows(device: str) -> list[bool]:
    """Log-probabilities and their gradients, and entropies, against a plain softmax over [tokens, vocabulary]."""
    out, g = [], torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=g).to(device) for n in (TOKENS, VOCABULARY))
    weight /= 8
    target = torch.randint(VOCABULARY, (TOKENS,), generator=g).to(device)
    logprobs.CHUNK_ELEMENTS[device] = VOCABULARY * 256
    for temperature, wide in ((1.0, False), (0.7, False), (1.0, True)):

        def fast(h: Tensor, w: Tensor, t: float = temperature, wide: bool = wide) -> Tensor:
            return linear_logprobs(h, w, target, temperature=t, float32_head=wide)[0]

        def plain(h: Tensor, w: Tensor, t: float = temperature, wide: bool = wide) -> Tensor:
            h, w = (x.float() if wide and x.dtype != torch.float64 else x for x in (h, w))
            logits = h @ w.T
            logits = logits if logits.dtype == torch.float64 else logits.float()
            return (logits / t).log_softmax(-1).gather(1, target[:, None])[:, 0]

        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            inputs = [x.to(dtype) for x in (hidden, weight)]
            exact = gradients(plain, [x.double() for x in inputs])
            name = f"log-probabilities at temperature {temperature:g}{', float32 head' if wide else ''}"
            out.append(report(name, dtype, gradients(fast, inputs), gradients(plain, inputs), exact))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        h, w = hidden.to(dtype), weight.to(dtype)
        fast_T = linear_logprobs(h, w, target, temperature=0.7)[1]
        plain_T, exact_T = (Categorical(logits=x / 0.7).entropy() for x in ((h @ w.T).float(), h.double() @ w.double().T))
        out.append(report("entropies at temperature 0.7", dtype, [fast_T], [plain_T], [exact_T]))
    return out


def after_their_prompts(ids: Tensor, policy: Policy) -> Tensor:
    """Hidden states of each segment alone, after the prompt that it sees."""
    out, parts = [], ids.split(LENGTHS, dim=1)
    for own, prompt in zip(parts, PROMPTS["a"], strict=True):
        row = own if prompt is None else torch.cat([parts[prompt], own], dim=1)
        at = torch.arange(row.shape[1], device=ids.device)[None]
        alone = Layout.of([Segment(row.shape[1])], ids.device)
        out.append(policy.hidden(row, at, layout=alone)[0, -own.shape[1] :])
    return torch.cat(out)


def with_a_shared_prompt(ids: Tensor, policy: Policy) -> Tensor:
    """The same of one packed row."""
    segments = [Segment(n, prompt) for n, prompt in zip(LENGTHS, PROMPTS["a"], strict=True)]
    start = [0 if s.prompt is None else LENGTHS[s.prompt] for s in segments]
    at = torch.cat([torch.arange(n) + first for n, first in zip(LENGTHS, start, strict=True)])[None].to(ids.device)
    return policy.hidden(ids, at, layout=Layout.of(segments, ids.device))[0]


def layer_rows(device: str) -> list[bool]:
    """A whole model with each setting against the same weights in float64: log-probabilities and all gradients."""
    create = CreateConfig(
        alphabet="0123456789", hidden_size=256, intermediate_size=512, num_layers=4, num_heads=8, num_kv_heads=4
    )
    config = ModelConfig(create=create, device=device)  # type: ignore[arg-type]
    ids = torch.randint(12, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0)).to(device)
    places = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(device)
    layout = Layout.of([Segment(n) for n in LENGTHS], device)

    def run(
        dtype: torch.dtype,
        computed: torch.dtype | None = None,
        hidden: Callable[[Policy], Tensor] = lambda policy: policy.hidden(ids, places, layout=layout)[0],
        **settings: str,
    ) -> list[Tensor]:
        policy = load_policy(config.model_copy(update=settings), temperature=1.0, seed=0)
        policy.model.to(dtype).to(computed or dtype)
        logp = linear_logprobs(hidden(policy), policy.head, ids[0], temperature=1.0)[0]
        logp.sum().backward()
        return [logp.detach(), *(p.grad for p in policy.trainable.values())]

    chosen = [("torch", "selective"), ("compile", "none"), ("compile", "selective"), ("compile", "full")]
    if device == "cuda":
        chosen.append(("liger", "none"))  # last: it is for the whole process
    # On a CPU torch adds up the embeddings' gradient in half precision, which drowns everything else.
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if device == "cuda" else (torch.float32,)
    exact, plain = (
        {dtype: run(dtype, computed, kernels="torch") for dtype in dtypes} for computed in (torch.float64, None)
    )
    together, alone = functools.partial(with_a_shared_prompt, ids), functools.partial(after_their_prompts, ids)
    out = [
        report(
            f"layers by {kernels}, a shared prompt",
            dtype,
            run(dtype, hidden=together, kernels=kernels),
            run(dtype, hidden=alone, kernels="torch"),
            run(dtype, torch.float64, alone, kernels="torch"),
        )
        for kernels in ("torch", "compile")
        for dtype in dtypes
    ]
    return out + [
        report(f"layers by {kernels}, checkpointing {kept}", dtype, found, plain[dtype], exact[dtype])
        for kernels, kept in chosen
        for dtype in dtypes
        if (found := run(dtype, kernels=kernels, checkpointing=kept))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    rows = {"attention": attention_rows, "head": head_rows, "layers": layer_rows}
    parser.add_argument("--rows", nargs="+", choices=rows, default=[*rows], help="what to compare")
    asked = parser.parse_args()
    good = [one for name in asked.rows for one in rows[name](asked.device)]  # all are printed
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
