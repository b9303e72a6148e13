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
    [(5, None), (9, None), (2, 0), (1, 0), (6, 1), (6, 1), (5, 1), (3, None)],
    [(2, None), (30, None), (3, 0), (3, 0), (3, 1), (40, None), (3, None)],
    [(2, None), (4, None), (3, None), (1, 0), (9, 2), (8, 2)],
]


def segments(lengths):
    return [Segment(n) for n in lengths]


@given(LENGTHS)
def test_buckets_hold_every_token_once(lengths):
    layout = Layout.of(segments(lengths))
    for bucket in layout.buckets:
        tokens_M = bucket.query_SL.flatten()[bucket.unpad_M]
        assert (tokens_M == torch.arange(len(tokens_M))).all()
    assert sum(len(bucket.unpad_M) for bucket in layout.buckets) == sum(lengths)
    in_order = lengths == sorted(lengths, reverse=True)
    assert (layout.order_N is None) == in_order
    assert in_order or sorted(layout.order_N.tolist()) == list(range(sum(lengths)))


@pytest.mark.parametrize(
    "shape",
    [[(3, None), (2, None), (1, 1), (1, 0)], [(2, None), (3, None), (1, 1), (4, None), (1, 1)], [(2, None), (1, 1)]],
)
def test_other_orders_than_prompts_responses_others_are_refused(shape):
    with pytest.raises(ValueError, match="shared prompts come first, then the responses to each"):
        Layout.of([Segment(*s) for s in shape])


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
def test_repeated_key_heads_are_grouped_ones(shape, monkeypatch):
    asked = []
    monkeypatch.setattr("gspo.training.attention._takes_groups", lambda query: asked.append(query.shape))
    test_packed_attention_is_each_segment_after_its_prompt_in_value_and_gradient(shape)
    assert asked


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's kernels for float32 are asked about")
@pytest.mark.parametrize("lengths", [(4096, 4096), (4096, 3600)])
def test_grouped_heads_in_float32_on_a_gpu_keep_no_square_of_weights(lengths):
    shape, g = [(n, None) for n in lengths], torch.Generator().manual_seed(0)
    layout = Layout.of(segments(lengths), "cuda")
    inputs = [torch.randn(1, h, sum(lengths), 64, generator=g) for h in (8, 2, 2)]
    leaves = [x.cuda().requires_grad_() for x in inputs]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = packed_attention(torch.nn.Module(), *leaves, None, layout=layout)[0]
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 8 * 4096**2 * 4  # float32 weights of one segment
    wide = [x.double().requires_grad_() for x in inputs]
    want = alone(shape, *wide)[0]
    want.sum().backward()
    for a, b in zip((out, *(x.grad for x in leaves)), (want, *(x.grad for x in wide)), strict=True):
        assert (a.cpu() - b).norm() < 1e-5 * b.norm()
