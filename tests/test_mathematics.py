"""The equality of answers: the table, and what holds for all of it."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from mathematics_cases import CASES, WRONG
from rewards_support import refused, reward, sample, value, verdict

from gspo.rewards import score
from gspo.rewards.mathematics import JUDGE, gold_text, last_boxed
from gspo.rewards.workers import Limits, shared_pool

POOL = shared_pool(JUDGE, Limits(5.0, 1024, 2))


def response(text):
    return text if "box" in text or "the answer is" in text else rf"So it is \boxed{{{text}}}."


def test_the_table_holds_case_by_case():
    samples = [sample(response(case[2]), case[1], number=i) for i, case in enumerate(CASES)]
    scored = score([reward(type="math")], samples)
    wrong = [(case, s.parts["math"].why) for case, s in zip(CASES, scored, strict=True) if s.total != case[3]]
    assert not wrong


def test_the_table_is_large_and_has_as_many_traps():
    assert len({case[1:3] for case in CASES}) == len(CASES) >= 500
    assert sum(not case[3] for case in CASES) >= sum(case[3] for case in CASES) >= 230
    needed = [case for case in CASES if case[-1] == WRONG]
    assert min(sum(case[3] for case in needed), sum(not case[3] for case in needed)) >= 35


def test_the_document_counts_the_table():
    text = (Path(__file__).parents[1] / "docs/mathematics.md").read_text()
    equal, needed = sum(case[3] for case in CASES), sum(case[-1] == WRONG for case in CASES)
    assert f"{equal} equal and {len(CASES) - equal} unequal" in text
    assert f"{needed} are decided wrongly" in text


def test_what_equals_goes_both_ways():
    cases = [case for case in CASES if "box" not in case[2] and "answer is" not in case[2] and case[0] != "choice"]
    outcomes = POOL.run([{"gold": case[2], "answer": gold_text(case[1])} for case in cases])
    assert not [
        case for case, o in zip(cases, outcomes, strict=True) if o.result is None or o.result.get("equal", False) != case[3]
    ]


@pytest.mark.skipif(not version("math-verify").startswith("0.9."), reason="the marks of the table are of math-verify 0.9")
def test_where_the_table_says_so_math_verify_alone_is_wrong():
    import logging

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    try:
        for case in CASES:
            found = verify(
                parse(rf"\boxed{{{case[1]}}}"),
                parse(case[2] if "box" in case[2] or "answer is" in case[2] else rf"\boxed{{{case[2]}}}"),
            )
            assert (found != case[3]) == (case[-1] == WRONG), case
    finally:
        logging.disable(logging.NOTSET)


def test_a_gold_answer_in_a_box_is_the_box():
    assert value(r"\boxed{7}", r"Thus \boxed{7}.", type="math") == 1
    assert value(r"\boxed{7}", 7, type="math") == 1


def test_a_gold_answer_that_cannot_be_read_is_an_error_and_no_zero():
    bad = sample(r"\boxed{7}", "^_", number=3)
    refused(lambda: score([reward(type="math")], [bad]), "math", bad.id, "'^_' cannot be read")
    good = sample(r"\boxed{7}", "7")
    out = score([reward(type="math", on_error="abstain")], [bad, good])
    assert [o.total for o in out] == [None, 1.0]


@pytest.mark.parametrize("text", [r"\boxed{\frac{1}{}}", r"\boxed{\begin{matrix} ^_ \\}", r"\boxed{   }", r"\boxed{^_}"])
def test_an_answer_that_cannot_be_read_scores_zero_and_says_so(text):
    found = verdict(reward(type="math"), sample(text, "7"))
    assert found.value == 0
    assert "cannot be read" in found.why or "is not" in found.why or "not closed" in found.why


def test_the_last_box_ends_at_its_own_brace():
    assert last_boxed(r"\boxed{a{b}c}d}") == "a{b}c"
    assert last_boxed(r"\boxed{\{1\}} \}") == r"\{1\}"
    assert last_boxed(r"\boxed{a\\}") == r"a\\"
    assert last_boxed(r"\boxed {a}") == "a"
    assert last_boxed(r"\boxed 42.") == "42"
    assert last_boxed(r"\boxedness{4}") is None
    assert last_boxed(r"\boxed{a") is None
    assert last_boxed("a") is None


STARTED = """
import multiprocessing, sys, threading
from gspo.rewards.workers import Limits, Pool

def ask(answers):
    pool = Pool("gspo.rewards.isolated.equality:judge", Limits(20.0, 1024, 1))
    answers.put([o.result["equal"] for o in pool.run([{"gold": "1/2", "answer": a} for a in ("0.5", "0.6")])])
    pool.close()

def start():
    context = multiprocessing.get_context(sys.argv[1])
    answers = context.Queue()
    process = context.Process(target=ask, args=(answers,))
    process.start()
    print(answers.get(timeout=100))
    process.join()
    assert process.exitcode == 0

if __name__ == "__main__":
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_that_a_thread_starts_by_another_method_has_workers(tmp_path, method):
    (tmp_path / "started.py").write_text(STARTED)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "started.py"), method],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[True, False]"), done.stderr


@pytest.mark.parametrize("text", [r"\sqrt{2}", r"-\sqrt{12}", r"5\sqrt{3}", r"-17 \sqrt{50}", r"0\sqrt{7}", r"3\sqrt{0}"])
def test_a_root_is_read_as_math_verify_reads_it(text):
    from math_verify import parse

    from gspo.rewards.isolated.equality import _sympy

    (mine,) = _sympy(text)
    assert mine.equals(parse(f"\\boxed{{{text}}}")[0])
