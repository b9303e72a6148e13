"""Attention for packed sequences, registered with transformers, so that stock models train packed without a patch.

All other layers see one row of N tokens with no padding. Attention alone is computed on [sequences, longest]: keys stand
to the right of nothing but earlier tokens of their own sequence, so a causal kernel needs no mask, and what the padding
computes is dropped. Micro-batches are filled by length, which keeps that padding small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "gspo_packed"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of packed sequences go on the padded side of attention. S sequences, L longest, N tokens."""

    pad_SL: Tensor
    """int64: the packed index of each padded place; places beyond a sequence's end point at its first token."""
    unpad_N: Tensor
    """int64: the flattened padded place of each packed token."""

    @staticmethod
    def of(lengths: list[int], device: torch.device | str = "cpu") -> Layout:
        """The layout of sequences with these lengths, packed one after the other."""
        length_S = torch.tensor(lengths)
        start_S = length_S.cumsum(0) - length_S
        column_L = torch.arange(int(length_S.max()))
        real_SL = column_L < length_S[:, None]
        pad_SL = start_S[:, None] + torch.where(real_SL, column_L, 0)
        return Layout(pad_SL.to(device), real_SL.flatten().nonzero()[:, 0].to(device))


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
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    q, k, v = (x[0].transpose(0, 1)[layout.pad_SL].transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1)[layout.unpad_N][None], None


# No mask function is registered on purpose: transformers then builds no mask of its own. Packed rows and right-padded
# prefills need none, and generation passes its own 4-D mask, which is used as it is. A 2-D padding mask would be ignored,
# so nothing here ever passes one.
AttentionInterface.register(NAME, packed_attention)
