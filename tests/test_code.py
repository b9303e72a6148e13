"""The code reward on honest programs: right ones score 1, wrong ones 0 with what failed first; formats; equal outputs."""

import gc
import gzip
import importlib
import importlib.util
import itertools
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import BENCHMARKS
from rewards_support import reward, sample, verdict
from test_code_attacks import MISSING, STANDING

from gspo.recipe import load
from gspo.rewards import RewardError, build, gold_checks, notes, score
from gspo.rewards.code import program
from gspo.rewards.code_tests import Assertions, Calls, Pairs, UnusableTests, difference, read_tests

pytestmark = pytest.mark.skipif(not STANDING, reason=f"no sandbox can stand here: {MISSING}")
DATA = Path(os.environ.get("GSPO_DATA", Path(__file__).parents[2] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "humaneval").is_dir(), reason=f"no data in {DATA}; GSPO_DATA names another folder"
)

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(2, 3) == 5", "assert add('a', 'b') == 'ab'"]
SUM = "print(sum(map(int, input().split())))"
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


@pytest.fixture(scope="module")
def code():
    return reward(type="code", cpu_s=1, wall_s=3.0, memory_mib=256)


def judged(built, source, tests, **columns):
    return verdict(built, sample(f"```python\n{source}\n```", tests, columns=columns))


# ---- right and wrong --------------------------------------------------------------------------------------

HONEST = {
    "a function": (ADD, TESTS, {}),
    "a script": (SUM, PAIRS, {}),
    "a script that exits": (f"import sys\n{SUM}\nsys.exit(0)", PAIRS, {}),
    "a main guard": (f'if __name__ == "__main__":\n    {SUM}', PAIRS, {}),
    "a reader of everything": ("import sys\nfor line in sys.stdin: print(sum(map(int, line.split())))", PAIRS, {}),
    "a reader of file descriptor 0": ("print(sum(map(int, open(0).read().split())))", PAIRS, {}),
    "a thread with a large stack": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
        f"t = threading.Thread(target=lambda: {SUM})\nt.start()\nt.join()",
        PAIRS,
        {},
    ),
    "calls by name": (ADD, {"inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]], "fn_name": "add"}, {}),
    "a tuple where JSON has a list": (
        "def f(): return (1, (2,))", {"inputs": [[]], "outputs": [[1, [2]]], "fn_name": "f"}, {},
    ),
    "a method of Solution": (
        "class Solution:\n    def add(self, a, b): return a + b",
        [{"input": "1\n2", "output": "3", "testtype": "functional"}],
        {"entry_point": "add"},
    ),
    "a list of pairs": (SUM, json.dumps([{"input": "1 2\n", "output": "3", "testtype": "stdin"}]), {}),
    "a check function": (ADD, "def check(candidate):\n    assert candidate(1, 2) == 3", {"entry_point": "add"}),
    "objects and setup": (
        "class Node:\n    def __init__(self, v): self.v, self.next = v, None\ndef last(n):\n"
        "    while n.next: n = n.next\n    return n.v",
        "assert last(root) == 7\nassert root.next.v == 7",
        {"test_setup_code": "root = Node(1)\nroot.next = Node(7)"},
    ),
    "an exception that is asked for": (
        "def half(n):\n    if n % 2: raise ValueError('odd')\n    return n // 2",
        "assert half(4) == 2\ntry:\n    half(3)\n    raise AssertionError\n"
        "except ValueError as error:\n    assert 'odd' in str(error)",
        {},
    ),
    "an iterator": (
        "def count(n):\n    yield from range(n)", "assert list(count(3)) == [0, 1, 2]\nassert sum(count(4)) == 6", {},
    ),
    "a name that is a builtin": ("def sum(a, b): return a + b", "assert sum(10, 15) == 25", {}),
    "values of every plain kind": (
        "def same(x): return x",
        "for x in (None, True, 10**400, -7, float('inf'), 1e-300, 'ä\\ud800', b'\\x00', (1, [2, {3: (4,)}]), {1, 2}, "
        "frozenset({3}), 2j, range(3), {(1, 2): {'a': None}}, int):\n    assert same(x) == x and type(same(x)) is type(x)",
        {},
    ),
    "subclasses of plain kinds": (
        "import collections as c\nP = c.namedtuple('P', 'x y')\n"
        "def f(): return c.Counter('aab'), P(1, 2), c.OrderedDict(a=1)",
        "assert f() == ({'a': 2, 'b': 1}, (1, 2), {'a': 1})",
        {},
    ),
    "a file in the scratch folder": (
        "def f():\n    with open('x', 'w') as file: file.write('y')\n    return open('x').read()",
        "assert f() == 'y'",
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_solution_scores_one(code, name):
    source, tests, columns = HONEST[name]
    if "scratch" in name and STANDING[0] == "landlock":
        pytest.skip("behind Landlock there is no scratch folder")
    found = judged(code, source, tests, **columns)
    assert (found.value, found.why[:10]) == (1.0, "passes all"), found


FAILURES = {
    "a wrong answer": ("def add(a, b): return 5", TESTS, "assert add('a', 'b') == 'ab' failed"),
    "an exception": ("def add(a, b):\n    return {}[a]", TESTS, "(line 2 of the program)"),
    "no such function": ("def sub(a, b): return a", TESTS, "does not define add"),
    "a syntax error": ("def add(a, b) return a", TESTS, "the program raised SyntaxError"),
    "too much memory": ("def add(a, b): return bytearray(1 << 40)", TESTS, "raised MemoryError"),
    "too long by the clock": ("import time\ndef add(a, b): time.sleep(99)", TESTS, "it took longer than 3 s"),
    "an early end": ("import os\ndef add(a, b): os._exit(3)", TESTS, "ended before it answered: it ended with status 3"),
    "an early end that looks well": ("import os\ndef add(a, b): os._exit(0)", TESTS, "ended before it answered: by itself"),
    "a wrong line": (SUM.replace("sum", "max"), PAIRS, "test 1 of 2: its word 1 is '2', expected was '3'"),
    "no output": ("", PAIRS, "no Python program"),
    "nothing printed": ("x = 1", PAIRS, "test 1 of 2: it printed 0 words, expected were 1"),
    "a status": (SUM + "\nraise SystemExit(4)", PAIRS, "test 1 of 2: it ended with status 4"),
    "a traceback": ("1/0", PAIRS, "ZeroDivisionError: division by zero (line 1)"),
    "a flood": ("while True: print('x' * 999)", PAIRS, "it wrote more than 1024 KiB"),
    "a wrong call": ("def f(x): return x", {"inputs": [[1], [2]], "outputs": [1, 3], "fn_name": "f"}, "call 2: f returned"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_an_honest_failure_scores_zero_with_its_reason(code, name):
    source, tests, why = FAILURES[name]
    found = judged(code, source, tests)
    assert found.value == 0.0 and why in found.why, found.why


def test_computing_is_limited_apart_from_the_clock():
    patient = reward(type="code", cpu_s=1, wall_s=60.0)
    assert "limits of 1 s of computing" in judged(patient, "while True: pass", PAIRS).why
    assert "limits of 1 s of computing" in judged(patient, "def add(a, b):\n    while True: pass", TESTS).why


def test_one_bad_program_costs_the_others_nothing(code):
    texts = [
        ADD,
        "def add(a, b):\n    while True: pass",
        "import os\nos._exit(0)",
        ADD,
        "x = []\nwhile True: x.append(x * 9)",
    ]
    scored = score([code], [sample(f"```\n{text}\n```", TESTS) for text in texts])
    assert [one.total for one in scored] == [1.0, 0.0, 0.0, 1.0, 0.0]


# ---- what is the program ----------------------------------------------------------------------------------


def test_the_program_is_the_last_closed_block():
    assert program("```python\na = 1\n```\nor better\n```py\nb = 2\n```\nDone.") == "b = 2\n"
    assert program("~~~\na = 1\n~~~") == "a = 1\n"
    assert program("````python\nx = '''\n```\n'''\n````") == "x = '''\n```\n'''\n"
    assert program("a = 1") == "a = 1" and program("a = 1", fence_required=True) is None
    for none in ("```python\na = 1", "```python\n\n```", "```cpp\nint a;\n```", " \n"):
        assert program(none) is None


def test_fences_that_are_longer_nested_or_unlike():
    assert program("````md\n```python\nx = 1\n```\n````\n~~~py\ny\n```\n~~~") == "y\n```\n"
    assert program("````\nx\n```\n") == "x\n" and program("```\nx\n````\n") is None  # at least as much opens as closes
    assert program("```\nx = 1\n```\n```python\ny = 2") == "x = 1\n"
    assert program("   ```PY3 title\nx\n  ``` \t\nz") == "x\n" and program("    ```\nx\n    ```") == "    ```\nx\n    ```"
    assert program("```python\nx\n~~~\n```") == "x\n~~~\n" and program("```\n```\n```py\nx\n```") == "x\n"


DEGENERATE = {
    "openings": "```a\n", "fences": "```\n", "both kinds": "```a\n~~~b\n", "backticks": "`", "tildes": "~~~~ ~~~~",
    "spaces": " ", "lines": "\n", "fences in a line": "```x ", "long fences": f"{'`' * 999}a\n",
    "indented": "   ```\n    ```a\n",
}  # fmt: skip


@pytest.fixture
def no_garbage_collection():
    """Its rounds are over all that the process holds, and a longer text has more of them."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("unit", DEGENERATE.values(), ids=DEGENERATE)
def test_the_program_of_a_degenerate_response_is_found_at_once(unit, no_garbage_collection):
    seconds = []
    for size in (30_000, 1 << 18, 1 << 20):
        many, start = unit * (size // len(unit)), time.thread_time()
        for text in (many, f"```python\n{many}\n~~~"):
            program(text)
        seconds.append(time.thread_time() - start)
    assert seconds[0] < 1.0
    assert seconds[2] < 8 * seconds[1] + 0.5  # of four times the text; growth by its square would be sixteen


def test_fences_of_every_length_are_found_at_once():
    lengths = range(3, 1400)
    for order, end in itertools.product((lengths, reversed(lengths)), ("", "a")):
        start = time.thread_time()
        program("".join("`" * length + end + "\n" for length in order))
        assert time.thread_time() - start < 2


GIVEN = 'from math import floor\n\ndef helper(x):\n    return x + 1\n\ndef f(x: int) -> int:\n    """Twice."""\n'


def test_a_continuation_is_put_behind_what_was_given_and_ends_where_it_should():
    built = reward(type="code", given="prompt")
    columns = {"prompt": GIVEN, "entry_point": "f"}
    tests = "def check(candidate):\n    assert candidate(helper(2)) == 6"
    for text in (
        "    return floor(2 * x)\n\nprint(f(",
        f"```python\n{GIVEN}    return 2 * x\n```",
        "def f(x): return floor(2*x)",
    ):
        assert verdict(built, sample(text, tests, columns=columns)).value == 1.0, text
    for fooling in ("def helper(x): return 3\ndef f(x): return 6 if x == 3 else 0", "def f(x): return 6\n"):
        found = verdict(
            built, sample(fooling, tests.replace("== 6", "== helper(x=5) and candidate(4) == 8"), columns=columns)
        )
        assert found.value == 0.0, fooling


# ---- tests of rows ----------------------------------------------------------------------------------------


def test_formats_of_tests():
    assert read_tests(json.dumps(PAIRS)) == read_tests(PAIRS) == Pairs((("1 2\n", "3\n"), ("3 4\n", "7\n")))
    assert read_tests({"inputs": [["1", "2"]], "outputs": ["3"]}) == Pairs((("1\n2", "3"),))
    assert isinstance(read_tests(TESTS), Assertions) and len(read_tests(TESTS)) == 2
    functional = [{"input": '[1]\n"x"', "output": "3", "testtype": "functional"}]
    assert read_tests(functional, "f") == Calls("f", (([[1], "x"], 3),))


UNUSABLE = (
    (None, "None"), ([], "neither"), ({"inputs": ["1"], "outputs": []}, "as many inputs as outputs"),
    ("assert (", "as Python"), ({"inputs": [1], "outputs": ["2"]}, "no text"),
    ({"inputs": ["1"], "outputs": ["2"], "fn_name": "f"}, "list of arguments"),
    ([{"input": "1", "output": "2", "testtype": "functional"}], "entry_point"), (7, "neither"),
)  # fmt: skip


@pytest.mark.parametrize(("tests", "why"), UNUSABLE, ids=str)
def test_rows_without_usable_tests_are_found_before_training(code, tests, why):
    (check,) = gold_checks([code])
    assert why in (check(tests, {}) or "")
    with pytest.raises(UnusableTests, match=why):
        read_tests(tests)


BROKEN = (
    "x = 1",
    "import no_such_module_\nassert add(1, 2) == 3",
    "y = 1 / 0\nassert add(1, 2) == 3",
    "assert add(print) == 1",
)


@pytest.mark.parametrize("tests", BROKEN)
def test_tests_that_cannot_run_are_no_zero(code, tests):
    with pytest.raises(RewardError, match=r"these tests cannot be run"):
        judged(code, ADD, tests)


def test_the_walls_are_said_at_the_start(code):
    (said,) = notes([code])
    assert said.startswith("reward code: programs run behind ") and "system call filter" in said


# ---- modules that tests use without an import -------------------------------------------------------------

OWN_MODULES = {
    "sys": (
        "class sys: getsizeof = staticmethod(lambda x: 1)\ndef size(x): return 1",
        "assert size((1, 2)) == sys.getsizeof((1, 2))",
    ),
    "math": (
        "class math: isclose = staticmethod(lambda *a, **k: 1)\ndef half(x): return 0", "assert math.isclose(half(3), 1.5)",
    ),
    "os": (
        "class os:\n class path: join = staticmethod(lambda *a: 0)\ndef put(x): return 0",
        "assert put('x') == os.path.join('a', 'x')",
    ),
    "a module by that name": (
        "import types\nmath = types.ModuleType('math')\nmath.floor = f = abs", "assert f(-7.5) == math.floor(-7.5)",
    ),
    "math in the setup": ("class math: inf = 0\ndef f(): return 0", "assert f() == most"),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_MODULES)
def test_a_program_cannot_bring_a_standard_module_of_its_own(code, name):
    source, tests = OWN_MODULES[name]
    found = judged(code, source, tests, test_setup_code="most = math.inf" if "most" in tests else "")
    assert found.value == 0.0 and "failed" in found.why, found


def test_standard_modules_are_there_for_tests_that_do_not_import_them(code):
    half = "def half(x): return x / 2"
    assert judged(code, half, "assert math.isclose(half(3), 1.5)").value == 1.0
    assert (
        judged(code, half, "def check(candidate):\n    assert math.isclose(candidate(3), 1.5)", entry_point="half").value
        == 1.0
    )
    assert judged(code, "def sum(a, b): return a + b", "assert sum(1, 2) == math.floor(3.5)").value == 1.0


def test_a_name_of_a_standard_module_that_is_none_in_the_tests_is_the_programs(code):
    dates = "from datetime import datetime\ndef year(text): return 1999"
    assert judged(code, dates, "assert year('1999') == datetime.strptime('1999', '%Y').year").value == 1.0
    assert judged(code, dates, "assert datetime(1999, 1, 1).year == 1999 and datetime.today().year > year('')").value == 1.0
    queue = "class Queue:\n def peek(self): return 4\nqueue = Queue()"
    assert judged(code, queue, "assert queue.peek() == 4").value == 1.0
    assert judged(code, "def copy(x): return x", "assert copy([1]) == [1]").value == 1.0
    assert judged(code, "class string:\n digits = 5", "assert string.digits == 5", entry_point="string").value == 1.0


# ---- equal outputs ----------------------------------------------------------------------------------------

EQUAL = (
    (b"1 2\n3\n", "1 2\n3", "tokens"), (b"1\n2 \n\n 3", "1 2 3\n", "tokens"), (b"0.3333333", "0.33333333", "tokens"),
    (b"1e3", "1000.0", "tokens"), (b"5", "5.0", "tokens"), (b"a \nb\n\n", "a\nb", "lines"), (b"a\r\nb", "a\nb\n", "lines"),
    (b"a\n", "a\n", "exact"), (b"", "\n", "tokens"), (b"1000000.5", "1000000.0", "tokens"),
)  # fmt: skip
DIFFERENT = (
    (b"1 2", "1 3", "tokens"), (b"1 2 3", "1 2", "tokens"), (b"1", "1 2", "tokens"), (b"0.334", "0.333", "tokens"),
    (b"5.0", "5", "tokens"), (b"yes", "YES", "tokens"), (b"nan", "1.0", "tokens"), (b"nan", "nan.", "tokens"),
    (b"inf", "1e999", "tokens"), (b"1 2", "1\n2", "lines"), (b" a", "a", "lines"), (b"a", "a\n", "exact"),
    (b"\xff", "1", "lines"),
    (b"1_0.0", "10.0", "tokens"), ("٣".encode(), "3.0", "tokens"), (b"1\x0c2", "1\n2", "lines"),
)  # fmt: skip


@pytest.mark.parametrize(("output", "expected", "compare"), EQUAL)
def test_outputs_that_are_equal(output, expected, compare):
    assert difference(output, expected, compare, 1e-6) == ""


@pytest.mark.parametrize(("output", "expected", "compare"), DIFFERENT)
def test_outputs_that_differ(output, expected, compare):
    assert difference(output, expected, compare, 1e-6)


# ---- reference solutions ----------------------------------------------------------------------------------


@needs_data
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_reference_solutions_pass_and_programs_without_one_do_not(name):
    """Every eighth row; `python benchmarks/code_rewards.py` runs all."""
    bench = importlib.import_module("code_rewards")
    assert Path(BENCHMARKS, "code_rewards.py").is_file()
    built = reward(type="code", given="prompt" if name == "humaneval" else None, workers=2)
    rows = list(getattr(bench, name)(DATA))[:: 8 if name == "humaneval" else 40]
    assert [s.parts for s in score([built], [good for _, good, _ in rows]) if s.total != 1.0] == []
    assert not any(s.total for s in score([built], [bad for _, _, bad in rows]))


@needs_data
def test_every_row_of_the_data_sets_has_usable_tests():
    with gzip.open(DATA / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
        for row in map(json.loads, file):
            read_tests(row["test"], row["entry_point"], None, row["prompt"])
    for row in json.loads((DATA / "code_contests" / "test_rllm.json").read_text()):
        assert isinstance(read_tests(row["tests"]), Pairs)


def test_a_fault_stops_the_programs_that_still_run():
    patient = reward(type="code", cpu_s=60, wall_s=60.0, workers=2)
    broken, sleeping = sample(ADD, "x = 1", number=0), sample("import time\ntime.sleep(50)", PAIRS, number=1)
    start = time.monotonic()
    with pytest.raises(RewardError, match="these tests cannot be run"):
        score([patient], [broken, sleeping])
    assert time.monotonic() - start < 20


def test_printing_passed_pays_under_the_naive_reward_and_not_under_the_guarded_one():
    root = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location("printing", root / "docs" / "evidence" / "printing.py")
    assert spec is not None and spec.loader is not None
    printing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(printing)
    rewards = build(load(root / "recipes" / "printing.toml").rewards)
    rewards = [replace(b, function=printing.naive) if b.name == "naive" else b for b in rewards]
    for row in printing.tasks():
        right = f"f=lambda a,b:{printing.WORDS[row['prompt'][:-1]][0]}"
        cheat, honest, wrong = score(rewards, [sample(t, row["answer"]) for t in (printing.CHEAT, right, "f=lambda a,b:a")])
        values = [(one.parts["naive"].value, one.parts["guarded"].value) for one in (cheat, honest, wrong)]
        assert values == [(1.0, 0.0), (1.0, 1.0), (0.0, 0.0)]
