"""`gspo compare-evals A B`: two evaluations on the same problems."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..recipe import differences
from .evaluate import EvaluationError
from .samples_file import write_json
from .statistics import RESAMPLES, paired
from .suite_scores import aligned

Results = Mapping[str, Any]

SAME = ("data", "problems", "rewards", "solved_at")
"""Settings without which two evaluations do not measure the same."""


def compare(first: Path, second: Path, *, output: Path | None = None) -> str:
    """A table of the suites that both folders hold: mean pass@1 of each, difference with interval, p-value.

    first, second: folders of evaluations by suites, or of one suite each. The unit is the problem: its value is the
    share of its samples that are solved, so that numbers of samples may differ. A problem without a scored sample on one
    side is left out on both, and counted. Other settings (temperature, engine) may differ too, and are then named below.
    output: where the comparison also goes as JSON. Raises EvaluationError if a folder holds no results, no suite is in
    both, or a suite's problems or rewards differ.
    """
    ours, theirs = read_results(first), read_results(second)
    shared = [name for name in ours if name in theirs]
    if not shared:
        raise EvaluationError(f"no suite is in both: {first} holds {', '.join(ours)}, {second} holds {', '.join(theirs)}")
    found = {name: _compared(name, ours[name], theirs[name]) for name in shared}
    if output is not None:
        write_json(output, {"first": str(first), "second": str(second), "suites": found})
    return _table(first, second, found, sorted(ours.keys() ^ theirs.keys()))


def read_results(folder: Path) -> dict[str, Results]:
    """The results in a folder by suite: its own, or those of the folders in it. Raises EvaluationError for none."""
    paths = [folder / "results.json"] if (folder / "results.json").is_file() else sorted(folder.glob("*/results.json"))
    if not paths:
        raise EvaluationError(f"{folder}: holds no results.json; evaluations by `gspo eval MODEL --suite NAME` write them")
    out = {}
    for path in paths:
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            _require_whole(result)
            out[result["suite"]] = result
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise EvaluationError(f"{path}: is no results of a suite: {error!r}") from None
    return out


def _require_whole(result: Any) -> None:
    """Raises KeyError, TypeError or ValueError where a comparison would stumble."""
    if not isinstance(result["suite"], str) or not isinstance(result["settings"], dict):
        raise TypeError("suite is no name, or settings no table")
    for problem in result["problems"]:
        scores, solved = problem["scores"], problem["solved"]
        if not isinstance(problem["id"], str) or not isinstance(scores, list) or not 0 <= solved <= len(scores):
            raise ValueError(f"problem {problem['id']}: scores or solved are damaged")


def _compared(name: str, first: Results, second: Results) -> dict[str, Any]:
    changed = differences(first["settings"], second["settings"])
    if wrong := [key for key in changed if key.split(".")[0] in SAME]:
        raise EvaluationError(
            f"suite {name}: the two do not measure the same, {', '.join(wrong)} differ: run one of them again"
        )
    a, b = _shares(first), _shares(second)
    both = [key for key in a if key in b]
    if not both:
        raise EvaluationError(f"suite {name}: no problem has a scored sample on both sides")
    result = paired([a[key] for key in both], [b[key] for key in both])
    return {
        "problems": len(both),
        "left_out": len(first["problems"]) - len(both),
        "first": sum(a[key] for key in both) / len(both),
        "second": sum(b[key] for key in both) / len(both),
        "test": f"two-sided sign-flip permutation over problems, {RESAMPLES} flips",
        **asdict(result),
        "settings_differ": [key for key in changed if key != "model.weights"],
    }


def _shares(results: Results) -> dict[str, float]:
    known = {p["id"]: sum(score is not None for score in p["scores"]) for p in results["problems"]}
    return {p["id"]: p["solved"] / known[p["id"]] for p in results["problems"] if known[p["id"]]}


def _table(first: Path, second: Path, found: Mapping[str, Results], alone: list[str]) -> str:
    lines = [("suite", "problems", "first", "second", "difference", "95% (bootstrap)", "p", "better", "worse")]
    notes = [f"first: {first}", f"second: {second}"]
    for name, c in found.items():
        gap = c["difference"]
        interval = f"[{gap['low']:+.4f}, {gap['high']:+.4f}]"
        scores = (f"{c['first']:.4f}", f"{c['second']:.4f}", f"{gap['mean']:+.4f}", interval, f"{c['p_value']:.4f}")
        lines.append((name, str(c["problems"]), *scores, str(c["num_better"]), str(c["num_worse"])))
        if not c["num_better"] + c["num_worse"]:
            notes.append(f"{name}: no problem differs; the interval then has no width, which is not certainty")
        if c["left_out"]:
            notes.append(f"{name}: {c['left_out']} problems have no scored sample on one side and are left out")
        if c["settings_differ"]:
            notes.append(f"{name}: beside the models, these settings differ: {', '.join(c['settings_differ'])}")
    notes.append(f"p: two-sided sign-flip permutation test over problems, {RESAMPLES} flips; better, worse: problems")
    if len(found) > 1:
        notes.append(f"{len(found)} suites are tested: by chance alone one in twenty has p < 0.05")
    if alone:
        notes.append(f"in one of the two only: {', '.join(alone)}")
    return "\n".join([*aligned(lines), *notes])
