"""Whole runs of a tiny model: every method trains, every step is measured, every fault ends in one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import groupby

import pytest
import tomli_w
import torch
from conftest import tiny_config, values

from gspo.cli import main
from gspo.data import DataError
from gspo.loop import train
from gspo.recipe import RecipeError
from gspo.reporting.names import METRICS, ONLY_WHEN, table_key
from gspo.rewards import RewardError
from gspo.rollout.transformers import TransformersEngine
from gspo.signals import Interrupted
from gspo.training import update as update_module
from gspo.training.packing import TrainingError


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


EVALUATION = {
    "max_response_tokens": 6, "every": 2, "samples": 4, "pass_at": [1, 4], "overlap": "allow",
    "data": {
        "source": "reasoning_gym", "task": "chain_sum", "size": 6, "seed": 9, "template": "{expression}=",
        "format": "text", "parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"objective__name": "gspo_token"},
        {"objective__name": "grpo", "training__groups": "keep"},
        {"objective__name": "dapo", "advantage__baseline": "leave_one_out", "advantage__std": "none"},
        {"objective__kl": {"coefficient": 0.1, "estimator": "k3", "place": "loss"}},
        {"objective__kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}, "advantage__std": "none"},
        {"rollout__old_logprobs": "trainer", "rollout__max_rows": 5},
        {"model__lora": {"rank": 2}, "objective__kl": {"coefficient": 0.1, "estimator": "k2", "place": "loss"}},
        {"tracking__tensorboard": True, "rollout__temperature": 0.7},
    ],
    ids=str,
)
def test_every_step_logs_exactly_the_metrics_of_the_table(tmp_path, changes):
    run = train(tiny_config(tmp_path, evaluation=EVALUATION, **changes))
    first, *steps = rows(run)
    assert first["step"] == 0 and all(k.startswith(("step", "time", "evaluation/")) for k in first)
    always = {k for k in METRICS if not any(k.startswith(prefix) for prefix in ONLY_WHEN)}
    for row in steps:
        assert {table_key(k) for k in row} >= always
        assert all(table_key(k) for k in row), [k for k in row if not table_key(k)]
        assert ("kl/reference" in row) is ("objective__kl" in changes)
        assert ("evaluation/pass@4_low" in row) is (row["step"] in (2, 3))
        assert row["update/updates"] == 2 * row["step"]
        assert row["reward/groups_without_signal"] < 1
    assert (run / "report.html").stat().st_size > 10_000
    samples = [json.loads(line) for line in (run / "samples" / "step-000003.jsonl").read_text().splitlines()]
    assert len(samples) == 16 and len({s["seed"] for s in samples}) == 16
    held_out = [json.loads(line) for line in (run / "evaluation" / "step-000003.jsonl").read_text().splitlines()]
    assert len(held_out) == 24 and all(s["parts"] and s["advantage"] is None for s in held_out)
    assert {s["weight_version"] for s in samples} == {4}  # two steps of two minibatches came before


def test_a_run_with_the_same_seed_is_the_same_and_with_another_is_not(tmp_path):
    runs = [rows(train(tiny_config(tmp_path, name=n, seed=s)))[-1] for n, s in (("a", 1), ("b", 1), ("c", 2))]
    assert runs[0]["objective/loss"] == runs[1]["objective/loss"] != runs[2]["objective/loss"]


def test_without_checkpoints_a_run_leaves_its_records_and_the_cold_starts_model(tmp_path):
    cold = {"steps": 3, "batch_size": 8, "learning_rate": 1e-2}
    run = train(tiny_config(tmp_path, cold_start=cold, checkpoint={"every": None}))
    assert [r["step"] for r in rows(run)] == [1, 2, 3] and not (run / "checkpoints").exists()
    assert [p.name for p in (run / "cold_start" / "checkpoints").glob("step-*")] == ["step-000003"]


def test_an_adapter_starts_from_the_cold_start(tmp_path):
    pytest.importorskip("peft")
    cold = {"steps": 3, "batch_size": 8, "learning_rate": 1e-2}
    run = train(tiny_config(tmp_path, model__lora={"rank": 2}, cold_start=cold))
    assert rows(run / "cold_start")[-1]["step"] == 3
    again = train(tiny_config(tmp_path, model__lora={"rank": 2}, cold_start=cold, training__steps=4), resume=True)
    assert [r["step"] for r in rows(again)] == [1, 2, 3, 4]


def test_a_broken_reward_stops_the_run_by_name_or_abstains(tmp_path):
    broken = str(values(tmp_path)["rewards"][0]["function"]).replace("even_sum", "broken")
    reward = {"type": "function", "function": broken}
    with pytest.raises(RewardError, match=r"broken.*s1/e0-r\d+/0|s1/e0-r\d+/0.*broken"):
        train(tiny_config(tmp_path, rewards=[reward]))
    # Nothing left to train on is no silent no-op either.
    with pytest.raises(RewardError, match=r"abstained on every sample of step 1.*the verifier is down"):
        train(tiny_config(tmp_path, name="abstain", rewards=[reward | {"on_error": "abstain"}]))


def test_a_training_set_too_small_for_a_batch_is_an_error_with_both_numbers(tmp_path):
    with pytest.raises(DataError, match=r"3 prompts.* 4"):
        train(tiny_config(tmp_path, data__size=3))


def test_faulty_rows_are_listed_before_anything_is_trained(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "", "answer": "2"}\n{"prompt": "1+1="}\n')
    source = {"source": "jsonl", "path": str(file), "format": "text"}
    with pytest.raises(DataError, match=r"(?s)row 1 .*row 2 "):
        train(tiny_config(tmp_path, data=source, rewards=[{"type": "exact"}]))
    assert not (tmp_path / "tiny" / "metrics.jsonl").exists()


def recipe(folder, **changes):
    path = folder / "recipe.toml"
    plain = json.loads(json.dumps(values(folder, **changes)))

    def without_none(value):
        return {k: without_none(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value

    path.write_bytes(tomli_w.dumps(without_none(plain)).encode())
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "nowhere.toml"], "nowhere.toml: there is no such recipe"),
        (["train", "RECIPE", "--training.lerning_rate", "1"], "nearest known one is training.learning_rate"),
        (["train", "RECIPE", "--model.path", "nowhere"], "exactly one of path"),
        (["eval", "RECIPE"], "no [evaluation] table"),
        (["sft", "RECIPE"], "no [cold_start] table"),
        (["report", "nowhere"], "nowhere"),
        (["train", "RECIPE", "--rollout.max_response_tokens", "600", "--training.micro_batch_tokens", "9999"], "512"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_a_fault_is_one_sentence_and_exit_status_1(tmp_path, capsys, words, said):
    path = str(recipe(tmp_path))
    assert main([path if w == "RECIPE" else w for w in words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("gspo: ") and said in error and error.count("\n") == 1


def test_the_command_line_trains_evaluates_and_reports(tmp_path):
    path = recipe(tmp_path, evaluation=EVALUATION, cold_start={"steps": 2, "batch_size": 8, "learning_rate": 1e-3})
    gspo = [sys.executable, "-W", "error", "-m", "gspo.cli"]
    for words in (
        ["sft", str(path)],
        ["train", str(path), "--training.steps", "2"],
        ["eval", str(path), "--from", str(tmp_path / "tiny")],
        ["report", str(tmp_path / "tiny")],
    ):
        result = subprocess.run([*gspo, *words], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stderr == ""
        assert "\x1b" not in result.stdout  # no terminal: no control characters
    assert "report.html" in result.stdout


def test_a_clip_range_of_the_other_kind_is_warned_about(tmp_path, capsys):
    train(tiny_config(tmp_path, objective__clip_low=0.2, objective__clip_high=0.2))
    assert "range for token ratios" in capsys.readouterr().out


def test_the_penalty_in_the_reward_needs_undivided_advantages(tmp_path):
    with pytest.raises(RecipeError, match=r'use advantage.std = "none"'):
        tiny_config(tmp_path, objective__kl={"coefficient": 0.1, "estimator": "k1", "place": "reward"})


def test_a_signal_in_a_reward_is_no_failure_of_the_reward(tmp_path):
    reward = {"type": "function", "function": f"{values(tmp_path)['rewards'][0]['function'].partition(':')[0]}:stops"}
    with pytest.raises(Interrupted):
        train(tiny_config(tmp_path, rewards=[reward | {"on_error": "abstain"}]))
    assert not (tmp_path / "tiny" / "metrics.jsonl").exists()


def test_a_loss_that_is_not_finite_is_skipped_counted_and_recorded_as_null(tmp_path, monkeypatch):
    wanted = update_module._accumulate

    def once(scorer, *rest):
        one = wanted(scorer, *rest)
        if scorer.policy.version == 0:
            next(iter(scorer.policy.trainable.values())).grad.fill_(float("inf"))
            return replace(one, loss=float("inf"))
        return one

    monkeypatch.setattr(update_module, "_accumulate", once)
    with pytest.raises(TrainingError, match="3 updates in a row"):
        train(tiny_config(tmp_path, training__minibatches=2))
    (first,) = rows(tmp_path / "tiny")
    assert first["objective/loss"] is None and first["update/grad_norm"] is None
    assert first["update/skipped"] == 2 and first["update/updates"] == 0


def test_no_step_is_charged_for_the_evaluation_before_training(tmp_path):
    first = rows(train(tiny_config(tmp_path, evaluation=EVALUATION)))[1]
    assert first["time/evaluate_s"] == 0.0


def test_an_update_that_runs_out_of_memory_says_what_to_lower(tmp_path, monkeypatch):
    def too_large(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr("gspo.run.update", too_large)
    wanted = r"step 1: out of memory in the update: lower training.micro_batch_tokens, .*memory_fraction or .*sleep = true"
    with pytest.raises(TrainingError, match=wanted):
        train(tiny_config(tmp_path))


def test_a_signal_while_the_engine_is_proven_ends_a_run_at_once(tmp_path, monkeypatch, interruptible):
    """Nothing can be lost before the first step; a supervisor that waits half a minute would kill it."""
    went_on = []

    def load(engine, policy):
        os.kill(os.getpid(), signal.SIGINT)
        went_on.append(True)

    monkeypatch.setattr(TransformersEngine, "load", load)
    with pytest.raises(Interrupted):
        train(tiny_config(tmp_path))
    assert not went_on


def test_the_engine_rests_while_weights_are_updated(tmp_path, monkeypatch):
    """What may go back to the trainer goes after a step's last sample and before the update, and comes with the load."""
    asked = []
    for name in ("generate", "rest", "load"):
        own = getattr(TransformersEngine, name)
        monkeypatch.setattr(
            TransformersEngine, name, lambda *args, own=own, name=name, **more: asked.append(name) or own(*args, **more)
        )
    own_update = update_module.update
    monkeypatch.setattr("gspo.run.update", lambda *args: asked.append("update") or own_update(*args))
    train(tiny_config(tmp_path, training__steps=2))
    step = ["generate", "rest", "update", "load"]
    assert [name for name, _ in groupby(asked)] == ["load", *step, *step]
