"""A program that runs jobs as several ranks of one run: `python ranks.py FOLDER`.

It imports everything once and forks the ranks of each job, so that a job costs a second and not ten; it computes nothing
itself, as threads do not survive a fork. What torchrun would put into the environment is put there here. What the jobs find
is written to FOLDER for tests to compare: by job its exit statuses, what each rank said, and how long it took.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import matplotlib.figure  # noqa: F401  this and the next two for forked ranks, which then need not import them again
import reasoning_gym  # noqa: F401
import tomli_w
import torch
import torch.distributed.fsdp
from conftest import sampled, tiny_config, tiny_model, values
from safetensors.torch import save_file

from gspo import cli
from gspo.distributed import World, open_world
from gspo.loop import train  # noqa: F401  imported for its imports
from gspo.training import checkpoint, sharding
from gspo.training import update as update_module
from gspo.training.optimizer import Optimizer
from gspo.training.policy import Policy, load_policy, shard
from gspo.training.sharding import gathered
from gspo.training.update import Skips, Updated, pack_minibatches, update
from gspo.types import Trajectory

LENGTHS = [3, 9, 1, 5, 7, 2, 4, 6, 8]
"""Prompt lengths of a batch."""

CASES: dict[str, tuple[dict[str, Any], int]] = {
    "gspo": ({"objective__name": "gspo"}, 9),
    "gspo, unequal passes": ({"objective__name": "gspo", "training__micro_batch_tokens": 21}, 7),
    "gspo, a rank without samples": ({"objective__name": "gspo"}, 1),
    "gspo, some micro-batches clipped": (
        {
            "objective__name": "gspo",
            "training__micro_batch_tokens": 21,
            "rollout__old_logprobs": "engine",
            "objective__clip_low": 1e-6,
            "objective__clip_high": 1e-6,
        },
        9,
    ),
    "gspo, activations recomputed": ({"objective__name": "gspo"}, 9),
    "gspo, layers gathered one by one": ({"objective__name": "gspo"}, 9),
    "grpo": ({"objective__name": "grpo"}, 9),
    "grpo, unequal passes": ({"objective__name": "grpo", "training__micro_batch_tokens": 21}, 7),
    "grpo, a rank without samples": ({"objective__name": "grpo"}, 1),
    "dapo, nobody has samples": ({"objective__name": "dapo"}, 0),
}
"""Settings, and how many samples of a batch carry a signal."""

DTYPES = ("float32", "bfloat16", "float16")

ENDS = {"sampling": 1, "reward": 1, "update": 1, "SIGKILL": 1, "quit": 1, "SIGTERM": 1, "first": 0}
"""Trouble at step 2, and which of two ranks has it."""


# ---- what must not depend on the number of ranks ----------------------------------------------------------


def batch(policy: Policy, live: int) -> list[Trajectory]:
    """Samples of the policy itself, moved a little off it; all but the first `live` without a signal."""
    moved = [replace(t, engine_logprobs=t.engine_logprobs - 1e-4) for t in sampled(policy, LENGTHS, limit=10)]
    return [t if i < live else replace(t, advantage=0.0) for i, t in enumerate(moved)]


def updated(policy: Policy, config: Any, trajectories: list[Trajectory], optimizer: Optimizer) -> tuple[Updated, list[int]]:
    """The updates on one batch, and the number of this rank's micro-batches in each."""
    parts = pack_minibatches(trajectories, config, seed=0, device=policy.device, world=policy.world)
    return update(policy, optimizer, parts, config, Skips()), [len(part.micro_batches) for part in parts]


def gradients(folder: Path, world: World, name: str) -> dict[str, Any]:
    """Writes the gradient of one minibatch before any step; returns what else is to be compared."""
    changes, live = CASES[name]
    model = tiny_model().model_copy(update={"checkpointing": "full" if "recomputed" in name else "none"})
    policy = load_policy(model, temperature=1.0, seed=0)
    trajectories = batch(policy, live)
    with patch.object(sharding, "GROUP_BYTES", 1 if "one by one" in name else sharding.GROUP_BYTES):
        shard(policy, world)
    config = tiny_config(folder, **{"training__minibatches": 1, "training__micro_batch_tokens": 42} | changes)
    optimizer = Optimizer(policy.trainable, config.training, 1)
    held: dict[str, torch.Tensor] = {}

    def no_step(norm: torch.Tensor) -> None:
        held.update({n: m.grad.clone() for n, m in optimizer.masters.items() if m.grad is not None})

    optimizer._move = no_step
    out, num_micro_batches = updated(policy, config, trajectories, optimizer)
    whole = gathered(held.items(), world)
    if world.is_main:
        save_file(whole, folder / f"{name}.safetensors")
    return {
        "loss": out.losses[0],
        "mismatch": out.mismatch,
        "samples": sorted(name for r in out.ratios[0] for name in r.ids),
        "micro_batches": [by_rank[0] for by_rank in world.gather(num_micro_batches)],
    }


def laws(folder: Path) -> None:
    """Gradients in all cases; three steps of four minibatches in each precision, and a checkpoint of them."""
    with open_world("cpu") as world:
        folder.mkdir(exist_ok=True)
        said: dict[str, Any] = {name: gradients(folder, world, name) for name in CASES}
        said["overflow"] = world.gather(overflow(folder, world))
        said["ahead"] = [ahead(folder, world, share) for share in (2.0, 0.0)]
        for dtype in DTYPES:
            continued(folder / dtype, world, None)
        if world.is_main:
            (folder / "said.json").write_text(json.dumps(said))


def ahead(folder: Path, world: World, share: float) -> dict[str, Any]:
    """Four minibatches of which three or more of four sequences are clipped, looked at first where `share` is 0. Writes the
    weights; returns what else is to be compared."""
    policy = load_policy(tiny_model(), temperature=1.0, seed=0)
    some = sampled(policy, [*LENGTHS, *LENGTHS, *LENGTHS, *LENGTHS])
    for i, t in enumerate(some):  # far off the old ones, to the side that the sign of the advantage clips
        t.engine_logprobs[:] -= 0.4 if (t.advantage > 0) == (i % 4 > 0) else -0.4
    shard(policy, world)
    config = tiny_config(
        folder,
        rollout__old_logprobs="engine",
        training__minibatches=4,
        training__micro_batch_tokens=21,
        training__learning_rate=1e-3,
    )
    optimizer, passes = Optimizer(policy.trainable, config.training, 100), 0

    def backward(*arguments: torch.Tensor) -> None:
        nonlocal passes
        passes += 1
        Optimizer.backward(optimizer, *arguments)

    optimizer.backward = backward
    with patch.object(update_module, "LOOK_AHEAD_FROM", share):
        out, _ = updated(policy, config, some, optimizer)
    whole = gathered(policy.trainable.items(), world)
    if world.is_main:
        save_file(whole, folder / f"ahead-{share:g}.safetensors")
    return {"looked_ahead": out.looked_ahead, "losses": out.losses, "passes": world.gather(passes)}


def overflow(folder: Path, world: World) -> tuple[float, bool]:
    """The loss scale after a step in which one rank's part of the gradient is infinite, over that before; and `lowered`."""
    policy = load_policy(tiny_model("float16"), temperature=1.0, seed=0)
    shard(policy, world)
    config = tiny_config(folder, model__dtype="float16")
    optimizer = Optimizer(policy.trainable, config.training, 1, policy.dtype)
    before = optimizer.scaler.get_scale()
    if world.is_main:
        optimizer.gradients[0].view(-1)[0] = torch.inf
    optimizer.step()
    optimizer.settle()
    return optimizer.scaler.get_scale() / before, optimizer.lowered


def continued(folder: Path, world: World, source: Path | None) -> None:
    """Two steps of four minibatches, from the newest checkpoint of a folder if there is one; writes a checkpoint."""
    found = checkpoint.newest(source) if source else None
    config = tiny_config(folder, model__dtype=folder.name, training__minibatches=4, rollout__old_logprobs="trainer")
    policy = load_policy(config.model, temperature=1.0, seed=0, path=found.model if found else None)
    drawn = load_policy(tiny_model(folder.name), temperature=1.0, seed=0)
    shard(policy, world)
    optimizer = Optimizer(policy.trainable, config.training, 100, policy.dtype)
    if found:
        found.restore(optimizer)
        # What was read is written again at once: what a round trip over another number of ranks changes, shows.
        checkpoint.save(folder / "again", policy, optimizer, {}, step=optimizer.updates, keep=9)
    for live in (9, 1):
        updated(policy, config, batch(drawn, live), optimizer)
    checkpoint.save(folder, policy, optimizer, {}, step=optimizer.updates, keep=9)


def resumed(folder: Path, source: Path) -> None:
    """Go on from another number of ranks' checkpoints."""
    with open_world("cpu") as world:
        for dtype in DTYPES:
            continued(folder / dtype, world, source / dtype)


# ---- whole runs ------------------------------------------------------------------------------------------


def recipe(folder: Path, **changes: Any) -> Path:
    """A recipe's file: three steps, with what `troubled` asks for at the second."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = values(folder, **{"checkpoint__every": 10} | changes)
    plain["rewards"][0]["function"] = f"{Path(__file__).parent / 'rewards_for_tests.py'}:troubled"
    plain = json.loads(json.dumps(plain), object_hook=lambda d: {k: v for k, v in d.items() if v is not None})
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps(plain))
    return path


def command(*words: str | Path) -> Callable[[], int]:
    """The command line."""
    return lambda: cli.main([str(word) for word in words])


# ---- ranks -----------------------------------------------------------------------------------------------


def run(folder: Path, name: str, size: int, job: Callable[[], Any], within_s: float = 60, **environment: str) -> None:
    """Run a job as `size` ranks and write down how it ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    logs, start = [folder / f"{name}-{rank}.log" for rank in range(size)], time.monotonic()
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **environment}
    sys.stdout.flush()
    pids = [fork(job, log, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank, log in enumerate(logs)]
    statuses: dict[int, int] = {}
    seconds = [0.0] * size
    while len(statuses) < size:
        for rank, pid in enumerate(pids):
            done, status = (0, 0) if rank in statuses else os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[rank], seconds[rank] = os.waitstatus_to_exitcode(status), time.monotonic() - start
        if time.monotonic() - start > within_s:
            for rank in set(range(size)) - set(statuses):
                os.kill(pids[rank], 9)
        time.sleep(0.01)
    said = [log.read_text() for log in logs]
    ended = {"statuses": [statuses[rank] for rank in range(size)], "said": said, "seconds": seconds}
    (folder / f"{name}.json").write_text(json.dumps(ended))


def fork(job: Callable[[], Any], log: Path, environment: dict[str, str]) -> int:
    """A rank; returns its process id."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(environment)
        torch.set_num_threads(1)
        status = job() or 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(folder: Path) -> None:
    """All jobs."""
    for size in (1, 2, 3):
        run(folder, f"laws-{size}", size, lambda: laws(folder / f"ranks-{size}"))  # noqa: B023  called at once
        path = recipe(folder / f"run-{size}", evaluation=EVALUATION, objective__kl=KL)
        run(folder, f"run-{size}", size, command("train", path))
    for size in (1, 2):
        run(folder, f"partial-{size}", size, command("train", recipe(folder / f"partial-{size}", **PARTIAL)))
    for to, was in ((1, 2), (2, 1), (3, 2)):
        here, there = folder / f"ranks-{was}-to-{to}", folder / f"ranks-{was}"
        run(folder, here.name, to, lambda: resumed(here, there))  # noqa: B023
    for trouble, rank in ENDS.items():
        path = recipe(folder / f"end-{trouble}")
        what = "update" if trouble == "first" else trouble
        run(folder, f"end-{trouble}", 2, command("train", path), TROUBLE=what, TROUBLED_RANK=str(rank))
    for trouble, size in (("reward", 2), ("SIGTERM", 1), ("update", 2)):
        run(folder, f"end-{trouble}-resumed", size, command("train", folder / f"end-{trouble}/recipe.toml", "--resume"))
    refused = recipe(folder / "refused")
    run(folder, "refused-lora", 2, command("train", refused, "--model.lora.rank", "2"))
    run(folder, "refused-eval", 2, command("eval", refused))
    for size in (1, 2):
        cold = recipe(folder / f"cold-{size}", evaluation=EVALUATION, cold_start=COLD_START)
        run(folder, f"cold-{size}", size, command("train", cold, "--training.steps", "1"))


EVALUATION = {
    "max_response_tokens": 6, "every": 2, "samples": 2, "pass_at": [1], "overlap": "allow",
    "data": {
        "source": "reasoning_gym", "task": "chain_sum", "size": 5, "seed": 9, "template": "{expression}=",
        "format": "text", "parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    },
}  # fmt: skip
COLD_START = {"steps": 3, "batch_size": 7, "learning_rate": 1e-2, "micro_batch_tokens": 19, "evaluate_every": 3}
PARTIAL = {
    "rollout__prompts_per_step": 8, "rollout__group_size": 2, "rollout__max_response_tokens": 15,
    "rollout__max_step_tokens": 5, "training__minibatches": 1, "training__learning_rate": 1e-7,
}  # fmt: skip
KL = {"coefficient": 0.1, "estimator": "k3", "place": "loss"}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
