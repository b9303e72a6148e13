"""Attention within segments of a row by varlen kernels, as one operation that torch.compile takes into its graph.

The kernels are FlashAttention-4's (the package flash-attn-4, where it is installed and made for the GPU), else those that
torch ships. Shared prompts go through them a second time: every segment attends to itself, then the responses of a prompt,
as one run of queries, attend to its keys where they stand, and the two results are joined by their logsumexps. Backward,
both kernels are given the joined result and logsumexp, from which each finds the probabilities of its own part, as in ring
attention (Liu et al., arXiv:2310.01889). Nothing is gathered, and no key stands twice in memory.

N packed tokens, h heads, D width of a head, S segments, F shared prompts.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .kernels import KernelError

HEAD_DIM = 256
"""Widest head that torch's kernels take; their widths are multiples of eight."""

FLASH_HEAD_DIM = 128
"""Widest head for which FlashAttention-4 is used: wider ones it takes on some of its GPUs only."""

FLASH = "flash-attn-4"
"""The package."""

RUNS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
"""What its kernels call the four parts of `Runs`."""

FLASH_GPUS = (9, 10)
"""Major compute capabilities that it is made for: Hopper and Blackwell for servers."""


class Kernels(NamedTuple):
    """A forward and a backward kernel: queries of run i attend to keys of run i, with `causal` the last one to all."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    """(query, key, value, runs, causal=, scale=): out [N, h, D] and logsumexp, float32 [h, N]."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(grad, query, key, value, out, logsumexp, runs, causal=, scale=): gradients of query, key and value."""


Runs = tuple[Tensor, Tensor, int, int]
"""Where runs of queries and of keys start, and where the last one ends (int32), and the longest of either."""


def has_kernels(query: Tensor, dropout: float) -> bool:
    """Whether there are varlen kernels for these queries [.., D]: on NVIDIA's GPUs, in half precision, without dropout."""
    half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return half and dropout == 0 and query.shape[-1] <= HEAD_DIM and query.shape[-1] % 8 == 0


@torch.library.custom_op("gspo::segment_attention", mutates_args=())
def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start_S1: Tensor,
    query_start_F1: Tensor | None,
    key_start_F1: Tensor | None,
    sizes: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of [N, h, D] within segments, and of the responses to shared prompts; the same, and its logsumexp [h, N].

    start_S1: where segments start, and where the last one ends. Where prompts are shared they come first: key_start_F1 is
    where each of them starts, and query_start_F1 where the responses to each start, counted from the first of all of them.
    sizes: the longest segment; then, with shared prompts, the longest run of responses, the longest prompt, the tokens of
    all prompts, and the place where the last response ends. Keys may have fewer heads than queries.
    """
    kernels = _kernels(query)
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out, norm = kernels.forward(query, key, value, (start_S1, start_S1, sizes[0], sizes[0]), causal=True, scale=scale)
    if query_start_F1 is not None and key_start_F1 is not None:
        _, longest_queries, longest_keys, first, end = sizes
        runs = query_start_F1, key_start_F1, longest_queries, longest_keys
        more, more_norm = kernels.forward(query[first:end], key[:first], value[:first], runs, causal=False, scale=scale)
        _joiner(query.is_cuda)(out[first:end], norm[:, first:end], more, more_norm)
    return out, norm


@segment_attention.register_fake
def _(query: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@torch.library.custom_op("gspo::segment_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    norm: Tensor,
    start_S1: Tensor,
    query_start_F1: Tensor | None,
    key_start_F1: Tensor | None,
    sizes: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    kernels = _kernels(query)
    grad, query, key, value = grad.contiguous(), query.contiguous(), key.contiguous(), value.contiguous()
    runs = start_S1, start_S1, sizes[0], sizes[0]
    grads = kernels.backward(grad, query, key, value, out, norm, runs, causal=True, scale=scale)
    if query_start_F1 is not None and key_start_F1 is not None:
        _, longest_queries, longest_keys, first, end = sizes
        runs, own = (query_start_F1, key_start_F1, longest_queries, longest_keys), slice(first, end)
        inputs = grad[own], query[own], key[:first], value[:first], out[own], norm[:, own].contiguous()
        more = kernels.backward(*inputs, runs, causal=False, scale=scale)
        for total, at, part in zip(grads, (own, slice(first), slice(first)), more, strict=True):
            total[at] += part
    return grads


@_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, sizes, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.sizes, ctx.scale = sizes, scale


def _gradients(ctx: Any, grad: Tensor, grad_norm: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, *starts, out, norm = ctx.saved_tensors
    grads = _backward(grad, query, key, value, out, norm, *starts, ctx.sizes, ctx.scale)
    return (*grads, None, None, None, None, None)


segment_attention.register_autograd(_gradients, setup_context=_save)


def _join(out: Tensor, norm: Tensor, more: Tensor, more_norm: Tensor) -> None:
    """Attention [N, h, D] over some keys becomes attention over those and others, whose logsumexps are [h, N]."""
    share = torch.sigmoid(more_norm - norm).T[..., None]
    out.copy_(torch.lerp(out.to(norm.dtype), more.to(norm.dtype), share))
    norm.copy_(torch.logaddexp(norm, more_norm))


@functools.cache
def _joiner(on_gpu: bool) -> Callable[..., None]:
    """`_join`, on a GPU as one kernel: as eight it would cost a twentieth of a layer."""
    return torch.compile(_join, dynamic=True) if on_gpu else _join


# ---- kernels ----------------------------------------------------------------------------------------------


def _kernels(query: Tensor) -> Kernels:
    flash = flash_attention(query.device.index) if query.shape[-1] <= FLASH_HEAD_DIM else None
    return flash or Kernels(_torch_forward, _torch_backward)


def _torch_forward(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._flash_attention_forward(query, key, value, *runs, 0.0, causal, False, scale=scale)[:2]


def _torch_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    norm: Tensor,
    runs: Runs,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    seed, offset = query.new_empty(2, dtype=torch.uint64), query.new_empty(0)  # of dropout, which there is none of
    inputs = grad, query, key, value, out, norm
    return torch.ops.aten._flash_attention_backward(*inputs, *runs, 0.0, causal, seed, offset, scale=scale)


@functools.cache
def flash_attention(gpu: int | None) -> Kernels | None:
    """FlashAttention-4's kernels, where the package is installed and made for this GPU. Raises KernelError where it is
    installed and lacks what it needs, or has them under other names.

    The package is asked for by its name: flash-attn 2 has a folder of that one's, of another age, in the same place.
    """
    if gpu is None or torch.cuda.get_device_capability(gpu)[0] not in FLASH_GPUS:
        return None
    try:
        version = importlib.metadata.version(FLASH)
    except importlib.metadata.PackageNotFoundError:
        return None
    try:
        from flash_attn.cute.interface import (  # pyright: ignore[reportMissingImports]
            _flash_attn_bwd,
            _flash_attn_fwd,
        )

        for kernel in (_flash_attn_fwd, _flash_attn_bwd):
            if lacking := set(RUNS) - set(inspect.signature(kernel).parameters):
                raise ImportError(f"{kernel.__name__} takes no {min(lacking)}")
    except ImportError as error:
        wanted = f"{FLASH} {version} is installed but cannot be used ({error}): pip install 'gspo[flash]', or uninstall it"
        raise KernelError(wanted) from error

    def names(runs: Runs) -> dict[str, Any]:
        return dict(zip(RUNS, runs, strict=True))

    def forward(*inputs: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        *tensors, runs = inputs
        return _flash_attn_fwd(*tensors, softmax_scale=scale, causal=causal, return_lse=True, **names(runs))[:2]  # type: ignore[arg-type]

    def backward(*inputs: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        grad, query, key, value, out, norm, runs = inputs
        tensors = query, key, value, out, grad, norm
        return _flash_attn_bwd(*tensors, softmax_scale=scale, causal=causal, **names(runs))  # type: ignore[arg-type]

    return Kernels(forward, backward)
