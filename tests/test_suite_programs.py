"""Suites of programs, from their rows as published to a verdict: right programs pass every hidden test, others do not."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from dataclasses import replace

from rewards_support import sample
from test_suites import DATA, needs_data

from gspo.chat import character_tokenizer
from gspo.evaluation.suite import load_suite, rewards_of
from gspo.evaluation.suite_rows import suite_prompts, suite_rows
from gspo.rewards import build, score

SUM = "a, b = map(int, input().split())\nprint(a + b)"
TWO_SUM = """class Solution:
    def twoSum(self, nums: List[int], target: int) -> List[int]:
        seen = {}
        for i, x in enumerate(nums):
            if target - x in seen:
                return [seen[target - x], i]
            seen[x] = i
"""
FIRST_TWO = "class Solution:\n    def twoSum(self, nums, target):\n        return [0, 1]\n"
SQUARES = """for _ in range(int(input())):
    s = input()
    print("YES" if s[: len(s) // 2] == s[len(s) // 2 :] else "NO")
"""
POWERS = """for _ in range(int(input())):
    n, k = map(int, input().split())
    print(sum(pow(n, i, 10**9 + 7) for i in range(32) if k >> i & 1) % (10**9 + 7))
"""


def verdicts(name, folder, programs):
    """What the suite's rewards make of these programs, a list for each row's number."""
    suite = load_suite(name, changes={"format": "text"})
    rewards, rows = build(rewards_of(suite)), suite_rows(suite, folder)
    chosen = [rows[number] for number in programs]
    characters = "".join(sorted({c for row in chosen for c in suite.template.format(**row)}))
    prompts = suite_prompts(suite, chosen, character_tokenizer(characters), rewards)
    samples = [
        replace(sample(f"So:\n```python\n{program}\n```"), id=f"{prompt.id}/{number}", prompt=prompt)
        for prompt, programs_of_row in zip(prompts, programs.values(), strict=True)
        for number, program in enumerate(programs_of_row)
    ]
    totals = iter(scored.total for scored in score(rewards, samples))
    return {number: [next(totals) for _ in row] for number, row in programs.items()}


def published(kind, public, private, **columns):
    """A row as LiveCodeBench publishes it: private tests are base64 of a zlib stream of a pickle of JSON."""
    public, private = ([{"input": i, "output": o, "testtype": kind} for i, o in tests] for tests in (public, private))
    return {
        "question_title": "t",
        "contest_date": "2024-11-02T00:00:00",
        "starter_code": "",
        "metadata": "{}",
        "public_test_cases": json.dumps(public),
        "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(json.dumps(private)))).decode(),
    } | columns


def test_livecodebench_as_published_is_judged_by_its_private_tests(tmp_path):
    rows = [
        published("stdin", [("1 2\n", "3\n")], [("10 20", "30"), ("-5 5", "0")], question_content="Add two numbers."),
        published(
            "functional",
            [("[2,7,11,15]\n9", "[0,1]")],
            [("[3,2,4]\n6", "[1,2]"), ("[3,3]\n6", "[0,1]")],
            question_content="Find two that add up.",
            starter_code=TWO_SUM.partition("seen")[0],
            metadata='{"func_name": "twoSum"}',
        ),
    ]
    (tmp_path / "livecodebench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {0: [SUM, "print(3)", "import os\nos._exit(0)"], 1: [TWO_SUM, FIRST_TWO, ""]}
    assert verdicts("livecodebench", tmp_path, given) == {0: [1, 0, 0], 1: [1, 0, 0]}


@needs_data
def test_code_contests_knows_right_programs_from_wrong_ones():
    given = {139: [SQUARES, "print('YES')"], 52: [POWERS, POWERS.replace("32", "8")]}
    assert verdicts("code_contests", DATA, given) == {139: [1, 0], 52: [1, 0]}
