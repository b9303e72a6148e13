"""Start, train and stop with the engine vllm, again and again in one process: vllm_cycles.py [CYCLES].

Prints what the process holds after the first cycle (what a first start sets up for good is not counted) and after the
last, and exits with 1 if anything grew: children, threads, files and sockets, shared memory, temporary files; memory by
more than MIB_A_CYCLE from the fifth cycle on, until which allocators and caches fill.
"""

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "cold_start": "null",
    "evaluation": "null",
    "rollout.engine": "vllm",
    "training.steps": "3",
    "training.warmup_updates": "0",
}


MIB_A_CYCLE = {"resident MiB": 0.5, "GPU MiB in use": 0.0}
"""Growth that is none. A model of this recipe is 2 MiB: one that stayed in each cycle would show."""
SLACK_MIB = 8
"""By which memory goes up and down between cycles."""


def held() -> dict[str, int]:
    """What this process and its kind hold."""
    links = [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.exists()]
    status = Path("/proc/self/status").read_text()
    out = {
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "threads": int(status.split("Threads:")[1].split()[0]),
        "sockets": sum(name.startswith("socket:") for name in links),
        "other files": sum(not name.startswith("socket:") for name in links),
        "shared memory": len(list(Path("/dev/shm").iterdir())),
        "temporary files": len(list(Path(tempfile.gettempdir()).iterdir())),
        "resident MiB": int(status.split("VmRSS:")[1].split()[0]) // 1024,
    }
    import torch

    if torch.cuda.is_available():
        out["GPU MiB in use"] = (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) // 2**20
    return out


def main(cycles: int) -> int:
    """0 if nothing stayed behind."""
    from gspo.loop import train
    from gspo.recipe import load

    first: dict[str, int] = {}
    fifth: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as temporary:
        os.environ["TMPDIR"] = tempfile.tempdir = temporary  # nobody else's files are counted
        os.chdir(ROOT)  # which the recipe's paths are below
        for i in range(cycles):
            settings = SETTINGS | {"name": f"cycle{i}", "output": folder}
            words = [word for key, value in settings.items() for word in (f"--{key}", value)]
            train(load("experiments/sorting.toml", words))
            last = held()
            first, fifth = first or last, last if i == 4 else fifth
            print(f"cycle {i + 1}: {last}", flush=True)
    grown = [name for name in first if name not in MIB_A_CYCLE and last[name] > first[name]]
    grown += [k for k in fifth if k in MIB_A_CYCLE and last[k] - fifth[k] > SLACK_MIB + MIB_A_CYCLE[k] * (cycles - 5)]
    print(f"{cycles} cycles: " + (f"grown: {', '.join(grown)}" if grown else "nothing stayed behind"))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
