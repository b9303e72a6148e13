"""A program that trains in child processes and kills them: `python killing.py FOLDER SEED`.

It imports everything once and forks, so that a kill costs no start-up; it computes nothing itself, as threads do not
survive a fork. Prints a line for each kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import matplotlib.figure  # noqa: F401  this and the next for forked children, which then need not import them again
import reasoning_gym  # noqa: F401
import torch
from conftest import tiny_config

from gspo.cli import main as cli  # noqa: F401  imported for its imports
from gspo.config import Config
from gspo.loop import train

KILLS, STEPS = 20, 40


def config(folder: Path, name: str) -> Config:
    """Steps after a cold start, a checkpoint every second step, evaluations, batches that cross epochs."""
    return tiny_config(
        folder,
        name=name,
        data__size=22,  # five and a half batches: epochs end inside batches
        training__steps=STEPS,
        training__minibatches=2,
        checkpoint__every=2,
        cold_start={"steps": 6, "batch_size": 8, "learning_rate": 1e-3},
        evaluation={
            "max_response_tokens": 6, "every": 7, "overlap": "allow",
            "data": {
                "source": "reasoning_gym", "task": "chain_sum", "size": 8, "seed": 9, "template": "{expression}=",
                "format": "text", "parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            },
        },
    )  # fmt: skip


def child(settings: Config, *, resume: bool) -> int:
    """Train in a forked process; returns its id."""
    if pid := os.fork():
        return pid
    log = os.open(Path(settings.output) / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)  # two threads that wait for each other are slow on a busy machine
    status = 1
    try:
        train(settings, resume=resume)
        status = 0
    except BaseException:
        traceback.print_exc()  # a forked child ends without telling of an error otherwise
    finally:
        sys.stderr.flush()
        os._exit(status)


def ended(pid: int, within_s: float) -> int | None:
    """The status of a child that ended in time, None if it still runs."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    return None


def killed(folder: Path, name: str, kills: int, seed: int, span_s: float) -> None:
    """Runs that are killed within each span of time until the last step is saved, as many as it takes for all kills."""
    rng, run = random.Random(seed), 0
    while kills:
        run += 1
        settings, resume = config(folder, f"killed-{name}{run}"), False
        checkpoints = folder / settings.name / "checkpoints"
        while kills and not (checkpoints / f"step-{STEPS:06d}").exists():
            pid = child(settings, resume=resume)
            status = ended(pid, rng.uniform(0, span_s))
            assert status in (0, None), (folder / "log.txt").read_text()
            if status is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                kills, resume = kills - 1, True
                newest = sorted(p.name for p in checkpoints.glob("*"))
                print(json.dumps({"kill": settings.name, "checkpoints": newest}), flush=True)
        assert os.waitpid(child(settings, resume=resume), 0)[1] == 0, (folder / "log.txt").read_text()


def main(folder: Path, seed: int) -> None:
    """A run that is left alone, then those that are killed, one row of them on each of two cores."""
    start = time.monotonic()
    assert os.waitpid(child(config(folder, "reference"), resume=False), 0)[1] == 0, (folder / "log.txt").read_text()
    span_s = 0.4 * (time.monotonic() - start)  # long enough to get on, short enough to hit every stage
    rows = []
    for number, name in enumerate("ab"):
        if not (pid := os.fork()):
            try:
                killed(folder, name, KILLS // 2, 2 * seed + number, span_s)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        rows.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in rows] == [0, 0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
