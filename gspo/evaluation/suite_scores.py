"""From the samples of a suite to its scores, each with an interval over problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .elo import elo
from .evaluate import EvaluationError
from .statistics import bootstrap_interval, mean_interval, pass_at_k
from .suite import Suite

Row = Mapping[str, Any]


def problems_of(rows: Sequence[Row], solved_at: float) -> list[dict[str, Any]]:
    """One record a problem, in the order of their rows: scores of its samples (None: a verifier abstained), how many are
    solved, mean response length in tokens, share that was cut off at the limit."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["row"], row["index"])):
        groups.setdefault(row["problem"], []).append(row)
    return [_problem(name, group, solved_at) for name, group in groups.items()]


def scores_of(suite: Suite, problems: Sequence[Row]) -> dict[str, Any]:
    """Every score with its interval, from the records of `problems_of`.

    `pass@k`: mean over problems of the unbiased estimate; low and high by `mean_interval` (Wilson), which has a width
    at 0 and 1, bootstrap_low and bootstrap_high by `bootstrap_interval`. `reward`, `response_tokens` and `truncated` have
    the bootstrap's alone. Raises EvaluationError where abstentions leave no problem for a pass@k.
    """
    out: dict[str, Any] = {}
    for k in suite.sampling.pass_at:
        values = [value for p in problems if (value := _pass_at(p, k)) is not None]
        if not values:
            raise EvaluationError(f"suite {suite.name}: pass@{k} is undefined: verifiers abstained on every problem")
        out[f"pass@{k}"] = _wilson(values) | _bootstrap(values, "bootstrap_")
    rewards = [sum(known) / len(known) for p in problems if (known := _known(p))]
    for name, values in (
        ("reward", rewards),
        ("response_tokens", [p["response_tokens"] for p in problems]),
        ("truncated", [p["truncated"] for p in problems]),
    ):
        out[name] = {"mean": sum(values) / len(values)} | _bootstrap(values) if values else None
    out["abstained"] = sum(score is None for p in problems for score in p["scores"])
    return out


def rating_of(suite: Suite, problems: Sequence[Row], ratings: Mapping[str, float | None]) -> dict[str, Any] | None:
    """The Elo rating over the problems that have one, or None where the suite has no ratings.

    ratings: points by problem id, None where a problem has none. Problems without a rating, or on whose every sample the
    verifiers abstained, are left out; `problems` counts the rest.
    """
    rated = [(ratings.get(p["id"]), p["solved"], len(_known(p))) for p in problems]
    rated = [(float(r), solved, tries) for r, solved, tries in rated if r is not None and tries]
    if suite.rating_column is None or not rated:
        return None
    found = elo(*map(list, zip(*rated, strict=True)))
    return {
        "rating": found.rating,
        "low": found.low,
        "high": found.high,
        "dispersion": found.dispersion,
        "why": found.why,
        "problems": len(rated),
    }


def table(results: Sequence[Row]) -> str:
    """The results of several suites as aligned lines; intervals are at 95%."""
    lines = [("suite", "problems", "samples", "score", "value", "95% (Wilson)", "95% (bootstrap)", "tokens", "cut off")]
    for result in results:
        scores = result["scores"]
        for key, score in scores.items():
            if not key.startswith("pass@"):
                continue
            lines.append(
                (
                    result["suite"],
                    str(len(result["problems"])),
                    str(result["settings"]["sampling"]["samples"]),
                    key,
                    f"{score['mean']:.4f}",
                    f"[{score['low']:.4f}, {score['high']:.4f}]",
                    f"[{score['bootstrap_low']:.4f}, {score['bootstrap_high']:.4f}]",
                    f"{scores['response_tokens']['mean']:.0f}",
                    f"{scores['truncated']['mean']:.1%}",
                )
            )
    notes = [note for result in results for note in _notes(result)]
    return "\n".join([*aligned(lines), *notes])


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines with columns of equal width, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]


def _notes(result: Row) -> list[str]:
    out = []
    if abstained := result["scores"]["abstained"]:
        out.append(f"{result['suite']}: verifiers abstained on {abstained} samples, which count nowhere")
    rating = result["elo"]
    if rating and rating["rating"] is None:
        out.append(f"{result['suite']}: Elo over {rating['problems']} rated problems: {rating['why']}")
    elif rating:
        interval = f"[{rating['low']:.0f}, {rating['high']:.0f}]"
        out.append(f"{result['suite']}: Elo {rating['rating']:.0f} {interval} over {rating['problems']} rated problems")
    elif result["settings"]["rating_column"]:
        out.append(f"{result['suite']}: no Elo: none of the problems has a rating")
    return out


def _problem(name: str, group: Sequence[Row], solved_at: float) -> dict[str, Any]:
    scores = [row["score"] for row in group]
    return {
        "id": name,
        "row": group[0]["row"],
        "solved": sum(score is not None and score >= solved_at for score in scores),
        "scores": scores,
        "response_tokens": sum(row["tokens"] for row in group) / len(group),
        "truncated": sum(row["finish_reason"] == "length" for row in group) / len(group),
    }


def _known(problem: Row) -> list[float]:
    return [score for score in problem["scores"] if score is not None]


def _pass_at(problem: Row, k: int) -> float | None:
    known = len(_known(problem))
    return pass_at_k(known, problem["solved"], k) if known >= k else None


def _wilson(values: Sequence[float]) -> dict[str, float]:
    interval = mean_interval(values)
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _bootstrap(values: Sequence[float], prefix: str = "") -> dict[str, float]:
    interval = bootstrap_interval(values)
    return {f"{prefix}low": interval.low, f"{prefix}high": interval.high}
