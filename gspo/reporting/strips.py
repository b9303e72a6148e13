"""What the page holds of single tokens: one response as a strip, and the weight of each token in the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .records import RecordsError, is_number
from .text import visible
from .tokens import ends

MAX_BYTES = 1_000_000
"""Of all strips: with texts and figures the page then stays under 5 MB."""

CUTS = (512, 256, 128, 64, 32)
"""Tokens of a response that the page holds; fewer where all strips would be larger than MAX_BYTES."""

GSPO_CLIP, GRPO_CLIP = (3e-4, 4e-4), (0.2, 0.2)
"""Clip ranges of the comparison where the run has another objective: the defaults of the two."""

OWN = {"gspo": "gspo", "gspo_token": "gspo", "grpo": "grpo", "dapo": "grpo"}
"""Objective of a run to the one of the two whose ratio it clips."""


def clips(objective: str, clip: tuple[float, float] | None) -> dict[str, tuple[float, float]]:
    """Clip range, below and above 1, of gspo and of grpo: the run's own of the one that it clips by."""
    out = {"gspo": GSPO_CLIP, "grpo": GRPO_CLIP}
    if clip and objective in OWN:
        out[OWN[objective]] = clip
    return out


def strips(steps: Sequence[tuple[int, Sequence[Mapping[str, Any]]]], limit: int) -> list[dict[str, Any]]:
    """By step the responses whose tokens were recorded, at most `limit` tokens each; on-policy ones last.

    steps: (step, lines of its samples file). Steps without such a response are left out.
    """
    out = []
    for step, lines in steps:
        found = sorted((line for line in lines if line.get("tokens")), key=lambda line: line["tokens"]["minibatch"] == 1)
        if found:
            out.append({"step": step, "responses": [_response(line, limit) for line in found]})
    return out


def require_whole_tokens(step: int, lines: Sequence[Mapping[str, Any]]) -> None:
    """Raises RecordsError, by sample, for a line whose `tokens` table pictures cannot be drawn from."""
    for line in lines:
        table = line.get("tokens")
        if not table:
            continue
        if not isinstance(table, dict) or not _is_whole(table) or not is_number(line.get("ratio")):
            raise RecordsError(
                f"samples of step {step}, sample {line.get('id')}: what is recorded of its tokens is damaged; without the "
                "key `tokens` in its line the report can be drawn"
            )


def _is_whole(table: Mapping[str, Any]) -> bool:
    """Whether all lists are there, as long as the texts, and hold what they should."""
    texts = table.get("texts")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return False

    def numbers(key: str) -> bool:
        values = table.get(key)
        return isinstance(values, list) and len(values) == len(texts) and all(map(is_number, values))

    return (
        all(map(numbers, ("ids", "log_ratio", "trainer_logprobs", "engine_logprobs")))
        and (numbers("advantage") or is_number(table.get("advantage")))
        and (table.get("engine_gap", "") is None or numbers("engine_gap"))
        and isinstance(table.get("chosen"), list)
        and all(is_number(table.get(key)) for key in ("minibatch", "left_out"))
        and (table.get("left_out_largest", "") is None or is_number(table.get("left_out_largest")))
    )


def _response(line: Mapping[str, Any], limit: int) -> dict[str, Any]:
    table = line["tokens"]
    num = len(table["ids"])
    kept = ends(num, limit)
    hidden = [abs(d) for i, d in enumerate(table["log_ratio"]) if i not in set(kept)]
    left_out = table["left_out_largest"]
    several = {
        "ids": table["ids"],
        "texts": [visible(text) for text in table["texts"]],
        "d": table["log_ratio"],
        "trainer": table["trainer_logprobs"],
        "engine": table["engine_logprobs"],
        "gap": table["engine_gap"],
        "advantage": table["advantage"],
    }
    return {
        "id": visible(str(line.get("id"))),
        "prompt": visible(str(line.get("prompt") or ""))[:300],
        "s": line["ratio"],
        "clipped": bool(line.get("clipped")),
        "reward": line.get("reward"),
        "length": num + table["left_out"],
        "minibatch": table["minibatch"],
        "chosen": [visible(str(word)) for word in table["chosen"]],
        "leftOut": table["left_out"] + len(hidden),
        "leftOutLargest": max([*hidden, *([] if left_out is None else [left_out])], default=None),
        **{key: [value[i] for i in kept] if isinstance(value, list) else value for key, value in several.items()},
    }
