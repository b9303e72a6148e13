"""The committed rows of experiments are those of the runs that are committed whole."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from gspo.config import Config

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
RUNS = sorted(path.parent for path in EVIDENCE.glob("runs/*/*/metrics.jsonl"))
TRIALS = sorted(path.parent for path in EVIDENCE.glob("runs/clip_range/*-digits/*/metrics.jsonl"))
LABELS = (
    "what", "arm", "method", "seed", "rate", "scale", "minibatches", "precision", "machine", "digits", "since", "change",
)  # fmt: skip
OTHER_NAMES = {"held_out": "evaluation/reward", "entropy": "policy/entropy", "grad_norm": "update/grad_norm"}
"""Of numbers that some experiments' rows name otherwise than a run does."""
MEANS = ("reward", "clipped", "grad_norm")
"""What rows of turns.jsonl tell of ten steps each."""


@pytest.fixture(scope="module")
def common():
    sys.path.insert(0, str(ROOT / "experiments"))
    import common

    yield common
    sys.path.remove(str(ROOT / "experiments"))


def in_rows_words(name: str, rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """By step what a run said, also by the names that rows have for it."""
    out = {row["step"]: row | {new: row[old] for new, old in OTHER_NAMES.items() if old in row} for row in rows}
    if name == "hidden_change":
        return {step: row | {"reward": row.get("reward/mean")} for step, row in out.items()}
    if name != "turns":
        return out
    trained = [row for row in rows if "reward/mean" in row]
    for ten in (trained[i : i + 10] for i in range(0, len(trained), 10)):
        for new, old in zip(MEANS, ("reward/mean", "clip/sequence", "update/grad_norm"), strict=True):
            out[ten[-1]["step"]][new] = round(fmean(row[old] for row in ten), 5)
    return out


@pytest.mark.parametrize("name", sorted({run.parent.name for run in RUNS}))
def test_what_is_committed_of_a_whole_run_says_what_the_run_said(common, name):
    extracts: dict[tuple, list[dict]] = {}
    for row in common.read(name):
        if "step" in row:
            extracts.setdefault(tuple(str(row.get(key)) for key in LABELS), []).append(row)

    def says(whole: Mapping[int, Mapping[str, Any]], rows: list[dict]) -> bool:
        """Whether every number of these rows is the run's; enough of them that it can be no other's."""
        known = 0
        for row in rows:
            told = whole.get(row["step"], {})
            for key in (row.keys() & told.keys()).difference(LABELS):
                if told[key] is not None:
                    if row[key] not in (told[key], common.short(told[key])):
                        return False
                    known += 1
        return known > 2 * len(rows)

    found = {}
    for run in (run for run in RUNS if run.parent.name == name):
        whole = in_rows_words(name, common.metrics(run))
        keys = [key for key, rows in extracts.items() if says(whole, rows)]
        # The authors' range at a rate is one run, whose rows stand again where ranges are searched there, or it is chosen,
        # maybe on another machine that gave the same numbers; and what a run hides stands in rows of its own.
        again = [key for key in keys[1:] if key[0].endswith(("search", "chosen")) and key[5] == "1.0"]
        found[run.name] = [key for key in keys if key not in again and key[0] != "hidden"]
    assert found and all(len(keys) == 1 for keys in found.values()), found
    assert len({keys[0] for keys in found.values()}) == len(found)


def test_what_is_committed_of_trials_of_ranges_is_what_their_runs_said(common):
    """clip_range's: means over the steps of each. Those of the search's seed are told by what they chose alone."""
    keys = {"clip/sequence": "share", **{k: k for k in ("reward/mean", "ratio/sequence_std", "ratio/token_std")}}
    told = [row for row in common.read("clip_range") if row["what"] == "range"]
    found = []
    for run in TRIALS:
        config = json.loads((run / "config.json").read_text())
        if config["seed"] != common.SEARCH_SEED:
            rows, digits = common.metrics(run), int(run.parent.name.removesuffix("-digits"))
            scale = config["objective"]["clip_high"] / common.METHODS["gspo"].high
            given = {"digits": digits, "seed": config["seed"], "rate": config["training"]["learning_rate"]}
            means = {new: common.short(common.mean(rows, old)) for old, new in keys.items()}
            found += [
                row
                for row in told
                if (given | means).items() <= row.items() and row["scale"] == pytest.approx(scale, rel=1e-4)
            ]
    assert sorted(map(str, found)) == sorted(map(str, told))


@pytest.mark.parametrize("run", [*RUNS, *TRIALS], ids=lambda run: run.name)
def test_the_settings_of_a_whole_run_are_known(run):
    config = Config.model_validate(json.loads((run / "config.json").read_text()))
    assert run.name.endswith(f"seed{config.seed}") and config.name == run.name
