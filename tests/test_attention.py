"""Attention's buckets: every packed token once, little padding, sorted or not, the same as plain attention."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from gspo.training.attention import SHORTEST_SHARE, Layout, packed_attention

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=20)


@given(LENGTHS)
def test_buckets_hold_every_token_once_in_packed_order(lengths):
    start = 0
    for bucket in Layout.of(lengths).buckets:
        tokens_M = bucket.pad_SL.flatten()[bucket.unpad_M]
        assert (tokens_M == torch.arange(len(tokens_M))).all()
        start += len(tokens_M)
    assert start == sum(lengths)


@given(LENGTHS)
def test_padding_is_bounded_by_the_shortest_share(lengths):
    assert Layout.of(lengths).num_padded * SHORTEST_SHARE <= sum(lengths)


@pytest.mark.parametrize("lengths", [[7], [9, 9, 9], [20, 12, 5, 1], [1, 12, 3, 20, 20], [3, 3, 2, 2, 2]])
def test_packed_attention_is_each_sequence_alone(lengths):
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, h, sum(lengths), 8, generator=g, dtype=torch.float64) for h in (4, 2, 2))
    out, _ = packed_attention(torch.nn.Module(), query, key, value, None, layout=Layout.of(lengths))
    parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    alone = [scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
    torch.testing.assert_close(out, torch.cat(alone, dim=2).transpose(1, 2))
