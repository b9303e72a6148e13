"""Log-probabilities out of hidden states without ever holding [tokens, vocabulary].

T tokens, H width, V vocabulary. Logits exist for one chunk of tokens at a time, forward and again in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**23
"""Logits held at once: 32 MiB in float32, whatever the vocabulary. Larger chunks were not faster on a CPU."""


def linear_logprobs(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """log softmax(hidden weight^T / temperature)[target] and the entropy of that softmax, both float32 [T].

    Differentiable in hidden and weight through the log-probabilities; the entropy is a measurement and has no gradient.
    The matrix product runs in the inputs' precision, everything after it in float32 (float64 inputs: in float64).
    """
    return _LinearLogProbs.apply(hidden_TH, weight_VH, target_T, temperature)  # type: ignore[return-value]


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + rows, num_tokens)) for start in range(0, num_tokens, rows)]


def _logits(hidden_CH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    logits_CV = hidden_CH @ weight_VH.T
    if logits_CV.dtype != torch.float64:
        logits_CV = logits_CV.float()
    return logits_CV.div_(temperature) if temperature != 1 else logits_CV


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, temperature: float):
        wide = torch.float64 if hidden_TH.dtype == torch.float64 else torch.float32
        logp_T, entropy_T, norm_T = hidden_TH.new_empty((3, len(target_T)), dtype=wide)
        for at in _chunks(len(target_T), len(weight_VH)):
            logits_CV = _logits(hidden_TH[at], weight_VH, temperature)
            norm_T[at] = logits_CV.logsumexp(-1)
            logp_T[at] = logits_CV.gather(1, target_T[at, None])[:, 0] - norm_T[at]
            logits_CV -= norm_T[at, None]
            entropy_T[at] = -torch.linalg.vecdot(logits_CV.exp(), logits_CV)
        ctx.save_for_backward(hidden_TH, weight_VH, target_T, norm_T)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        hidden_TH, weight_VH, target_T, norm_T = ctx.saved_tensors
        scaled_T = grads[0] / ctx.temperature
        grad_hidden_TH = torch.empty_like(hidden_TH) if ctx.needs_input_grad[0] else None
        grad_weight_VH = None
        if ctx.needs_input_grad[1]:  # summed over chunks, so at least in float32
            grad_weight_VH = torch.zeros_like(weight_VH, dtype=norm_T.dtype)
        for at in _chunks(len(target_T), len(weight_VH)):
            grad_CV = _logits(hidden_TH[at], weight_VH, ctx.temperature)
            grad_CV.sub_(norm_T[at, None]).exp_().mul_(-scaled_T[at, None])
            grad_CV.scatter_add_(1, target_T[at, None], scaled_T[at, None])
            if grad_hidden_TH is not None:
                grad_hidden_TH[at] = grad_CV.to(weight_VH.dtype) @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH.addmm_(grad_CV.T, hidden_TH[at].to(grad_CV.dtype))
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_TH, grad_weight_VH, None, None
