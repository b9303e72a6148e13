"""What the figure of precisions draws: `python docs/evidence/gather.py RUN... > docs/evidence/vllm-precisions.jsonl`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

KEYS = (
    "step", "reward/mean", "evaluation/pass@1", "evaluation/pass@1_low", "evaluation/pass@1_high", "clip/sequence",
    "mismatch/size", "mismatch/recomputed", "mismatch/decisions", "mismatch/decisions_differ",
    "rollout/response_tokens_mean", "update/skipped",
)  # fmt: skip


def gather(run: Path) -> list[dict]:
    """The rows of a run, less what is not drawn."""
    config = json.loads((run / "config.json").read_text())
    what = {"dtype": config["model"]["dtype"], "old": config["rollout"]["old_logprobs"], "seed": config["seed"]}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [what | {k: row[k] for k in KEYS if k in row} for row in rows]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for row in gather(Path(name)):
            print(json.dumps(row))
