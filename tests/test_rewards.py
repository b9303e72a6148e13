"""Laws of the rewards that are built in, and of the user's own."""

import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from adversarial import ORDINARY, answers
from rewards_support import ONE_REWARD, refused, reward, sample, value, verdict

from gspo.config import ReasoningGymSource, RewardConfig
from gspo.data import load_rows
from gspo.rewards import BUILDERS, build, gold_checks, score
from gspo.rewards.gym import _is_expression
from gspo.rewards.isolated import equality
from gspo.rewards.workers import Outcome, Pool


def test_every_kind_of_reward_has_a_builder():
    assert set(BUILDERS) == set(RewardConfig.__subclasses__())


# ---- built-in rewards -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "answer", "expected"), [(" 7\n", "7", 1), ("7", 7, 1), ("7.0", "7", 0), ("", "7", 0)])
def test_exact_compares_strings(text, answer, expected):
    assert value(text, answer, type="exact") == expected


@pytest.mark.parametrize(
    ("text", "answer", "tolerance", "expected"),
    [
        ("1,234", "1234.0", 0, 1),
        ("0.5", "1/2", 0, 1),
        ("0.3", 0.3, 0, 1),
        ("0.30000000000000001", "0.3", 0, 0),  # equal as floats
        ("9007199254740993", 9007199254740992, 0, 0),
        ("0.4", "0.3", 0.1, 1),  # not within 0.1 in floats
        ("0.41", "0.3", 0.1, 0),
        ("so 7", "7", 0, 0),
        ("", "7", 0, 0),
    ],
)
def test_numeric_compares_whole_responses_exactly(text, answer, tolerance, expected):
    assert value(text, answer, type="numeric", tolerance=tolerance) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [("3 + 4 = 7.", "7", 1), ("7 or 8", 7, 0), ("no idea", 7, 0), ("1/0", 7, 0), ("9" * 5000, 7, 0), ("= -7", -7, 1)],
)
def test_last_number_compares_the_last_number(text, answer, expected):
    assert value(text, answer, type="last_number") == expected


@pytest.mark.parametrize("kind", ["numeric", "last_number"])
def test_a_gold_answer_that_is_no_number_is_an_error_and_no_zero(kind):
    refused(lambda: value("7", "seven", type=kind), kind, "s1/e0-r0/0", "seven", "not a number")


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (r"First \boxed{3}, no: \boxed{\frac{1}{2}}", "0.5", 1),
        (r"First \boxed{0.5}, no: \boxed{3}", "0.5", 0),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1),
        (r"\boxed{7}", 7, 1),
        (r"\boxed{7}", r"Thus \boxed{7}.", 1),
        ("7", "7", 0),
        (r"\boxed{7} and \boxed{8", "7", 0),
        (r"\boxed{}", "7", 0),
        (r"\boxed{\frac{1}{}}", "7", 0),
        (r"\boxed{\begin{matrix} ^_ \\}", "7", 0),
    ],
)
def test_math_compares_the_last_box(text, answer, expected, capfd):
    assert value(text, answer, type="math") == expected
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("on_error", ["raise", "abstain"])
def test_an_answer_at_a_limit_scores_zero_with_the_reason_whatever_the_setting(on_error):
    texts = [
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{3}",
        r"\boxed{" + "9" * 1_000_000 + "}",
        r"\boxed{" + "{" * 900 + "3" + "}" * 900 + "}",
    ]
    texts.append(r"\boxed{" + r"\frac{1}{" * 150 + "3" + "}" * 150 + "}")
    out = score(
        [reward(type="math", timeout_s=1, on_error=on_error)], [sample(t, "3", number=i) for i, t in enumerate(texts)]
    )
    assert [o.total for o in out] == [0, 1, 0, 1, 0]
    whys = [o.parts["math"].why for o in out]
    assert "took longer than 1 s" in whys[0] or "needed more than 1024 MiB" in whys[0]
    assert "longer than 2,000 characters" in whys[2]
    ends = ("nested too deeply", "cannot be read", "took longer", "is not '3'")  # the last where a second is enough
    assert any(reason in whys[4] for reason in ends)


def test_math_works_in_any_thread():
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda n: value(rf"\boxed{{{n} + {n}}}", str(2 * n), type="math"), range(8))
        assert list(found) == [1] * 8


def test_equal_questions_of_math_are_asked_once(monkeypatch):
    asked = []
    run = Pool.run
    monkeypatch.setattr(Pool, "run", lambda self, questions: asked.extend(questions) or run(self, questions))
    built = reward(type="math")
    group = [sample(rf"\boxed{{{n % 2}}}", "1", number=n) for n in range(10)]
    for _ in range(2):
        assert [s.total for s in score([built], group)] == [n % 2 for n in range(10)]
    assert asked == [{"gold": "1", "answer": "0"}, {"gold": "1", "answer": "1"}]


def test_an_answer_that_cannot_be_compared_abstains_and_is_no_zero(monkeypatch):
    def fail(gold, answer):
        raise TypeError("sympy does not know")

    with monkeypatch.context() as broken:
        broken.setattr(equality, "equal", fail)
        with pytest.raises(TypeError, match="does not know"):
            equality.judge({"gold": "7", "answer": "8"})
    run = Pool.run

    def outcomes(self, questions):
        answered = zip(questions, run(self, questions), strict=True)
        return [Outcome(error="TypeError: sympy does not know") if q.get("answer") == "8" else o for q, o in answered]

    monkeypatch.setattr(Pool, "run", outcomes)
    right, unknown = score([reward(type="math")], [sample(r"\boxed{7}", "7"), sample(r"\boxed{8}", "7", number=1)])
    assert right.total == 1.0 and unknown.total is None
    assert "could not be compared" in unknown.parts["math"].why and "does not know" in unknown.parts["math"].why


@pytest.mark.parametrize("on_error", ["raise", "abstain"])
def test_a_worker_of_math_that_cannot_start_is_an_error_whatever_the_setting(monkeypatch, on_error):
    monkeypatch.setattr("gspo.rewards.mathematics.JUDGE", "gspo.rewards.isolated.gone:judge")
    refused(lambda: value(r"\boxed{7}", "7", type="math", on_error=on_error), "math", "cannot start", "isolated.gone")


def test_random_and_adversarial_answers_all_get_a_verdict_and_leave_nothing():
    built = reward(type="math", timeout_s=1, num_workers=2)
    texts = answers(400, seed=3, hanging=2)
    samples = [sample(rf"\boxed{{{t}}}", ORDINARY[i % len(ORDINARY)], number=i) for i, t in enumerate(texts)]
    score([built], samples[:10])
    before = psutil.Process().num_fds(), len(psutil.Process().children())
    out = score([built], samples)
    assert all(o.total in (0, 1) and o.parts["math"].why.isprintable() for o in out)
    assert (psutil.Process().num_fds(), len(psutil.Process().children())) == before


def test_format_matches_the_whole_response_across_lines():
    tags = {"type": "format", "pattern": r"<think>.*</think>\s*[0-9]+"}
    assert value("<think>a\nb</think> 7", None, **tags) == 1
    assert value("<think>a</think> 7 apples", None, **tags) == 0
    assert value("so <think>a</think> 7", None, **tags) == 0
    refused(lambda: reward(type="format", pattern="(a"), "format", "(a", "no regular expression")


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 0), (10, 0), (11, -0.1), (15, -0.5), (20, -1), (99, -1)])
def test_the_length_penalty_falls_linearly_and_ends_at_minus_one(num_tokens, expected):
    penalty = reward(type="length_penalty", free_tokens=10, max_tokens=20)
    assert verdict(penalty, sample("x", num_tokens=num_tokens)).value == pytest.approx(expected)


@pytest.mark.parametrize("settings", [{"type": t} for t in ("exact", "numeric", "last_number", "math")])
def test_every_verdict_says_why_on_one_line(settings):
    for text in ("7", "8\n\x1b[31m" * 40, r"\boxed{7}"):
        why = verdict(reward(**settings), sample(text, "7")).why
        assert why
        assert why.isprintable()
        assert len(why) < 200


# ---- reasoning-gym ----------------------------------------------------------------------------------------


def gym_sample(text, task, number=0, **parameters):
    row = load_rows(ReasoningGymSource(task=task, size=2, seed=1, parameters=parameters))[0]
    return sample(row["answer"] if text is None else text, row["answer"], number, columns=row)


GYM = {"type": "reasoning_gym"}


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "n_queens", "simple_integration", "polynomial_multiplication"])
def test_the_tasks_own_answer_scores_one(task):
    assert verdict(reward(**GYM), gym_sample(None, task)).value == 1


def test_a_wrong_answer_scores_what_the_task_says():
    assert verdict(reward(**GYM), gym_sample("1", "chain_sum")).value == 0
    assert verdict(reward(**GYM), gym_sample("1", "countdown")).value == 0.05
    right = gym_sample(None, "chain_sum")
    assert verdict(reward(**GYM), sample(f" {right.text}\n", right.answer, columns=right.prompt.columns)).value == 1


def test_rows_of_different_parameters_are_scored_by_their_own(monkeypatch):
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

    monkeypatch.setattr(ChainSumDataset, "score_answer", lambda self, answer, entry: self.config.max_terms / 10)
    samples = [gym_sample("1", "chain_sum", n, min_terms=2, max_terms=n) for n in (3, 5, 3)]
    assert [s.total for s in score([reward(**GYM)], samples)] == [0.3, 0.5, 0.3]


def test_a_row_from_elsewhere_is_not_scored():
    refused(lambda: verdict(reward(**GYM), sample("1", "1")), "reasoning_gym", "only rows of a source")
    (check,) = gold_checks([reward(**GYM)])
    assert "only rows of a source" in check("1", {})
    assert check(None, gym_sample(None, "chain_sum").prompt.columns) is None


@pytest.mark.parametrize("task", ["n_queens", "string_insertion", "countdown", "simple_integration", "puzzle24"])
@pytest.mark.parametrize("attack", ["open('{}', 'w')", "__import__('pathlib').Path('{}').touch()", "[open('{}', 'w')]"])
def test_no_scorer_runs_what_a_model_wrote(task, attack, tmp_path):
    target = tmp_path / "touched"
    assert verdict(reward(**GYM), gym_sample(attack.format(target), task)).value < 1
    assert not target.exists()


@pytest.mark.parametrize("text", ["94*4 - 61 - 6", "x**2*sin(x)/2 + C", "-6*x**5 + 3.5*x", "(x+1)**2", "x**(1/2)", "2**x"])
def test_ordinary_expressions_reach_the_scorer(text):
    assert _is_expression(text)


@pytest.mark.parametrize(
    "text", ["9**9**9", "9**(9**9)", "9**(10*99)", "9**999", "exec(chr(1))", "x.n", "a_b", "[1]", "lambda: 1"]
)
def test_expressions_that_could_do_harm_do_not(text):
    assert not _is_expression(text)


# ---- the user's own ---------------------------------------------------------------------------------------

MINE = """
import asyncio
from dataclasses import dataclass

@dataclass
class Kept:  # dataclasses need their module to be registered
    x: int = 1

def length(samples, unit=1):
    return [len(s.text) / unit for s in samples]

async def later(samples, unit=1):
    await asyncio.sleep(0)
    return [len(s.text) / unit for s in samples]
"""


@pytest.mark.parametrize("name", ["length", "later"])
def test_a_function_of_a_file_is_a_reward(tmp_path, monkeypatch, name):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    built = reward(type="function", function=f"sub/mine.py:{name}", parameters={"unit": 2})
    assert built.name == name
    assert [s.total for s in score([built], [sample("abcd"), sample("ab", number=1)])] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("function", "parameters", "words"),
    [
        ("gone.py:f", {}, ["no file gone.py"]),
        ("mine.py:lenght", {}, ["no function lenght", "it has length"]),
        ("mine:length", {}, ["path/to/file.py:name"]),
        ("mine.py:length", {"units": 2}, ["does not take", "units"]),
    ],
)
def test_a_function_that_cannot_be_used_is_one_sentence(tmp_path, monkeypatch, function, parameters, words):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    message = refused(lambda: reward(type="function", function=function, parameters=parameters), "reward", *words)
    assert "\n" not in message


def test_a_file_is_run_once_however_many_functions_are_taken(tmp_path):
    path = tmp_path / "counted.py"
    path.write_text("N = []\ndef a(s):\n    N.append(1)\n    return [len(N)]\nb = a\n")
    first, second = (reward(type="function", function=f"{path}:{name}", name=name) for name in "ab")
    assert verdict(first, sample("")).value == 1
    assert verdict(second, sample("")).value == 2
    assert not [key for key in sys.modules if key == "counted"]


# ---- gold answers -------------------------------------------------------------------------------------------


def test_gold_checks_name_their_reward():
    checks = gold_checks(
        build(
            [
                ONE_REWARD.validate_python(r)
                for r in (
                    {"type": "exact"},
                    {"type": "numeric", "name": "close"},
                    {"type": "math"},
                    {"type": "format", "pattern": "x"},
                )
            ]
        )
    )
    said = {
        answer if not isinstance(answer, list) else "list": [c(answer, {}) for c in checks]
        for answer in ("7", "x y", None, [1])
    }
    assert said["7"] == [None, None, None]
    assert said["x y"][0] is None
    assert said["x y"][1] == "reward close: the gold answer 'x y' is not a number"
    assert [word.split(":")[0] for word in said[None]] == ["reward exact", "reward close", "reward math"]
    assert "list" in said["list"][0]


def test_a_gold_answer_that_math_cannot_read_is_found():
    (check,) = gold_checks([reward(type="math")])
    assert check(r"\frac{1}{2}", {}) is None
    assert "the gold answer '^_' cannot be read" in check("^_", {})


def test_a_gold_answer_at_a_limit_is_a_fault_of_its_row():
    (check,) = gold_checks([reward(type="math", timeout_s=0.5)])
    said = check("9^{9^{9^{9}}}", {})
    assert "took longer than 0.5 s" in said or "memory" in said
    assert check("7", {}) is None
