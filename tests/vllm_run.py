"""A run with the engine vllm: vllm_run.py FOLDER [STEPS]. A long one by default, for tests that end it. Exits with 3 when a
signal ended it well."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

if __name__ == "__main__":
    from conftest import tiny_config, tiny_model

    from gspo.loop import train
    from gspo.signals import Interrupted

    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 100_000
    model = tiny_model(hidden_size=128, intermediate_size=128).model_dump()
    config = tiny_config(Path(sys.argv[1]), model=model, rollout__engine="vllm", training__steps=steps)
    try:
        train(config)
    except Interrupted:
        sys.exit(3)
