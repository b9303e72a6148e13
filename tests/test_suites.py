"""Suites: each says all of its settings, gold answers are found in the original data, and no stranger's pickle runs."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from gspo.config import RewardConfig
from gspo.evaluation import gold
from gspo.evaluation.evaluate import EvaluationError
from gspo.evaluation.gold import RULES, unpack_tests
from gspo.evaluation.suite import load_suite, names, rewards_of
from gspo.evaluation.suite_rows import suite_rows

DATA = next((p / "shared" / "data" for p in Path(__file__).parents if (p / "shared" / "data").is_dir()), None)
needs_data = pytest.mark.skipif(DATA is None, reason="needs the original data sets in ../shared/data")

NEEDED = """
about = "sums"
settings_from = "ours"
local = ["sums.jsonl"]
template = "{question}"
answer_column = "answer"
[[rewards]]
type = "last_number"
[sampling]
max_response_tokens = 6
"""


def own_suite(folder: Path, text: str = NEEDED) -> str:
    (folder / "sums.toml").write_text(text)
    return str(folder / "sums.toml")


# ---- files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_every_suite_and_each_of_its_presets_loads_and_says_where_its_settings_are_from(name):
    suite = load_suite(name)
    for preset in [None, *suite.presets]:
        load_suite(name, preset=preset)
    assert suite.hub is not None and suite.local and suite.gold in RULES
    assert "ours" in suite.settings_from or "arXiv:" in suite.settings_from
    stated = {"samples", "temperature", "max_response_tokens"}
    assert stated <= suite.sampling.model_fields_set


def test_the_reported_settings_are_presets():
    aime, coding = load_suite("aime24", preset="gspo").sampling, load_suite("livecodebench", preset="gspo")
    assert (aime.samples, aime.temperature, aime.top_p, aime.top_k, aime.max_response_tokens) == (32, 0.6, 0.95, 20, 38912)
    assert (coding.sampling.samples, coding.sampling.max_response_tokens) == (8, 32768)
    assert coding.window is not None and (coding.window.first, coding.window.last) == ("2024-10-01", "2025-02-28")
    assert load_suite("aime24", preset="qwen3").sampling.samples == 64


def test_the_caller_wins_over_the_preset_and_the_preset_over_the_file():
    assert load_suite("gsm8k", preset="qwen3").sampling.temperature == 0.6
    changed = load_suite("gsm8k", preset="qwen3", changes={"temperature": 1.0, "format": "text"})
    assert changed.sampling.temperature == 1.0 and changed.sampling.top_p == 0.95 and changed.format == "text"


def test_faults_of_suites_are_sentences(tmp_path):
    with pytest.raises(EvaluationError, match=r"there is no suite 'gsmk8': the nearest known one is gsm8k"):
        load_suite("gsmk8")
    with pytest.raises(EvaluationError, match="has no preset 'qwen'; it has qwen3"):
        load_suite("gsm8k", preset="qwen")
    with pytest.raises(EvaluationError, match="all would be alike"):
        load_suite("gsm8k", changes={"samples": 4})
    with pytest.raises(EvaluationError, match=r"pass@4 needs samples = 4"):
        load_suite("gsm8k", changes={"pass_at": [4]})
    with pytest.raises(EvaluationError, match=r"sums.toml: templat: unknown key; the nearest known one is template"):
        load_suite(own_suite(tmp_path, NEEDED.replace("template", "templat")))
    with pytest.raises(EvaluationError, match=r"gold = 'nonsense' is no rule \(the rules are as_is"):
        (tmp_path / "sums.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
        suite_rows(load_suite(own_suite(tmp_path), changes={"gold": "nonsense"}), tmp_path)
    with pytest.raises(EvaluationError, match=r"has none of its files; sought are aime24/test.jsonl"):
        suite_rows(load_suite("aime24"), tmp_path)
    if "code" not in {k.model_fields["type"].default for k in RewardConfig.__subclasses__() if "type" in k.model_fields}:
        with pytest.raises(EvaluationError, match=r"humaneval needs the reward type = 'code'.*not scored"):
            rewards_of(load_suite("humaneval"))
    else:
        assert rewards_of(load_suite("humaneval"))


def test_a_users_own_rule_finds_the_gold_answer(tmp_path):
    (tmp_path / "rules.py").write_text("def half(row, column):\n    return {'gold': row[column] // 2}\n")
    (tmp_path / "sums.jsonl").write_text('{"question": "1+1=", "answer": 4}\n')
    suite = load_suite(own_suite(tmp_path), changes={"gold": f"{tmp_path}/rules.py:half"})
    assert [row["gold"] for row in suite_rows(suite, tmp_path)] == [2]


# ---- gold answers -----------------------------------------------------------------------------------------


def test_gold_answers_are_found_or_said_to_be_missing():
    assert gold.after_hashes({"a": "2+2000\n#### 2,002"}, "a") == {"gold": "2002"}
    assert gold.number({"a": "145.0"}, "a") == {"gold": "145"} and gold.number({"a": 0.5}, "a") == {"gold": "1/2"}
    assert gold.boxed({"a": r"so \boxed{1}, no, \boxed{\frac{1}{2}}"}, "a") == {"gold": r"\frac{1}{2}"}
    assert gold.aime({"a": "025"}, "a") == {"gold": "25"} and gold.aime({"a": 7}, "a") == {"gold": "7"}
    for rule, answer in ((gold.after_hashes, "5"), (gold.number, "five"), (gold.boxed, "5"), (gold.aime, "1000")):
        with pytest.raises(ValueError, match="column a"):
            rule({"a": answer}, "a")


def test_rows_without_a_gold_answer_are_listed_by_number(tmp_path):
    rows = [{"problem": "?", "answer": answer} for answer in ("1", "x", "2", "1000")]
    (tmp_path / "aime24.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(EvaluationError, match=r"(?s)row 1: .*'x'.*row 3: .*'1000'"):
        suite_rows(load_suite("aime24"), tmp_path)


def test_code_contests_take_all_tests_of_either_layout_and_a_rating_of_zero_is_none():
    kept = {"description": "d", "cf_rating": 0} | {
        f"{kind}_tests": {"input": [kind], "output": ["o"]} for kind in ("public", "private", "generated")
    }
    out = gold.code_contests(kept, "description")
    assert out is not None and out["gold"]["inputs"] == ["public", "private", "generated"] and out["cf_rating"] is None
    other = gold.code_contests({"problem": " p ", "tests": {"inputs": ["1"], "outputs": ["2"]}}, "description")
    assert other == {"gold": {"inputs": ["1"], "outputs": ["2"]}, "problem": "p", "cf_rating": None}
    with pytest.raises(ValueError, match="1 test inputs and 0 outputs"):
        gold.code_contests({"problem": "p", "tests": {"inputs": ["1"], "outputs": []}}, "description")


# ---- LiveCodeBench's private tests ------------------------------------------------------------------------


def packed(value) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def problem(kind: str, private, **columns):
    public = [{"input": "1", "output": "1", "testtype": kind}]
    return {
        "public_test_cases": json.dumps(public), "private_test_cases": private, "metadata": "{}", "starter_code": "",
    } | columns  # fmt: skip


def test_private_tests_are_unpacked_beside_the_public_ones():
    private = [{"input": "2\n", "output": "4\n", "testtype": "stdin"}] * 3
    for value in (private, json.dumps(private), packed(json.dumps(private))):
        out = gold.livecodebench(problem("stdin", value), "private_test_cases")
        assert [t["input"] for t in out["gold"]] == ["1", *["2\n"] * 3] and out["entry_point"] is None
    private = packed(json.dumps([{"input": "[1]\n2", "output": "3", "testtype": "functional"}]))
    row = problem("functional", private, metadata='{"func_name": "add"}', starter_code="class Solution: ...")
    out = gold.livecodebench(row, "private_test_cases")
    assert out["entry_point"] == "add" and out["gold"][1]["input"] == "[1]\n2" and "class Solution" in out["instructions"]


def test_a_pickle_that_would_run_something_is_refused_and_does_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    for value in (Evil(), ["[]", "[]"], b"[]"):
        with pytest.raises(ValueError, match=r"refused|not of one"):
            unpack_tests(packed(value))
    assert not (tmp_path / "ran").exists()


def test_packed_tests_that_are_broken_or_huge_are_refused(monkeypatch):
    whole = packed(json.dumps([{"input": "1" * 5000, "output": "2"}]))
    for broken in ("no base64!", base64.b64encode(b"no zlib").decode(), base64.b64encode(zlib.compress(b"\x80")).decode()):
        with pytest.raises(ValueError):
            unpack_tests(broken)
    cut = base64.b64encode(base64.b64decode(whole)[:-8]).decode()
    with pytest.raises(ValueError, match="cut short"):
        unpack_tests(cut)
    monkeypatch.setattr(gold, "LARGEST", 1000)
    with pytest.raises(ValueError, match="larger than 1000"):
        unpack_tests(whole)
    with pytest.raises(ValueError, match="kinds functional, stdin"):
        gold.livecodebench(problem("functional", '[{"input": "", "output": ""}]'), "private_test_cases")


def test_only_the_problems_of_the_window_are_in(tmp_path):
    private = json.dumps([{"input": "", "output": "", "testtype": "stdin"}])
    days = ("2024-09-30T23:59:59", "2024-10-01T00:00:00", "2025-02-28T12:00:00", "2025-03-01T00:00:00")
    rows = [problem("stdin", private, contest_date=day, question_content=day) for day in days]
    (tmp_path / "livecodebench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = suite_rows(load_suite("livecodebench"), tmp_path)
    assert [row["contest_date"] for row in found] == list(days[1:3])


def test_a_row_without_a_day_is_a_fault_and_not_left_out(tmp_path):
    private = json.dumps([{"input": "", "output": "", "testtype": "stdin"}])
    row = problem("stdin", private, contest_date="June", question_content="?")
    (tmp_path / "livecodebench.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(EvaluationError, match="row 0: contest_date = 'June' does not begin with a day such as 2024-10-31"):
        suite_rows(load_suite("livecodebench"), tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[window]\ncolumn = "d"\nfirst = "2024"\nlast = "2024-01-01"', "'2024' is no day: write it as 2024-10-31"),
        ('[window]\ncolumn = "d"\nfirst = "2024-02-01"\nlast = "2025-13-45"', "'2025-13-45' is no day"),
        ('[window]\ncolumn = "d"\nfirst = "2024-02-01"\nlast = "2024-01-01"', "is after last = 2024-01-01"),
    ],
)
def test_a_window_is_of_days(tmp_path, text, told):
    (tmp_path / "mine.toml").write_text(f"{NEEDED}\n{text}\n")
    with pytest.raises(EvaluationError, match=told):
        load_suite(str(tmp_path / "mine.toml"))


def test_a_name_in_the_file_and_a_reward_without_a_type_are_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "other"\n{NEEDED}')
    with pytest.raises(EvaluationError, match="name: a suite is called as its file is, mine: leave it out"):
        load_suite(str(path))
    for kind in ('type = ["a"]', "weight = 1.0"):
        path.write_text(NEEDED.replace('type = "last_number"', kind))
        with pytest.raises(EvaluationError, match=r"a table \[\[rewards\]\] has no type: name one of code"):
            rewards_of(load_suite(str(path)))


# ---- the original data ------------------------------------------------------------------------------------


@needs_data
@pytest.mark.parametrize(
    ("name", "count"),
    [("gsm8k", 1319), ("math500", 500), ("svamp", 1000), ("humaneval", 164), ("mbpp", 500), ("code_contests", 165)],
)
def test_every_problem_of_the_original_data_has_its_prompt_and_gold_answer(name, count):
    suite = load_suite(name)
    rows = suite_rows(suite, DATA)
    assert len(rows) == count and all(row["gold"] for row in rows)
    assert all(len(suite.template.format(**row)) > 40 for row in rows)
    assert len(suite_rows(suite, DATA, limit=3)) == 3


@needs_data
def test_reference_solutions_pass_the_assertions_in_the_form_that_the_reward_gets():
    rows = suite_rows(load_suite("humaneval"), DATA) + suite_rows(load_suite("mbpp"), DATA)[:200]
    programs = []
    for row in rows:
        if "prompt" in row:
            parts = [row["prompt"] + row["canonical_solution"], row["gold"], f"check({row['entry_point']})"]
        else:
            parts = [row["test_setup_code"], row["code"], *row["gold"]]
        programs.append("\n".join(parts))
    run = (
        "import json, sys\nfailed = []\nfor n, text in enumerate(json.load(sys.stdin)):\n"
        "    try: exec(compile(text, 'p', 'exec'), {'__name__': 'p'})\n"
        "    except Exception as error: failed.append((n, repr(error)))\n"
        "print(json.dumps(failed))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", run], input=json.dumps(programs), capture_output=True, text=True, timeout=120
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []
