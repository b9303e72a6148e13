"""Episodes of several turns and over several steps by vLLM for real, on the CPU: the tokens, and the trainer's numbers."""

from __future__ import annotations

import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from conftest import plain_logprobs, tiny_policy
from environments_for_tests import Sums
from test_partial_rollouts import prompts
from test_vllm import SHAPE, move, pytestmark, start

from gspo.config import SamplingConfig
from gspo.credit import trajectory
from gspo.environments import Environment
from gspo.rollout.collect import begin, go_on, unfinished, whole
from gspo.rollout.transformers import TransformersEngine
from gspo.rollout.vllm_package import write_shape

__all__ = ["pytestmark"]
SAMPLING = SamplingConfig(max_response_tokens=40)
THREE = Environment(lambda columns: Sums(columns, turns=3), max_turns=3)


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(**SHAPE)


@pytest.fixture(scope="module")
def engine(policy):
    with start(policy) as engine:
        yield engine


@contextmanager
def asked_of(engine):
    """The requests that an engine gets meanwhile, call by call."""
    calls, generate = [], engine.generate
    engine.generate = lambda requests, *more: (calls.append(list(requests)), generate(requests, *more))[1]
    yield calls
    engine.generate = generate


def play(engine, policy, budget=None, between=lambda: None):
    groups = begin(prompts(policy), group_size=4, seed=0, step=1)
    while unfinished(groups):
        groups = go_on(engine, groups, SAMPLING, policy.tokenizer, budget, environment=THREE)
        between()
    return [s for group in whole(groups) for s in group]


def test_each_turn_goes_on_from_the_exact_ids_of_those_before_with_the_trainers_log_probabilities(engine, policy):
    with asked_of(engine) as calls:
        samples = play(engine, policy)
    assert max(len(s.turns) for s in samples) == 3 and len(calls) == 3
    for s in samples:
        read = list(s.prompt.token_ids)
        for number, turn in enumerate(s.turns):
            (request,) = (r for r in calls[number] if r.id == s.id)
            assert list(request.prompt) == read
            read += [*turn.completion.token_ids.tolist(), *turn.reply_ids.tolist()]
        t = trajectory(s)
        assert t.token_ids.tolist() == read
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(t.engine_logprobs), plain_logprobs(policy, t), atol=2e-5, rtol=0)


def test_its_episodes_are_the_embedded_engines(engine, policy):
    for ours, theirs in zip(play(engine, policy), play(TransformersEngine(policy, max_rows=8), policy), strict=True):
        assert ours.completion.token_ids.tolist() == theirs.completion.token_ids.tolist()
        assert [t.reply for t in ours.turns] == [t.reply for t in theirs.turns]
        np.testing.assert_allclose(ours.completion.logprobs, theirs.completion.logprobs, atol=2e-5)


def test_a_suspended_episode_draws_on_where_it_stood(engine, policy):
    for cut, at_once in zip(play(engine, policy, budget=3), play(engine, policy), strict=True):
        assert cut.completion.token_ids.tolist() == at_once.completion.token_ids.tolist()
        np.testing.assert_allclose(cut.completion.logprobs, at_once.completion.logprobs, atol=2e-5)


def test_a_continued_episode_has_each_policys_log_probabilities_and_version():
    policy, policies = tiny_policy(**SHAPE), []
    with start(policy) as engine:

        def between():
            policies.append(tiny_policy(**SHAPE))
            policies[-1].model.load_state_dict(policy.model.state_dict())
            move(policy)
            engine.load(policy)

        samples = play(engine, policy, 6, between)
    assert max(len(s.completion.versions) for s in samples) > 2
    for s in samples:
        t, version_T = trajectory(s), torch.from_numpy(s.completion.version_T)
        with torch.no_grad():
            by_policy = torch.stack([plain_logprobs(p, t) for p in policies])
        wanted = by_policy.gather(0, version_T[None])[0]
        torch.testing.assert_close(torch.from_numpy(t.engine_logprobs), wanted, atol=3e-5, rtol=0)


def test_the_same_shape_lies_in_the_same_place_and_another_does_not(policy, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    one, again, other = write_shape(policy), write_shape(tiny_policy(**SHAPE)), write_shape(tiny_policy())
    assert one == again != other and [p.name for p in one.iterdir()] == ["config.json"]
    assert json.loads((one / "config.json").read_text())["architectures"] == [type(policy.model).__name__]
