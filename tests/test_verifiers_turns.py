"""Environments of several turns of the package `verifiers` itself: its stops, states, tools and rubrics, by our engines."""

from __future__ import annotations

import importlib.util
import json
import signal

import pytest
from conftest import tiny_config
from test_episodes import CHATML, Scripted, ambiguous_tokenizer, ids, prompt_of

from gspo import chat
from gspo.config import SamplingConfig, VerifiersEnvironment, VerifiersReward, VerifiersSource
from gspo.data.sources import load_rows
from gspo.environments import EpisodeError, open_environment, reply_roles, tool_schemas
from gspo.loop import train
from gspo.rewards import build, gold_checks, score
from gspo.rollout.collect import begin, collect, go_on, unfinished, whole
from gspo.types import Prompt
from gspo.verifiers_package import load_environment

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("verifiers") is None,
        reason="the package verifiers is not installed: pip install 'verifiers<0.2'",
    ),
    pytest.mark.filterwarnings("ignore"),  # its and its dependencies' own
]
NAME = "verifiers-for-tests"


def environment(kind="guess", max_turns=8, **parameters):
    return VerifiersEnvironment(environment=NAME, parameters={"kind": kind, **parameters}, max_turns=max_turns)


def rows(kind="guess"):
    return load_rows(VerifiersSource(environment=NAME, parameters={"kind": kind}))


def prompts(tokenizer, kind="guess"):
    made = [prompt_of(tokenizer, row["prompt"][0]["content"], f"e0-r{i}") for i, row in enumerate(rows(kind))]
    return [
        Prompt(i, p.messages, p.text, p.token_ids, None, r, p.id)
        for i, (p, r) in enumerate(zip(made, rows(kind), strict=True))
    ]


def spell(tokenizer, *texts):
    return [ids(tokenizer, *text, "<end>") for text in texts]


def play(config, *turns, limit=400):
    """One sample of each of the three prompts, which all say the same in a turn, or what a list has for each."""
    tokenizer = ambiguous_tokenizer()
    spelt = [spell(tokenizer, *t) if isinstance(t, list) else spell(tokenizer, t)[0] for t in turns]
    engine, game = Scripted(*spelt), open_environment(config)
    sampling = SamplingConfig(max_response_tokens=limit)
    groups = collect(engine, prompts(tokenizer), sampling, tokenizer, group_size=1, seed=0, step=1, environment=game)
    return [s for (s,) in groups]


def test_the_packages_own_stops_state_and_rubric_play_and_judge_an_episode():
    one, two, three = play(
        environment(),
        "2",
        ["1", "3"],
    )
    assert [len(s.turns) for s in (one, two, three)] == [2, 1, 2]
    assert [m["content"] for m in one.conversation] == ["1?", "2", "lower", "1"]
    assert [m["content"] for m in three.conversation] == ["3?", "2", "higher", "3"]
    assert [[t.reply.reward for t in s.turns] for s in (one, two, three)] == [
        [None, 1 / 2 + 0.5 * 0.5], [1 + 0.5 * 0.25], [None, 1 / 2 + 0.5 * 0.5],
    ]  # fmt: skip
    assert all(s.turns[-1].reply.done for s in (one, two, three))


def test_its_limit_of_turns_and_ours_end_an_episode_that_is_judged():
    for config, done in ((environment(max_turns=2), False), (environment(max_turns=9), True)):
        turns = ["7"] * (2 if not done else 5)
        for s in play(config, *turns):
            assert len(s.turns) == len(turns) and s.turns[-1].reply.done is done
            assert s.turns[-1].reply.reward == pytest.approx(0.5 * 0.25 * len(turns))


def test_an_environment_that_says_a_last_word_ends_there():
    for s in play(environment(), "stop"):
        assert s.turns[0].reply.done and s.turns[0].reply.messages == ({"role": "user", "content": "bye"},)


def test_a_fault_of_the_package_stops_the_run_and_is_no_reward():
    with pytest.raises(EpisodeError, match="failed on sample s1/e0-r0/0: Error: the game has crashed"):
        play(environment(), "crash")
    with pytest.raises(EpisodeError, match="rewrites earlier messages"):
        play(environment("rewriting"), "7")
    with pytest.raises(EpisodeError, match="cannot load the environment nothing"):
        open_environment(VerifiersEnvironment(environment="nothing"))


def test_its_tools_are_told_of_called_and_answered_in_the_models_own_format():
    config = environment("tools")
    (schema,) = tool_schemas(config)
    assert schema["function"]["name"] == "double" and reply_roles(config) == ("tool",)
    call = '<tool_call>{{"name": "{}", "arguments": {{"x": {}}}}}</tool_call>'
    first, second, third = play(
        config, [call.format("double", 1), call.format("halve", 2), call.format("double", 500)], "2"
    )
    assert [t.reply.messages for t in first.turns] == [({"role": "tool", "content": "2"},), ()]
    assert first.turns[-1].reply.reward == 1.0 and third.turns[-1].reply.reward == 0.0
    assert "halve" in second.turns[0].reply.messages[0]["content"] and second.turns[0].reply.calls[0].failed
    assert "too large" in third.turns[0].reply.messages[0]["content"]
    assert first.turns[0].reply.calls[0].output == "2" and first.turns[0].reply.calls[0].arguments == '{"x": 1}'


def test_a_suspended_episode_goes_on_as_if_never_suspended():
    tokenizer, game = ambiguous_tokenizer(), open_environment(environment())
    sampling = SamplingConfig(max_response_tokens=400)
    turns = [[5, 2], [6, 2], [7, 2]]
    groups = begin(prompts(tokenizer), group_size=1, seed=0, step=1)
    for turn in turns[:-1]:
        groups = go_on(Scripted(turn), groups, sampling, tokenizer, 2, environment=game)
    assert len(unfinished(groups)) == 3
    parts = whole(go_on(Scripted(turns[-1], *[[8, 2]] * 9), groups, sampling, tokenizer, 99, environment=game))
    at_once = collect(
        Scripted(*turns, *[[8, 2]] * 9), prompts(tokenizer), sampling, tokenizer,
        group_size=1, seed=0, step=1, environment=game,
    )  # fmt: skip
    assert [[t.reply for t in s.turns] for (s,) in parts] == [[t.reply for t in s.turns] for (s,) in at_once]


def test_single_turns_are_judged_by_the_rubric_and_several_are_not():
    tokenizer = ambiguous_tokenizer()
    engine, sampling = Scripted([spell(tokenizer, t)[0] for t in ("2", "4", "7")]), SamplingConfig(max_response_tokens=9)
    groups = collect(engine, prompts(tokenizer, "single"), sampling, tokenizer, group_size=1, seed=0, step=1)
    rewards = build([VerifiersReward()])
    assert [s.total for s in score(rewards, [s for (s,) in groups])] == [1.0, 1.0, 0.0]
    (check,) = gold_checks(rewards)
    assert check("1", rows("single")[0]) is None and "several turns" in str(check("1", rows()[0]))


def test_the_runs_signals_stay_the_runs():
    def mine(number, frame):
        pass

    before = {number: signal.signal(number, mine) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        load_environment(NAME, {"kind": "guess", "max_turns": 77})
        assert all(signal.getsignal(number) is mine for number in before)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_run_plays_it_by_name(tmp_path):
    tokenizer = ambiguous_tokenizer(CHATML)
    chat.require_continuation(tokenizer, reply_roles(environment()))
    config = tiny_config(
        tmp_path,
        data={"source": "verifiers", "environment": NAME, "format": "text", "template": "{answer}="},
        environment={"type": "verifiers", "environment": NAME, "parameters": {"kind": "signs"}, "max_turns": 2},
        rewards=[{"type": "environment"}],
        rollout__prompts_per_step=2,
        rollout__max_response_tokens=30,
        training__steps=2,
        training__micro_batch_tokens=128,
    )
    folder = train(config)
    samples = [json.loads(x) for x in (folder / "samples/step-000001.jsonl").read_text().splitlines()]
    assert max(len(s["turns"]) for s in samples if "turns" in s) == 2
    assert {s["turns"][-1]["reward"] for s in samples if s["finish_reason"] == "stop"} <= {0.125, 0.25, 0.75, 1.125}
