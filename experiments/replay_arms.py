"""The arms of routing_replay.py and deep_mixture.py, searches of their rates and ranges, and the rows of their runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from common import METHODS, SEARCH_SEED, SEEDS, Plan, Rows, best, labelled, metrics, short, side_by_side

SCORED = {"rollout.old_logprobs": "trainer", "training.schedule": "constant", "evaluation.every": 20}
"""In all arms: the scoring pass that replay needs, so that arms differ in nothing else."""
ARMS = {
    f"{objective}{' with replay' if replay == 'trainer' else ''}": (objective, replay)
    for objective in ("gspo", "grpo")
    for replay in ("none", "trainer")
}
MOE = (
    "moe/flips_by_minibatch", "moe/flips_by_layer", "moe/tokens_flipped", "moe/auxiliary_loss", "moe/replay_bytes",
    "moe/replay_s", "moe/flips_after_by_minibatch", "moe/tokens_flipped_after", "moe/tokens_flipped_after_by_minibatch",
)  # fmt: skip
PARTS = {"first six": slice(6), "last six": slice(-6, None)}
"""Of the layers."""
SOUGHT = ("what", "arm", "seed", "rate", "minibatches", "step", "reward/mean", "evaluation/pass@1")
"""Of a search's runs."""

Trials = Callable[[str, Sequence[tuple]], Sequence[Rows]]
"""The rows, labelled by its first argument if that says anything, of each (arm, seed, rate, minibatches, steps, scale)."""
Factors = Mapping[str, Sequence[float]]
"""On the authors' clip range, by objective."""


def trials_of(plan: Plan, starts: Mapping[int, str], at_once: int) -> Trials:
    """Trials of that plan from these models by seed, so many at once."""

    def trials(what: str, jobs: Sequence[tuple]) -> list[Rows]:
        found = side_by_side(trial, [(plan, *job[:-1], starts[job[1]], job[-1]) for job in jobs], at_once)
        return [of_range(some, what, job[-1]) if what else some for job, some in zip(jobs, found, strict=True)]

    return trials


def with_own_rates(
    trials: Trials, factors: Factors, tried: Sequence[float], minibatches: int, search_steps: int, steps: int
) -> list[Mapping[str, Any]]:
    """Rows of a search of every arm's rate, of the arms at it at all seeds, and of `ranges` there."""
    jobs = {arm: [(arm, SEARCH_SEED, rate, minibatches, search_steps, 1.0) for rate in tried] for arm in ARMS}
    chosen, rows = best(lambda some: trials("search", some), jobs)
    rates = {arm: job[2] for arm, job in chosen.items()}
    rows += at_all_seeds(trials, rates, minibatches, steps)
    return rows + ranges("range", trials, factors, rates, minibatches, search_steps, steps)


def all_pushed(
    trials: Trials, factors: Factors | None, rate: float, minibatches: int, steps: int
) -> list[Mapping[str, Any]]:
    """Rows of every arm at one rate at all seeds, and, where there are factors to search, of `ranges` there."""
    rates = dict.fromkeys(ARMS, rate)
    rows = pushed(at_all_seeds(trials, rates, minibatches, steps))
    return rows + (ranges("pushed range", trials, factors, rates, minibatches, steps, steps) if factors else [])


def at_all_seeds(trials: Trials, rates: Mapping[str, float], minibatches: int, steps: int) -> list[Mapping[str, Any]]:
    """Rows of every arm at its rate with its authors' range."""
    jobs = [(arm, seed, rates[arm], minibatches, steps, 1.0) for seed in SEEDS for arm in ARMS]
    return [row for some in trials("", jobs) for row in some]


def ranges(
    what: str,
    trials: Trials,
    factors: Factors,
    rates: Mapping[str, float],
    minibatches: int,
    search_steps: int,
    steps: int,
) -> list[Mapping[str, Any]]:
    """Rows of a search of every arm's clip range at its rate, and of the arms with what it chose at all seeds."""
    tried = {
        arm: [(arm, SEARCH_SEED, rates[arm], minibatches, search_steps, scale) for scale in factors[objective]]
        for arm, (objective, _) in ARMS.items()
    }
    chosen, rows = best(lambda jobs: trials(f"{what} search", jobs), tried)
    jobs = [(arm, seed, rates[arm], minibatches, steps, job[-1]) for arm, job in chosen.items() for seed in SEEDS]
    return rows + [row for some in trials(f"{what} chosen", jobs) for row in some]


def of_range(rows: Rows, what: str, scale: float) -> list[dict[str, Any]]:
    """Rows of a run with the authors' range times `scale`, without lists by layer; of a search what it goes by."""
    given = {"what": what, "scale": scale}
    if what.endswith("search"):
        return [{k: row[k] for k in SOUGHT if k in row} | given for row in rows]
    return [{k: v for k, v in row.items() if k != "moe/flips_by_layer"} | given for row in rows]


def pushed(rows: Rows) -> list[dict[str, Any]]:
    """Rows of a run that was pushed: without lists by layer or minibatch, which those at the arms' own rates have."""
    return [{k: v for k, v in row.items() if not isinstance(v, list)} | {"what": "pushed"} for row in rows]


def trial(
    plan: Plan,
    arm: str,
    seed: int,
    rate: float,
    minibatches: int,
    steps: int,
    model: str | None = None,
    scale: float = 1.0,
) -> list[dict[str, Any]]:
    """The rows of one run, from the seed's cold start or from `model`, with the authors' clip range times `scale`."""
    objective, replay = ARMS[arm]
    settings = {
        **METHODS[objective].settings(rate, scale),
        **SCORED,
        "training.replay": replay,
        "training.minibatches": minibatches,
        "training.steps": steps,
    }
    name = f"{objective}-{replay}-lr{rate:g}-n{minibatches}-{steps}" + (f"-x{scale:.4g}" if scale != 1 else "")
    folder = plan.run(name, seed, settings, model=model)
    labels = {"arm": arm, "seed": seed, "rate": rate, "minibatches": minibatches}
    kept = labelled(folder, what="search" if seed == SEARCH_SEED else "run", **labels)
    return [a | experts(b) for a, b in zip(kept, metrics(folder), strict=True)]


def experts(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is committed of a step's `moe/`: flips by layer of each fifth step, after each update those of PARTS, load and
    dead experts over all layers."""
    kept = {key: short(row[key]) for key in MOE if row.get(key) is not None}
    if row["step"] % 5:
        kept.pop("moe/flips_by_layer", None)
    if by_both := row.get("moe/flips_after_by_minibatch_and_layer"):
        kept |= {
            f"after, {name}": [None if by_layer is None else short(fmean(by_layer[part])) for by_layer in by_both]
            for name, part in PARTS.items()
        }
    if row.get("moe/load_by_layer"):
        kept |= {"load": short(max(row["moe/load_by_layer"])), "dead": sum(row["moe/dead_experts_by_layer"])}
    return kept
