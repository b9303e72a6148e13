"""The question of old_likelihoods.py, of a language model on a GPU.

    python experiments/language_likelihoods.py
    python experiments/language_likelihoods.py --draw

Run from the repository's folder, with vllm installed. The recipe's model learns the recipe's task; a dozen runs go side by
side, each with a vLLM of its own, about 75 GB of one GPU in all. Writes docs/evidence/language_likelihoods.jsonl and .png.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common import SEEDS, Plan, main, side_by_side, write
from language_model import MODEL, RECIPE, SEARCH_STEPS, SETTINGS, STEPS
from old_likelihoods import ARMS, own, picture, trial

PRECISIONS = ("bfloat16", "float16")
"""Of engine and trainer alike. In float32 no decision differed wherever it was counted."""
RATES = {"gspo": 3e-5, "grpo": 3e-5}
"""What language_model's search chose for each, in bfloat16 with the trainer's."""
OWN_RATES = (1e-5, 3e-5, 1e-4)
"""Of the search of each arm's own."""
MEMORY = {"rollout.vllm.memory_fraction": 0.02}
"""What must be free of the GPU when a run starts."""
CACHE_BYTES = 2**30
"""For each vLLM's keys and values: 128 samples of this task take a third of it."""
AT_ONCE = 12


def run(output: Path, model: str) -> None:
    """Every arm in every precision at every seed; then each with its own rate and range."""
    plan = Plan(RECIPE, output / "language_likelihoods", SETTINGS | MEMORY, model=model)
    jobs = [
        (plan, objective, old, precision, seed, RATES[objective], STEPS)
        for seed in SEEDS
        for precision in PRECISIONS
        for objective, old in ARMS.values()
    ]
    rows = [row for some in side_by_side(beside, jobs, at_once=AT_ONCE) for row in some]

    def trials(jobs: Sequence[tuple]) -> list[list[dict[str, Any]]]:
        return side_by_side(beside, [(plan, *job) for job in jobs], at_once=AT_ONCE)

    for precision in PRECISIONS:
        rows += own(trials, precision, OWN_RATES, SEARCH_STEPS, STEPS)
    write("language_likelihoods", rows)


def beside(*job: Any) -> list[dict[str, Any]]:
    """One run, whose vLLM is told its cache: it would measure what is free while others beside it take theirs."""
    from gspo.rollout.vllm_package import import_vllm

    vllm = import_vllm()
    with patch.object(vllm, "LLM", functools.partial(vllm.LLM, kv_cache_memory_bytes=CACHE_BYTES)):
        return trial(*job)


def draw() -> None:
    """The figure, and on standard output the tables."""
    picture("language_likelihoods", window=10)


if __name__ == "__main__":
    main(str(__doc__), run, draw, MODEL)
