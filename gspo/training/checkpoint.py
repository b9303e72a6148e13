"""Checkpoints: a folder that is whole or is passed over.

    checkpoints/step-000020/
        model/                  Hugging Face format, adapters merged
        optimizer.safetensors   moments, master weights
        random.safetensors      torch's and numpy's random state
        state.json              step, data cursor, counters, Python's random state
        manifest.json           SHA-256 and size of every file above

It is written beside as `.step-000020.tmp`, every file is synced, then it is renamed. Only JSON and safetensors are read
back: a checkpoint from a stranger can hold wrong numbers, but not code.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from .optimizer import Optimizer
from .policy import Policy
from .sharding import gathered

MANIFEST = "manifest.json"
REQUIRED = ("state.json", "optimizer.safetensors", "random.safetensors", "model/config.json")


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the message says which file and why."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is whole."""

    folder: Path
    """Its folder."""
    state: Mapping[str, Any]
    """What `save` was given as state, `step` among it."""

    @property
    def model(self) -> Path:
        """The model in Hugging Face format."""
        return self.folder / "model"

    def restore(self, optimizer: Optimizer) -> None:
        """Put moments, master weights and random states back."""
        optimizer.load_state(load_file(self.folder / "optimizer.safetensors"))
        states = load_file(self.folder / "random.safetensors")
        torch.set_rng_state(states["torch"])
        kind, keys = np.random.get_state()[0], states["numpy"].numpy().astype(np.uint32)  # type: ignore[index]
        np.random.set_state((kind, keys, *self.state["random"]["numpy"]))
        version, words, gauss = self.state["random"]["python"]
        random.setstate((version, tuple(words), gauss))


def save(folder: Path, policy: Policy, optimizer: Optimizer, state: Mapping[str, Any], *, step: int, keep: int) -> Path:
    """Write checkpoint `step` into folder, whole or not at all, then delete all but the newest `keep`.

    All ranks call it: weights and moments are put together one tensor at a time, and the first rank writes what a single
    process would, so that any number of ranks can go on from it.
    """
    weights, moments = policy.gathered(), gathered(optimizer.state().items(), policy.world)
    return policy.world.first(lambda: _write(folder, policy, weights, moments, state, step=step, keep=keep))


def _write(
    folder: Path,
    policy: Policy,
    weights: dict[str, torch.Tensor] | None,
    moments: dict[str, torch.Tensor],
    state: Mapping[str, Any],
    *,
    step: int,
    keep: int,
) -> Path:
    final = folder / f"step-{step:06d}"
    beside = folder / f".step-{step:06d}.tmp"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    policy.save(beside / "model", weights)
    save_file(moments, beside / "optimizer.safetensors")
    _, keys, *numpy_state = np.random.get_state()
    arrays = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys, np.int64))}
    save_file(arrays, beside / "random.safetensors")
    randoms = {"numpy": numpy_state, "python": random.getstate()}
    (beside / "state.json").write_text(json.dumps({**state, "step": step, "random": randoms}))
    files = sorted(p for p in beside.rglob("*") if p.is_file())
    manifest = {str(p.relative_to(beside)): {"sha256": _sha256(p), "bytes": p.stat().st_size} for p in files}
    (beside / MANIFEST).write_text(json.dumps(manifest, indent=1))
    _sync(beside)
    for later in _folders(folder):  # of a run that went back to before them, as they were damaged
        if _step(later) >= step:
            shutil.rmtree(later)
    beside.rename(final)
    _sync_folder(folder)
    for old in _folders(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def newest(folder: Path, say: Callable[[str], None] = lambda text: None) -> Checkpoint | None:
    """The newest whole checkpoint of a folder; `say` hears which were passed over and why. None if there is none."""
    for candidate in reversed(_folders(folder)):
        try:
            return load(candidate)
        except CheckpointError as error:
            say(f"passing over {candidate.name}: {error}")
    return None


def load(folder: Path) -> Checkpoint:
    """A checkpoint whose every file has its recorded size and hash. Raises CheckpointError."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        named = {name: (entry["sha256"], entry["bytes"]) for name, entry in manifest.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{MANIFEST} is missing or broken ({error})") from None
    if lacking := [name for name in REQUIRED if name not in named]:
        raise CheckpointError(f"{MANIFEST} lacks {lacking[0]}")
    for name, (sha256, size) in named.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{name} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{name} has {path.stat().st_size} bytes instead of {size}")
        if _sha256(path) != sha256:
            raise CheckpointError(f"{name} does not have its recorded hash")
    state = json.loads((folder / "state.json").read_text())
    if not isinstance(state, dict) or not {"step", "random"} <= state.keys():
        raise CheckpointError("state.json lacks the step or the random states")
    return Checkpoint(folder, state)


def _folders(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("step-*") if p.is_dir() and p.name[5:].isdigit()), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """fsync every file and folder below."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
