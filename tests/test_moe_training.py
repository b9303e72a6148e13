"""Laws of an update over a mixture of experts: what is replayed, and what is measured on the way."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import group_of, sampled, tiny_config, tiny_model, tiny_policy
from moe_support import EXPERTS, FAMILIES, experts_inputs, moe_policy, with_experts
from test_kernels import needs_compiler
from test_partial_rollouts import SAMPLING, prompts

from gspo.loop import train
from gspo.recipe import RecipeError
from gspo.rollout.collect import begin, go_on, unfinished
from gspo.rollout.suspended import restored, saved
from gspo.rollout.transformers import TransformersEngine
from gspo.training.flops import FlopCounter
from gspo.training.kernels import uncompiled
from gspo.training.optimizer import Optimizer
from gspo.training.packing import TrainingError, make_micro_batches
from gspo.training.pretrained import ModelError
from gspo.training.routing import require_routing
from gspo.training.update import Skips, pack_minibatches, update

PROMPTS = [3, 9, 1, 5, 7, 2, 4, 6, 8, 3, 5, 2]
FAR = {"training__learning_rate": 3e-2, "objective__clip_low": 0.2, "objective__clip_high": 0.2, "training__minibatches": 4}
"""Updates that move routers a lot, and clip little."""
REPLAY = {
    "none": {"rollout__old_logprobs": "trainer"},
    "trainer": {"rollout__old_logprobs": "trainer", "training__replay": "trainer"},
    "engine": {"rollout__routed_experts": True, "training__replay": "engine"},
}


def updated(folder, policy, trajectories, **changes):
    config = tiny_config(folder, **FAR | {"model__create": tiny_model(**EXPERTS).create.model_dump()} | changes)
    parts = pack_minibatches(trajectories, config, seed=0, device=policy.device)
    out = update(policy, Optimizer(policy.trainable, config.training, 4), parts, config, Skips())
    return out, parts


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("replay", ["trainer", "engine"])
def test_with_replay_nothing_flips_and_without_it_choices_move(tmp_path, replay, checkpointing):
    policy = moe_policy(checkpointing=checkpointing)
    samples = with_experts(policy, sampled(policy, PROMPTS))
    out, _ = updated(tmp_path, policy, samples, **REPLAY[replay])
    assert out.routing["moe/flips_by_minibatch"] == [0.0] * 4
    assert out.routing["moe/flips_by_layer"] == [0.0] * 3 and out.routing["moe/tokens_flipped"] == 0.0
    free = moe_policy(checkpointing=checkpointing)
    out, _ = updated(tmp_path, free, samples, **REPLAY["none"], rollout__routed_experts=True)
    first, *later = out.routing["moe/flips_by_minibatch"]
    assert (
        first == 0.0 and min(later) > 0.01 and out.routing["moe/tokens_flipped"] >= max(out.routing["moe/flips_by_layer"])
    )
    assert out.routing["moe/engine_flips"] == 0.0  # float32, and the very weights


@pytest.mark.parametrize("replay", ["none", "trainer", "engine"])
def test_what_experts_were_given_counted_without_our_records_bears_the_flips_out(tmp_path, replay):
    """The ids that reach the experts' own forward, in the passes at the old policy and in those of the update."""
    policy = moe_policy()
    samples = with_experts(policy, sampled(policy, PROMPTS))
    seen = experts_inputs(policy)
    settings = REPLAY[replay] | {"rollout__old_logprobs": "trainer", "training__micro_batch_tokens": 1000}
    out, parts = updated(tmp_path, policy, samples, **settings)
    assert [len(part.micro_batches) for part in parts] == [1] * 4
    passes = [[ids_NK for _, ids_NK in seen[i : i + 3]] for i in range(0, len(seen), 3)]
    looks = 4 if replay == "engine" else 1  # at what updates changed: after each, or after the last alone
    assert len(passes) == 4 + 3 + looks
    first, old, new = passes[0], passes[1:4], passes[5:10:2] if replay == "engine" else passes[4:7]
    assert len(first) == len(new) == 3
    kept = [
        (a[:, :, None] == b[:, None, :]).any(-1).float().mean()
        for x, y in zip(old, new, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    found = [1 - float(torch.stack(kept[i : i + 3]).mean()) for i in range(0, 9, 3)]
    assert out.routing["moe/flips_by_minibatch"] == pytest.approx([0.0, *found], abs=1e-6)
    assert all(found) if replay == "none" else found == [0.0] * 3


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_experts_get_the_old_choice_forward_and_in_what_backward_recomputes(tmp_path, checkpointing):
    policy = moe_policy(checkpointing=checkpointing)
    samples = sampled(policy, PROMPTS)
    (micro,) = make_micro_batches(samples, token_budget=1000)
    with torch.no_grad():
        policy.score(micro)
    old = policy.routing.chosen()
    with torch.no_grad():
        for p in policy.trainable.values():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) * p.std())
        policy.score(micro)
    assert not torch.equal(policy.routing.chosen(), old)
    seen = experts_inputs(policy)
    policy.routing.replay(old)
    logp_T = policy.score(micro)[0]
    assert [ids.tolist() for _, ids in seen] == [old[:, i].tolist() for i in range(3)]
    logp_T.sum().backward()
    again = [ids.tolist() for _, ids in seen[3:]]
    assert again == ([] if checkpointing == "none" else [old[:, i].tolist() for i in (2, 1, 0)])
    assert all(router.weight.grad.abs().sum() > 0 for router in policy.routing.routers)


@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_replay_what_written_ones_do_in_value_and_gradient(monkeypatch):
    """And are recomputed in the backward pass, compiled."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # graphs, and no machine code
    samples, frames = sampled(moe_policy(), PROMPTS[:4]), torch._dynamo.utils.counters["frames"]
    (micro,) = make_micro_batches(samples, token_budget=1000)
    ids = torch.tensor([[[1, 5]] * 3], dtype=torch.uint8).expand(micro.num_tokens, -1, -1).contiguous()
    torch._dynamo.reset()
    found, compiled = [], []
    for kernels in ("torch", "compile"):
        with uncompiled():  # the comparison at loading
            policy = moe_policy(kernels=kernels, checkpointing="full")
        for replayed in (ids, None):
            policy.routing.replay(replayed)
            logp_T = policy.score(micro)[0]
            logp_T.sum().backward()
            compiled.append(frames["total"])
            gradients = {k: p.grad.clone() for k, p in policy.trainable.items()}
            found.append((policy.routing.chosen().tolist(), logp_T.detach(), gradients))
    for (chosen, logp_T, gradients), other in zip(found[:2], found[2:], strict=True):
        assert chosen == other[0]
        torch.testing.assert_close(logp_T, other[1])
        assert all(float((gradients[k] - g).norm()) <= 1e-5 * float(g.norm()) for k, g in other[2].items())
    assert found[2][0] == ids.tolist() and found[3][0] != ids.tolist()
    assert compiled[0] == compiled[1] < compiled[2]


def test_shared_prompts_and_another_packing_get_the_choices_of_their_samples(tmp_path, monkeypatch):
    """With most sequences clipped the others are packed anew: each token still meets the experts of the old policy."""
    monkeypatch.setattr("gspo.training.update.LOOK_AHEAD_FROM", 0.0)
    rng, policy = np.random.default_rng(0), moe_policy()
    samples = [t for i in range(4) for t in group_of(rng, f"g{i}", 6, [5, 3, 7, 4])]
    narrow = {"objective__clip_low": 1e-3, "objective__clip_high": 1e-3, "training__micro_batch_tokens": 40}
    used, score = [], type(policy).score

    def noted(self, micro, **kwargs):
        out = score(self, micro, **kwargs)
        chosen = self.routing.chosen()
        used.extend((t.id, chosen[torch.from_numpy(p)]) for t, p in zip(micro.trajectories, micro.places, strict=True))
        return out

    monkeypatch.setattr(type(policy), "score", noted)
    monkeypatch.setattr("gspo.training.routing._Watcher.after", lambda watcher, micro: None)  # in which nothing is replayed
    out, parts = updated(tmp_path, policy, samples, **REPLAY["trainer"], **narrow, training__groups="keep")
    assert out.looked_ahead == 3 and any(len(m.token_ids_N) < sum(len(p) for p in m.places) for m in parts[1].micro_batches)
    by_sample = {}
    for name, ids in used:
        by_sample.setdefault(name, []).append(ids)
    passes = [len(some) for some in by_sample.values()]
    assert max(passes) == 3  # the old policy's, the look ahead, and the moving ones packed anew
    assert all(torch.equal(ids, some[0]) for some in by_sample.values() for ids in some)


def test_no_row_is_taken_for_expert_zero_where_a_record_is_missing(tmp_path):
    policy = moe_policy()
    samples = with_experts(policy, sampled(policy, PROMPTS))
    assert all(len(t.routed_experts) == len(t.token_ids) - 1 for t in samples)  # no row for what the model did not read
    without = [replace(samples[0], routed_experts=None), *samples[1:]]
    with pytest.raises(TrainingError, match=f"sample {samples[0].id}: the engine did not return its routed experts"):
        updated(tmp_path, policy, without, **REPLAY["engine"])
    short = [replace(samples[0], routed_experts=samples[0].routed_experts[:-1]), *samples[1:]]
    with pytest.raises(TrainingError, match=rf"sample {samples[0].id}: .* or one row less"):
        updated(tmp_path, policy, short, **REPLAY["engine"])
    zeros = [replace(samples[0], routed_experts=np.zeros_like(samples[0].routed_experts)), *samples[1:]]
    with pytest.raises(TrainingError, match=rf"sample {samples[0].id}: .* it was not filled in"):
        updated(tmp_path, policy, zeros, **REPLAY["engine"])


def test_the_embedded_engine_returns_the_experts_that_the_trainer_finds(tmp_path):
    """Also where rows wait and are refilled, prompts are padded, and equal prompts go through the model once."""
    policy = moe_policy()
    samples = with_experts(policy, sampled(policy, PROMPTS))
    micros = make_micro_batches(samples, token_budget=30)
    for micro in micros:
        with torch.no_grad():
            policy.score(micro)
        chosen = policy.routing.chosen().numpy()
        for t, place_P in zip(micro.trajectories, micro.places, strict=True):
            assert (np.sort(chosen[place_P], -1) == np.sort(t.routed_experts, -1)).all()


def test_records_cost_what_their_shape_says(tmp_path):
    policy = moe_policy()
    out, parts = updated(tmp_path, policy, sampled(policy, PROMPTS), **REPLAY["trainer"])
    later = sum(m.num_tokens for part in parts[1:] for m in part.micro_batches)
    assert out.routing["moe/replay_bytes"] == later * 3 * 2 and out.routing["moe/replay_s"] > 0


def test_a_dense_model_is_measured_and_asked_as_before(tmp_path):
    policy = tiny_policy()
    config = tiny_config(tmp_path)
    parts = pack_minibatches(sampled(policy, PROMPTS), config, seed=0, device=policy.device)
    assert update(policy, Optimizer(policy.trainable, config.training, 2), parts, config, Skips()).routing == {}
    for changes, told in (
        (REPLAY["trainer"], r'training.replay = "trainer": no module of Qwen3ForCausalLM returns what a router'),
        ({"rollout__routed_experts": True}, r"rollout.routed_experts = true: no module of Qwen3ForCausalLM"),
    ):
        with pytest.raises(ModelError, match=told):
            require_routing(policy, tiny_config(tmp_path, **changes))


def test_replay_is_refused_for_routers_whose_weights_are_not_understood(tmp_path):
    policy = moe_policy()
    policy.routing.replayable = False
    require_routing(policy, tiny_config(tmp_path, rollout__routed_experts=True))
    with pytest.raises(ModelError, match=r'routers of Qwen3MoeForCausalLM make their weights in a way .* "none"'):
        require_routing(policy, tiny_config(tmp_path, **REPLAY["engine"]))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"training__replay": "trainer"}, 'rollout.old_logprobs = "auto" may leave out: use old_logprobs = "trainer"'),
        ({"training__replay": "engine"}, "set rollout.routed_experts = true"),
        ({"model__create__num_experts": 4}, "set experts_per_token and moe_intermediate_size too, or none"),
        ({f"model__create__{k}": v for k, v in (EXPERTS | {"experts_per_token": 9}).items()}, "use 8 or fewer"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, changes, told):
    with pytest.raises(RecipeError, match=told):
        tiny_config(tmp_path, **changes)


@pytest.mark.parametrize("replay", REPLAY)
def test_a_mixture_trains_by_recipe(tmp_path, replay):
    changes = {f"model__create__{k}": v for k, v in EXPERTS.items()} | REPLAY[replay]
    folder = train(tiny_config(tmp_path, **changes))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        flips = row["moe/flips_by_minibatch"]
        assert len(flips) == 2 and (replay == "none" or all(not x for x in flips))
        assert ("moe/engine_flips" in row) is (replay == "engine") and "moe/auxiliary_loss" in row


AFTER = (
    "moe/flips_after_by_minibatch", "moe/flips_after_by_minibatch_and_layer", "moe/flips_after_by_layer",
    "moe/tokens_flipped_after_by_minibatch", "moe/tokens_flipped_after",
)  # fmt: skip
COUNTS = ("calls", "kept", "idle")
"""Of experts' calls: all, those with the ids that the engine chose, and idle passes of a rank, each followed by another."""


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory):
    """What moe_ranks.py left."""
    folder = tmp_path_factory.mktemp("moe_ranks")
    words = [sys.executable, "-W", "error::UserWarning", str(Path(__file__).parent / "moe_ranks.py"), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_replay_and_count_what_one_does(by_ranks, name):
    """Models of four families from their checkpoints, packed, activations recomputed; two ranks with sharded weights and
    passes of unequal number. What experts themselves are given is the record, forward and in what backward recomputes."""
    for size in (1, 2):
        ended = json.loads((by_ranks / f"{name}-{size}.json").read_text())
        assert set(ended["statuses"]) == {0}, ended["said"]
    one, two = (json.loads((by_ranks / f"said-{name}-{size}.json").read_text()) for size in (1, 2))
    assert sum(two["none"]["given"]["idle"]) > sum(one["none"]["given"]["idle"]) == 0
    single = [said.pop("single") for said in (one, two)]  # with two ranks one has no sample and takes part all the same
    for key in AFTER:
        assert single[0][key] and np.array(single[0][key]) == pytest.approx(np.array(single[1][key])), key
    for name, told in one.items():
        layers = told["layers"]
        for size, given in enumerate((told.pop("given"), two[name]["given"]), 1):
            other = [c - k - 2 * layers * idle for c, k, idle in zip(*(given[key] for key in COUNTS), strict=True)]
            assert len(other) == size and all((number > 0) if name == "none" else (number == 0) for number in other)
            # forward, and again in what backward recomputes, of each of the passes; at the old policy of four once
            assert size > 1 or given["calls"] == [layers * (2 * 9 + 4)]
        assert told["moe/flips_by_minibatch"][0] == 0.0 and (told["moe/flips_by_minibatch"][1] > 0) is (name == "none")
        for at in (told, two[name]):  # each rank looks at samples of its own
            after, by_both, by_layer, by_minibatch, tokens = (at.pop(key) for key in AFTER)
            assert len(after) == 2 and 0 < after[-1] == pytest.approx(np.mean(by_layer)) and len(by_layer) == layers
            assert [np.mean(x) for x in by_both] == pytest.approx(after, abs=1e-6) and len(by_both[-1]) == layers
            assert after[-1] <= tokens == by_minibatch[-1] <= 1
        for key in told:
            if key != "moe/replay_bytes":  # ranks share prompts in other rows
                assert two[name][key] == pytest.approx(told[key], rel=1e-3, abs=1e-3), (name, key)


def test_experts_are_computed_by_the_grouped_product_as_one_after_the_other():
    policy = moe_policy()
    (micro,) = make_micro_batches(sampled(policy, PROMPTS), token_budget=1000)
    found = {}
    for way in (policy.model.get_experts_implementation()[""], "eager"):
        policy.model.set_experts_implementation(way)
        logp_T = policy.score(micro)[0]
        policy.model.zero_grad()
        logp_T.sum().backward()
        found[way] = logp_T.detach(), {name: p.grad.clone() for name, p in policy.trainable.items()}
    (logp_T, gradients), other = found["grouped_mm"], found["eager"]
    torch.testing.assert_close(logp_T, other[0])
    assert all(float((gradients[k] - g).norm()) <= 1e-5 * float(g.norm()) for k, g in other[1].items())


def test_of_stacked_experts_those_count_as_arithmetic_that_compute_a_token():
    policy = moe_policy()
    experts = sum(p.numel() for name, p in policy.model.named_parameters() if ".experts." in name)
    routing, counted = policy.routing, FlopCounter(policy).body
    policy.routing = None
    idle = 1 - routing.top_k / routing.num_experts
    assert 0 < idle < 1 and FlopCounter(policy).body - counted == pytest.approx(2 * experts * idle)


def test_a_sample_that_was_suspended_has_the_experts_of_one_that_was_not():
    policy = moe_policy()
    engine = TransformersEngine(policy, max_rows=4, routed_experts=True)
    asked = prompts(policy)

    def sampled_by(budget):
        groups = begin(asked, group_size=4, seed=0, step=1)
        while unfinished(groups):
            groups = go_on(engine, groups, SAMPLING, policy.tokenizer, budget)
            groups = restored(json.loads(json.dumps(saved(groups))), asked)
        return [s for group in groups for s in group]

    for parts, at_once in zip(sampled_by(4), sampled_by(None), strict=True):
        experts = at_once.completion.routed_experts
        assert parts.completion.token_ids.tolist() == at_once.completion.token_ids.tolist()
        assert experts is not None and experts.any() and parts.completion.routed_experts.dtype == experts.dtype
        np.testing.assert_array_equal(np.sort(parts.completion.routed_experts), np.sort(experts))
