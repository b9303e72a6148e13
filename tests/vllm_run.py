"""A run with the engine vllm, a long one by default, for tests that end it.

Exits with 3 when a signal ended it well; with --fail its reward fails in the first step, and it exits with 4.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def fail(samples):
    """A reward that cannot be had."""
    raise RuntimeError("this reward fails")


if __name__ == "__main__":
    from conftest import tiny_config, tiny_model

    from gspo.loop import train
    from gspo.rewards import RewardError
    from gspo.signals import Interrupted

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--fail", action="store_true")
    args = parser.parse_args()
    changes: dict = {}
    if args.fail:
        changes["rewards"] = [{"type": "function", "function": f"{__file__}:fail"}]
    if args.device == "cuda":
        changes["rollout__vllm"] = {"memory_fraction": 0.1}
        args.folder.mkdir(exist_ok=True)  # sums in a file: there the library that makes problems may be missing
        sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
        (args.folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
        changes["data"] = {"source": "jsonl", "path": str(args.folder / "sums.jsonl"), "format": "text"}
    model = tiny_model(hidden_size=128, intermediate_size=128).model_dump() | {"device": args.device, "kernels": "torch"}
    config = tiny_config(args.folder, model=model, rollout__engine="vllm", training__steps=args.steps, **changes)
    try:
        train(config)
    except Interrupted:
        sys.exit(3)
    except RewardError:
        sys.exit(4)
