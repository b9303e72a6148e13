"""Attention's segments: every packed token once, little padding, sorted or not, the same as plain attention."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from gspo.training.attention import SHORTEST_SHARE, Layout, Segment, packed_attention

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=20)
SHAPES = [
    [(7, None)],
    [(9, None), (9, None), (9, None)],
    [(20, None), (12, None), (5, None), (1, None)],
    [(1, None), (12, None), (3, None), (20, None), (20, None)],
    [(5, None), (4, 0), (4, 0)],
    [(5, None), (9, None), (6, 1), (2, 0), (1, 0), (3, None), (6, 1), (5, 1)],
    [(2, None), (30, None), (3, 0), (3, 1), (3, None), (3, 0)],
]


def segments(lengths):
    return [Segment(n) for n in lengths]


@given(LENGTHS)
def test_buckets_hold_every_token_once_in_packed_order(lengths):
    start = 0
    for bucket in Layout.of(segments(lengths)).buckets:
        tokens_M = bucket.query_SL.flatten()[bucket.unpad_M]
        assert (tokens_M == torch.arange(len(tokens_M))).all()
        start += len(tokens_M)
    assert start == sum(lengths)


@given(LENGTHS)
def test_padding_is_bounded_by_the_shortest_share(lengths):
    assert Layout.of(segments(lengths)).num_padded * SHORTEST_SHARE <= sum(lengths)


def alone(shape, query, key, value):
    """Each segment by itself, after the prompt that it sees; also the number of pairs seen."""
    lengths = [n for n, _ in shape]
    parts = [x.split(lengths, dim=2) for x in (query, key, value)]
    out, pairs = [], 0
    for i, (n, prompt) in enumerate(shape):
        k, v = (x[i] if prompt is None else torch.cat([x[prompt], x[i]], dim=2) for x in parts[1:])
        before = k.shape[2] - n
        mask = torch.arange(k.shape[2]) <= before + torch.arange(n)[:, None]
        pairs += int(mask.sum())
        out.append(scaled_dot_product_attention(parts[0][i], k, v, mask, enable_gqa=True))
    return torch.cat(out, dim=2).transpose(1, 2), pairs


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_attention_is_each_segment_after_its_prompt_in_value_and_gradient(shape):
    g = torch.Generator().manual_seed(0)
    total, layout = sum(n for n, _ in shape), Layout.of([Segment(*s) for s in shape])
    inputs = [torch.randn(1, h, total, 8, generator=g, dtype=torch.float64) for h in (4, 2, 2)]
    upstream = torch.randn(1, total, 4, 8, generator=g, dtype=torch.float64)
    results = []
    for function in (lambda q, k, v: packed_attention(torch.nn.Module(), q, k, v, None, layout=layout)[0],
                     lambda q, k, v: alone(shape, q, k, v)[0]):  # fmt: skip
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        (out * upstream).sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert layout.num_pairs == alone(shape, *inputs)[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_varlen_attention_is_told_the_same_segments(shape, monkeypatch):
    """Its kernels run on GPUs alone; here a plain stand-in with its signature reads the starts, the keys and the window."""

    def varlen(query, key, value, start_q, start_k, longest_q, longest_k, *, scale, window_size, **grouped):
        assert window_size == (-1, 0) and start_q.dtype == start_k.dtype == torch.int32
        out = []
        for i in range(len(start_q) - 1):
            q = query[start_q[i] : start_q[i + 1]]
            k, v = (x[start_k[i] : start_k[i + 1]] for x in (key, value))
            assert len(q) <= longest_q and len(k) <= longest_k
            mask = torch.arange(len(k)) <= len(k) - len(q) + torch.arange(len(q))[:, None]
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            out.append(scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True).transpose(0, 1))
        return torch.cat(out)

    monkeypatch.setattr("gspo.training.attention.varlen_attn", varlen)
    monkeypatch.setattr("gspo.training.attention._has_varlen", lambda query, dropout: True)
    test_packed_attention_is_each_segment_after_its_prompt_in_value_and_gradient(shape)
