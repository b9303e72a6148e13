"""The committed rows of experiments are those of the runs that are committed whole."""

import json
import sys
from pathlib import Path

import pytest

from gspo.config import Config

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
RUNS = sorted(path.parent for path in EVIDENCE.glob("runs/*/*/metrics.jsonl"))
LABELS = ("what", "arm", "seed", "rate", "scale", "minibatches", "precision")


@pytest.fixture(scope="module")
def common():
    sys.path.insert(0, str(ROOT / "experiments"))
    import common

    yield common
    sys.path.remove(str(ROOT / "experiments"))


@pytest.mark.parametrize("name", sorted({run.parent.name for run in RUNS}))
def test_what_is_committed_of_a_whole_run_says_what_the_run_said(common, name):
    extracts = {}
    for row in common.read(name):
        extracts.setdefault(tuple(row.get(key) for key in LABELS), []).append(row)

    def says(run: Path, rows: list[dict]) -> bool:
        """Whether every number of these rows is the run's."""
        whole = {row["step"]: row for row in common.metrics(run)}
        if {row.get("step") for row in rows} != set(whole):
            return False
        pairs = [
            (value, whole[row["step"]][key]) for row in rows for key, value in row.items() if key in whole[row["step"]]
        ]
        return len(pairs) > 5 * len(rows) and all(value == common.short(told) for value, told in pairs)

    mine = [run for run in RUNS if run.parent.name == name]
    found = {run.name: [key for key, rows in extracts.items() if says(run, rows)] for run in mine}
    assert mine and all(len(keys) == 1 for keys in found.values()), found
    assert len({keys[0] for keys in found.values()}) == len(mine)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_settings_of_a_whole_run_are_known(run):
    config = Config.model_validate(json.loads((run / "config.json").read_text()))
    assert run.name.endswith(f"seed{config.seed}") and config.name == run.name
