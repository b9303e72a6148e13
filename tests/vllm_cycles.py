"""Start, train and stop with the engine vllm, again and again in one process: vllm_cycles.py [CYCLES].

Prints what the process holds before the first cycle and after each, and exits with 1 if anything grew: from the first on
(what a first start sets up for good is not counted) children, threads, files and sockets, shared memory, temporary files;
from the second on memory in use on a GPU, to the MiB; from the fifth on resident memory by more than MIB_A_CYCLE, until
which allocators and caches fill. Hence at least eight cycles.
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


MIB_A_CYCLE = 0.5
"""Growth of resident memory that is none. A model of this recipe is 2 MiB: one that stayed in each cycle would show."""
SLACK_MIB = 4
"""By which it goes up and down between cycles."""
FEWEST = 8


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
    """0 if nothing stayed behind, 2 if that could not be told."""
    from gspo.loop import train
    from gspo.recipe import load

    if cycles < FEWEST:
        print(f"{cycles} cycles tell growth from filling no better than one: ask for {FEWEST} or more")
        return 2
    after: list[dict[str, int]] = []
    print(f"before: {held()}", flush=True)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as temporary:
        os.environ["TMPDIR"] = tempfile.tempdir = temporary  # nobody else's files are counted
        os.chdir(ROOT)  # which the recipe's paths are below
        for i in range(cycles):
            settings = SETTINGS | {"name": f"cycle{i}", "output": folder}
            words = [word for key, value in settings.items() for word in (f"--{key}", value)]
            train(load("experiments/sorting.toml", words))
            after.append(held())
            print(f"cycle {i + 1}: {after[-1]}", flush=True)
    print("children: " + ("; ".join(children()) or "none"))
    grown = grew(after)
    print(f"{cycles} cycles: " + (f"grown: {', '.join(grown)}" if grown else "nothing stayed behind"))
    return 1 if grown else 0


def children() -> list[str]:
    """The commands of this process's children."""
    ids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [Path(f"/proc/{i}/cmdline").read_text().replace("\0", " ").strip() for i in ids]


def grew(after: list[dict[str, int]]) -> list[str]:
    """What grew, of what was held after each cycle."""
    last, out = after[-1], []
    for name in after[0]:
        since = {"GPU MiB in use": 1, "resident MiB": 4}.get(name, 0)
        room = SLACK_MIB + MIB_A_CYCLE * (len(after) - 1 - since) if name == "resident MiB" else 0
        if last[name] > after[since][name] + room:
            out.append(name)
    return out


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
