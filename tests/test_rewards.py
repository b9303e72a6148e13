"""Laws of rewards: what they give, and what they refuse to believe."""

import asyncio
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from gspo.config import ReasoningGymSource, Reward, RewardConfig
from gspo.data import load_rows
from gspo.rewards import BUILDERS, Built, RewardError, build, gold_checks, score
from gspo.rewards.gym import _is_expression
from gspo.rewards.mathematics import last_boxed
from gspo.rewards.numbers import last_number, parse_number, to_number
from gspo.types import Completion, Prompt, Sample, Score

ONE_REWARD = TypeAdapter(Reward)


def sample(text, answer=None, number=0, num_tokens=3, columns=None):
    prompt = Prompt(number, None, "?", (1,), answer, columns or {}, f"e0-r{number}")
    completion = Completion(np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.float32), "stop", 0, 0)
    return Sample(f"s1/e0-r{number}/0", prompt, completion, text)


def reward(**settings):
    (built,) = build([ONE_REWARD.validate_python(settings)])
    return built


def verdict(built, one):
    (scored,) = score([built], [one])
    return scored.parts[built.name]


def value(text, answer, **settings):
    return verdict(reward(**settings), sample(text, answer)).value


def own(function, name="own", weight=1.0, on_error="raise"):
    return Built(name, weight, on_error, function, None)


def refused(call, *words):
    with pytest.raises(RewardError) as caught:
        call()
    for word in words:
        assert str(word) in str(caught.value), str(caught.value)
    return str(caught.value)


def test_every_kind_of_reward_has_a_builder():
    assert set(BUILDERS) == set(RewardConfig.__subclasses__())


# ---- numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        (" -3.5\n", Fraction(-7, 2)),
        ("+7", 7),
        ("\u22128", -8),
        (".5", Fraction(1, 2)),
        ("1,234", 1234),
        ("-1,234,567.25", Fraction(-123456725, 100)),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        ("2/3", Fraction(2, 3)),
        ("-4/6", Fraction(-2, 3)),
        ("007", 7),
        ("0.1", Fraction(1, 10)),
    ],
)
def test_numbers_are_read_exactly(text, number):
    assert parse_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        *("", "-", "five", "$5", "5%", "5.", "1,23", "1,2345", ",123", "1.234,5", "1_000", "1 000", "1 1/2", "1.5/2"),
        *("½", "0x10", "inf", "nan", "1/0", "--1", "1e", "e5", "٣", "1e1001", "1e-999999999", "9" * 1001, "3 apples"),
        "1/-2",
    ],
)
def test_what_is_no_number_is_not_read(text):
    assert parse_number(text) is None


@given(st.integers(), st.sampled_from(["{}", "{:,}", " {} ", "{}.0", "{}e0", "{}/1"]))
def test_integers_come_back_in_every_spelling(n, form):
    assert parse_number(form.format(n)) == n


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**30), max_value=10**30))
def test_decimals_come_back_exactly(d):
    assert parse_number(str(d)) == Fraction(d) == to_number(d)


@given(st.integers(), st.integers(min_value=1))
def test_fractions_come_back_exactly(n, d):
    assert parse_number(f"{n}/{d}") == Fraction(n, d)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_counts_as_the_decimal_that_is_printed(x):
    assert to_number(x) == Fraction(repr(x))


@given(st.text(max_size=60))
def test_parsing_any_text_ends_and_the_last_number_is_in_it(text):
    parse_number(text)
    found = last_number(text)
    assert found is None or found in text
    assert (found is None) == (not any(c in "0123456789" for c in text))


@given(st.text(alphabet="ab .,()=-", max_size=20), st.integers())
def test_the_last_number_is_found_behind_any_words(words, n):
    assert parse_number(last_number(f"{words} {n}. So.")) == n


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The answer is 5.", "5"),
        ("x = -3", "-3"),
        ("5-3", "3"),
        ("(2)-3", "3"),
        ("1, 2", "2"),
        ("it costs $1,234.50!", "1,234.50"),
        ("about 3/4 of 5/6", "5/6"),
        ("1.5/2", "2"),
        ("1.2.3", "3"),
        ("#### 72", "72"),
        ("50%", "50"),
        ("-1e3", "-1e3"),
        ("\u22124", "\u22124"),
        ("none", None),
        ("٣", None),
    ],
)
def test_the_last_number_of_a_text(text, found):
    assert last_number(text) == found


def test_reading_numbers_takes_linear_time():
    start = time.perf_counter()
    for text in ("1" * 100_000, "1," * 50_000, "1/" * 50_000, "-" * 100_000, ".1" * 50_000, "1,111" * 20_000):
        last_number(text)
        parse_number(text)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("gold", [True, None, "x", float("nan"), float("inf"), Decimal("nan"), Decimal("1e9999999"), [1]])
def test_what_is_no_number_is_no_gold_number(gold):
    assert to_number(gold) is None


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


def test_the_last_box_ends_at_its_own_brace():
    assert last_boxed(r"\boxed{a{b}c}d}") == "a{b}c"
    assert last_boxed(r"\boxed{\{1\}} \}") == r"\{1\}"
    assert last_boxed(r"\boxed{a\\}") == r"a\\"
    assert last_boxed(r"\boxed{a") is None
    assert last_boxed("a") is None


SLOW = sample(r"\boxed{10^{10^{10}}}", "3", number=1)


def test_a_timeout_of_math_is_an_exception_and_no_zero():
    good = sample(r"\boxed{3}", "3", number=2)
    refused(lambda: score([reward(type="math", timeout_s=1)], [SLOW]), "math", SLOW.id, "longer than 1 s")
    out = score([reward(type="math", timeout_s=1, on_error="abstain")], [SLOW, good])
    assert [o.total for o in out] == [None, 1.0]
    assert "longer than 1 s" in out[0].parts["math"].why


@pytest.mark.parametrize("on_error", ["raise", "abstain"])
def test_math_outside_the_main_thread_is_an_error_whatever_the_setting(on_error):
    caught = []

    def work():
        try:
            value(r"\boxed{7}", "7", type="math", on_error=on_error)
        except RewardError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]


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


# ---- scoring ----------------------------------------------------------------------------------------------

THREE = [sample(text, number=i) for i, text in enumerate(["a", "bb", "ccc"])]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ([1.0], ["1 verdicts", "3 samples", THREE[2].id]),
        ([1.0] * 4, ["4 verdicts", "3 samples"]),
        (1.0, ["float", "not a list"]),
        (None, ["NoneType", "not a list"]),
        ("abc", ["str", "not a list"]),
        ({"a": 1}, ["dict", "not a list"]),
        ([1.0, "0.5", 1.0], [THREE[1].id, "str", "0.5"]),
        ([1.0, [1.0], 1.0], [THREE[1].id, "list"]),
        ([1.0, 1j, 1.0], [THREE[1].id, "complex"]),
        ([1.0, 1.0, float("nan")], [THREE[2].id, "nan", "finite"]),
        ([float("-inf"), 1.0, 1.0], [THREE[0].id, "-inf", "finite"]),
        (np.array([1.0, np.nan, 0.0]), [THREE[1].id, "nan"]),
        ([1.0, torch.zeros(2), 1.0], [THREE[1].id, "Tensor"]),
        ([1.0, Score("1"), 1.0], [THREE[1].id, "str"]),
        ([1.0, Score(1.0, None), 1.0], [THREE[1].id, "why", "NoneType"]),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "abstain"])
def test_a_wrong_result_names_reward_and_sample_whatever_the_setting(result, words, on_error):
    refused(lambda: score([own(lambda samples: result, "odd", on_error=on_error)], THREE), "reward odd", *words)


@pytest.mark.parametrize(
    "one", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), torch.tensor(1.0), Score(1), np.ones(1)]
)
def test_every_kind_of_number_is_a_number(one):
    (scored,) = score([own(lambda samples: [one])], THREE[:1])
    assert scored.total == 1.0
    assert type(scored.total) is float
    assert type(scored.parts["own"].value) is float


def test_whole_arrays_are_results_too():
    for result in (np.array([0.0, 0.5, 1.0]), torch.tensor([0.0, 0.5, 1.0]), (0, 0.5, True)):
        assert [s.total for s in score([own(lambda samples, r=result: r)], THREE)] == [0, 0.5, 1]


def test_the_total_is_the_weighted_sum_without_rounding_on_the_way():
    rewards = [("a", 1e16, 1), ("b", 2, 0.5), ("c", 1e16, -1)]
    built = [own(lambda s, v=v: [Score(v, "why")] * len(s), n, w) for n, v, w in rewards]
    for scored in score(built, THREE):
        assert scored.total == 1.0
        assert scored.parts == {"a": Score(1e16, "why"), "b": Score(2.0, "why"), "c": Score(1e16, "why")}


def test_samples_keep_their_order_and_none_need_no_reward():
    assert [s.sample for s in score([own(lambda s: [0.0] * len(s))], THREE)] == THREE
    assert score([own(lambda s: [0.0] * 7)], []) == []


def test_a_total_is_missing_where_one_reward_abstains():
    built = [own(lambda s: [None, Score(None, "unsure"), 1.0], "a"), own(lambda s: [1.0] * 3, "b")]
    out = score(built, THREE)
    assert [o.total for o in out] == [None, None, 2.0]
    assert out[0].parts["a"].why == "the reward abstained"
    assert out[1].parts["a"].why == "unsure"
    assert out[1].parts["b"].value == 1.0


def picky(samples):
    if any(s.text == "bb" for s in samples):
        raise ZeroDivisionError("two b")
    return [1.0] * len(samples)


async def picky_later(samples):
    await asyncio.sleep(0)
    return picky(samples)


@pytest.mark.parametrize("function", [picky, picky_later])
def test_an_exception_stops_or_leaves_out_only_the_sample_that_failed(function):
    message = refused(lambda: score([own(function, "picky")], THREE), "picky", *[s.id for s in THREE], "ZeroDivisionError")
    assert "two b" in message
    out = score([own(function, "picky", on_error="abstain")], THREE)
    assert [o.total for o in out] == [1.0, None, 1.0]
    assert out[1].parts["picky"] == Score(None, "ZeroDivisionError: two b")


def test_the_exception_of_a_reward_is_the_cause_of_the_error():
    with pytest.raises(RewardError) as caught:
        score([own(picky)], THREE)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_builtin_names_the_very_sample_that_failed():
    samples = [sample("1", "1"), sample("2", "x", number=1), sample("3", "3", number=2)]
    refused(lambda: score([reward(type="numeric")], samples), f"at sample {samples[1].id}")


def test_many_samples_are_counted_and_not_all_named():
    samples = [sample("bb", number=i) for i in range(30)]
    message = refused(lambda: score([own(picky)], samples), samples[0].id, "and 22 more")
    assert samples[29].id not in message


def test_interrupts_are_never_taken_for_a_verdict():
    def interrupted(samples):
        raise KeyboardInterrupt

    async def cancelled(samples):
        raise asyncio.CancelledError

    for function, error in ((interrupted, KeyboardInterrupt), (cancelled, asyncio.CancelledError)):
        with pytest.raises(error):
            score([own(function, on_error="abstain")], THREE)


def test_async_rewards_wait_together():
    meeting = []

    async def meets(samples):
        meeting.append(1)
        while len(meeting) < 2:  # would never end if the other were not running
            await asyncio.sleep(0.001)
        return [1.0] * len(samples)

    out = score([own(meets, "a"), own(meets, "b")], THREE)
    assert [o.total for o in out] == [2.0] * 3


def test_async_rewards_work_inside_a_running_loop():
    async def notebook():
        return score([own(picky_later)], THREE[:1])

    assert asyncio.run(notebook())[0].total == 1.0


def test_a_failing_sync_reward_leaves_no_coroutine_unawaited():
    refused(lambda: score([own(picky_later, "later", on_error="abstain"), own(picky, "now")], THREE), "now")


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


def test_a_gold_answer_that_math_verify_cannot_parse_is_found():
    (check,) = gold_checks([reward(type="math")])
    assert check(r"\frac{1}{2}", {}) is None
    assert "cannot parse" in check("^_", {})
