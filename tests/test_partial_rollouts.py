"""Episodes over several steps: each token stays its own policy's, nothing is lost or trained on twice, age is no noise."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from conftest import plain_logprobs, sampled, tiny_config, tiny_policy
from environments_for_tests import Sums
from test_episodes import EPISODES
from test_resuming import assert_same, state, timeless

from gspo import chat
from gspo.config import SamplingConfig, ToolEnvironment
from gspo.credit import trajectory
from gspo.data import Cursor, DataError, take
from gspo.environments import SINGLE_TURN, Environment, EpisodeError
from gspo.environments.tool_calling import ToolEpisode
from gspo.loop import train
from gspo.objectives import OBJECTIVES
from gspo.recipe import RecipeError
from gspo.reporting.names import table_key
from gspo.rollout.collect import begin, go_on, num_tokens, unfinished, whole
from gspo.rollout.suspended import restored, saved
from gspo.rollout.transformers import TransformersEngine
from gspo.run import Run
from gspo.training.diagnosis import mismatch_metrics, mismatch_size, staleness_metrics
from gspo.training.optimizer import Optimizer
from gspo.training.update import Skips, pack_minibatches, update, why_recomputed
from gspo.types import Completion, Prompt, Reply, Sample, ToolCall, Turn, Unfinished

SAMPLING = SamplingConfig(max_response_tokens=30)
ENVIRONMENTS = {"one turn": SINGLE_TURN, "turns": Environment(lambda columns: Sums(columns, turns=4), max_turns=4)}
PROMPTS = [3, 9, 1, 5, 7, 2, 4, 6]


def prompts(policy, texts="12"):
    encoded = [(t, tuple(chat.encode(policy.tokenizer, t))) for t in texts]
    return [Prompt(i, None, t, ids, None, {}, f"e0-r{i}") for i, (t, ids) in enumerate(encoded)]


def rounds(policy, budget, environment=SINGLE_TURN, *, after=lambda groups: groups, groups=None):
    """All groups, sampled budget by budget; `after` is called between, and may move the policy."""
    engine = TransformersEngine(policy, max_rows=5)
    groups = groups or begin(prompts(policy), group_size=4, seed=0, step=1)
    while not groups or unfinished(groups):
        engine.load(policy)
        groups = after(go_on(engine, groups, SAMPLING, policy.tokenizer, budget, environment=environment))
    return whole(groups)


def move(policy, size=0.05):
    with torch.no_grad():
        for p in policy.trainable.values():
            p.add_(torch.randn_like(p) * size)
    policy.version += 1


def said(groups):
    return [
        (s.id, s.text, s.completion.token_ids.tolist(), s.completion.finish_reason, [t.reply for t in s.turns])
        for group in groups
        for s in group
    ]


@pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
@pytest.mark.parametrize("budget", [1, 4, 11])
def test_under_unchanged_weights_a_suspended_episode_becomes_what_it_would_have_been(environment, budget):
    policy = tiny_policy()
    steps = count()
    at_once = rounds(policy, None, environment)
    parts = rounds(policy, budget, environment, after=lambda groups: next(steps) is None or groups)
    assert said(parts) == said(at_once) and next(steps) > 30 // budget / 2
    for a, b in zip(*([s for g in groups for s in g] for groups in (parts, at_once)), strict=True):
        np.testing.assert_allclose(a.completion.logprobs, b.completion.logprobs, atol=2e-5)
        assert a.completion.later == () and trajectory(a).trained.tolist() == trajectory(b).trained.tolist()


@pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_every_token_keeps_the_log_probability_and_the_version_of_the_policy_that_sampled_it(environment):
    policy, told = tiny_policy(), {}
    policies = []

    def after(groups):
        policies.append(tiny_policy())
        policies[-1].model.load_state_dict(policy.model.state_dict())
        for s in (s for group in groups for s in group):
            told[s.id] = [*told.get(s.id, []), s.num_tokens]
        move(policy)
        return groups

    samples = [s for group in rounds(policy, 5, environment, after=after) for s in group]
    assert any(len(s.completion.versions) > 2 for s in samples)
    for s in samples:
        new = np.diff([0, *told[s.id]])
        expected = np.repeat(np.arange(len(new)), new)
        assert s.completion.version_T.tolist() == expected.tolist() and max(new) <= 5
        assert [n for _, n in s.completion.versions] == [n for n in new.tolist() if n]
        t = trajectory(s, version=len(policies))
        with torch.no_grad():
            by_policy = torch.stack([plain_logprobs(p, t) for p in policies])
        wanted = by_policy[torch.from_numpy(expected), torch.arange(t.num_trained)]
        torch.testing.assert_close(torch.from_numpy(t.engine_logprobs), wanted, atol=2e-5, rtol=0)
        last = trajectory(s, version=int(expected[-1])).stale
        assert t.stale is not None and t.stale.all()
        assert (np.zeros(len(expected), bool) if last is None else last).tolist() == (expected < expected[-1]).tolist()


@pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_groups_pass_through_json_exactly_wherever_they_are_suspended(environment):
    policy = tiny_policy()

    def through_json(groups):
        move(policy)
        back = restored(json.loads(json.dumps(saved(groups))), prompts(policy))
        for a, b in zip((s for g in groups for s in g), (s for g in back for s in g), strict=True):
            assert type(a) is type(b) and (a.id, a.prompt, a.num_tokens) == (b.id, b.prompt, b.num_tokens)
        assert json.dumps(saved(back)) == json.dumps(saved(groups))
        return back

    torch.manual_seed(1)
    there = rounds(policy, 3, environment, after=through_json)
    policy = tiny_policy()
    torch.manual_seed(1)
    stayed = rounds(policy, 3, environment, after=lambda groups: move(policy) or groups)
    assert json.dumps(saved(there)) == json.dumps(saved(stayed))


def test_what_belongs_to_other_prompts_is_not_restored():
    policy = tiny_policy()
    groups = saved(begin(prompts(policy), group_size=2, seed=0, step=1))
    for other in (prompts(policy, "13"), prompts(policy, "1")):
        with pytest.raises(DataError, match="row 1 of the prompts"):
            restored(groups, other)


def test_an_environment_that_does_not_repeat_itself_is_told_from_the_policy():
    policy, said = tiny_policy(), count()

    class Moody:
        def __init__(self, columns):
            pass

        def step(self, messages):
            return Reply(({"role": "user", "content": f"{next(said) % 10}="},))

    with pytest.raises(EpisodeError, match="otherwise than before it was suspended"):
        rounds(policy, 3, Environment(Moody, max_turns=6))


def test_calls_of_tools_are_counted_and_not_made_again():
    config = ToolEnvironment(tools=["calculator"], max_calls=3)
    calls = tuple(ToolCall("calculator", "{}", "1", failed=False) for _ in range(2))
    done = Completion(np.array([5, 1]), np.zeros(2, np.float32), "stop", 0, 0)
    turn = Turn(done, "x", Reply(({"role": "tool", "content": "1"},), calls=calls), np.array([7]))

    class Watched:
        calls = 0

        def call(self, name, arguments):
            Watched.calls += 1
            return True, "4"

    def resume(columns, turns):
        return ToolEpisode(config, Watched(), sum(len(t.reply.calls) for t in turns))  # type: ignore[arg-type]

    environment = Environment(resume, max_turns=4, resume=resume)  # type: ignore[arg-type]
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "2*2"}}</tool_call>'
    episode = environment.resumed({}, [turn])
    replies = [episode.step([{"role": "assistant", "content": call}]) for _ in range(2)]
    assert Watched.calls == 1 and [c.failed for r in replies for c in r.calls] == [False, True]


# ---- whole runs -------------------------------------------------------------------------------------------

PARTIAL = {
    "rollout__max_response_tokens": 15,
    "rollout__max_step_tokens": 5,
    "rollout__prompts_per_step": 8,
    "rollout__group_size": 2,
    "training__steps": 8,
    "training__minibatches": 1,
}


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trained_groups(folder):
    """By step, the prompt ids of what was trained on."""
    files = sorted((folder / "samples").glob("step-*.jsonl"))
    return [[json.loads(line)["id"].split("/")[1] for line in f.read_text().splitlines()] for f in files]


def test_every_prompt_is_trained_on_once_with_its_whole_group_and_in_no_step_too_few(tmp_path, monkeypatch):
    waiting, takes, data = [], [], []
    advance = Run.advance
    monkeypatch.setattr(
        Run, "advance", lambda run, c, w: (advance(run, c, w), waiting.append(w), data.append(run.training))
    )
    folder = train(tiny_config(tmp_path, **PARTIAL))
    rows, groups = rows_of(folder), trained_groups(folder)
    assert all(table_key(key) for row in rows for key in row)
    every = [name for step in groups for name in sorted(set(step))]
    assert len(every) == len(set(every)) and all(step.count(name) == 2 for step in groups for name in step)
    assert all(1 <= len(set(step)) <= 8 for step in groups)  # a group for each minibatch, at most prompts_per_step
    begun = set(every) | {g[0].prompt.id for g in waiting[-1]}
    assert all(len(set(step)) + len(w) == 8 for step, w in zip(groups, waiting, strict=True))
    cursor = json.loads((folder / "checkpoints/step-000008/state.json").read_text())["cursor"]
    takes, reached = take(data[0], Cursor(), len(begun), 0)
    assert {p.id for p in takes} == begun and reached.state() == cursor
    assert [r["partial/waiting_groups"] for r in rows] == [len(w) for w in waiting] and any(map(len, waiting))
    assert [r["partial/carried_tokens"] for r in rows] == [num_tokens(w) for w in waiting]
    assert max(r["partial/continued"] for r in rows) > 0 and max(r["partial/staleness"] or 0 for r in rows) > 0
    assert all((r["partial/staleness"] is None) == (r["partial/stale_tokens"] == 0) for r in rows)
    assert rows[0]["partial/stale_tokens"] == rows[0]["partial/continued"] == 0


@pytest.mark.parametrize("more", [{}, {**EPISODES, "rollout__max_step_tokens": 5}], ids=["one turn", "turns"])
def test_with_suspended_episodes_four_steps_and_four_are_eight(tmp_path, more):
    changes = {**PARTIAL, **more, "checkpoint__every": 4, "checkpoint__keep": 5}
    whole_run = train(tiny_config(tmp_path, name="whole", **changes))
    parts = train(tiny_config(tmp_path, name="parts", **changes))
    waiting = json.loads((parts / "checkpoints/step-000004/state.json").read_text())["waiting"]
    assert any("response" in s for g in waiting for s in g["samples"]) and not list(parts.rglob("*.pkl"))
    shutil.rmtree(parts / "checkpoints" / "step-000008")
    (parts / "report.html").unlink()
    train(tiny_config(tmp_path, name="parts", **changes), resume=True)
    assert_same(state(whole_run, 8), state(parts, 8))
    assert timeless(whole_run) == timeless(parts) and len(timeless(parts)) == 8
    for step in range(1, 9):
        name = f"samples/step-{step:06d}.jsonl"
        assert (whole_run / name).read_text() == (parts / name).read_text()
    ends = [json.loads((r / "checkpoints/step-000008/state.json").read_text()) for r in (whole_run, parts)]
    assert ends[0]["waiting"] == ends[1]["waiting"] and ends[0]["cursor"] == ends[1]["cursor"]


def test_a_budget_that_suspends_nothing_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="max_step_tokens = 6 suspends nothing"):
        tiny_config(tmp_path, rollout__max_step_tokens=6)


# ---- the update -------------------------------------------------------------------------------------------


def aged(trajectories, by=0.3, tokens=2):
    """As if the first tokens of every second sample were an earlier policy's, which found them less likely."""
    out = []
    for i, t in enumerate(trajectories):
        stale = np.arange(t.num_trained) < (tokens if i % 2 else 0)
        logprobs = t.engine_logprobs - np.float32(by) * stale
        out.append(replace(t, engine_logprobs=logprobs, stale=stale if stale.any() else None))
    return out


def updated(folder, policy, trajectories, **changes):
    config = tiny_config(folder, **changes)
    parts = pack_minibatches(trajectories, config, seed=0, device=policy.device)
    return update(policy, Optimizer(policy.trainable, config.training, 2), parts, config, Skips()), config


@pytest.mark.parametrize("name", OBJECTIVES)
def test_age_is_not_taken_for_a_mismatch_of_the_engine_and_not_passed_over(tmp_path, name):
    policy = tiny_policy()
    fresh = sampled(policy, PROMPTS)
    out, config = updated(tmp_path, tiny_policy(), aged(fresh), objective__name=name)
    assert out.mismatch is not None and out.mismatch < 1e-5 < out.threshold  # engine and trainer are one here
    assert out.recomputed and "sampled by an earlier policy" in str(why_recomputed(out, config))
    plain, _ = updated(tmp_path, tiny_policy(), fresh, objective__name=name)
    assert not plain.recomputed and staleness_metrics(plain.ratios, on=True) == {"partial/staleness": None}
    assert float(staleness_metrics(out.ratios, on=True)["partial/staleness"]) > 0.01
    told = mismatch_metrics(out.ratios, recomputed=True)
    assert told["mismatch/largest_log_ratio"] < 1e-5 and told["mismatch/decisions_differ"] == 0
    assert told["mismatch/decisions"] < sum(
        len(r.ids if r.unit == "sequence" else r.log_ratio_T) for m in out.ratios for r in m
    )
    first = torch.cat([r.log_ratio_T for r in out.ratios[0]])
    assert torch.equal(first, torch.zeros_like(first))  # ratios count from the policy of this step


def test_with_the_engines_log_probabilities_age_is_in_the_ratio(tmp_path):
    policy = tiny_policy()
    out, _ = updated(tmp_path, policy, aged(sampled(policy, PROMPTS)), rollout__old_logprobs="engine")
    for r in out.ratios[0]:
        torch.testing.assert_close(r.log_ratio_T, torch.where(r.stale_T, 0.3, 0.0), atol=2e-5, rtol=0)
    assert not out.recomputed and any(r.stale_T.any() for r in out.ratios[0])


def test_a_real_mismatch_is_measured_beside_age(tmp_path):
    policy = tiny_policy()
    off = [replace(t, engine_logprobs=t.engine_logprobs + np.float32(0.01)) for t in aged(sampled(policy, PROMPTS))]
    out, _ = updated(tmp_path, policy, off)
    assert out.mismatch == pytest.approx(-np.expm1(-0.01), rel=1e-2)
    assert mismatch_size(out.ratios[0], "token") == pytest.approx(-np.expm1(-0.01), rel=1e-2)


def test_a_correction_weighs_age_too(tmp_path):
    policy = tiny_policy()
    correction = {"level": "sequence_product", "mode": "truncate", "high": 10.0}
    changes = {"rollout__old_logprobs": "trainer", "rollout__correction": correction}
    out, _ = updated(tmp_path, policy, aged(sampled(policy, PROMPTS)), **changes)
    for r in (r for r in out.ratios[0] if r.weight is not None):
        stale_S = torch.zeros(len(r.ids)).index_add(0, r.sequence_T, r.stale_T.float())
        torch.testing.assert_close(r.weight, (0.3 * stale_S).exp(), atol=1e-4, rtol=0)


def test_completions_join_by_runs_of_versions():
    parts = [Completion(np.arange(n), np.zeros(n, np.float32), "length", v, 9) for n, v in ((2, 3), (1, 3), (4, 5), (2, 6))]
    a, b, c, d = parts
    for joined in (a.followed_by(b).followed_by(c).followed_by(d), a.followed_by(b.followed_by(c.followed_by(d)))):
        assert joined.versions == ((3, 3), (5, 4), (6, 2)) and joined.version_T.tolist() == [3] * 3 + [5] * 4 + [6] * 2
        assert joined.seed == 9 and len(joined.logprobs) == 9
    assert Unfinished("a", prompts(tiny_policy())[0], 0).num_tokens == 0 and isinstance(a, Completion) and Sample
