"""A program for tests: the updates of mixtures of experts as one and as two ranks, `python moe_ranks.py FOLDER`."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
from conftest import sampled, tiny_config
from moe_support import FAMILIES, family_policy, with_experts
from ranks import run

from gspo.distributed import open_world
from gspo.training.optimizer import Optimizer
from gspo.training.policy import shard
from gspo.training.update import Skips, pack_minibatches, update

PROMPTS = [9] * 9
REPLAY: dict[str, dict[str, Any]] = {
    "none": {},
    "trainer": {"training__replay": "trainer"},
    "engine": {"training__replay": "engine"},
}


def laws(folder: Path, family: str) -> None:
    """What each kind of replay does to a model of a family, with passes of unequal number and activations recomputed."""
    said = {}
    with open_world("cpu") as world:
        for name, changes in REPLAY.items():
            policy = family_policy(family, folder, checkpointing="full")
            samples = with_experts(policy, sampled(policy, PROMPTS))
            shard(policy, world)
            common = {"rollout__old_logprobs": "trainer", "rollout__routed_experts": True, "training__learning_rate": 3e-2}
            wide = {"objective__clip_low": 0.2, "objective__clip_high": 0.2, "training__micro_batch_tokens": 21}
            config = tiny_config(folder, **common | wide | changes)
            parts = pack_minibatches(samples, config, seed=0, device=policy.device, world=world)
            out = update(policy, Optimizer(policy.trainable, config.training, 2), parts, config, Skips())
            told = {k: v for k, v in out.routing.items() if k != "moe/replay_s"}
            said[name] = told | {"norms": out.grad_norms, "idle": sum(world.gather(sum(p.idle for p in parts)))}
    if world.is_main:
        (folder / f"said-{family}-{world.size}.json").write_text(json.dumps(said))


def main(folder: Path) -> None:
    """All families, with both numbers of ranks."""
    torch.set_num_threads(1)
    for family, size in itertools.product(FAMILIES, (1, 2)):
        run(folder, f"{family}-{size}", size, lambda family=family: laws(folder, family))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
