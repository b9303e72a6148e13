"""The training loop, the first file to read: a step is collect, score, pack, update, sync, evaluate, record, save."""

from __future__ import annotations

import time
from pathlib import Path

from . import data
from .cold_start import cold_start
from .config import Config
from .distributed import World, open_world
from .reporting.html import write_report
from .reporting.trackers import require_packages
from .rollout.engines import require_engine
from .run import open_run
from .training.policy import require_one_rank


def train(config: Config, *, resume: bool = False) -> Path:
    """Train as the recipe says and return the run's folder, with its report.

    Raises RecipeError, DataError or ModelError before any work is done; RewardError, EngineError or TrainingError when
    a step cannot be trusted; Interrupted, after a checkpoint, when a signal asked to stop. Every process that torchrun
    starts calls it; RankError where another of them failed.
    """
    with (
        open_world(config.model.device) as world,
        open_run(config, _start(config, world, resume=resume), resume=resume, world=world) as run,
    ):
        if run.step == 0 and run.evaluation:
            with run.signals.interruptible():
                run.record({"step": 0, "time": time.time(), **run.evaluate()})
            run.clock.take()
        while run.step < config.training.steps:
            with run.signals.interruptible():
                prompts, cursor = data.take(run.training, run.cursor, run.room, config.seed)
                with run.clock("collect"):
                    groups, waiting = run.collect(prompts)
                with run.clock("score"):
                    scored = run.score(groups)
                with run.clock("pack"):
                    advantages, minibatches = run.pack(scored)
            with run.clock("update"):
                updated = run.update(minibatches)
            with run.clock("sync"):
                run.sync()
            run.advance(cursor, waiting)
            evaluation = run.evaluate() if run.evaluation_is_due() else {}
            run.record(run.measure(scored, advantages, minibatches, updated) | evaluation)
            if run.checkpoint_is_due():
                run.save()
    if world.is_main:
        write_report(run.folder)
    return run.folder


def _start(config: Config, world: World, *, resume: bool) -> Path | None:
    """The model to start from, None for the recipe's: what a cold start leaves. Refuses what cannot run, before work."""
    require_packages(config.tracking)
    require_engine(config)
    require_one_rank(config, world)
    return cold_start(config, resume=resume, world=world) if config.cold_start else None
