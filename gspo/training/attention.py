"""Attention for packed sequences, registered with transformers, so that stock models train packed without a patch.

All other layers see one row of N tokens with no padding. On a GPU in half precision attention does too: torch's varlen
attention takes the places where sequences start. It has no other precision and no CPU kernel; there attention alone is
computed on [sequences, longest], one call for each bucket of neighbours of like length: keys stand to the right of nothing
but earlier tokens of their own sequence, so a causal kernel needs no mask, and what the padding computes is dropped.
Micro-batches are filled longest first, which keeps the buckets few and the padding small.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "gspo_packed"

SHORTEST_SHARE = 0.75
"""Sequences share a call down to this share of its longest. One call for all lengths computed three times the real tokens
at skewed lengths; more calls than these save nothing, since each costs some fixed time."""

VARLEN_HEAD_DIM = 256
"""Widest head that varlen attention takes; its widths are multiples of eight."""

VARLEN_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Grouped heads have to be allowed from torch 2.12 on; 2.11 takes them without a word."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring sequences of like length. S sequences, L longest, M tokens of this bucket."""

    pad_SL: Tensor
    """int64: the place in the bucket of each padded place; places beyond a sequence's end point at its first token."""
    unpad_M: Tensor
    """int64: the flattened padded place of each token of the bucket."""

    @staticmethod
    def of(lengths: list[int], device: torch.device | str) -> Bucket:
        """The bucket of sequences with these lengths, packed one after the other."""
        length_S = torch.tensor(lengths)
        start_S = length_S.cumsum(0) - length_S
        column_L = torch.arange(max(lengths))
        real_SL = column_L < length_S[:, None]
        pad_SL = start_S[:, None] + torch.where(real_SL, column_L, 0)
        return Bucket(pad_SL.to(device), real_SL.flatten().nonzero()[:, 0].to(device))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of packed sequences go on the padded side of attention."""

    buckets: tuple[Bucket, ...]
    """In packed order; together they hold all N tokens."""
    start_S1: Tensor
    """int32 [S + 1]: where each of the S sequences starts, and where the last one ends."""
    longest: int
    """Tokens of the longest sequence."""

    @staticmethod
    def of(lengths: list[int], device: torch.device | str = "cpu") -> Layout:
        """The layout of sequences with these lengths, packed one after the other; best where they are sorted."""
        buckets: list[list[int]] = []
        for length in lengths:
            if not buckets or min(length, *buckets[-1]) < SHORTEST_SHARE * max(length, *buckets[-1]):
                buckets.append([])
            buckets[-1].append(length)
        start_S1 = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
        return Layout(tuple(Bucket.of(b, device) for b in buckets), start_S1, max(lengths))

    @property
    def num_padded(self) -> int:
        """Places that attention computes."""
        return sum(b.pad_SL.numel() for b in self.buckets)


@torch.compiler.disable  # a compiled layer calls it as it is: its kernels are fixed, its lengths differ every time
def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence, [1, heads, N, D] -> [1, N, heads, D].

    Without a layout (generation, plain calls) it is transformers' own scaled dot product attention.
    """
    for name in ("softcap", "s_aux", "sliding_window"):
        if kwargs.get(name) is not None:
            raise ValueError(f"attention with {name} is not handled: choose a model without it")
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    q_NhD, k_NhD, v_NhD = (x[0].transpose(0, 1) for x in (query, key, value))
    if _has_varlen(query, dropout):
        return _varlen(layout, q_NhD, k_NhD, v_NhD, scaling)[None], None
    sizes = [len(b.unpad_M) for b in layout.buckets]
    split = zip(layout.buckets, *(x.split(sizes) for x in (q_NhD, k_NhD, v_NhD)), strict=True)
    out = [_attend(b, q, k, v, scale=scaling, dropout_p=dropout) for b, q, k, v in split]
    return torch.cat(out)[None], None


def _has_varlen(query: Tensor, dropout: float) -> bool:
    half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return half and dropout == 0 and query.shape[-1] <= VARLEN_HEAD_DIM and query.shape[-1] % 8 == 0


def _varlen(layout: Layout, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """[N, heads, D] -> [N, heads, D]."""
    start, longest = layout.start_S1, layout.longest
    window = (-1, 0)  # causal: everything before, nothing after
    sizes = start, start, longest, longest
    out = varlen_attn(query, key, value, *sizes, scale=scale, window_size=window, **VARLEN_GROUPED)
    assert isinstance(out, Tensor)  # a tuple only where more is asked for
    return out


def _attend(bucket: Bucket, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    """[M, heads, D] -> [M, heads, D]."""
    q, k, v = (x[bucket.pad_SL].transpose(1, 2) for x in (query, key, value))
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped, **kwargs)
    return out.transpose(1, 2).flatten(0, 1)[bucket.unpad_M]


# No mask function is registered on purpose: transformers then builds no mask of its own. Packed rows and right-padded
# prefills need none, and generation passes its own 4-D mask, which is used as it is. A 2-D padding mask would be ignored,
# so nothing here ever passes one.
AttentionInterface.register(NAME, packed_attention)
