"""Log-probabilities out of hidden states without ever holding [tokens, vocabulary].

T tokens, H width, V vocabulary, C rows of a chunk. Logits exist for one chunk of tokens at a time, forward and again in
backward. The matrix products are torch's; on a GPU what lies between them is a kernel a pass, elsewhere torch's operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}
"""Logits held at once, whatever the vocabulary, by kind of device: 32 MiB in float32 on a CPU, where larger chunks were not
faster; 1 GiB on a GPU, which needs large products to be busy."""


def linear_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, *, temperature: float, float32_head: bool = False
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden weight^T / temperature)[target] and the entropy of that softmax, both float32 [T].

    Differentiable in hidden and weight through the log-probabilities; the entropy is a measurement and has no gradient.
    The matrix product runs in the inputs' precision, or in float32 with float32_head, at the price of a float32 copy of the
    matrix for as long as a call takes; everything after it is in float32 (float64 inputs: in float64).
    """
    return _LinearLogProbs.apply(hidden_TH, weight_VH, target_T, temperature, float32_head)  # type: ignore[return-value]


def chunk_rows(weight_VH: Tensor) -> int:
    """Rows of logits that may be held at once."""
    return max(1, CHUNK_ELEMENTS.get(weight_VH.device.type, CHUNK_ELEMENTS["cpu"]) // len(weight_VH))


def head_weight(weight_VH: Tensor, *, float32_head: bool) -> Tensor:
    """The output matrix in the precision of the product."""
    return weight_VH.float() if float32_head and weight_VH.dtype != torch.float64 else weight_VH


def _chunks(num_tokens: int, weight_VH: Tensor) -> list[slice]:
    rows = chunk_rows(weight_VH)
    return [slice(start, min(start + rows, num_tokens)) for start in range(0, num_tokens, rows)]


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, temperature: float, float32_head: bool):
        wide = torch.float64 if hidden_TH.dtype == torch.float64 else torch.float32
        head_VH = head_weight(weight_VH, float32_head=float32_head)
        logp_T, entropy_T, norm_T = hidden_TH.new_empty((3, len(target_T)), dtype=wide)
        for at in _chunks(len(target_T), weight_VH):
            logits_CV = hidden_TH[at].to(head_VH.dtype) @ head_VH.T
            logp_T[at], entropy_T[at], norm_T[at] = _statistics(logits_CV, target_T[at], temperature)
        ctx.save_for_backward(hidden_TH, weight_VH, target_T, norm_T)
        ctx.temperature, ctx.float32_head = temperature, float32_head
        ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        hidden_TH, weight_VH, target_T, norm_T = ctx.saved_tensors
        head_VH = head_weight(weight_VH, float32_head=ctx.float32_head)
        grad_hidden_TH = torch.zeros_like(hidden_TH) if ctx.needs_input_grad[0] else None
        grad_weight_VH = None
        if ctx.needs_input_grad[1]:  # summed over chunks, so at least in float32
            grad_weight_VH = torch.zeros_like(weight_VH, dtype=norm_T.dtype)
        live = grads[0].nonzero()[:, 0]  # clipped tokens need no logits
        for chunk in _chunks(len(live), weight_VH):
            at = live[chunk]
            logits_CV = hidden_TH[at].to(head_VH.dtype) @ head_VH.T
            grad_CV = _gradient(logits_CV, target_T[at], norm_T[at], grads[0][at], ctx.temperature)
            if grad_hidden_TH is not None:
                grad_hidden_TH[at] = _times_head(grad_CV.to(head_VH.dtype), head_VH).to(hidden_TH.dtype)
            if grad_weight_VH is not None:
                _add_outer(grad_weight_VH, grad_CV, hidden_TH[at])
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_TH, grad_weight_VH, None, None, None


def _statistics(logits_CV: Tensor, target_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the target, entropy and logsumexp of softmax(logits / temperature): [C] each."""
    if _has_kernels(logits_CV):
        from .logprob_kernels import row_statistics

        return row_statistics(logits_CV, target_C, temperature)
    logits_CV = _scaled(logits_CV, temperature)
    norm_C = logits_CV.logsumexp(-1)
    logp_C = logits_CV.gather(1, target_C[:, None])[:, 0] - norm_C
    logits_CV -= norm_C[:, None]
    return logp_C, -torch.linalg.vecdot(logits_CV.exp(), logits_CV), norm_C


def _gradient(logits_CV: Tensor, target_C: Tensor, norm_C: Tensor, grad_C: Tensor, temperature: float) -> Tensor:
    """The gradient of the logits [C, V], given the one of the log-probabilities; the logits are overwritten."""
    if _has_kernels(logits_CV):
        from .logprob_kernels import logits_to_gradient

        logits_to_gradient(logits_CV, target_C, norm_C, grad_C, temperature)
        return logits_CV
    scaled_C1 = (grad_C / temperature)[:, None]
    grad_CV = _scaled(logits_CV, temperature)
    grad_CV.sub_(norm_C[:, None]).exp_().mul_(-scaled_C1)
    return grad_CV.scatter_add_(1, target_C[:, None], scaled_C1)


def _has_kernels(logits_CV: Tensor) -> bool:
    """Kernels are for NVIDIA's GPUs, whose torch brings Triton along, and compute in float32."""
    return logits_CV.is_cuda and logits_CV.dtype != torch.float64


def _scaled(logits_CV: Tensor, temperature: float) -> Tensor:
    if logits_CV.dtype != torch.float64:
        logits_CV = logits_CV.float()
    return logits_CV.div_(temperature) if temperature != 1 else logits_CV


def _times_head(grad_CV: Tensor, head_VH: Tensor) -> Tensor:
    """grad head, [C, H]. On a GPU in half precision the sum over the vocabulary is asked for in float32: else it may come
    in parts that are rounded before they are added up."""
    if _narrow(grad_CV):
        return torch.mm(grad_CV, head_VH, out_dtype=torch.float32)
    return grad_CV @ head_VH


def _narrow(x: Tensor) -> bool:
    """In half precision on a GPU, where a matrix product may add up, and give, float32."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def _add_outer(total_VH: Tensor, grad_CV: Tensor, hidden_CH: Tensor) -> None:
    """total += grad^T hidden. On a GPU the factors may be in half precision and the sum in float32, as everywhere in its
    matrix products; a CPU has no such product, and there all of it is in float32."""
    if _narrow(grad_CV):
        torch.addmm(total_VH, grad_CV.T, hidden_CH, out_dtype=torch.float32, out=total_VH)
    else:
        total_VH.addmm_(grad_CV.T, hidden_CH.to(grad_CV.dtype))
