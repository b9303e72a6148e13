"""Attention for packed segments, registered with transformers, so that stock models train packed without a patch.

All other layers see one row of N tokens with no padding. Attention knows its segments: a sequence, or a prompt that several
responses share, or one of those responses, whose tokens see the whole prompt and then themselves. On a GPU in half
precision that is a varlen kernel's work (varlen.py). There is none for other precisions or for a CPU; there attention is
computed on [segments, longest], one call for each bucket of segments of like length, and what the padding computes is
dropped.

S segments of a call, L longest, M tokens of a bucket, K keys, F shared prompts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .kernels import KernelError
from .varlen import has_kernels, segment_attention

NAME = "gspo_packed"

SHORTEST_SHARE = 0.75
"""Segments share a call down to this share of its longest. One call for all lengths computed three times the real tokens
at skewed lengths; more calls than these save nothing, since each costs some fixed time."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of packed tokens that see each other, each those before it."""

    length: int
    """Its tokens."""
    prompt: int | None = None
    """Number of the segment, an earlier one without a prompt of its own, that all its tokens see before themselves."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments of like length."""

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
    def of(runs: list[tuple[int, int]], prompts: list[tuple[int, int]], device: torch.device | str) -> Bucket:
        """The bucket of segments that start and last so in the row, after prompts that do."""
        start_S1, length_S1 = (torch.tensor(x)[:, None] for x in zip(*runs, strict=True))
        column_L = torch.arange(int(length_S1.max()))
        real_SL = column_L < length_S1
        inside_SL = torch.where(real_SL, column_L, 0)
        bucket = (length_S1.cumsum(0) - length_S1 + inside_SL).to(device), real_SL.flatten().nonzero()[:, 0].to(device)
        if not any(length for _, length in prompts):
            return Bucket(*bucket)
        at_S1, before_S1 = (torch.tensor(x)[:, None] for x in zip(*prompts, strict=True))
        widest = int(before_S1.max())
        column_P = torch.arange(widest) - widest + before_S1  # the prompt's last token stands in the last column
        prompt_SP = at_S1 + column_P.clamp(min=0)
        causal_LL = column_L <= column_L[:, None]
        seen = [column_P[:, None, :].expand(-1, len(column_L), -1) >= 0, causal_LL.expand(len(runs), -1, -1)]
        keys_SK = torch.cat([prompt_SP, start_S1 + inside_SL], 1)
        return Bucket(*bucket, keys_SK.to(device), torch.cat(seen, 2)[:, None].to(device))


@dataclass(eq=False)  # not frozen: torch 2.11 looks into frozen ones, and would compile anew for each number of segments
class Layout:
    """Where the segments of a packed row stand, for both ways of computing attention."""

    segments: tuple[Segment, ...]
    """In packed order; together they hold all N tokens."""
    start_S1: Tensor
    """int32 [S + 1]: where each segment starts, and where the last one ends."""
    query_start_F1: Tensor | None
    """int32 [F + 1]: where the responses to each shared prompt start, counted from the first of all; None without any."""
    key_start_F1: Tensor | None
    """int32 [F + 1]: where each shared prompt starts, and where the last one ends."""
    sizes: list[int]
    """The longest segment; with shared prompts also the longest run of responses to one, the longest of them, the tokens of
    all of them, and the place where the last response ends."""
    num_pairs: int
    """Pairs of a query and a key that it sees."""

    @staticmethod
    def of(segments: Sequence[Segment], device: torch.device | str = "cpu") -> Layout:
        """The layout of segments packed one after the other.

        Raises ValueError unless shared prompts come first, and then the responses to each, in the prompts' order.
        """
        lengths = [s.length for s in segments]
        starts, before = _places(segments)
        asked = [s.prompt for s in segments if s.prompt is not None]
        shared = next((i for i, s in enumerate(segments) if s.prompt is not None), 0)
        order = [*[None] * shared, *sorted(asked), *[None] * (len(segments) - shared - len(asked))]
        if [s.prompt for s in segments] != order or any(prompt >= shared for prompt in asked):
            raise ValueError("shared prompts come first, then the responses to each in the prompts' order, then the others")
        queries = [sum(s.length for s in segments if s.prompt == prompt) for prompt in range(shared)]
        more = [max(queries), max(lengths[:shared]), starts[shared], starts[shared] + sum(queries)] if shared else []

        def places(runs: list[int]) -> Tensor:
            return torch.tensor([0, *runs]).cumsum(0).to(torch.int32).to(device)

        return Layout(
            segments=tuple(segments),
            start_S1=places(lengths),
            query_start_F1=places(queries) if shared else None,
            key_start_F1=places(lengths[:shared]) if shared else None,
            sizes=[max(lengths), *more],
            num_pairs=sum(n * p + n * (n + 1) // 2 for n, (_, p) in zip(lengths, before, strict=True)),
        )

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The segments by like lengths, longest first. Made when asked for: masks are large, varlen kernels need none."""
        starts, before = _places(self.segments)
        device = self.start_S1.device
        return tuple(
            Bucket.of([(starts[i], self.segments[i].length) for i in some], [before[i] for i in some], device)
            for some in self._alike
        )

    @functools.cached_property
    def order_N(self) -> Tensor | None:
        """int64 [N]: the packed places of the buckets' tokens, one bucket after the other; None where they are in order."""
        order = [i for some in self._alike for i in some]
        if order == list(range(len(order))):
            return None
        starts, _ = _places(self.segments)
        return torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order]).to(self.start_S1.device)

    @functools.cached_property
    def _alike(self) -> list[list[int]]:
        """The segments of each bucket: queries, and keys, within SHORTEST_SHARE of its longest."""
        _, before = _places(self.segments)
        sizes = [(s.length, s.length + p) for s, (_, p) in zip(self.segments, before, strict=True)]
        out: list[list[int]] = []
        for i in sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True):
            some = [sizes[k] for k in (*out[-1], i)] if out else []
            if not some or any(min(column) < SHORTEST_SHARE * max(column) for column in zip(*some, strict=True)):
                out.append([])
            out[-1].append(i)
        return out

    @property
    def num_padded(self) -> int:
        """Query places that attention computes in buckets."""
        return sum(b.query_SL.numel() for b in self.buckets)


def _places(segments: Sequence[Segment]) -> tuple[list[int], list[tuple[int, int]]]:
    """Where each segment starts, and the last one ends; place and length of the prompt before each."""
    lengths = [s.length for s in segments]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return starts, [(0, 0) if s.prompt is None else (starts[s.prompt], lengths[s.prompt]) for s in segments]


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

    Without a layout (generation, plain calls) it is transformers' own scaled dot product attention. Raises KernelError for
    what no way of computing it here knows; a sliding window as long as the model's longest sequence hides nothing.
    """
    window = kwargs.pop("sliding_window", None)
    if window is not None and window < module.config.max_position_embeddings:  # pyright: ignore
        raise KernelError("attention with sliding_window is not handled: choose a model without it")
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise KernelError(f"attention with {name} is not handled: choose a model without it")
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    rows = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
    if has_kernels(query, dropout):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        starts = layout.start_S1, layout.query_start_F1, layout.key_start_F1
        return segment_attention(*rows, *starts, layout.sizes, scale)[0][None], None
    return _in_buckets(layout, *rows, scaling, dropout)[None], None  # pyright: ignore[reportCallIssue]


@torch.compiler.disable  # a compiled layer calls it as it is: its lengths differ every time
def _in_buckets(layout: Layout, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
    """[N, heads, D] -> [N, heads, D]."""
    sizes, order_N = [len(b.unpad_M) for b in layout.buckets], layout.order_N
    rows = (query, key, value) if order_N is None else tuple(x.index_select(0, order_N) for x in (query, key, value))
    out = []
    for bucket, *own in zip(layout.buckets, *(x.split(sizes) for x in rows), strict=True):
        q, k, v = (x[bucket.query_SL].transpose(1, 2) for x in own)
        if bucket.key_SK is not None:
            k, v = (x[bucket.key_SK].transpose(1, 2) for x in (key, value))
        mask, grouped = bucket.mask_S1LK, q.shape[1] != k.shape[1]
        if grouped and not _takes_groups(q):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            grouped = False
        options: dict[str, Any] = {"is_causal": mask is None, "enable_gqa": grouped, "scale": scale, "dropout_p": dropout}
        y = scaled_dot_product_attention(q, k, v, mask, **options)
        out.append(y.transpose(1, 2).flatten(0, 1)[bucket.unpad_M])
    out_N = torch.cat(out)
    return out_N if order_N is None else out_N.index_select(0, order_N.argsort())


def _takes_groups(query: Tensor) -> bool:
    """Whether torch computes attention of fewer key heads than query heads without keeping L x K weights: on a GPU its
    kernel for float32 and for masks does not."""
    return not query.is_cuda


# No mask function is registered on purpose: transformers then builds no mask of its own. Packed rows and right-padded
# prefills need none, and generation passes its own 4-D mask, which is used as it is. A 2-D padding mask would be ignored,
# so nothing here ever passes one.
AttentionInterface.register(NAME, packed_attention)
