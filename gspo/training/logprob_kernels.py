"""Triton kernels for rows of logits: one pass each where torch's own operations take eight.

C rows of a chunk, V vocabulary.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch for GPUs alone, and launches a function by an index.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LAUNCH: dict[str, Any] = {"BLOCK": 4096, "num_warps": 4}
"""Logits that a program holds at once, and its warps: the fastest of their neighbours on an H100, 1.8 TB/s of reading and
2.4 TB/s of overwriting."""


def row_statistics(logits_CV: Tensor, target_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of softmax(logits / temperature): log-probability of the target, entropy, and logsumexp; float32 [C] each."""
    logp_C, entropy_C, norm_C = torch.empty((3, len(target_C)), dtype=torch.float32, device=logits_CV.device)
    sizes = logits_CV.shape[1], logits_CV.stride(0)
    _statistics[(len(target_C),)](logits_CV, target_C, logp_C, entropy_C, norm_C, *sizes, temperature, **LAUNCH)
    return logp_C, entropy_C, norm_C


def logits_to_gradient(logits_CV: Tensor, target_C: Tensor, norm_C: Tensor, grad_C: Tensor, temperature: float) -> None:
    """Overwrite logits with the gradient that grad_C, the one of the log-probabilities, gives them; in their precision."""
    sizes = logits_CV.shape[1], logits_CV.stride(0)
    grid = len(target_C), triton.cdiv(logits_CV.shape[1], LAUNCH["BLOCK"])
    _gradient[grid](logits_CV, target_C, norm_C, grad_C, *sizes, temperature, **LAUNCH)


@triton.jit
def _statistics(logits, target, logp, entropy, norm, V, stride, temperature, BLOCK: tl.constexpr):
    """A row a program. Sums are kept relative to the largest logit so far, so that nothing overflows or cancels."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    largest = float("-inf")
    total = 0.0  # of exp(x - largest)
    moment = 0.0  # of exp(x - largest) (x - largest)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32) / temperature
        new = tl.maximum(largest, tl.max(x, 0))
        moved = tl.where(largest == new, 0.0, largest - new)
        shrunk = tl.exp(moved)
        moment = tl.where(shrunk > 0, (moment + total * moved) * shrunk, 0.0)
        total = total * shrunk
        e = tl.exp(x - tl.where(new == float("-inf"), 0.0, new))
        total += tl.sum(e, 0)
        moment += tl.sum(tl.where(x == float("-inf"), 0.0, e * (x - new)), 0)
        largest = new
    log_total = tl.log(total)
    chosen = tl.load(logits + tl.load(target + row)).to(tl.float32) / temperature
    tl.store(norm + row, largest + log_total)
    tl.store(logp + row, chosen - largest - log_total)
    tl.store(entropy + row, log_total - moment / total)


@triton.jit
def _gradient(logits, target, norm, grad, V, stride, temperature, BLOCK: tl.constexpr):
    """A block of a row a program."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits += row.to(tl.int64) * stride
    x = tl.load(logits + at, mask=at < V, other=0.0).to(tl.float32) / temperature
    softmax = tl.exp(x - tl.load(norm + row))
    one_hot = tl.where(at == tl.load(target + row), 1.0, 0.0)
    out = (one_hot - softmax) * (tl.load(grad + row) / temperature)
    tl.store(logits + at, out.to(logits.dtype.element_ty), mask=at < V)
