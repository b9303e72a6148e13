"""The question of routing_replay.py, of a mixture fifteen times as large, twice as deep, with longer answers, on GPUs.

    python experiments/deep_mixture.py
    python experiments/deep_mixture.py --draw

Run from the repository's folder. All runs of a phase go side by side, a process each, over all GPUs that are visible; a GPU
holds a dozen of them. Writes docs/evidence/deep_mixture.jsonl and .png.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import SEARCH_SEED, SEEDS, Plan, main, read, side_by_side, sorting, write
from replay_arms import all_pushed, trials_of, with_own_rates
from routing_replay import picture, print_tables

DIGITS = 16
DECODER = {
    "model.dtype": "bfloat16",
    "model.kernels": "torch",
    "model.head_dtype": "float32",
    "model.create.num_layers": 48,
    "model.create.hidden_size": 128,
    "model.create.num_experts": 64,
    "model.create.experts_per_token": 8,
    "model.create.moe_intermediate_size": 64,
    "cold_start.learning_rate": 1e-3,
    "checkpoint.every": None,
}
"""78 million parameters, of which a token meets a sixth. Layers uncompiled: compiling takes as long as a run. No
checkpoints: each would take a gigabyte, and none is started from."""
RATES = {4: (1e-5, 3e-5, 1e-4, 3e-4), 8: (1e-5, 3e-5, 1e-4), 16: (1e-5, 3e-5, 1e-4)}
"""Of the search, by minibatches a rollout batch: eight samples each at 16."""
STEPS = 28
"""Of all runs."""
FACTORS = {"gspo": (1 / 4, 1.0, 4.0, 16.0, 64.0), "grpo": (16.0, 4.0, 1.0, 1 / 4, 1 / 16)}
"""On the authors' clip ranges."""
BOUNDARY = ((1e-4, 4), (1e-4, 8), (1e-4, 16), (3e-4, 4))
"""Learning rates and minibatches at which every arm is pushed at every seed."""
RANGED = DRAWN = BOUNDARY[1:3]
"""Those of them where every arm's clip range is searched too, and that are drawn."""

AT_ONCE = 16
"""Runs side by side: one GPU holds them."""
LATER = (4, 5)
"""Machines of 8 and 16 minibatches alone: on the first their rates were searched, on the second arms ran with what was
chosen, and with ranges of their own."""


def run(output: Path) -> None:
    """By minibatches each arm at its own rate, and with its own range; all pushed, with own ranges at some places."""
    plan, seeds = sorting(DIGITS, output), (SEARCH_SEED, *SEEDS)
    plan = Plan(plan.recipe, output / "deep_mixture", {**plan.settings, **DECODER})
    starts = dict(zip(seeds, side_by_side(plan.start, [(seed,) for seed in seeds]), strict=True))
    trials, rows = trials_of(plan, starts, AT_ONCE), list[Mapping[str, Any]]()
    for number, rates in RATES.items():
        rows += with_own_rates(trials, FACTORS, rates, number, STEPS, STEPS)
    for rate, number in BOUNDARY:
        rows += all_pushed(trials, FACTORS if (rate, number) in RANGED else None, rate, number, STEPS)
    write("deep_mixture", rows)


def draw() -> None:
    """The figure, with 16 minibatches of the last machine, where every arm had its own rate; on standard output the tables,
    those of the last two machines apart."""
    rows = read("deep_mixture")
    earlier = [row for row in rows if row.get("machine") not in LATER]
    print_tables(earlier)
    for machine in LATER:
        print(f"machine {machine}")
        print_tables([row for row in rows if row.get("machine") == machine])
    with_16 = [row for row in rows if row.get("machine") == LATER[-1] and row["what"] == "run" and row["minibatches"] == 16]
    picture("deep_mixture", [row for row in earlier if row["what"] != "run" or row["minibatches"] == 4] + with_16, DRAWN)


if __name__ == "__main__":
    main(str(__doc__), run, draw)
