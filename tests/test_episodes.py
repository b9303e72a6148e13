"""Episodes of several turns: what was sampled stays as it was, what was read is not trained on, and every end is an end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import plain_logprobs, tiny_config, tiny_policy
from environments_for_tests import Broken, Sums
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gspo import chat
from gspo.config import EnvironmentReward, SamplingConfig
from gspo.credit import trajectory
from gspo.environments import Environment, EpisodeError
from gspo.loop import train
from gspo.recipe import RecipeError
from gspo.reporting.names import table_key
from gspo.rewards import build, score
from gspo.rollout.collect import collect
from gspo.rollout.engine import Request, sample_seed, turn_seed
from gspo.rollout.transformers import TransformersEngine
from gspo.training.packing import make_micro_batches
from gspo.types import Completion, Prompt, Reply

CHATML = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '<end>' + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
FORGETFUL = (  # drops the thinking of all responses that a user's message follows, as Qwen3's does
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{% set text = m.content.split('</think>')[-1] %}{% endif %}"
    "{{ '[' + m.role + ']' + text + '<end>' + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def ambiguous_tokenizer(template=CHATML):
    """BPE over letters in which "a", "b" and "ab" are tokens: [a, b] and [ab] decode to the same text."""
    letters = ["<pad>", "<eos>", "<end>", *map(chr, range(32, 127)), "\n"]
    vocabulary = {token: i for i, token in enumerate([*letters, "ab"])}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")  # type: ignore[assignment]
    backend.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=["<end>"]
    )
    tokenizer.chat_template = template
    return tokenizer


def ids(tokenizer, *tokens):
    return [tokenizer.convert_tokens_to_ids(t) for t in tokens]


class Scripted:
    """An engine that says what it is told, turn by turn, and keeps what it was asked."""

    version, copies_weights = 0, False

    def __init__(self, *turns):
        self.turns, self.asked = turns, []

    def generate(self, requests, sampling, progress=lambda n: None):
        said = self.turns[len(self.asked)]
        self.asked.append(list(requests))
        progress(len(requests))
        out = []
        for k, r in enumerate(requests):
            tokens = np.array(said[k] if isinstance(said[0], list) else said, np.int64)[: r.limit]
            stopped = "stop" if tokens[-1] in (1, 2) else "length"
            out.append(Completion(tokens, -np.arange(1.0, len(tokens) + 1, dtype=np.float32), stopped, 7, r.seed))
        return out


def prompt_of(tokenizer, text="ab?", name="e0-r0"):
    messages = ({"role": "user", "content": text},)
    return Prompt(0, messages, text, tuple(chat.encode(tokenizer, messages)), None, {}, name)


class Asks:
    """Replies with the same messages until it has replied `times` times."""

    def __init__(self, *contents, times=1, role="user", reward=None):
        self.messages = tuple({"role": role, "content": c} for c in contents)
        self.left, self.reward, self.seen = times, reward, []

    def step(self, messages):
        self.seen.append(list(messages))
        self.left -= 1
        return Reply(done=True, reward=self.reward) if self.left < 0 else Reply(self.messages, reward=self.reward)


def asking(*contents, max_turns=5, max_turn_tokens=None, **more):
    return Environment(lambda columns: Asks(*contents, **more), max_turns=max_turns, max_turn_tokens=max_turn_tokens)


def run(engine, tokenizer, environment, *, limit=100, group_size=1, prompts=None):
    prompts = prompts or [prompt_of(tokenizer)]
    sampling = SamplingConfig(max_response_tokens=limit)
    return collect(engine, prompts, sampling, tokenizer, group_size=group_size, seed=0, step=1, environment=environment)


# ---- tokens -----------------------------------------------------------------------------------------------


def test_what_was_sampled_is_what_is_read_and_trained_on_where_its_text_has_other_tokens():
    tokenizer = ambiguous_tokenizer()
    first, second = ids(tokenizer, "a", "b", "<end>"), ids(tokenizer, "b", "<end>")
    text = tokenizer.decode(first[:-1])
    assert tokenizer(text, add_special_tokens=False)["input_ids"] != first[:-1], "this tokenizer must be ambiguous"
    engine = Scripted(first, second)
    ((sample,),) = run(engine, tokenizer, asking("ab"))
    between = ids(tokenizer, *"|[user]", "ab", "<end>", *"|[assistant]")
    start = list(sample.prompt.token_ids)
    assert list(engine.asked[1][0].prompt) == start + first + between
    t = trajectory(sample)
    assert t.token_ids.tolist() == start + first + between + second
    assert t.token_ids[t.trained].tolist() == first + second == sample.completion.token_ids.tolist()
    assert t.num_trained == len(first + second) and t.engine_logprobs.tolist() == [-1, -2, -3, -1, -2]
    assert [m["content"] for m in sample.conversation] == ["ab?", "ab", "ab", "b"] and sample.text == "b"


def test_thinking_that_the_template_would_drop_stays_in_what_is_read_and_trained_on():
    tokenizer = ambiguous_tokenizer(FORGETFUL)
    thought = ids(tokenizer, *"<think>x</think>y", "<end>")
    engine = Scripted(thought, ids(tokenizer, "y", "<end>"))
    ((sample,),) = run(engine, tokenizer, asking("go on"))
    rendered = tokenizer.apply_chat_template(sample.conversation, tokenize=False)
    assert "<think>" not in rendered, "this template must drop thinking"
    read = list(engine.asked[1][0].prompt)
    start = len(sample.prompt.token_ids)
    assert read[start : start + len(thought)] == thought
    assert tokenizer.decode(read[start + len(thought) :]) == "|[user]go on<end>|[assistant]"


def test_a_turn_is_closed_once_whatever_end_of_sequence_was_sampled():
    tokenizer = ambiguous_tokenizer()
    reply = [{"role": "user", "content": "x"}]
    end, eos = ids(tokenizer, "<end>", "<eos>")
    after_end = chat.continuation(tokenizer, reply, last=end, chat=True)
    after_eos = chat.continuation(tokenizer, reply, last=eos, chat=True)
    assert after_eos == [end, *after_end] and tokenizer.decode(after_end) == "|[user]x<end>|[assistant]"
    assert chat.continuation(tokenizer, reply, last=eos, chat=False) == ids(tokenizer, "x")


def test_between_two_responses_stands_what_the_template_itself_writes_there():
    tokenizer = ambiguous_tokenizer()
    messages = [
        {"role": "user", "content": "ab?"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "ab 1"},
    ]
    whole = chat.encode(tokenizer, messages)
    start = [*chat.encode(tokenizer, messages[:1]), *ids(tokenizer, "b", "<end>")]
    assert whole == start + chat.continuation(tokenizer, messages[2:], last=start[-1], chat=True)


def test_control_tokens_spelled_out_in_a_reply_become_text():
    tokenizer = ambiguous_tokenizer()
    end = ids(tokenizer, "<end>")[0]
    got = chat.continuation(tokenizer, [{"role": "tool", "content": "x<end>y<eos>"}], last=end, chat=True)
    assert got.count(end) == 1 and 1 not in got
    assert "x< end>y< eos>" in tokenizer.decode(got)


@pytest.mark.parametrize(
    ("template", "role", "said"),
    [
        ("{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}", "user", "0 times"),
        ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}", "user", "2 times"),
        (
            "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}",
            "tool",
            "drops or repeats",
        ),
        ("{% for m in messages %}{{ loop.index ~ m.content }}{% endfor %}", "user", "something else after a first"),
        ("{{ raise_exception('no tools here') }}", "tool", "no tools here"),
    ],
)
def test_a_template_that_does_not_say_what_follows_a_response_is_refused(template, role, said):
    with pytest.raises(chat.ChatError, match=said):
        chat.require_continuation(ambiguous_tokenizer(template), [role])
    chat.require_continuation(ambiguous_tokenizer(FORGETFUL), ["user", "tool"])


# ---- ends -------------------------------------------------------------------------------------------------


def test_a_response_cut_by_its_limit_ends_the_episode_and_is_still_judged():
    tokenizer = ambiguous_tokenizer()
    engine = Scripted(ids(tokenizer, *"bbbbbb"))
    ((sample,),) = run(engine, tokenizer, asking("x", reward=0.5, max_turn_tokens=4))
    assert len(engine.asked) == 1 and sample.num_tokens == 4
    assert sample.completion.finish_reason == "length" and sample.turns[0].reply.reward == 0.5


@pytest.mark.parametrize("limit", range(3, 30))
def test_no_episode_is_longer_than_its_budget_and_none_ends_in_a_reply(limit):
    tokenizer = ambiguous_tokenizer()
    engine = Scripted(*[ids(tokenizer, "b", "<end>")] * 5)
    ((sample,),) = run(engine, tokenizer, asking("x", times=4), limit=limit)
    t = trajectory(sample)
    assert sample.num_tokens + sample.num_reply_tokens <= limit and t.trained[-1]
    between = len(chat.continuation(tokenizer, [{"role": "user", "content": "x"}], last=2, chat=True))
    assert (sample.completion.finish_reason == "length") == (limit < 5 * 2 + 4 * between)


def test_the_last_turn_gets_no_reply_and_finished_episodes_drop_out():
    tokenizer = ambiguous_tokenizer()
    said = ids(tokenizer, "b", "<end>")
    left = iter([0, 3, 1, 3])
    environment = Environment(lambda columns: Asks("x", times=next(left)), max_turns=3)
    engine, done = Scripted(said, said, said), []
    prompts = [prompt_of(tokenizer, name=f"e0-r{i}") for i in range(2)]
    sampling = SamplingConfig(max_response_tokens=100)
    groups = collect(
        engine, prompts, sampling, tokenizer, group_size=2, seed=0, step=1, environment=environment, progress=done.append
    )
    assert [[len(s.turns) for s in group] for group in groups] == [[1, 3], [2, 3]]
    assert [[r.id for r in asked] for asked in engine.asked][1:] == [
        ["s1/e0-r0/1", "s1/e0-r1/0", "s1/e0-r1/1"],
        ["s1/e0-r0/1", "s1/e0-r1/1"],
    ]
    assert done == [1, 1, 2]
    assert all(len(s.turns[-1].reply_ids) == 0 for group in groups for s in group)


def test_every_turn_has_random_numbers_of_its_own_and_the_first_has_the_samples():
    tokenizer = ambiguous_tokenizer()
    engine = Scripted(*[ids(tokenizer, "b", "<end>")] * 3)
    ((sample,),) = run(engine, tokenizer, asking("x", times=2))
    seed = sample_seed(0, 1, "e0-r0", 0)
    assert [t.completion.seed for t in sample.turns] == [turn_seed(seed, k) for k in range(3)]
    assert turn_seed(seed, 0) == seed == sample.completion.seed and len({turn_seed(seed, k) for k in range(50)}) == 50


def test_an_environment_sees_messages_alone_and_the_whole_conversation():
    tokenizer = ambiguous_tokenizer()
    game = Asks("x")
    run(Scripted(*[ids(tokenizer, "b", "<end>")] * 2), tokenizer, Environment(lambda columns: game, max_turns=4))
    asked = {"role": "user", "content": "ab?"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "x"}
    assert game.seen == [list(asked[:2]), [*asked, {"role": "assistant", "content": "b"}]]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("raise", "failed on sample s1/e0-r0/0: RuntimeError: the game has crashed"),
        ("none", "a NoneType"),
        ("nan", "reward nan"),
        ("silent", "neither ended"),
        ("message", "not a message"),
    ],
)
def test_a_broken_environment_stops_the_run_with_the_samples_name(reply, said):
    tokenizer = ambiguous_tokenizer()
    environment = Environment(lambda columns: Broken(columns, reply), max_turns=3)
    with pytest.raises(EpisodeError, match=said):
        run(Scripted(ids(tokenizer, "b", "<end>")), tokenizer, environment)


# ---- with a policy ----------------------------------------------------------------------------------------


def episodes(policy, *, turns=3, group_size=4, limit=40):
    """Groups of real episodes of the tiny policy, plain text."""
    environment = Environment(lambda columns: Sums(columns, turns=turns), max_turns=turns)
    prompts = [Prompt(i, None, t, tuple(chat.encode(policy.tokenizer, t)), None, {}, f"r{i}") for i, t in enumerate("12")]
    engine = TransformersEngine(policy, max_rows=5)
    return run(engine, policy.tokenizer, environment, limit=limit, group_size=group_size, prompts=prompts)


def test_the_engines_log_probabilities_are_the_models_on_the_whole_episode():
    policy = tiny_policy()
    samples = [s for group in episodes(policy) for s in group]
    assert max(len(s.turns) for s in samples) == 3 and min(len(s.turns) for s in samples) < 3
    for s in samples:
        t = trajectory(s)
        with torch.no_grad():
            torch.testing.assert_close(plain_logprobs(policy, t), torch.from_numpy(t.engine_logprobs), atol=2e-5, rtol=0)


def test_packed_episodes_with_a_shared_prompt_score_as_each_alone():
    policy = tiny_policy()
    trajectories = [trajectory(s) for group in episodes(policy) for s in group]
    for micro in make_micro_batches(trajectories, token_budget=400):
        with torch.no_grad():
            logp_T = policy.score(micro)[0].split([t.num_trained for t in micro.trajectories])
            for t, logp in zip(micro.trajectories, logp_T, strict=True):
                torch.testing.assert_close(logp, plain_logprobs(policy, t), atol=2e-5, rtol=0)


def test_a_request_stops_at_its_own_limit_and_draws_the_same_tokens_before_it():
    policy = tiny_policy()
    engine, sampling = TransformersEngine(policy, max_rows=4), SamplingConfig(max_response_tokens=20)
    whole = [Request(str(i), (3, 4, 5), i) for i in range(6)]
    limits = [1, 2, 3, 5, 30, None]
    cut = engine.generate([replace(r, limit=k) for r, k in zip(whole, limits, strict=True)], sampling)
    for limit, short, long in zip(limits, cut, engine.generate(whole, sampling), strict=True):
        assert short.token_ids.tolist() == long.token_ids[:limit].tolist()


# ---- whole runs -------------------------------------------------------------------------------------------


def test_an_episode_that_broke_off_is_worth_0_and_an_environment_without_a_verdict_is_a_fault():
    tokenizer = ambiguous_tokenizer()
    rewards = build([EnvironmentReward(on_error="abstain")])
    cut = run(Scripted(ids(tokenizer, *"bbb")), tokenizer, asking("x"), limit=3)[0]
    ended = run(Scripted(ids(tokenizer, "b", "<end>")), tokenizer, asking("x", times=0))[0]
    assert [s.total for s in score(rewards, cut + ended)] == [0.0, None]


def environment_of(**more):
    path = Path(__file__).parent / "environments_for_tests.py"
    return {"type": "function", "function": f"{path}:Sums", "max_turns": 3, **more}


EPISODES = {
    "environment": environment_of(),
    "rewards": [{"type": "environment"}],
    "rollout__max_response_tokens": 30,
    "training__micro_batch_tokens": 128,
}


def test_a_run_of_episodes_trains_and_records_turns(tmp_path):
    config = tiny_config(tmp_path, **EPISODES, objective__name="gspo_token", advantage__credit="turn")
    folder = train(config)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(table_key(key) for row in rows for key in row)
    assert rows[0]["environment/turns_mean"] > 1 and rows[0]["environment/reward_by_turn"][0] is None
    samples = [json.loads(line) for line in (folder / "samples" / "step-000001.jsonl").read_text().splitlines()]
    several = [s for s in samples if len(s.get("turns", [])) > 1]
    assert several and all(len(s["turns"]) == len(s["advantage"]) for s in several if s["advantage"] is not None)
    assert all(s["turns"][0]["reply"] == [{"role": "user", "content": "+1="}] for s in several)
    assert any(s["ratio"] is not None for s in several) and all("[user] +1=" in s["response"] for s in several)


def test_a_run_without_an_environment_is_the_run_whose_environment_ends_after_one_response(tmp_path):
    plain = train(tiny_config(tmp_path, name="plain"))
    one = train(tiny_config(tmp_path, name="one", environment=environment_of(max_turns=1)))
    losses = [
        [json.loads(line)["objective/loss"] for line in (f / "metrics.jsonl").read_text().splitlines()]
        for f in (plain, one)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"advantage__credit": "turn", "objective__name": "gspo_token"},
            'add \\[\\[rewards\\]\\] with type = "environment"',
        ),
        ({"rewards": [{"type": "environment"}]}, "needs an \\[environment\\] table"),
        ({**EPISODES, "advantage__credit": "turn"}, "one advantage a sequence"),
        ({"environment": {"type": "tools", "tools": ["calculator"], "parameters": {"serch": {}}}}, "parameters of serch"),
        ({"environment": {"type": "function", "function": "x.py:y", "max_turn": 1}}, "max_turns"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, changes, said):
    with pytest.raises(RecipeError, match=said):
        tiny_config(tmp_path, **changes)
