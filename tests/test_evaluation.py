"""Evaluation: independent samples, held-out prompts, and scores that are undefined are errors."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny_config, tiny_policy

from gspo.cli import main
from gspo.cold_start import cold_start
from gspo.config import EvaluationConfig, ReasoningGymSource, SamplingConfig
from gspo.evaluation.command import evaluate_model, find_model
from gspo.evaluation.evaluate import EvaluationError, evaluate, summarise
from gspo.loop import train
from gspo.prompts import load_prompts
from gspo.recipe import RecipeError
from gspo.rewards import Built
from gspo.rollout.collect import collect
from gspo.rollout.transformers import TransformersEngine
from gspo.types import Completion, Prompt, Sample, Score, Scored

STOPS = [{"type": "function", "function": f"{Path(__file__).with_name('rewards_for_tests.py')}:stops"}]
ADDITION = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def source(seed, size=8):
    return ReasoningGymSource(
        task="chain_sum", size=size, seed=seed, template="{expression}=", format="text", parameters=ADDITION
    )


def settings(**changes):
    return EvaluationConfig(data=source(9), max_response_tokens=6, **changes)


def scored(totals, row):
    prompt = Prompt(row, None, "1+1=", (2, 3), "2", id=f"r{row}")
    completion = Completion(np.array([1]), np.zeros(1, np.float32), "stop", 0, 0)
    return [Scored(Sample(f"s0/r{row}/{k}", prompt, completion, ""), t, {"x": Score(t)}) for k, t in enumerate(totals)]


def test_scores_are_means_over_prompts_with_intervals():
    groups = [scored([1.0, 0.0, 0.0, 0.0], 0), scored([1.0, 1.0, 1.0, 1.0], 1)]
    metrics = summarise(groups, settings(samples=4, pass_at=[1, 2]), solved_at=1.0).metrics
    assert metrics["evaluation/pass@1"] == pytest.approx((0.25 + 1) / 2)
    assert metrics["evaluation/pass@2"] == pytest.approx((0.5 + 1) / 2)  # 1 - C(3,2)/C(4,2) = 0.5
    assert metrics["evaluation/pass@1_low"] < 0.625 < metrics["evaluation/pass@1_high"]
    assert metrics["evaluation/reward"] == 0.625
    assert (
        metrics["evaluation/reward_low"] == 0.25 and metrics["evaluation/reward_high"] == 1.0
    )  # two prompts: one or other


def test_abstentions_that_leave_a_score_undefined_are_an_error():
    groups = [scored([1.0, None], 0), scored([None, None], 7)]
    with pytest.raises(EvaluationError, match=r"pass@2 is undefined"):
        summarise(groups, settings(samples=2, pass_at=[2]), solved_at=1.0)
    metrics = summarise(groups, settings(samples=2), solved_at=1.0).metrics
    assert metrics["evaluation/abstained"] == 3 and metrics["evaluation/pass@1"] == 1.0  # over the one scored prompt


def test_every_evaluation_prompt_has_random_numbers_of_its_own():
    policy = tiny_policy()
    prompts = load_prompts(
        source(9, size=40), policy.tokenizer, [], max_prompt_tokens=12, where="evaluation.data", say=print
    )
    assert [p.id for p in prompts] == [f"r{i}" for i in range(40)]
    sampling = SamplingConfig(max_response_tokens=6)
    engine = TransformersEngine(policy, max_rows=64)
    groups = collect(engine, prompts, sampling, policy.tokenizer, group_size=2, seed=0, step=0)
    assert len({s.completion.seed for g in groups for s in g}) == 80
    again = collect(engine, prompts, sampling, policy.tokenizer, group_size=2, seed=0, step=0)
    assert [s.text for g in again for s in g] == [s.text for g in groups for s in g]


def test_prompts_that_would_share_their_random_numbers_are_refused():
    policy = tiny_policy()
    alike = [Prompt(i, None, "1+1=", (2, 3), "2") for i in range(2)]
    with pytest.raises(ValueError, match="ids of their own"):
        collect(
            TransformersEngine(policy, max_rows=4), alike, SamplingConfig(max_response_tokens=2), policy.tokenizer,
            group_size=2, seed=0, step=0,
        )  # fmt: skip


def test_an_evaluation_samples_k_responses_to_each_prompt():
    policy = tiny_policy()
    prompts = load_prompts(source(9), policy.tokenizer, [], max_prompt_tokens=12, where="evaluation.data", say=print)
    parity = Built("parity", 1.0, "raise", lambda samples: [float(s.num_tokens % 2) for s in samples], None)
    done = evaluate(
        TransformersEngine(policy, max_rows=5), prompts, [parity], settings(samples=3), policy.tokenizer, solved_at=1.0
    )
    assert [len(g) for g in done.groups] == [3] * 8
    share = np.mean([s.total for g in done.groups for s in g])
    assert done.metrics["evaluation/pass@1"] == pytest.approx(share)


def test_the_command_finds_the_model_in_a_run_a_cold_start_a_checkpoint_and_a_model_folder(tmp_path):
    config = tiny_config(
        tmp_path,
        cold_start={"steps": 2, "batch_size": 8, "learning_rate": 1e-3},
        evaluation=settings(overlap="allow").model_dump(mode="json"),
    )
    model = cold_start(config)
    run = tmp_path / "tiny"
    assert find_model(run) == model
    train(config)
    newest = run / "checkpoints" / "step-000003"
    for folder in (run, newest, newest / "model"):
        assert find_model(folder) == newest / "model"
    assert "pass@1" in evaluate_model(config, run)
    with pytest.raises(RecipeError, match="neither a whole checkpoint nor a model"):
        find_model(tmp_path)


def test_a_cold_start_stops_at_its_reward_and_says_so_when_resumed(tmp_path):
    changes = {
        "cold_start": {"steps": 50, "batch_size": 8, "learning_rate": 1e-3, "evaluate_every": 4, "stop_at": 0.0},
        "evaluation": settings(overlap="allow").model_dump(mode="json"),
    }
    model = cold_start(tiny_config(tmp_path, **changes))
    assert model.parent.name == "step-000004"  # the first evaluation is good enough
    assert cold_start(tiny_config(tmp_path, **changes), resume=True) == model
    with pytest.raises(RecipeError, match=r"set cold_start.evaluate_every"):
        tiny_config(tmp_path, cold_start=changes["cold_start"] | {"evaluate_every": 0}, evaluation=changes["evaluation"])


def test_a_signal_ends_an_evaluation_in_a_sentence_and_closes_its_engine(tmp_path, capsys, monkeypatch):
    closed = []
    monkeypatch.setattr(TransformersEngine, "close", lambda self: closed.append(True))
    config = tiny_config(tmp_path, rewards=STOPS, evaluation=settings(overlap="allow"))
    monkeypatch.setattr("gspo.recipe.load", lambda *args: config)
    assert main(["eval", "recipe.toml"]) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; nothing of it is kept" in capsys.readouterr().err
    assert closed == [True]
