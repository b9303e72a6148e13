"""The question of routing_replay.py, of a mixture made out of a language model that already speaks, on a GPU.

    python experiments/language_mixture.py
    python experiments/language_mixture.py --draw

Run from the repository's folder. The mixture is made by upcycle.py out of the recipe's model and learns the recipe's task.
Runs go side by side, a process each. Writes docs/evidence/language_mixture.jsonl and .png.
"""

from __future__ import annotations

from pathlib import Path

from common import FACTORS, SEARCH_SEED, SEEDS, Plan, main, read, write
from replay_arms import trials_of, with_own_rates
from routing_replay import picture, print_tables
from upcycle import upcycle

RECIPE = "recipes/smollm2.toml"
DENSE = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The recipe's model."""
SETTINGS = {
    "model.dtype": "bfloat16",
    "model.head_dtype": "float32",
    "model.kernels": "torch",
    "checkpoint.every": None,
}
"""Layers uncompiled: compiling takes as long as a run. No checkpoints: each would take 5 GB, and none is started from."""
RATES = (1e-5, 3e-5, 1e-4)
"""Of the search, which is the boundary too. The recipe's is the first."""
MINIBATCHES = 4
AT_ONCE = 12
"""Runs side by side: they need about 100 GB."""
STEPS = 20
"""Of all runs."""


def run(output: Path, model: str) -> None:
    """The comparison and own ranges, every run from the same mixture: seeds differ in prompts and samples."""
    plan = Plan(RECIPE, output / "language_mixture", SETTINGS)
    mixture = str(upcycle(model, plan.folder / "mixture"))
    starts = dict.fromkeys((SEARCH_SEED, *SEEDS), mixture)
    trials = trials_of(plan, starts, AT_ONCE)
    write("language_mixture", with_own_rates(trials, FACTORS, RATES, MINIBATCHES, STEPS, STEPS))


def draw() -> None:
    """The figure, and on standard output the tables."""
    rows = read("language_mixture")
    print_tables(rows)
    picture("language_mixture", rows)


if __name__ == "__main__":
    main(str(__doc__), run, draw, DENSE)
