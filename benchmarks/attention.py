"""Ways to compute packed attention, forward and backward, side by side: python benchmarks/attention.py 0.6B.

MODEL is one of Qwen3's shapes; only its heads count. A row a layout: 16 segments of 1,151 tokens, as many of W2's lengths
as fit into 18,432 tokens, one of 32,768, and groups of 8 responses of 512 tokens behind shared prompts of 1,024 and 4,096.
Ways: FlashAttention-4 and torch's varlen kernels by gspo's own operation; torch's flex attention, compiled, its mask made
once and not counted; padded buckets through scaled dot product attention, which is what a CPU gets. Milliseconds are
medians of the repeats, the host's time included, ways in turn. "off" is the largest relative difference of value and
gradients from the first way of the row. On a CPU there are buckets alone.

Not covered: attention inside of a compiled layer, where the host's time can hide behind the GPU's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from workload import SHAPES, parsed, positive, response_lengths

from gspo.training import varlen
from gspo.training.attention import Layout, Segment, _in_buckets

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query [N, h, D], key, value -> [N, h, D]."""
GROUP, RESPONSE, BUDGET = 8, 512, 18_432
FLASH = varlen.flash_attention
"""Replaced in `operation`: training takes the fastest kernels that there are, and has no setting for others."""


def layouts(shrink: int) -> Iterator[tuple[str, list[Segment]]]:
    """What is packed into a row; all lengths over `shrink`."""

    def alone(lengths: list[int]) -> list[Segment]:
        return [Segment(max(1, n // shrink)) for n in lengths]

    yield "16 x 1,151", alone([1151] * 16)
    drawn, some = [n + 127 for n in response_lengths("W2", 128)], []
    while sum(some) + drawn[len(some)] <= BUDGET:
        some.append(drawn[len(some)])
    yield f"{len(some)} of W2's lengths", alone(some)
    yield "one of 32,768", alone([32_768])
    for prompt, groups in ((1024, 4), (4096, 2)):
        responses = [Segment(max(1, RESPONSE // shrink), g) for g in range(groups) for _ in range(GROUP)]
        yield f"{groups} shared prompts of {prompt:,}", [*alone([prompt] * groups), *responses]


def operation(layout: Layout, scale: float, kernels: varlen.Kernels | None) -> Way:
    """gspo's operation with these kernels, torch's own where None."""

    def way(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        varlen.flash_attention = lambda gpu: kernels  # pyright: ignore[reportAttributeAccessIssue]
        starts = layout.start_S1, layout.query_start_F1, layout.key_start_F1
        return varlen.segment_attention(query, key, value, *starts, layout.sizes, scale)[0]

    return way


def flex(layout: Layout, device: str, compiled: Callable[..., Tensor]) -> Way:
    """torch's flex attention with a block mask of who sees whom."""
    from torch.nn.attention.flex_attention import create_block_mask

    lengths = torch.tensor([s.length for s in layout.segments])
    number_S = torch.arange(len(lengths))
    prompt_S = torch.tensor([i if s.prompt is None else s.prompt for i, s in enumerate(layout.segments)])
    own_N, prompt_N = (x.repeat_interleave(lengths).to(device) for x in (number_S, prompt_S))

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ((own_N[query] == own_N[key]) & (query >= key)) | (
            (prompt_N[query] == own_N[key]) & (own_N[query] != own_N[key])
        )

    size = len(own_N)
    mask = create_block_mask(sees, None, None, size, size, device=device)

    def way(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = (x.transpose(0, 1)[None] for x in (query, key, value))
        return compiled(*rows, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)  # pyright: ignore[reportCallIssue]

    return way


def ways(layout: Layout, width: int, device: str, compiled: Callable[..., Tensor] | None) -> dict[str, Way]:
    """Those that this machine has, by name."""
    out: dict[str, Way] = {}
    if device == "cuda":
        if flash := FLASH(torch.cuda.current_device()):
            out["FlashAttention-4"] = operation(layout, width**-0.5, flash)
        out["torch varlen"] = operation(layout, width**-0.5, None)
    if compiled is not None:
        out["flex"] = flex(layout, device, compiled)
    out["buckets"] = lambda *row: _in_buckets(layout, *row, None, 0.0)  # pyright: ignore[reportCallIssue]
    return out


def once(way: Way, inputs: list[Tensor], grad: Tensor, device: str) -> tuple[float, list[Tensor]]:
    """Milliseconds of one forward and backward pass, and the value and gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    out = way(*leaves)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1000, found


def off(found: list[Tensor], first: list[Tensor]) -> float:
    """The largest relative difference of the value and the three gradients."""
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, first, strict=True))


def row(name: str, segments: list[Segment], args: argparse.Namespace, compiled: Callable[..., Tensor] | None) -> list[str]:
    """The lines of one layout, a way each."""
    shape, layout = SHAPES[args.model], Layout.of(segments, args.device)
    heads, groups, width = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    g, size = torch.Generator().manual_seed(0), sum(s.length for s in segments)
    made = (torch.randn(size, h, width, generator=g) for h in (heads, groups, groups, heads))
    *inputs, grad = (x.to(args.device, getattr(torch, args.dtype)) for x in made)
    mine, took, results = ways(layout, width, args.device, compiled), {}, {}
    for k in range(args.warm + args.repeats):
        for way, function in mine.items():
            ms, found = once(function, inputs, grad, args.device)
            results.setdefault(way, found)
            if k >= args.warm:
                took.setdefault(way, []).append(ms)
    first = next(iter(results.values()))
    return [f"| {name} | {way} | {statistics.median(took[way]):.2f} | {off(results[way], first):.1e} |" for way in mine]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=positive, default=20)
    parser.add_argument("--warm", type=positive, default=3, help="rounds before those that count, compiling among them")
    parser.add_argument("--shrink", type=positive, default=1, help="divides all lengths, for trying it on a CPU")
    args = parsed(parser)
    if args.device == "cuda" and args.dtype == "float32":
        parser.error("--dtype float32: the kernels are for half precision: use bfloat16 or float16, or --device cpu")
    compiled = None
    if args.device == "cuda":
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        torch._dynamo.config.recompile_limit = 64  # a layout each
    shape = SHAPES[args.model]
    heads = f"{shape['num_attention_heads']} query heads over {shape['num_key_value_heads']} of {shape['head_dim']}"
    print(f"{heads}, {args.dtype}, {args.device}, torch {torch.__version__}\n\n| row | way | ms | off |\n|---|---|---|---|")
    for name, segments in layouts(args.shrink):
        print("\n".join(row(name, segments, args, compiled)), flush=True)


if __name__ == "__main__":
    main()
