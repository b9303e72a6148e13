"""A Triton kernel that draws: one launch for a decoding step where torch's own operations take 25.

R rows of a step, V vocabulary.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch for GPUs alone, and launches a function by an index.

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

LAUNCH: dict[str, Any] = {"BLOCK": 4096, "num_warps": 8}
"""Logits that a program holds at once, and its warps."""


def mark_draws(logits_RV: Tensor, asked_R2: Tensor, logps: Tensor, temperature: float) -> None:
    """Draw one token a row from softmax(logits / temperature), temperature > 0, and raise its logit to infinity in place.

    asked_R2, float64: the number in [0, 1) at which each row's cumulative distribution is inverted, and where in the flat,
    contiguous float32 logps the token's log-probability is written. The tokens are those of `sampling.draw` but for
    rounding. A row with NaN or infinity, or without a possible token, gets NaN; a token of probability 0 is never drawn.
    """
    rows, vocabulary = logits_RV.shape
    blocks = max(2, triton.next_power_of_2(triton.cdiv(vocabulary, LAUNCH["BLOCK"])))
    sizes = vocabulary, logits_RV.stride(0)
    _mark_draws[(rows,)](logits_RV, asked_R2, logps, *sizes, temperature, BLOCKS=blocks, **LAUNCH)


@triton.jit
def _mark_draws(logits, asked, logps, V, stride, temperature, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """A row a program: once over all of it for the mass of each block, and once more over the block that is drawn.

    Whatever is broken reaches the sum of all masses as NaN, and so the log-probability; the token then is one of the row's
    all the same.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    block = tl.arange(0, BLOCKS)
    largest_of = tl.full([BLOCKS], float("-inf"), tl.float32)
    sum_of = tl.zeros([BLOCKS], tl.float64)  # of exp((x - the block's largest) / temperature)
    for start in range(0, V, BLOCK):
        x, largest, p = _masses(logits, start + lane, V, temperature)
        largest_of = tl.where(block == start // BLOCK, largest, largest_of)
        sum_of = tl.where(block == start // BLOCK, tl.sum(p, 0), sum_of)
    largest_of_all = tl.max(largest_of, 0)
    mass = sum_of * tl.exp((largest_of - largest_of_all).to(tl.float64) / temperature)
    total = tl.sum(mass, 0)
    at = tl.load(asked + 2 * row) * total
    drawn = _search(mass, at, block, BLOCKS)
    x, largest, p = _masses(logits, drawn * BLOCK + lane, V, temperature)
    rest = (at - tl.sum(tl.where(block < drawn, mass, 0.0), 0)) / tl.sum(tl.where(block == drawn, mass, 0.0), 0)
    inside = _search(p, rest * tl.sum(p, 0), lane, BLOCK)
    # Not loaded again: other warps may have overwritten it by then.
    chosen = tl.sum(tl.where(lane == inside, x, 0.0), 0)
    logp = (chosen - largest_of_all).to(tl.float64) / temperature - tl.log(total)
    tl.store(logps + tl.load(asked + 2 * row + 1).to(tl.int64), logp.to(tl.float32))
    tl.store(logits + drawn * BLOCK + inside, float("inf"))


@triton.jit
def _masses(logits, at, V, temperature):
    """Logits of a block, the largest of them, and float64 masses relative to it; minus infinity and 0 beyond the row."""
    x = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, 0)
    p = tl.exp((x - tl.where(largest == float("-inf"), 0.0, largest)) / temperature)
    return x, largest, p.to(tl.float64)


@triton.jit
def _search(p, at, index, N: tl.constexpr):
    """The first of N masses with which their running sum passes `at`; one of 0 never, even where the sum is rounded up.

    Where rounding keeps the sum below `at`, the last mass above 0; where none is above 0, the first.
    """
    possible = p > 0
    first = tl.min(tl.where(possible & (tl.cumsum(p, 0) > at), index, N), 0)
    last = tl.max(tl.where(possible, index, 0), 0)
    return tl.minimum(first, last)
