"""10,000 random and adversarial answers through the `math` reward: no crash, no hang, nothing left, and every verdict in.

    python benchmarks/math_stress.py [answers] [hanging ones among them]

Prints verdicts by reason, seconds, and processes, file descriptors and resident memory before and after; ends with an
error if one of them grew. The answers are those of tests/adversarial.py.
"""

from __future__ import annotations

import collections
import gc
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from adversarial import ORDINARY, answers

from gspo.config import MathReward
from gspo.rewards import build, score
from gspo.types import Completion, Prompt, Sample

TIMEOUT_S = 2.0
REASON = re.compile(
    "took longer|needed more|is nested|crashed|is longer|cannot be read|could not be compared|is not|equals|"
    "the response has no|its last|$"
)


def samples(texts: list[str]) -> list[Sample]:
    completion = Completion(np.zeros(1, np.int64), np.zeros(1, np.float32), "stop", 0, 0)
    golds = [ORDINARY[i % len(ORDINARY)] for i in range(len(texts))]
    prompts = [Prompt(i, None, "?", (1,), gold, {}, f"r{i}") for i, gold in enumerate(golds)]
    return [Sample(f"s/{p.id}/0", p, completion, rf"\boxed{{{text}}}") for p, text in zip(prompts, texts, strict=True)]


def footprint() -> dict[str, float]:
    gc.collect()
    me = psutil.Process()
    return {
        "children": len(me.children(recursive=True)),
        "file descriptors": me.num_fds(),
        "MiB": round(me.memory_info().rss / 2**20),
    }


def main(number: int = 10_000, hanging: int = 40) -> None:
    built = build([MathReward(timeout_s=TIMEOUT_S)])
    score(built, samples(answers(200, seed=1, hanging=0)))
    before, start, cpu = footprint(), time.perf_counter(), sum(os.times()[:4])
    scored = score(built, samples(answers(number, seed=0, hanging=hanging)))
    took, after = time.perf_counter() - start, footprint()
    del built
    closed = footprint()
    reasons = collections.Counter(REASON.findall(s.parts["math"].why)[-2:][0] for s in scored)
    for reason, count in reasons.most_common():
        print(f"{count:6}  {reason}")
    print(f"{len(scored):,} answers, {hanging} made to hang, in {took:.1f} s; CPU {sum(os.times()[:4]) - cpu:.1f} s")
    for name, values in {"before": before, "after": after, "pool dropped": closed}.items():
        print(f"{name:13}", values)
    assert len(scored) == number and all(s.total in (0.0, 1.0) for s in scored)
    assert after["children"] <= before["children"] and closed["children"] == 0
    assert after["file descriptors"] <= before["file descriptors"]
    assert after["MiB"] <= before["MiB"] + 60, "the memory of verdicts and samples is some MiB"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
