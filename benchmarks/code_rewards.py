"""Whether the reference solutions of HumanEval and MBPP pass behind the sandbox, and what a program costs.

    python benchmarks/code_rewards.py FOLDER [--sandbox KIND] [--workers N]

FOLDER holds humaneval/HumanEval.jsonl.gz and mbpp/mbpp.jsonl. Prints a line for each solution that does not pass, counts
and times of each set, and exits with 1 where fewer pass than should: 164 of 164 and 972 of 974. For each row a wrong
program runs too (no function, or one that returns nothing), and none of those may pass.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from gspo.config import CodeReward
from gspo.rewards import Built, build, score
from gspo.types import Completion, Prompt, Sample, Score

NEEDED = {"humaneval": 164, "mbpp": 972}


def sample(text: str, answer: Any, columns: dict[str, Any]) -> Sample:
    """A response to a row."""
    completion = Completion(np.zeros(1, np.int64), np.zeros(1, np.float32), "stop", 0, 0)
    return Sample("s0/r0/0", Prompt(0, None, "", (1,), answer, columns), completion, text)


def humaneval(folder: Path) -> Iterator[tuple[str, Sample, Sample]]:
    """Name, reference solution and wrong one of each row."""
    with gzip.open(folder / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
        for row in map(json.loads, file):
            good, bad = row["canonical_solution"], "    return None\n"
            yield row["task_id"], sample(good, row["test"], row), sample(bad, row["test"], row)


def mbpp(folder: Path) -> Iterator[tuple[str, Sample, Sample]]:
    """Name, reference solution and wrong one of each row, with the harder tests where there are any."""
    with open(folder / "mbpp" / "mbpp.jsonl") as file:
        for row in map(json.loads, file):
            tests = [*row["test_list"], *row["challenge_test_list"]]
            yield str(row["task_id"]), sample(row["code"], tests, row), sample("def f(): pass", tests, row)


def timed(reward: Built, one: Sample) -> tuple[Score, float]:
    """A verdict, and the seconds that it took."""
    start = time.perf_counter()
    (scored,) = score([reward], [one])
    return scored.parts[reward.name], time.perf_counter() - start


def check(name: str, rows: list[tuple[str, Sample, Sample]], reward: Built, workers: int) -> bool:
    """Run one set, print what came of it, and say whether it is as it should be."""
    start = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        good = list(pool.map(lambda row: timed(reward, row[1]), rows))
        spent = time.perf_counter() - start
        bad = list(pool.map(lambda row: timed(reward, row[2]), rows))
    for (task, _, _), (verdict, _) in zip(rows, good, strict=True):
        if verdict.value != 1.0:
            print(f"{name} {task}: {verdict.value}: {verdict.why}")
    passed, fooled = (sum(verdict.value == 1.0 for verdict, _ in verdicts) for verdicts in (good, bad))
    seconds = sorted(s for _, s in good)
    print(
        f"{name}: {passed} of {len(rows)} reference solutions pass, {fooled} wrong ones do; {spent:.1f} s with "
        f"{workers} at a time, a program {statistics.median(seconds):.3f} s (median), {seconds[-1]:.2f} s (longest)"
    )
    return passed >= NEEDED[name] and not fooled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sandbox", default="auto")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    (reward,) = build([CodeReward(sandbox=options.sandbox, given="prompt", workers=1, on_error="abstain")])
    print(reward.note)
    (plain,) = build([CodeReward(sandbox=options.sandbox, workers=1, on_error="abstain")])
    right = check("humaneval", list(humaneval(options.folder)), reward, options.workers)
    right = check("mbpp", list(mbpp(options.folder)), plain, options.workers) and right
    sys.exit(not right)


if __name__ == "__main__":
    main()
