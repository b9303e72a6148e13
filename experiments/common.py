"""What the experiments share: arms as settings laid over a recipe, one cold start a seed, runs that are not run twice,
a small search before the arms are compared, the rows that are committed, and intervals over seeds.

An arm is a name and its settings, by the dotted keys of the command line: `{"objective.name": "grpo"}`. Everything that
an arm does not set is the same in all arms: prompts, samples, updates, the model to start from.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from gspo.config import Config
from gspo.recipe import load
from gspo.reporting.seeds import seed_interval

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
SEARCH_SEED = 100
"""Of the search for learning rates and clip ranges. No reported run has it."""
SEEDS = (0, 1, 2)
"""Of the reported runs."""

Settings = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]
"""Rows of metrics, with the labels that say which run they are of."""

KEYS = (
    "step", "reward/mean", "evaluation/pass@1", "evaluation/pass@1_low", "evaluation/pass@1_high", "clip/sequence",
    "clip/token", "clip/sequence_by_minibatch", "clip/outside_band", "ratio/sequence_std", "ratio/token_std",
    "ratio/largest_log_ratio", "rollout/response_tokens_mean", "reward/groups_without_signal", "policy/entropy",
    "update/grad_norm", "update/skipped", "time/step_s", "time/collect_s", "time/update_s",
)  # fmt: skip
"""What is committed of a run's metrics; its lists and histograms stay in the run's folder."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One recipe, and where its runs are kept."""

    recipe: str
    """Path below the repository's folder."""
    folder: Path
    """Of the runs. What is whole there is taken as it is, so settings that change need another folder."""
    settings: Settings
    """Laid over the recipe in every run, the cold starts too."""
    model: str | None = None
    """To begin from in place of a cold start: a folder or a hub name."""

    def config(self, name: str, seed: int, settings: Settings) -> Config:
        """The configuration of a run. Raises RecipeError for settings that the recipe does not take."""
        own = {"name": f"{name}-seed{seed}", "seed": seed, "output": str(self.folder)}
        return load(ROOT / self.recipe, words({**self.settings, **settings, **own}))

    def start(self, seed: int) -> str:
        """The model from which all arms of a seed begin: the one after its cold start, unless the plan has one."""
        from gspo.cold_start import cold_start

        return self.model or str(cold_start(self.config("start", seed, {}), resume=True))

    def run(self, name: str, seed: int, settings: Settings, *, model: str | None = None) -> Path:
        """The folder of a run of these settings, from the cold start or from `model`; run unless it is whole there."""
        from gspo.loop import train

        begin = {"cold_start": None, "model.create": None, "model.path": model or self.start(seed)}
        config = self.config(name, seed, {**begin, **settings})
        folder = self.folder / config.name
        if not (rows := metrics(folder)) or rows[-1]["step"] < config.training.steps:
            start = time.process_time()
            train(config, resume=True)
            (folder / "cpu_s.json").write_text(f"{time.process_time() - start:.3f}\n")
        return folder


def sorting(digits: int, folder: Path) -> Plan:
    """Sorting that many digits."""
    tokens, parameters = digits + 2, {"digits": digits}
    return Plan(
        "experiments/sorting.toml",
        folder / f"sorting{digits}",
        {
            "data.parameters": parameters,
            "evaluation.data.parameters": parameters,
            "rollout.max_response_tokens": tokens,
            "evaluation.max_response_tokens": tokens,
        },
    )


def words(settings: Settings) -> list[str]:
    """Settings as words of the command line; lists, tables and null as JSON."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    return [word for key, text in texts.items() for word in (f"--{key}", text)]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run, none where there is none."""
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def labelled(folder: Path, **labels: Any) -> list[dict[str, Any]]:
    """What is committed of a run: KEYS of each row, after the labels that say which run it is."""
    return [labels | {key: row[key] for key in KEYS if row.get(key) is not None} for row in metrics(folder)]


def short(value: Any) -> Any:
    """Numbers to five significant digits: the files are read by people too."""
    if isinstance(value, list):
        return [short(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def write(name: str, rows: Rows) -> None:
    """Replace docs/evidence/NAME.jsonl."""
    lines = (json.dumps({key: short(value) for key, value in row.items()}) for row in rows)
    (EVIDENCE / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")


def read(name: str) -> list[dict[str, Any]]:
    """The rows of docs/evidence/NAME.jsonl."""
    return [json.loads(line) for line in (EVIDENCE / f"{name}.jsonl").read_text("utf-8").splitlines()]


# ---- several runs at a time, on GPUs ----------------------------------------------------------------------


def side_by_side(work: Callable[..., Any], jobs: Iterable[tuple], at_once: int = 16) -> list[Any]:
    """What `work` gives for each tuple of arguments, in their order, computed by up to `at_once` processes."""
    jobs, context = list(jobs), multiprocessing.get_context("spawn")
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    order = context.Value("i", 0)
    with ProcessPoolExecutor(
        min(len(jobs), at_once), context, initializer=alone, initargs=(gpus.split(","), order)
    ) as pool:
        return [future.result() for future in [pool.submit(work, *job) for job in jobs]]


def alone(gpus: list[str], order: Any) -> None:
    """Let this process see one GPU, the next in turn; threads of its own would only be in the others' way."""
    with order.get_lock():
        place, order.value = order.value, order.value + 1
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    torch.set_num_threads(1)


# ---- the search before the comparison ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Method:
    """An objective as its authors set it, and what is calibrated."""

    objective: str
    """Name of the objective."""
    low: float
    """The authors' lower clip range."""
    high: float
    """The authors' upper one."""
    share: str
    """The metric of the clipped share, in the unit that is clipped."""

    def settings(self, rate: float, scale: float) -> Settings:
        """At a learning rate, with the authors' range times `scale`."""
        clip = {"objective.clip_low": min(self.low * scale, 0.9), "objective.clip_high": self.high * scale}
        return {"objective.name": self.objective, "training.learning_rate": rate, **clip}


METHODS = {
    "gspo": Method("gspo", 3e-4, 4e-4, "clip/sequence"),
    "grpo": Method("grpo", 0.2, 0.27, "clip/token"),
}
RATES = (1e-4, 3e-4, 1e-3)
FACTORS = {"gspo": (1.0, 4.0, 16.0, 64.0, 256.0), "grpo": (1.0, 1 / 4, 1 / 16, 1 / 64, 1 / 256)}
"""On the authors' clip ranges, for a search at an arm's own rate: with theirs gspo drops half of all tokens, grpo few."""
TARGET = 0.15
"""Clipped share that a range is calibrated to: the paper's of tokens, under gspo."""
CALIBRATION_STEPS = 20
CALIBRATION_RUNS = 4


def trial(plan: Plan, method: Method, rate: float, scale: float, seed: int = SEARCH_SEED) -> dict[str, Any]:
    """Clipped share, reward and spread of ratios over CALIBRATION_STEPS steps at a constant rate."""
    steps = {"training.steps": CALIBRATION_STEPS, "training.schedule": "constant", "evaluation": None}
    name = f"calibrate-{method.objective}-lr{rate:g}-x{scale:.4g}"
    rows = metrics(plan.run(name, seed, {**method.settings(rate, scale), **steps}))
    found = {key: mean(rows, key) for key in ("reward/mean", "ratio/sequence_std", "ratio/token_std")}
    given = {"what": "calibration", "objective": method.objective, "seed": seed, "rate": rate, "scale": scale}
    return {**given, "share": mean(rows, method.share), **found}


def calibrate(plan: Plan, method: Method, rate: float, seed: int = SEARCH_SEED) -> tuple[float, list[dict[str, Any]]]:
    """The factor on the authors' range that clips a share of TARGET, and the trials. Factors of four until two trials stand
    on either side of it, then between them by the logarithms: the share falls with the range about as a power.
    CALIBRATION_RUNS trials; the nearest is taken, whether it is near or not."""
    trials: list[dict[str, Any]] = []
    for _ in range(CALIBRATION_RUNS):
        scale = next_scale([(t["scale"], t["share"]) for t in trials]) if trials else 1.0
        trials.append(trial(plan, method, rate, scale, seed))
    best = min(trials, key=lambda t: abs(math.log(max(t["share"], 1e-4) / TARGET)))
    return best["scale"], trials


def next_scale(trials: Sequence[tuple[float, float]]) -> float:
    """Where to try next, after trials of (factor, share)."""
    over = max((t for t in trials if t[1] > TARGET), default=None)
    under = min((t for t in trials if t[1] <= TARGET), default=None)
    if over is None or under is None:
        return over[0] * 4 if over else min(trials)[0] / 4
    (x0, y0), (x1, y1) = ((math.log(x), math.log(max(y, 1e-4))) for x, y in (over, under))
    part = (math.log(TARGET) - y0) / (y1 - y0)
    return math.exp(x0 + (x1 - x0) * min(max(part, 0.1), 0.9))


@dataclass(frozen=True, slots=True)
class Choice:
    """What a search chose."""

    name: str
    """Of its runs, less the seed. Experiments that choose alike share runs."""
    settings: Settings
    """Learning rate and clip range."""


def search(
    plan: Plan, method: Method, *, calibrated: bool, rates: Sequence[float] = RATES
) -> tuple[Choice, list[dict[str, Any]]]:
    """The settings with the best score at the search's seed, and a row for each trial: each rate with the authors' range,
    or with the range calibrated at it."""
    rows, tried = [], []
    for rate in rates:
        scale, trials = calibrate(plan, method, rate) if calibrated else (1.0, [])
        name = f"{method.objective}-lr{rate:g}-{'calibrated' if calibrated else 'authors'}"
        choice = Choice(name, method.settings(rate, scale))
        folder = plan.run(name, SEARCH_SEED, choice.settings)
        found = {"objective": method.objective, "rate": rate, "scale": scale, "score": score(metrics(folder))}
        rows += [*trials, {"what": "search", **found}]
        tried.append((found["score"], choice))
    return max(tried, key=lambda pair: pair[0])[1], rows


Trials = Callable[[Sequence[tuple]], Sequence[Rows]]
"""Runs what an experiment tries, one after the other or side by side: the rows of each tuple of arguments."""


def best(trials: Trials, candidates: Mapping[str, Sequence[tuple]]) -> tuple[dict[str, tuple], list[Mapping[str, Any]]]:
    """The best by `score` of each arm's candidates, which are arguments of `trials`, and the rows of all."""
    jobs = [job for some in candidates.values() for job in some]
    found = dict(zip(jobs, trials(jobs), strict=True))
    chosen = {arm: max(some, key=lambda job: score(found[job])) for arm, some in candidates.items()}
    return chosen, [row for rows in found.values() for row in rows]


def score(rows: Rows) -> float:
    """What the search goes by: mean training reward of the last 20 steps."""
    return fmean([row["reward/mean"] for row in rows if "reward/mean" in row][-20:])


# ---- what several runs say --------------------------------------------------------------------------------


def by_run(rows: Rows, *keys: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Rows by the values of these labels, in the order in which they come."""
    out: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        out.setdefault(tuple(row[key] for key in keys), []).append(row)
    return out


def mean(rows: Rows, key: str) -> float:
    """Mean of a metric over the rows that have it."""
    return fmean(row[key] for row in rows if row.get(key) is not None)


def last(rows: Rows, key: str) -> float:
    """A metric in the last row that has it."""
    return [row[key] for row in rows if row.get(key) is not None][-1]


def shown(values: Sequence[float], digits: int = 3) -> str:
    """`0.812 [0.774, 0.850]`: mean and Student's 95% interval over seeds; the values alone where there is but one."""
    if len(values) < 2:
        return ", ".join(f"{v:.{digits}f}" for v in values)
    middle, low, high = seed_interval(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def table(lines: Iterable[str], columns: Mapping[str, Any], cell: Callable[[str, Any], str]) -> str:
    """A Markdown table: a line for each name, a column for each value of `columns`, filled by `cell(name, value)`."""
    head = f"| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}\n"
    return head + "".join(f"| {line} | {' | '.join(cell(line, value) for value in columns.values())} |\n" for line in lines)


def band(axis: Any, runs: Sequence[Sequence[tuple[float, float]]], *, label: str, colour: str) -> None:
    """The mean of runs and a band from the lowest to the highest, at the places where all were measured: a step in which no
    group had a signal has no last minibatch."""
    curves = [dict(run) for run in runs]
    places = [x for x in curves[0] if all(x in curve for curve in curves)]
    values = [[curve[x] for curve in curves] for x in places]
    axis.fill_between(places, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15, linewidth=0)
    axis.plot(places, [fmean(v) for v in values], color=colour, label=label, linewidth=1.4)


def smooth(rows: Rows, key: str, window: int = 10) -> list[tuple[float, float]]:
    """(step, mean of the metric over the `window` steps that end there; fewer at the beginning)."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    values = [y for _, y in points]
    return [(x, fmean(values[max(0, i - window + 1) : i + 1])) for i, (x, _) in enumerate(points)]


def main(document: str, run: Callable[..., None], draw: Callable[[], None], model: str | None = None) -> None:
    """The command line of an experiment: run what is not there yet, then draw; or only draw what is committed. `run` gets
    the folder of the runs, and the model where the experiment has one to begin from."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/experiments"), help="folder of the runs")
    parser.add_argument("--draw", action="store_true", help="only draw, and print the tables of, what is committed")
    if model:
        parser.add_argument(
            "--model", default=model, help="to begin from: a folder, or a hub's name (default: %(default)s)"
        )
    options = parser.parse_args()
    if not options.draw:
        run(options.output, *([options.model] if model else []))
    draw()
