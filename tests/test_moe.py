"""Laws of routers: found by interface, replayed with live weights, and counted."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from moe_support import LAYERS, ROUTED, family, moe_policy
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from gspo.moe import Record, RecordError, RoutingCounts, checked_rows, find_routing, packed_ids, routing_metrics
from gspo.moe.flips import auxiliary_loss, flips
from gspo.rollout.engine import EngineError, Request
from gspo.rollout.vllm_experts import ExpertsOutput

IDS = torch.randint(2, 20, (2, 9), generator=torch.Generator().manual_seed(0))


def watched(name, **changes):
    model = family(name, **changes)
    return model, find_routing(model.get_decoder().layers, lambda: model(input_ids=IDS, use_cache=False))


def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTED)
def test_replaying_what_was_chosen_changes_no_bit(name, dtype):
    model, routing = watched(name, dtype=dtype)
    assert routing.layers == LAYERS.get(name, (0, 1, 2)) and (routing.num_experts, routing.top_k) == (8, 2)
    plain = logits(model)
    chosen = routing.chosen()
    assert chosen.dtype == torch.uint8 and chosen.shape == (18, len(routing.layers), 2)
    routing.replay(chosen)
    assert routing.replayable and torch.equal(logits(model), plain)
    routing.replay(None)
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("name", ROUTED)
def test_experts_get_the_replayed_ids_and_the_weights_of_live_logits(name):
    """An id that no router chose is computed, weighted and given a gradient, to the router too."""
    model, routing = watched(name)
    logits(model)
    chosen = routing.chosen().long()
    other = (chosen[..., :1] + torch.arange(1, 8)) % 8  # all but the first choice, and of these two not chosen
    free = [[[e for e in row.tolist() if e not in own.tolist()][:2] for row, own in zip(a, b, strict=True)]
            for a, b in zip(other, chosen, strict=True)]  # fmt: skip
    replayed = torch.tensor(free)
    got = []
    for router in routing.routers:
        router.register_forward_hook(lambda module, args, out: out[1].retain_grad() or got.append((module.weight, *out)))
    routing.replay(replayed.to(torch.uint8))
    logits(model).square().sum().backward(retain_graph=True)
    for layer, (weight, live, scores, ids) in enumerate(got):
        assert torch.equal(ids, replayed[:, layer])
        expected = torch.softmax(live, -1) if name != "deepseek_v3" else live.sigmoid()
        expected = expected.gather(1, ids)
        if name not in ("olmoe", "deepseek_v2"):
            expected = expected / expected.sum(-1, keepdim=True)
        torch.testing.assert_close(scores, expected * (2.5 if name == "deepseek_v3" else 1.0))
        for expert in ids.unique():
            assert weight.grad[expert].abs().max() > 0
        (alone,) = torch.autograd.grad(expected * (2.5 if name == "deepseek_v3" else 1.0), weight, scores.grad)
        torch.testing.assert_close(weight.grad, alone)  # all that reaches a router comes by the weights of these ids


def test_other_ways_to_weigh_are_told_apart():
    model, routing = watched("granitemoe", num_local_experts=8)
    _, weights, ids = model.get_decoder().layers[0].block_sparse_moe.router(torch.randn(5, 32))
    if weights.is_floating_point() and not ids.is_floating_point():
        assert routing.replayable
    else:  # a release of transformers that returns the three in another order
        assert routing is None
    _, routing = watched("phimoe", num_local_experts=8)
    assert routing.layers == (0, 1, 2) and not routing.replayable


def test_a_dense_model_has_no_routing():
    assert watched("qwen3", head_dim=8)[1] is None


def test_records_outlive_another_packing_and_a_shared_prompt_takes_the_first_samples():
    rng = np.random.default_rng(0)
    row = rng.integers(0, 8, (10, 3, 2)).astype(np.uint8)  # a prompt of 4 at places 0 to 3, responses of 3
    a, b = Record(row, np.array([0, 1, 2, 3, 4, 5, 6])), Record(row, np.array([0, 1, 2, 3, 7, 8, 9]))
    alone = packed_ids([b], [np.arange(7)], 7)
    assert (alone == row[[0, 1, 2, 3, 7, 8, 9]]).all()
    turned = packed_ids([b, a], [np.array([0, 1, 2, 3, 4, 5, 6]), np.array([0, 1, 2, 3, 7, 8, 9])], 10)
    assert (turned[4:7] == row[7:]).all() and (turned[7:] == row[4:7]).all() and (turned[:4] == row[:4]).all()
    other = Record(row[::-1].copy(), np.arange(7))
    shared = packed_ids([a, other], [np.array([0, 1, 2, 3, 4, 5, 6]), np.array([0, 1, 2, 3, 7, 8, 9])], 10)
    assert (shared[:4] == row[:4]).all() and (shared[7:] == row[::-1][4:7]).all()


def rows_of(tokens, experts=8):
    rng = np.random.default_rng(0)
    return np.stack([[rng.permutation(experts)[:2] for _ in range(3)] for _ in range(tokens)])


def test_rows_may_be_one_short_of_the_tokens():
    rows = rows_of(6)
    for given in (rows, rows[:5]):
        kept = checked_rows("s1/p/0", given, 6, (3, 2), 8)
        assert kept.dtype == np.uint8 and (kept == rows[:5]).all()
    assert checked_rows("s1/p/0", rows_of(6, 300), 6, (3, 2), 300).dtype == np.int16


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            lambda rows: rows[:4],
            r"sample s1/p/0: .* \[4, 3, 2\] for 6 tokens; .* must be \[6, 3, 2\], or one row less",
        ),
        (lambda rows: np.concatenate([rows, rows]), r"shape \[12, 3, 2\]"),
        (lambda rows: rows[:, :2], r"shape \[6, 2, 2\]"),
        (lambda rows: rows[0], r"shape \[3, 2\]"),
        (lambda rows: rows + 7, r"sample s1/p/0: the engine routed to expert \d+ of a model with 8"),
        (lambda rows: rows * (np.arange(6) != 3)[:, None, None], r"token 3 in layer 0 .* \[0, 0\]: it was not filled in"),
    ],
)
def test_rows_that_cannot_be_the_samples_are_refused_by_name(spoil, told):
    with pytest.raises(RecordError, match=told):
        checked_rows("s1/p/0", spoil(rows_of(6)), 6, (3, 2), 8)


def test_a_flip_is_an_expert_that_is_no_longer_chosen_in_any_slot():
    old = torch.tensor([[[1, 2], [3, 4]], [[1, 2], [3, 4]]])
    new = torch.tensor([[[2, 1], [3, 5]], [[0, 7], [4, 3]]])
    assert flips(old, new).tolist() == [[0, 1], [2, 0]]
    counts = RoutingCounts.zeros(2, 8)
    counts.add_pass(new, [])
    counts.add_old(old, new)
    counts.add_engine(new, new)
    nothing = RoutingCounts.zeros(2, 8)
    found = routing_metrics([nothing, counts], [nothing], top_k=2, auxiliary=False, engine=True)
    assert found["moe/flips_by_minibatch"] == [None, 3 / 8]
    assert found["moe/flips_by_layer"] == [2 / 4, 1 / 4] and found["moe/tokens_flipped"] == 1.0
    assert found["moe/engine_flips"] == 0.0 and found["moe/engine_flips_by_layer"] == [0.0, 0.0]
    assert found["moe/load_by_layer"] == [2.0, 4.0] and found["moe/dead_experts_by_layer"] == [4, 5]
    twice = counts.with_numbers([2 * x for x in counts.numbers()])
    after = routing_metrics([nothing], [nothing, twice], top_k=2, auxiliary=False, engine=False)
    assert after["moe/flips_after_by_layer"] == [2 / 4, 1 / 4] and after["moe/flips_after_by_minibatch"] == [None, 3 / 8]
    assert after["moe/flips_after_by_minibatch_and_layer"] == [None, [2 / 4, 1 / 4]]
    assert after["moe/tokens_flipped_after_by_minibatch"] == [None, 1.0]
    assert after["moe/tokens_flipped_after"] == 1.0 and after["moe/flips_by_layer"] is None
    assert found["moe/flips_after_by_minibatch"] == [None]
    assert found["moe/flips_after_by_layer"] is None and found["moe/tokens_flipped_after"] is None


def test_the_auxiliary_loss_is_transformers_own():
    model, routing = watched("mixtral")
    out = model(input_ids=IDS, use_cache=False, output_router_logits=True)
    counts = [RoutingCounts.zeros(3, 8), RoutingCounts.zeros(3, 8)]
    live, chosen = routing.take_logits(), routing.chosen()
    for part, at in zip(counts, (slice(0, 5), slice(5, 18)), strict=True):
        part.add_pass(chosen[at], [x[at] for x in live])
    theirs = load_balancing_loss_func(tuple(live), 8, 2)
    assert auxiliary_loss(counts) == pytest.approx(float(theirs), rel=1e-6)
    assert out.aux_loss.item() == pytest.approx(float(theirs), rel=1e-6)
    assert routing.take_logits() == [None] * 3


def test_a_created_mixture_has_the_experts_that_were_asked_for():
    policy = moe_policy()
    assert policy.model.config.model_type == "qwen3_moe" and policy.routing.replayable
    assert (policy.routing.num_experts, policy.routing.top_k, policy.routing.layers) == (8, 2, (0, 1, 2))


def output_of(rows, tokens=4):
    return SimpleNamespace(outputs=[SimpleNamespace(routed_experts=rows, token_ids=[2] * tokens)])


def test_of_vllms_rows_layers_without_experts_are_left_out():
    _, routing = watched("deepseek_v3")  # its first layer has none
    policy = SimpleNamespace(routing=routing, model=SimpleNamespace(config=SimpleNamespace(num_hidden_layers=3)))
    reader, request = ExpertsOutput(policy, wanted=True), Request("s1/p/0", (5, 6, 7), 0)
    assert reader.start == {"enable_return_routed_experts": True}
    rows = rows_of(6).astype(np.int16)
    rows[:, 0] = 0
    found = reader.read(request, output_of(rows))
    assert found.dtype == np.uint8 and (found == rows[:, 1:]).all()
    off = ExpertsOutput(policy, wanted=False)
    assert off.start == {} and off.read(request, output_of(rows)) is None
    for output, told in (
        (output_of(None), "vLLM returned no routed experts"),
        (output_of(rows[3:]), r"\[3, 2, 2\] for 7 tokens"),
        (output_of(np.roll(rows, 1, 1)), "it was not filled in"),
    ):
        with pytest.raises(EngineError, match=f"sample s1/p/0: .*{told}"):
            reader.read(request, output)
