"""Attention for packed segments, registered with transformers, so that stock models train packed without a patch.

All other layers see one row of N tokens with no padding. Attention knows its segments: a sequence, or a prompt that several
responses share, or one of those responses, whose tokens see the whole prompt and then themselves. On a GPU in half
precision torch's varlen attention takes the places where segments start. It has no other precision and no CPU kernel; there
attention is computed on [segments, longest], one call for each bucket of neighbours of like length, and what the padding
computes is dropped. Micro-batches are filled longest first, which keeps the buckets few and the padding small.

S segments of a call, L longest, M tokens of a bucket, K keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
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
"""Segments share a call down to this share of its longest. One call for all lengths computed three times the real tokens
at skewed lengths; more calls than these save nothing, since each costs some fixed time."""

VARLEN_HEAD_DIM = 256
"""Widest head that varlen attention takes; its widths are multiples of eight."""

VARLEN_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Grouped heads have to be allowed from torch 2.12 on; 2.11 takes them without a word."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of packed tokens that see each other, each those before it."""

    length: int
    """Its tokens."""
    prompt: int | None = None
    """Number of the segment, an earlier one without a prompt of its own, that all its tokens see before themselves."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring segments of like length."""

    query_SL: Tensor
    """int64: the place in the bucket of each padded query; places beyond a segment's end point at its first token."""
    unpad_M: Tensor
    """int64: the flattened padded place of each token of the bucket."""
    key_SK: Tensor | None = None
    """int64: the packed place of each padded key, the prompt's on the left and padded there, then the segment's own. None
    where no segment has a prompt: keys are then the bucket's own tokens, placed as the queries are."""
    mask_S1LK: Tensor | None = None
    """bool: the keys that each query sees; None where a causal kernel needs no mask."""

    @staticmethod
    def of(lengths: list[int], prompts: list[tuple[int, int]], first: int, device: torch.device | str) -> Bucket:
        """The bucket of segments with these lengths, packed from place `first` on; a prompt is its place and length."""
        length_S = torch.tensor(lengths)
        start_S = length_S.cumsum(0) - length_S
        column_L = torch.arange(max(lengths))
        real_SL = column_L < length_S[:, None]
        own_SL = start_S[:, None] + torch.where(real_SL, column_L, 0)
        bucket = own_SL.to(device), real_SL.flatten().nonzero()[:, 0].to(device)
        if not any(length for _, length in prompts):
            return Bucket(*bucket)
        at_S, before_S = (torch.tensor(x)[:, None] for x in zip(*prompts, strict=True))
        widest = int(before_S.max())
        column_P = torch.arange(widest) - widest + before_S  # the prompt's last token stands in the last column
        prompt_SP = at_S + column_P.clamp(min=0)
        causal_LL = column_L <= column_L[:, None]
        seen = [column_P[:, None, :].expand(-1, len(column_L), -1) >= 0, causal_LL.expand(len(lengths), -1, -1)]
        keys_SK = torch.cat([prompt_SP, first + own_SL], 1)
        return Bucket(*bucket, keys_SK.to(device), torch.cat(seen, 2)[:, None].to(device))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the segments of a packed row stand, for both ways of computing attention."""

    buckets: tuple[Bucket, ...]
    """In packed order; together they hold all N tokens."""
    query_start_S1: Tensor
    """int32 [S + 1]: where each segment starts, and where the last one ends."""
    key_start_S1: Tensor
    """int32 [S + 1]: the same for its keys, prompts included, one segment's after the other's."""
    key_K: Tensor | None
    """int64: the packed place of each of those keys; None where no segment has a prompt, so that keys are as packed."""
    longest: tuple[int, int]
    """Queries, and keys, of the segment with most of them."""
    num_pairs: int
    """Pairs of a query and a key that it sees."""

    @staticmethod
    def of(segments: Sequence[Segment], device: torch.device | str = "cpu") -> Layout:
        """The layout of segments packed one after the other; buckets are best where neighbours are of like length."""
        lengths = [s.length for s in segments]
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        before = [(0, 0) if s.prompt is None else (starts[s.prompt], lengths[s.prompt]) for s in segments]
        keys = [n + p for n, (_, p) in zip(lengths, before, strict=True)]
        places = [
            torch.cat([torch.arange(at, at + p), torch.arange(start, start + n)])
            for n, (at, p), start in zip(lengths, before, starts, strict=False)
        ]
        shared = any(p for _, p in before)
        return Layout(
            buckets=tuple(
                Bucket.of(lengths[a:b], before[a:b], starts[a], device)
                for a, b in _alike(list(zip(lengths, keys, strict=True)))
            ),
            query_start_S1=torch.tensor(starts, dtype=torch.int32, device=device),
            key_start_S1=torch.tensor([0, *keys]).cumsum(0).to(torch.int32).to(device),
            key_K=torch.cat(places).to(device) if shared else None,
            longest=(max(lengths), max(keys)),
            num_pairs=sum(n * p + n * (n + 1) // 2 for n, (_, p) in zip(lengths, before, strict=True)),
        )

    @property
    def num_padded(self) -> int:
        """Query places that attention computes in buckets."""
        return sum(b.query_SL.numel() for b in self.buckets)


def _alike(sizes: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ranges of neighbours whose lengths, queries and keys, are within SHORTEST_SHARE of the range's longest."""
    start = 0
    for end in range(1, len(sizes) + 1):
        ranges = zip(*sizes[start : end + 1], strict=True)
        if end == len(sizes) or any(min(some) < SHORTEST_SHARE * max(some) for some in ranges):
            yield start, end
            start = end


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
    """Attention within the segments of a packed row, [1, heads, N, D] -> [1, N, heads, D].

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
    out, first = [], 0
    for bucket, q_MhD in zip(layout.buckets, q_NhD.split(sizes), strict=True):
        own = slice(first, first + len(q_MhD))
        out.append(_attend(bucket, q_MhD, (k_NhD, v_NhD), own, scale=scaling, dropout_p=dropout))
        first = own.stop
    return torch.cat(out)[None], None


def _has_varlen(query: Tensor, dropout: float) -> bool:
    half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return half and dropout == 0 and query.shape[-1] <= VARLEN_HEAD_DIM and query.shape[-1] % 8 == 0


def _varlen(layout: Layout, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """[N, heads, D] -> [N, heads, D]. A causal kernel lets the last query see the last key: a prompt's stand before."""
    if layout.key_K is not None:
        key, value = (_Gather.apply(x, layout.key_K) for x in (key, value))
    sizes = layout.query_start_S1, layout.key_start_S1, *layout.longest
    window = (-1, 0)  # causal: everything before, nothing after
    out = varlen_attn(query, key, value, *sizes, scale=scale, window_size=window, **VARLEN_GROUPED)
    assert isinstance(out, Tensor)  # a tuple only where more is asked for
    return out


def _attend(bucket: Bucket, q_MhD: Tensor, key_value: tuple[Tensor, Tensor], own: slice, **kwargs: Any) -> Tensor:
    """[M, heads, D] -> [M, heads, D]; keys and values [N, heads, D] are of the whole row, `own` is the bucket's part."""
    q = q_MhD[bucket.query_SL].transpose(1, 2)
    if bucket.key_SK is None:
        k, v = (x[own][bucket.query_SL].transpose(1, 2) for x in key_value)
    else:
        k, v = (x[bucket.key_SK].transpose(1, 2) for x in key_value)
    mask, grouped = bucket.mask_S1LK, q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped, **kwargs)
    return out.transpose(1, 2).flatten(0, 1)[bucket.unpad_M]


class _Gather(torch.autograd.Function):
    """rows[at]; the gradients of a row that stands in many places add up in float32, not in the rows' half precision."""

    @staticmethod
    def forward(ctx: Any, rows_N: Tensor, at_K: Tensor) -> Tensor:
        ctx.save_for_backward(at_K)
        ctx.num_rows = len(rows_N)
        return rows_N.index_select(0, at_K)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        (at_K,) = ctx.saved_tensors
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        total_N = grads[0].new_zeros((ctx.num_rows, *grads[0].shape[1:]), dtype=wide)
        return total_N.index_add_(0, at_K, grads[0].to(wide)).to(grads[0].dtype), None


# No mask function is registered on purpose: transformers then builds no mask of its own. Packed rows and right-padded
# prefills need none, and generation passes its own 4-D mask, which is used as it is. A 2-D padding mask would be ignored,
# so nothing here ever passes one.
AttentionInterface.register(NAME, packed_attention)
