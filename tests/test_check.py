"""Laws of `gspo check`: right answers get full marks, empty, refusing and echoing ones do not, gaps are said."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from conftest import values

from gspo.check import NUM_SHOWN, REFUSAL, check_recipe
from gspo.cli import main
from gspo.config import JudgeReward, ModelReward
from gspo.data import DataError
from gspo.recipe import build
from gspo.rewards import RewardError

ROOT = Path(__file__).parents[1]
ALPHABET = "".join(map(chr, range(32, 127)))

REWARDS = """
from gspo.types import Score

def right(samples):
    return [float(s.text == f"<{int(s.answer)}>") for s in samples]

def written(answer, columns):
    return f"<{answer}>"

def generous(samples):
    return [1.0 if not s.text else 0.0 for s in samples]

def shy(samples):
    return [Score(None, "who knows") for s in samples]

def silent_on_nothing(samples):
    return [float(s.text == s.answer) if s.text else None for s in samples]

def fragile(samples):
    return [1.0 / len(s.text) / 10 for s in samples]

def nan(samples):
    return [float("nan") for s in samples]

def half(samples):
    return [0.5 for s in samples]
"""


@pytest.fixture
def recipe(tmp_path):
    """A recipe of two rows, `1 + 1?` and `Is it 7?`, with these rewards; dotted changes with __ for dots."""
    (tmp_path / "rewards.py").write_text(REWARDS)

    def make(*rewards, rows=(("1 + 1?", "2"), ("Is it 7?", "6")), **changes):
        lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        data = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl"), "format": "text"}
        plain = {"rollout__max_prompt_tokens": 64, "rollout__max_response_tokens": 64, "training__micro_batch_tokens": 128}
        plain["model__create__alphabet"] = ALPHABET
        settings = values(tmp_path, data=data, rewards=list(rewards), **plain | changes)
        return build(settings)

    return make


@pytest.fixture
def own(tmp_path):
    """A table of one of the functions above."""
    return lambda function, **more: {"type": "function", "function": f"{tmp_path}/rewards.py:{function}", **more}


def failed(config, **more):
    return [(f.row, f.reward, f.kind, f.value) for f in check_recipe(config, **more).failures]


@pytest.mark.parametrize("reward", [{"type": "exact"}, {"type": "numeric"}, {"type": "math"}])
def test_rewards_that_can_be_trusted_pass(recipe, reward):
    checked = check_recipe(recipe(reward))
    assert checked.num_failed == 0 and "got what it should" in checked.text
    assert {kind for _, _, kind in checked.counts} == {"gold", "empty", "refusal", "echo"}
    assert all(count == {"passed": 2} for count in checked.counts.values())


def test_an_echo_that_holds_the_answer_is_found(recipe):
    assert failed(recipe({"type": "last_number"}, rows=[("1 + 1?", "2"), ("Is it 7?", "7")])) == [
        (1, "last_number", "echo", 1.0)
    ]


def test_a_gold_answer_that_its_own_reward_does_not_take_is_found(recipe, own, tmp_path):
    spec = f"{tmp_path}/rewards.py:written"
    config = recipe(own("right", gold_response=spec), rows=[("1 + 1?", "2"), ("2 + 3?", "05"), ("3 + 3?", "6")])
    assert failed(config) == [(1, "right", "gold", 0.0)]


def test_the_scorer_of_a_task_is_held_to_its_own_gold_answers(recipe, tmp_path):
    rows = """
from gspo.config import ReasoningGymSource
from gspo.data import load_rows

def rows():
    made = load_rows(ReasoningGymSource(task="chain_sum", size=3))
    made[1]["_entry"]["answer"] = "no number"
    return made
"""
    (tmp_path / "source.py").write_text(rows)
    data = {"source": "python", "function": f"{tmp_path}/source.py:rows", "prompt_column": "question", "format": "text"}
    config = recipe({"type": "reasoning_gym"}, rollout__max_prompt_tokens=128, training__micro_batch_tokens=256)
    config = config.model_copy(update={"data": type(config).model_validate(config.model_dump() | {"data": data}).data})
    (failure,) = [f for f in check_recipe(config).failures if f.kind == "gold"]
    assert failure.row == 1 and failure.reward == "reasoning_gym"


def test_a_reward_that_pays_for_nothing_is_found(recipe, own):
    checked = check_recipe(recipe(own("generous"), {"type": "exact"}))
    assert [(f.row, f.reward, f.kind, f.value) for f in checked.failures] == [
        (0, "generous", "empty", 1.0),
        (1, "generous", "empty", 1.0),
    ]
    assert "reward generous: does not say how a gold answer is written" in checked.text
    assert failed(recipe({"type": "format", "pattern": ".{0,40}"}))


def test_rewards_that_only_together_pay_for_nothing_are_found(recipe, own):
    config = recipe(own("half"), own("half", name="other"))
    assert (0, "(sum)", "empty", 1.0) in failed(config)
    assert failed(recipe(own("half"), own("half", name="other"), solved_at=1.5)) == []


def test_a_reward_that_abstains_proves_nothing(recipe, own):
    checked = check_recipe(recipe(own("shy")))
    assert checked.num_failed == 6 and {f.kind for f in checked.failures} == {"empty", "refusal", "echo"}
    assert "no answer of this kind got a verdict" in checked.text


def test_an_abstention_on_gold_fails_and_one_among_verdicts_is_counted(recipe, own, tmp_path):
    spec = f"{tmp_path}/rewards.py:written"
    assert (0, "shy", "gold", None) in failed(recipe(own("shy", gold_response=spec)))
    rows = [("1 + 1?", "2"), ("Is it 7?", "6")]
    checked = check_recipe(recipe(own("silent_on_nothing"), rows=rows))
    assert {(f.kind, f.value) for f in checked.failures} == {("empty", None)}


@pytest.mark.parametrize("on_error", ["raise", "abstain"])
def test_an_exception_fails_where_training_would_stop_for_it(recipe, own, on_error):
    checked = check_recipe(recipe(own("fragile", on_error=on_error)))
    assert all("ZeroDivisionError" in f.why for f in checked.failures if f.row is not None)
    assert {f.kind for f in checked.failures} == {"empty"} and checked.num_failed == 2
    assert {f.row for f in checked.failures} == ({0, 1} if on_error == "raise" else {None})


def test_a_verdict_that_is_no_number_ends_the_check_as_it_ends_training(recipe, own):
    with pytest.raises(RewardError, match="nan"):
        check_recipe(recipe(own("nan", on_error="abstain")))


def test_a_gold_answer_that_the_policy_cannot_give_is_found(recipe):
    rows = [("1 + 1?", "2"), ("Spell it", "zwölf"), ("Write", "a" * 63), ("Write on", "a" * 64)]
    checked = check_recipe(recipe({"type": "exact"}, rows=rows))
    assert [(f.row, f.kind, f.value) for f in checked.failures] == [(1, "gold", None), (3, "gold", None)]
    assert "cannot write it" in checked.failures[0].why and "'ö'" in checked.failures[0].why
    assert "max_response_tokens = 64" in checked.failures[1].why


def test_an_answer_that_the_policy_cannot_write_is_said_and_not_skipped(recipe):
    config = recipe({"type": "exact"}, model__create__alphabet="0123456789+-= ", rows=[("1+1=", "2")])
    assert "1 answers refusal were not tried: the policy's tokenizer cannot write them" in check_recipe(config).text


def test_rewards_without_full_marks_are_named(recipe):
    penalty = {"type": "length_penalty", "free_tokens": 0, "max_tokens": 8}
    checked = check_recipe(recipe(penalty, {"type": "exact"}))
    assert checked.num_failed == 0 and "reward length_penalty: no value of it means" in checked.text
    assert "nothing was tried" in check_recipe(recipe(penalty, solved_at=0)).text


def test_an_episodes_reward_is_not_asked_about_single_answers(recipe):
    checked = check_recipe(recipe({"type": "environment"}, environment={"type": "tools", "tools": ["calculator"]}))
    assert checked.num_failed == 0 and "reward environment: no value of it means" in checked.text
    assert checked.text.endswith("nothing was tried")


@pytest.mark.parametrize("fence", ["optional", "required"])
def test_tests_are_held_to_a_program_that_is_right(recipe, tmp_path, fence):
    reward = {"type": "code", "solution": "solution", "fence": fence}
    config = recipe(reward, model__create__alphabet=ALPHABET + "\n")
    right, wrong = "f = lambda a: a + 1", "f = lambda a: a - 1"
    rows = [{"prompt": f"f {n}?", "answer": "assert f(1) == 2", "solution": s} for n, s in enumerate((right, wrong))]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert failed(config) == [(1, "code", "gold", 0.0)]
    del rows[1]["solution"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="column solution, named as solution, holds no program"):
        check_recipe(config)


def test_the_limit_counts_rows_of_each_source(recipe, tmp_path):
    config = recipe({"type": "exact"})
    held_out = {"max_response_tokens": 8, "data": config.data.model_dump(), "overlap": "allow"}
    checked = check_recipe(build(config.model_dump() | {"evaluation": held_out}), 1)
    assert {where for where, _, _ in checked.counts} == {"data", "evaluation.data"}
    assert all(sum(count.values()) == 1 for count in checked.counts.values())


def test_no_weights_are_loaded(recipe, monkeypatch):
    from gspo.training import policy

    monkeypatch.setattr(policy, "create", lambda config: pytest.fail("weights"))
    monkeypatch.setattr(policy, "load_policy", lambda *args, **kwargs: pytest.fail("weights"))
    assert check_recipe(recipe({"type": "exact"})).num_failed == 0


def test_what_failed_is_escaped_shortened_and_counted(recipe, tmp_path):
    (tmp_path / "rude.py").write_text(
        "from gspo.types import Score\n"
        "def rude(samples): return [Score(1.0, '\\x1b[31m\\u202e' + 'long ' * 99) for s in samples]\n"
    )
    rows = [(f"{i} + 1?", str(i + 1)) for i in range(50)]
    checked = check_recipe(recipe({"type": "function", "function": f"{tmp_path}/rude.py:rude"}, rows=rows))
    text = checked.text
    assert "\x1b" not in text and "\u202e" not in text and "⟦U+001B⟧" in text
    assert max(map(len, text.splitlines())) < 200
    assert checked.num_failed == 150 and len(checked.failures) == 3 * NUM_SHOWN and f"the first {NUM_SHOWN}" in text


# ---- the command ------------------------------------------------------------------------------------------


def test_the_command_ends_with_1_where_something_failed(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert main(["check", "recipes/quickstart.toml", "--limit", "5"]) == 0
    assert "every answer that was tried got what it should" in capsys.readouterr().out
    (tmp_path / "rewards.py").write_text(REWARDS)
    table = json.dumps([{"type": "function", "function": f"{tmp_path}/rewards.py:generous"}])
    assert main(["check", "recipes/quickstart.toml", "--limit", "5", "--rewards", table]) == 1
    out = capsys.readouterr().out
    assert "10 answers did not get what they should" in out and "evaluation.data  4    generous  empty" in out


@pytest.mark.parametrize("limit", ["0", "-1", "many"])
def test_a_limit_that_is_none_is_refused(limit, capsys):
    with pytest.raises(SystemExit):
        main(["check", "recipes/quickstart.toml", "--limit", limit])
    assert "limit" in capsys.readouterr().err


def test_a_faulty_row_is_said_in_a_sentence(recipe, tmp_path, capsys):
    import tomli_w

    config = recipe({"type": "numeric"}, rows=[("1 + 1?", "two")]).model_dump(mode="json", exclude_none=True)
    (tmp_path / "r.toml").write_text(tomli_w.dumps(config))
    assert main(["check", str(tmp_path / "r.toml")]) == 1
    assert "'two' is not a number" in capsys.readouterr().err


def test_the_refusal_holds_no_number():
    assert not any(c.isdigit() for c in REFUSAL)


def test_the_example_in_the_documents_is_what_is_printed(recipe):
    text = (ROOT / "docs" / "rewards.md").read_text("utf-8")
    shown = text.partition("is fooled by the prompt itself:\n\n```\n")[2].partition("```")[0]
    checked = check_recipe(recipe({"type": "last_number"}, rows=[("1 + 1?", "2"), ("Is it 7?", "7")]))
    assert checked.text + "\n" == shown
    tables = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert [type(recipe(*tomllib.loads(table)["rewards"]).rewards[0]) for table in tables] == [ModelReward, JudgeReward]
