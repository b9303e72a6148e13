"""Metrics to TensorBoard, Weights & Biases and trackio. Each is imported only when the recipe asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ..config import TrackingConfig
from .names import LENGTHS, QUANTILES


class TrackerMissing(Exception):
    """A tracker that the recipe asks for is not installed; the message says how to get it."""


class Tracker(Protocol):
    """Where scalars go besides metrics.jsonl."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the scalars of one step."""
        ...

    def close(self) -> None:
        """Write out what is pending, and end."""
        ...


class Trackers:
    """All trackers of a run as one."""

    def __init__(self, trackers: list[Tracker]):
        """trackers: may be empty, then nothing happens."""
        self._trackers = trackers

    def log(self, row: Mapping[str, Any]) -> None:
        """Send one row of metrics, as it stands in metrics.jsonl, to each tracker; see `scalars` for what is sent."""
        numbers = scalars(row)
        for tracker in self._trackers:
            tracker.log(row["step"], numbers)

    def close(self) -> None:
        """Close each tracker; one that fails does not keep the others open."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)
            self._trackers = []


def open_trackers(
    tracking: TrackingConfig,
    folder: str | Path,
    run_name: str,
    config: Mapping[str, Any],
    *,
    resumed_at: int | None = None,
) -> Trackers:
    """Open the trackers that the recipe asks for.

    folder: the run's folder; TensorBoard's event files go to `tensorboard/` in it, and W&B's to `wandb/`.
    config: the resolved configuration, shown beside the run. resumed_at: the step that the run continues from, or
    None for a new run; TensorBoard then drops later steps, W&B and trackio go on with the same run and keep what they
    were sent after it. Raises TrackerMissing, with nothing left open, if a package is not installed. Does not check
    that a service can be reached or that its key is right: the packages do, in their own words.
    """
    folder, trackers = Path(folder), list[Tracker]()
    with ExitStack() as undo:
        for tracker in _opened(tracking, folder, run_name, dict(config), resumed_at):
            trackers.append(tracker)
            undo.callback(tracker.close)
        undo.pop_all()
    return Trackers(trackers)


def require_packages(tracking: TrackingConfig) -> None:
    """Raises TrackerMissing if the recipe asks for a tracker that is not installed, without opening any."""
    wanted = {"tensorboard": tracking.tensorboard, "wandb": tracking.wandb, "trackio": tracking.trackio}
    for package, asked in wanted.items():
        if asked and find_spec(package) is None:
            raise _missing(package, ModuleNotFoundError(f"No module named {package!r}", name=package))


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row: quantiles as `key/q0.05`, lists by length as `key/64` (the bin's longest) and
    `key/longer`, lists by minibatch as `key/1`, `key/2` and so on.

    Left out: step and time (trackers have their own), None, and histograms and lists of lists, which stay in
    metrics.jsonl alone.
    """
    out: dict[str, float] = {}
    for key, value in row.items():
        if key in ("step", "time") or value is None or key.endswith(("_histogram", "_and_layer")):
            continue
        if not isinstance(value, list | tuple):
            out[key] = float(value)
        elif key.endswith("_quantiles"):
            out |= {f"{key}/q{q:g}": float(v) for q, v in zip(QUANTILES, value, strict=True)}
        else:
            names = (*LENGTHS, "longer") if key.endswith("_by_length") else range(1, len(value) + 1)
            out |= {f"{key}/{name}": float(v) for name, v in zip(names, value, strict=True) if v is not None}
    return out


def _opened(
    tracking: TrackingConfig, folder: Path, name: str, config: dict[str, Any], resumed_at: int | None
) -> Iterator[Tracker]:
    if tracking.tensorboard:
        yield _TensorBoard(folder, resumed_at)
    if tracking.wandb is not None:
        yield _Wandb(tracking.wandb, folder, name, config, resumed_at)
    if tracking.trackio is not None:
        yield _Trackio(tracking.trackio, name, config, resumed_at)


class _TensorBoard:
    def __init__(self, folder: Path, resumed_at: int | None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise _missing("tensorboard", error) from None
        purge = None if resumed_at is None else resumed_at + 1
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for key, value in scalars.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, project: str, folder: Path, name: str, config: dict[str, Any], resumed_at: int | None):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise _missing("wandb", error) from None
        file = folder / "wandb-run-id.txt"
        old = file.read_text(encoding="utf-8").strip() if resumed_at is not None and file.exists() else None
        resume = "allow" if old else None
        self._run = wandb.init(project=project, name=name, config=config, dir=str(folder), id=old, resume=resume)
        file.write_text(self._run.id + "\n", encoding="utf-8")
        # W&B's own counter refuses to go back, which a resumed run does; so the step is a metric like others.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, project: str, name: str, config: dict[str, Any], resumed_at: int | None):
        try:
            import trackio  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise _missing("trackio", error) from None
        self._trackio = trackio
        resume = "never" if resumed_at is None else "allow"
        trackio.init(project=project, name=name, config=config, resume=resume, embed=False)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._trackio.log(dict(scalars), step=step)

    def close(self) -> None:
        self._trackio.finish()


def _missing(package: str, error: ModuleNotFoundError) -> Exception:
    if (error.name or "").partition(".")[0] != package:
        return error
    return TrackerMissing(f"tracking.{package} is on, but {package} is not installed: pip install 'gspo[{package}]'")
