"""Laws of the old log-probabilities: whose stand below the ratio, what that costs, and what is measured on the way."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import sampled, tiny_config, tiny_policy

from gspo.loop import train
from gspo.reporting.drawing import Run, deviation_by_length, mismatch_by_length, pooled_by_length
from gspo.reporting.names import LENGTHS
from gspo.training import update as update_module
from gspo.training.diagnosis import mismatch_metrics
from gspo.training.optimizer import Optimizer
from gspo.training.packing import TrainingError
from gspo.training.update import MISMATCH_FRACTION, Skips, pack_minibatches, update, why_recomputed

PROMPTS = [3, 9, 1, 5, 7, 2, 4, 6]


def updated(folder, policy, trajectories, **changes):
    """What an update of two minibatches did, the samples of each, and how often the policy was asked for scores."""
    config = tiny_config(folder, **changes)
    parts = pack_minibatches(trajectories, config, seed=0, device=policy.device)
    calls, score = [], policy.score
    policy.score = lambda micro: calls.append(micro) or score(micro)
    out = update(policy, Optimizer(policy.trainable, config.training, 2), parts, config, Skips())
    policy.score = score
    return out, parts, len(calls)


def shifted(trajectories, by):
    """The same samples as an engine would tell them whose log-probabilities are off by so much."""
    return [replace(t, engine_logprobs=t.engine_logprobs + np.float32(by)) for t in trajectories]


@pytest.mark.parametrize(
    ("choice", "off", "extra"),
    [("engine", 0.0, False), ("engine", 0.01, False), ("auto", 0.0, False), ("auto", 0.01, True), ("trainer", 0.0, True)],
)
def test_only_recomputing_costs_a_pass_over_the_later_minibatches(tmp_path, choice, off, extra, monkeypatch):
    monkeypatch.setattr("gspo.training.update.LOOK_AHEAD_FROM", 2.0)  # that would be another pass
    policy = tiny_policy()
    out, parts, calls = updated(tmp_path, policy, shifted(sampled(policy, PROMPTS), off), rollout__old_logprobs=choice)
    first, later = (len(part.micro_batches) for part in parts)
    assert out.recomputed is extra
    assert calls == first + later * (2 if extra else 1)


@pytest.mark.parametrize(("choice", "off"), [("engine", 0.01), ("auto", 2e-5)])
def test_the_engines_own_stand_below_the_ratios_of_the_later_minibatches(tmp_path, choice, off):
    """At weights that do not move: each ratio is then what the engine is off by, and nothing else."""
    policy = tiny_policy()
    samples = shifted(sampled(policy, PROMPTS), off)
    out, _, _ = updated(tmp_path, policy, samples, rollout__old_logprobs=choice, training__learning_rate=1e-12)
    assert not out.recomputed
    assert out.ratios[1]
    for ratios in out.ratios[1]:
        torch.testing.assert_close(ratios.log_ratio_T, torch.full_like(ratios.log_ratio_T, -off), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("choice", ["auto", "trainer"])
def test_s_of_the_first_minibatch_is_exactly_one_unless_the_engines_are_wanted(tmp_path, choice, dtype):
    policy = tiny_policy(dtype)
    off = shifted(sampled(policy, PROMPTS), 0.01)
    out, _, _ = updated(tmp_path, policy, off, rollout__old_logprobs=choice, model__dtype=dtype)
    assert all((r.log_ratio_T == 0).all() and (r.log_ratio_S == 0).all() for r in out.ratios[0])
    out, _, _ = updated(tmp_path, tiny_policy(dtype), off, rollout__old_logprobs="engine", model__dtype=dtype)
    assert all((r.log_ratio_S != 0).all() for r in out.ratios[0])


@pytest.mark.parametrize("choice", ["engine", "auto", "trainer"])
def test_mismatch_is_measured_wherever_both_sides_are_known_for_free(tmp_path, choice):
    policy = tiny_policy()
    out, parts, _ = updated(tmp_path, policy, sampled(policy, PROMPTS), rollout__old_logprobs=choice)
    known = [[r.engine_gap_T is not None for r in part] for part in out.ratios]
    assert all(known[0]) and set(known[1]) == {choice == "trainer"}
    metrics = mismatch_metrics(out.ratios, recomputed=out.recomputed)
    measured = parts if choice == "trainer" else parts[:1]
    num = sum(len(m.trajectories) for part in measured for m in part.micro_batches)
    assert sum(metrics["mismatch/sequences_by_length"]) == metrics["mismatch/decisions"] == num
    alone = mismatch_metrics(out.ratios[:1], recomputed=out.recomputed)
    assert (metrics == alone) is (choice != "trainer")


@pytest.mark.parametrize(
    ("objective", "uniform", "recomputed"),
    [("gspo", True, True), ("grpo", True, False), ("gspo", False, False), 
     ("gspo_token", False, False), ("dapo", False, True)],
)  # fmt: skip
def test_auto_goes_by_the_ratio_that_the_objective_clips(tmp_path, objective, uniform, recomputed):
    """A common shift of 1e-3 moves s beyond 3e-5 and no token beyond 0.02; one that cancels over a response, by contrast,
    moves tokens alone."""
    policy, rng = tiny_policy(), np.random.default_rng(0)
    honest = sampled(policy, PROMPTS)
    noise = [rng.normal(0, 0.1, t.num_trained) for t in honest]
    told = (
        shifted(honest, 1e-3)
        if uniform
        else [
            replace(t, engine_logprobs=np.float32(t.engine_logprobs + x - x.mean()))
            for t, x in zip(honest, noise, strict=True)
        ]
    )
    out, _, _ = updated(tmp_path, policy, told, objective__name=objective)
    assert out.recomputed is recomputed
    low = 3e-4 if objective.startswith("gspo") else 0.2
    assert out.metrics()["mismatch/threshold"] == out.threshold == pytest.approx(MISMATCH_FRACTION * low)
    assert (out.mismatch > out.threshold) is recomputed


def test_size_is_the_root_mean_square_of_the_ratio_less_one(tmp_path):
    policy = tiny_policy()
    for objective in ("gspo", "grpo"):
        off = shifted(sampled(policy, PROMPTS), -0.01)
        out, _, _ = updated(tmp_path, policy, off, objective__name=objective, training__learning_rate=1e-9)
        assert out.metrics()["mismatch/size"] == pytest.approx(np.expm1(0.01), rel=1e-4)


def test_without_a_sample_to_compare_auto_recomputes_and_says_so(tmp_path):
    policy = tiny_policy()
    trajectories = sampled(policy, PROMPTS)
    config = tiny_config(tmp_path)
    first, second = pack_minibatches(trajectories, config, seed=0, device=policy.device)
    silent = replace(first, micro_batches=[])
    optimizer = Optimizer(policy.trainable, config.training, 2)
    out = update(policy, optimizer, [silent, second], config, Skips())
    assert out.recomputed and out.mismatch is None and out.metrics()["mismatch/size"] is None
    assert "no sample with a signal" in why_recomputed(out, config)
    out = update(policy, optimizer, [first, replace(second, micro_batches=[])], config, Skips())
    assert not out.recomputed  # there is nothing to recompute


def test_the_reason_has_the_numbers_and_only_auto_gives_one(tmp_path):
    policy = tiny_policy()
    off = shifted(sampled(policy, PROMPTS), -0.005)
    out, _, _ = updated(tmp_path, policy, off, training__learning_rate=1e-9)
    assert why_recomputed(out, tiny_config(tmp_path)) == (
        "old log-probabilities are recomputed by the trainer: engine against trainer alone moves s by 5.0e-03 "
        "(root mean square), more than 0.1 of the clip range 0.0003/0.0004"
    )
    assert why_recomputed(out, tiny_config(tmp_path, rollout__old_logprobs="trainer")) is None
    out.recomputed = False
    assert why_recomputed(out, tiny_config(tmp_path)) is None


def test_a_run_tells_once_why_it_recomputes_and_counts_every_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(update_module, "MISMATCH_FRACTION", -1.0)  # no mismatch is small enough, none included
    run = train(tiny_config(tmp_path))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["mismatch/recomputed"] for row in rows] == [1, 1, 1]
    assert all(row["mismatch/size"] >= 0 > row["mismatch/threshold"] for row in rows)
    assert capsys.readouterr().out.count("old log-probabilities are recomputed by the trainer") == 1


@pytest.mark.parametrize("choice", ["auto", "engine", "trainer"])
def test_an_engines_log_probability_that_is_not_finite_names_its_sample(tmp_path, choice):
    policy = tiny_policy()
    trajectories = sampled(policy, PROMPTS)
    trajectories[2].engine_logprobs[0] = -np.inf
    with pytest.raises(TrainingError, match=trajectories[2].id):
        updated(tmp_path, policy, trajectories, rollout__old_logprobs=choice)


# ---- by length --------------------------------------------------------------------------------------------


def test_s_by_length_is_what_loops_over_the_samples_find(tmp_path):
    policy, rng = tiny_policy(), np.random.default_rng(1)
    honest = sampled(policy, PROMPTS * 4)
    gaps = {t.id: rng.normal(0, 0.05, t.num_trained) for t in honest}
    told = [replace(t, engine_logprobs=np.float32(t.engine_logprobs + gaps[t.id])) for t in honest]
    out, _, _ = updated(tmp_path, policy, told, training__minibatches=1)
    metrics = mismatch_metrics(out.ratios, recomputed=False)
    d = np.concatenate([-gaps[t.id] for t in told])
    assert metrics["mismatch/k1"] == pytest.approx(-d.mean(), abs=1e-5)
    assert metrics["mismatch/k3"] == pytest.approx((np.exp(d) - 1 - d).mean(), abs=1e-5)
    assert metrics["mismatch/largest_log_ratio"] == pytest.approx(np.abs(d).max(), abs=1e-4)
    found = defaultdict(list)
    for t in told:
        found[sum(t.num_trained > edge for edge in LENGTHS)].append(np.exp(-gaps[t.id].mean()))
    assert len(found) > 2
    for i in range(len(LENGTHS) + 1):
        mean, std = (metrics[f"mismatch/sequence_{what}_by_length"][i] for what in ("mean", "std"))
        assert metrics["mismatch/sequences_by_length"][i] == len(found[i])
        assert mean == (pytest.approx(np.mean(found[i]), abs=1e-5) if found[i] else None)
        assert std == (pytest.approx(np.std(found[i], ddof=1), abs=1e-5) if len(found[i]) > 1 else None)


def test_nothing_measured_is_null_and_no_error():
    metrics = mismatch_metrics([[], []], recomputed=False)
    assert metrics["mismatch/sequences_by_length"] == [0] * (len(LENGTHS) + 1)
    assert set(metrics["mismatch/sequence_std_by_length"]) == {None}
    assert metrics["mismatch/decisions"] == 0


def test_pooled_over_steps_is_the_deviation_of_all_sequences_together():
    rng = np.random.default_rng(0)
    steps = [rng.normal(1, 0.1, (n,)) for n in (1, 7, 2)]
    empty = [None] * len(LENGTHS)
    rows = [
        {
            "step": i,
            "mismatch/sequence_mean_by_length": [s.mean(), *empty],
            "mismatch/sequence_std_by_length": [s.std(ddof=1) if len(s) > 1 else None, *empty],
            "mismatch/sequences_by_length": [len(s)] + [0] * len(LENGTHS),
        }
        for i, s in enumerate(steps, 1)
    ]
    mean, std, num = pooled_by_length(Run(rows))
    whole = np.concatenate(steps)
    assert (mean[0], std[0], num[0]) == (pytest.approx(whole.mean()), pytest.approx(whole.std(ddof=1)), 10)
    assert np.isnan(std[1:]).all() and (num[1:] == 0).all()
    assert_drawn(Run(rows, clip=(3e-4, 4e-4)), whole.mean() - 1, whole.std(ddof=1))


def assert_drawn(run, mean, std):
    """Both panels of the report's figure show these of the first length, and the clip range."""
    from matplotlib.figure import Figure

    first, second = Figure().subplots(1, 2)
    mismatch_by_length(first, run, ())
    means = next(line for line in first.lines if line.get_label() == "mean of s - 1")
    assert means.get_xydata().tolist() == [[0, pytest.approx(mean)]]
    (bar,) = (segments for c in first.collections if len(segments := c.get_segments()))
    assert bar[0][:, 1].tolist() == [pytest.approx(mean - std), pytest.approx(mean + std)]
    (band,) = first.patches
    assert [float(y) for y in (band.get_y(), band.get_height())] == [pytest.approx(-3e-4), pytest.approx(7e-4)]
    deviation_by_length(second, run, ())
    drawn = {line.get_label(): line.get_ydata() for line in second.lines}
    assert drawn["deviation of s"].tolist() == [pytest.approx(std)]
    assert list(drawn["narrower clip bound"]) == [3e-4, 3e-4]


def test_decisions_compared_are_of_the_objectives_unit(tmp_path):
    policy = tiny_policy()
    trajectories = sampled(policy, PROMPTS)
    tokens = sum(t.num_trained for t in trajectories)
    for objective, num in (("gspo", len(trajectories)), ("grpo", tokens)):
        out, _, _ = updated(tmp_path, policy, trajectories, training__minibatches=1, objective__name=objective)
        assert mismatch_metrics(out.ratios, recomputed=False)["mismatch/decisions"] == num
    assert torch.is_grad_enabled()
