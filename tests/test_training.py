"""The update's laws: on-policy minibatches, samples without a signal, diagnosis, LoRA."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import group_of, plain_logprobs, sampled, tiny_config, tiny_model, tiny_policy

from gspo.config import LoraConfig, ModelConfig
from gspo.training import update as update_module
from gspo.training.diagnosis import by_sample, mismatch_metrics, ratio_metrics
from gspo.training.optimizer import Optimizer
from gspo.training.packing import TrainingError, make_micro_batches
from gspo.training.policy import Policy, load_policy
from gspo.training.pretrained import ModelError
from gspo.training.scoring import score_trajectories
from gspo.training.update import Skips, pack_minibatches, update

LENGTHS = [3, 9, 1, 5, 7, 2, 4, 6]


def _gradients(folder, policy, trajectories, **changes):
    """Gradients of one minibatch holding all trajectories, before any step."""
    config = tiny_config(folder, training__minibatches=1, **changes)
    optimizer = Optimizer(policy.trainable, config.training, 1)
    caught = {}

    def no_step(norm):
        caught.update({k: m.grad.clone() for k, m in optimizer.masters.items()})

    optimizer._move = no_step
    parts = pack_minibatches(trajectories, config, seed=0, device=policy.device)
    out = update(policy, optimizer, parts, config, Skips())
    return caught, out


@pytest.mark.parametrize("objective", ["gspo", "gspo_token", "grpo", "dapo"])
def test_any_split_into_micro_batches_gives_the_same_gradient(tmp_path, objective):
    policy = tiny_policy()
    trajectories = sampled(policy, LENGTHS)
    moved = [replace(t, engine_logprobs=t.engine_logprobs - 1e-4) for t in trajectories]
    results = [
        _gradients(
            tmp_path, policy, moved, objective__name=objective, training__micro_batch_tokens=budget,
            rollout__old_logprobs="engine",
        )
        for budget in (32, 64, 1000)
    ]  # fmt: skip
    assert len(results[0][1].ratios[0]) > len(results[2][1].ratios[0]) == 1
    for grads, out in results[1:]:
        assert out.losses[0] == pytest.approx(results[0][1].losses[0], rel=1e-5, abs=1e-7)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, results[0][0][name], rtol=1e-4, atol=2e-6)


def test_first_minibatch_is_reinforce(tmp_path):
    policy = tiny_policy()
    trajectories = sampled(policy, LENGTHS)
    grads, out = _gradients(tmp_path, policy, trajectories, training__micro_batch_tokens=1000)
    policy.model.zero_grad()
    loss = -sum(t.advantage * plain_logprobs(policy, t).mean() for t in trajectories) / len(trajectories)
    loss.backward()
    for name, p in policy.trainable.items():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-6)
    assert (out.ratios[0][0].log_ratio_S == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_at_unchanged_weights_s_is_exactly_one_where_old_ones_are_recomputed(tmp_path, dtype, monkeypatch):
    policy = load_policy(tiny_model(dtype), temperature=1.0, seed=0)
    config = tiny_config(tmp_path, model__dtype=dtype, rollout__old_logprobs="trainer", training__minibatches=4)
    optimizer = Optimizer(policy.trainable, config.training, 4)
    monkeypatch.setattr(optimizer, "_move", lambda norm: None)  # weights stay where they are
    parts = pack_minibatches(sampled(policy, LENGTHS * 2), config, seed=0, device=policy.device)
    out = update(policy, optimizer, parts, config, Skips())
    assert out.recomputed
    assert all((r.log_ratio_T == 0).all() for part in out.ratios for r in part)
    assert ratio_metrics(out.ratios)["ratio/sequence_quantiles"] == [1.0] * 9


def test_auto_keeps_the_engine_in_float32_and_recomputes_in_bfloat16(tmp_path):
    for dtype, recomputed in (("float32", False), ("bfloat16", True)):
        policy = tiny_policy(dtype, hidden_size=256, num_layers=6)  # smaller ones can agree in bfloat16 by luck
        config = tiny_config(tmp_path, model__dtype=dtype)
        optimizer = Optimizer(policy.trainable, config.training, 2)
        parts = pack_minibatches(sampled(policy, LENGTHS), config, seed=0, device=policy.device)
        out = update(policy, optimizer, parts, config, Skips())
        assert out.recomputed is recomputed
        mismatch = mismatch_metrics(out.ratios, recomputed=out.recomputed)
        assert (mismatch["mismatch/largest_log_ratio"] < 1e-5) is (dtype == "float32")


def test_mismatch_counts_clip_decisions_that_would_differ(tmp_path):
    policy = tiny_policy()
    honest = sampled(policy, LENGTHS)
    off = [replace(t, engine_logprobs=t.engine_logprobs - np.float32(0.01), advantage=1.0) for t in honest]
    _, out = _gradients(tmp_path, policy, off)
    metrics = mismatch_metrics(out.ratios, recomputed=False)
    assert metrics["mismatch/decisions_differ"] == len(off)  # s = exp(0.01) is above 1 + 4e-4 for the engine alone
    assert metrics["mismatch/k1"] == pytest.approx(-0.01, abs=1e-4)
    assert metrics["mismatch/sequence_mean"] == pytest.approx(np.exp(0.01), abs=1e-4)
    _, out = _gradients(tmp_path, policy, honest)
    assert mismatch_metrics(out.ratios, recomputed=False)["mismatch/decisions_differ"] == 0


@pytest.mark.parametrize("objective", ["gspo", "gspo_token", "grpo", "dapo"])
def test_samples_without_a_signal_cost_nothing_and_change_nothing(tmp_path, monkeypatch, objective):
    policy = tiny_policy()
    some = [replace(t, advantage=0.0) if i % 2 else t for i, t in enumerate(sampled(policy, LENGTHS))]
    changes = {"objective__name": objective, "training__micro_batch_tokens": 1000}
    skipped, out = _gradients(tmp_path, policy, some, **changes)
    assert [len(r.ids) for r in out.ratios[0]] == [4]
    monkeypatch.setattr(update_module.np, "any", lambda a: True)
    computed, out = _gradients(tmp_path, policy, some, **changes)
    assert [len(r.ids) for r in out.ratios[0]] == [8]
    for name, gradient in skipped.items():
        torch.testing.assert_close(gradient, computed[name], rtol=1e-5, atol=1e-7)


def test_a_micro_batch_whose_every_sequence_is_clipped_goes_back_through_nothing(tmp_path, monkeypatch):
    policy, rng = tiny_policy(), np.random.default_rng(0)
    clipped, live = group_of(rng, "a", 4, [5, 7]), group_of(rng, "b", 9, [9, 8])
    for t in clipped:  # far above the band with a positive advantage; the others far below it with one
        t.engine_logprobs[:] = -9.0
    for t in live:
        t.engine_logprobs[:] = -0.1
    samples = [replace(t, advantage=1.0) for t in (*clipped, *live)]
    changes = {"rollout__old_logprobs": "engine", "training__micro_batch_tokens": 28}
    backward, passes = Optimizer.backward, []
    monkeypatch.setattr(Optimizer, "backward", lambda *args: passes.append(backward(*args)))
    gradients, out = _gradients(tmp_path, policy, samples, **changes)
    assert len(out.ratios[0]) == 2 and len(passes) == 1
    assert sum(int(r.clipped_T.any()) for r in out.ratios[0]) == 1
    with monkeypatch.context() as patched:  # with both passes it is the same gradient, bit by bit

        def both(scorer, optimizer, *rest):
            one = update_module._forward(scorer, *rest, train=True)
            optimizer.backward(one.logp_T, one.grad_T)
            return replace(one, logp_T=one.logp_T.detach())

        patched.setattr(update_module, "_accumulate", both)
        whole, _ = _gradients(tmp_path / "both", policy, samples, **changes)
    assert len(passes) == 3 and all(torch.equal(gradient, whole[name]) for name, gradient in gradients.items())
    # The same without the clipped ones, of the same global counts: half the samples, so half the divisor.
    alone, _ = _gradients(tmp_path / "alone", policy, [s for s in samples if s.group == "b"], **changes)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, alone[name] / 2, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("objective", ["gspo", "gspo_token", "grpo"])
def test_looking_ahead_leaves_out_what_is_clipped_and_makes_the_same_updates(tmp_path, monkeypatch, objective):
    policy = tiny_policy()
    some = sampled(policy, [*LENGTHS, *LENGTHS, *LENGTHS, *LENGTHS])
    for i, t in enumerate(some):  # old ones so far off that every other sequence is clipped, by the sign of its advantage
        t.engine_logprobs[:] -= 0.4 if (t.advantage > 0) == (i % 2 == 0) else -0.4
    config = tiny_config(
        tmp_path,
        objective__name=objective,
        rollout__old_logprobs="engine",
        training__minibatches=4,
        training__micro_batch_tokens=60,
        training__learning_rate=1e-3,
    )
    parts = pack_minibatches(some, config, seed=0, device=policy.device)
    score, results = Policy.score, {}
    for share in (2.0, 0.0):
        trained, one = [], copy.deepcopy(policy)

        def counted(policy, batch, trained=trained, **kwargs):
            trained.append(batch.num_tokens if torch.is_grad_enabled() else 0)
            return score(policy, batch, **kwargs)

        monkeypatch.setattr(Policy, "score", counted)
        monkeypatch.setattr(update_module, "LOOK_AHEAD_FROM", share)
        out = update(one, Optimizer(one.trainable, config.training, 100), parts, config, Skips())
        results[share] = one, out, sum(trained)
    (plain, said, all_tokens), (ahead, told, fewer) = results[2.0], results[0.0]
    assert (said.looked_ahead, told.looked_ahead) == (0, 3)
    assert objective == "grpo" or 0.25 * all_tokens < fewer < 0.8 * all_tokens
    for name, p in plain.trainable.items():
        torch.testing.assert_close(ahead.trainable[name], p, rtol=1e-5, atol=2e-6)
    assert told.losses == pytest.approx(said.losses, rel=1e-4, abs=1e-6)
    clipped = [ratio_metrics(x.ratios)["clip/sequence_by_minibatch"] for x in (said, told)]
    assert clipped[0] == clipped[1] and min(clipped[0]) > 0.2


def test_what_was_looked_at_goes_back_with_the_gradient_that_was_seen_however_it_is_packed(tmp_path, monkeypatch):
    """In bfloat16 sequences packed otherwise have other log-probabilities, by enough to move s as far as the clip range."""
    policy, rng = tiny_policy("bfloat16", hidden_size=256, num_layers=6), np.random.default_rng(0)
    some = [t for g in "abcdefgh" for t in group_of(rng, g, 20, rng.integers(20, 80, 4).tolist())]
    scores = score_trajectories(policy, some, token_budget=400)
    some = [replace(t, engine_logprobs=scores[t.id] - (9.0 if i % 2 else 0.0)) for i, t in enumerate(some)]
    config = tiny_config(
        tmp_path,
        model__dtype="bfloat16",
        rollout__old_logprobs="trainer",
        rollout__correction={"level": "sequence_mean", "mode": "mask", "low": 0.5, "high": 2.0},  # of every other one
        training__minibatches=2,
        training__micro_batch_tokens=400,
    )
    parts = pack_minibatches(some, config, seed=0, device=policy.device)
    monkeypatch.setattr(Optimizer, "_move", lambda self, norm: None)  # weights stay where they are: s is 1
    seen = []
    for share in (2.0, 0.0):
        gradients: list[torch.Tensor] = []
        monkeypatch.setattr(Optimizer, "backward", lambda self, out, grad, all=gradients: all.append(grad[grad != 0]))
        monkeypatch.setattr(update_module, "LOOK_AHEAD_FROM", share)
        out = update(policy, Optimizer(policy.trainable, config.training, 9), parts, config, Skips())
        assert out.looked_ahead == (share == 0)
        seen.append(torch.cat(gradients).sort().values)
    assert len(seen[0]) == sum(t.num_trained for t in some[::2])
    assert torch.equal(*seen)


def test_nothing_is_looked_at_ahead_where_clipped_sequences_have_a_gradient(tmp_path, monkeypatch):
    monkeypatch.setattr(update_module, "LOOK_AHEAD_FROM", 0.0)
    policy = tiny_policy()
    some = [replace(t, reference_logprobs=t.engine_logprobs) for t in sampled(policy, LENGTHS)]
    kl = {"coefficient": 0.1, "estimator": "k3", "place": "loss"}
    config = tiny_config(tmp_path, training__minibatches=2, objective__kl=kl)
    parts = pack_minibatches(some, config, seed=0, device=policy.device)
    assert update(policy, Optimizer(policy.trainable, config.training, 9), parts, config, Skips()).looked_ahead == 0


def test_with_a_kl_term_in_the_loss_samples_without_a_signal_are_trained(tmp_path):
    policy = tiny_policy()
    trajectories = [replace(t, advantage=0.0) for t in sampled(policy, LENGTHS)]
    config = tiny_config(tmp_path, objective__kl={"coefficient": 0.1, "estimator": "k3", "place": "loss"})
    parts = pack_minibatches(trajectories, config, seed=0, device=policy.device)
    assert sum(len(m.trajectories) for part in parts for m in part.micro_batches) == len(trajectories)


def test_a_minibatch_without_any_signal_moves_by_momentum_alone(tmp_path):
    policy = tiny_policy()
    config = tiny_config(tmp_path)
    optimizer = Optimizer(policy.trainable, config.training, 4)
    parts = pack_minibatches(sampled(policy, LENGTHS), config, seed=0, device=policy.device)
    update(policy, optimizer, parts, config, Skips())
    before = {n: p.detach().clone() for n, p in policy.trainable.items()}
    nothing = [replace(t, advantage=0.0) for t in sampled(policy, LENGTHS)]
    update(policy, optimizer, pack_minibatches(nothing, config, seed=0, device=policy.device), config, Skips())
    assert optimizer.updates == 4
    assert any((p != before[n]).any() for n, p in policy.trainable.items())


def test_a_broken_log_probability_names_its_sample(tmp_path):
    policy = tiny_policy()
    trajectories = sampled(policy, LENGTHS)
    broken = trajectories[3].engine_logprobs.copy()
    broken[0] = np.nan
    trajectories[3] = replace(trajectories[3], engine_logprobs=broken)
    config = tiny_config(tmp_path, rollout__old_logprobs="engine")
    optimizer = Optimizer(policy.trainable, config.training, 2)
    parts = pack_minibatches(trajectories, config, seed=0, device=policy.device)
    with pytest.raises(TrainingError, match=trajectories[3].id):
        update(policy, optimizer, parts, config, Skips())


def test_every_sample_is_diagnosed_by_name(tmp_path):
    policy = tiny_policy()
    trajectories = sampled(policy, LENGTHS)
    _, out = _gradients(tmp_path, policy, trajectories)
    assert by_sample(out.ratios) == {t.id: (1.0, False, 0.0) for t in trajectories}


class TestLora:
    def config(self, folder, **changes):
        return tiny_config(folder, model__lora={"rank": 4, "alpha": 8}, training__learning_rate=1e-2, **changes)

    def trained(self, folder):
        pytest.importorskip("peft")
        config = self.config(folder)
        policy = load_policy(config.model, temperature=1.0, seed=0)
        optimizer = Optimizer(policy.trainable, config.training, 8)
        frozen = {n: p.detach().clone() for n, p in policy.model.named_parameters() if not p.requires_grad}
        for step in range(4):
            trajectories = sampled(policy, LENGTHS, seed=step)
            parts = pack_minibatches(trajectories, config, seed=step, device=policy.device)
            update(policy, optimizer, parts, config, Skips())
        return policy, frozen

    def test_the_frozen_base_does_not_move(self, tmp_path):
        policy, frozen = self.trained(tmp_path)
        assert frozen and all("lora_" in n for n in policy.trainable)
        now = dict(policy.model.named_parameters())
        assert all((now[n] == w).all() for n, w in frozen.items())
        assert any(p.abs().max() > 0 for n, p in policy.trainable.items() if "lora_B" in n)

    def test_a_merged_export_gives_the_outputs_of_the_adapter(self, tmp_path):
        policy, _ = self.trained(tmp_path)
        policy.save(tmp_path / "model")
        merged = load_policy(tiny_model(), temperature=1.0, seed=9, path=tmp_path / "model")
        assert merged.adapter is None and not any("lora" in n for n, _ in merged.model.named_parameters())
        ids = torch.tensor([[3, 5, 7, 4, 9, 2]])
        a, b = (p.model(input_ids=ids, use_cache=False).logits for p in (policy, merged))
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        base = load_policy(tiny_model(), temperature=1.0, seed=0).model(input_ids=ids, use_cache=False).logits
        assert (a - base).abs().max() > 1e-3  # the adapter does something

    @pytest.fixture
    def untied(self, tmp_path):
        """The tiny model with an output matrix of its own."""
        policy = tiny_policy()
        policy.model.config.tie_word_embeddings = False
        policy.model.lm_head.weight = torch.nn.Parameter(policy.model.lm_head.weight.detach().clone() * 1.5)
        policy.save(tmp_path / "untied")
        return tmp_path / "untied"

    def test_an_adapter_on_the_output_matrix_is_trained_and_merged(self, untied, tmp_path):
        pytest.importorskip("peft")
        lora = {"rank": 2, "alpha": 4, "target_modules": ["q_proj", "lm_head"]}
        policy = load_policy(ModelConfig(path=str(untied), lora=lora), temperature=0.7, seed=0)
        generator = torch.Generator().manual_seed(0)
        for p in policy.trainable.values():
            p.data.copy_(torch.randn(p.shape, generator=generator) / 4)
        (micro,) = make_micro_batches(sampled(policy, [5, 3, 6]), token_budget=1000)
        mine = policy.score(micro)[0]
        mine.sum().backward()
        grads = {n: p.grad.clone() for n, p in policy.trainable.items()}
        assert any("lm_head" in n and g.abs().max() > 0 for n, g in grads.items())
        policy.model.zero_grad()
        theirs = torch.cat([plain_logprobs(policy, t) for t in micro.trajectories])
        theirs.sum().backward()
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        for name, p in policy.trainable.items():
            assert (grads[name] - p.grad).norm() <= 1e-5 * p.grad.norm(), name
        policy.save(tmp_path / "merged")
        merged = load_policy(ModelConfig(path=str(tmp_path / "merged")), temperature=0.7, seed=0)
        torch.testing.assert_close(merged.score(micro)[0], mine, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("target, told", [("embed_tokens", "on the embeddings"), ("lm_head", "would part them")])
    def test_adapters_that_have_no_place_in_a_checkpoint_are_refused(self, target, told):
        pytest.importorskip("peft")
        config = tiny_model().model_copy(update={"lora": LoraConfig(target_modules=[target, "q_proj"])})
        with pytest.raises(ModelError, match=told):
            load_policy(config, temperature=1.0, seed=0)
