"""What a person sees while a run runs: a live table under two progress bars, or, without a terminal, a few lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .text import visible


class Terminal:
    """The display of one run, a context manager: it puts the terminal in order however the run ends.

    On a terminal: progress of steps with the time left, progress of sampling, a table of the latest steps, and notes
    above them. Anywhere else: one plain line at the start, for each evaluation, for each note and at the end.
    Not covered: output written past sys.stdout and sys.stderr (by C libraries) is not kept out of the table.
    """

    def __init__(
        self,
        name: str,
        steps: int,
        *,
        done: int = 0,
        title: str = "",
        rows: int = 10,
        console: Console | None = None,
        silent: bool = False,
    ):
        """name: the run's. steps: of the whole run. done: steps taken before, where a run is resumed. title: a few
        words for the first line. rows: latest steps in the table. console: standard output by default. silent: show
        nothing, as another rank speaks."""
        self._name, self._steps, self._title, self._done, self._keep = name, steps, title, done, rows
        self._console = console or Console()
        able = self._console.is_terminal and not self._console.is_dumb_terminal and self._console.encoding == "utf-8"
        self._silent, self.quiet = silent, silent or not able
        self._rows: tuple[Mapping[str, Any], ...] = ()  # replaced, never changed: another thread draws it
        self._live: Live | None = None
        columns = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._bars = Progress(TextColumn("{task.description:<10}"), BarColumn(), *columns, console=self._console)
        self._bar = self._bars.add_task("steps", total=steps, completed=done)

    def __enter__(self) -> Self:
        resumed = f", going on after step {self._done}" if self._done else ""
        title = f": {self._title}" if self._title else ""
        self._print(f"{self._name}{title}, {self._steps} steps{resumed}")
        if not self.quiet:
            self._live = Live(console=self._console, get_renderable=self._picture, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._live:
            self._live.stop()
            self._live = None
        why = "" if kind is None else f" by {kind.__name__}"
        word = "ended" if kind is None else "stopped"
        self._print(f"{self._name}: {word}{why} after step {self._done} of {self._steps}")

    def step(self, row: Mapping[str, Any]) -> None:
        """Show one row of metrics: a line of the table; an evaluation in it is also a note."""
        self._done = row["step"]
        self._bars.update(self._bar, completed=self._done)
        if "reward/mean" in row:
            self._rows = (*self._rows, row)[-self._keep :]
        if line := evaluation_line(row):
            self.note(line)

    def note(self, text: str) -> None:
        """One sentence above the table; markup and control characters in it are shown, not obeyed."""
        self._print(text)

    @contextmanager
    def generation(self, total: int) -> Iterator[Callable[[int], None]]:
        """A second progress bar of `total` responses; yields `advance(n)`, to be called as n more are finished."""
        bar = self._bars.add_task("responses", total=total)
        try:
            yield lambda n: self._bars.advance(bar, n)
        finally:
            self._bars.remove_task(bar)

    def _print(self, text: str) -> None:
        text = visible(text, keep="")
        if self._silent:
            return
        if not self.quiet:
            self._console.print(Text(text))
            return
        encoding = getattr(self._console.file, "encoding", None) or "utf-8"
        self._console.file.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._console.file.flush()

    def _picture(self) -> Group:
        return Group(self._bars, *([_table(self._rows)] if self._rows else []))


def evaluation_line(row: Mapping[str, Any]) -> str | None:
    """The evaluation of a row in one line, or None if it has none."""
    keys = [k for k in row if k.startswith("evaluation/pass@") and not k.endswith(("_low", "_high"))]
    keys = [k for k in keys if row[k] is not None]
    if not keys:
        return None
    scores = (
        f"{k.removeprefix('evaluation/')} {row[k]:.3f} [{row[k + '_low']:.3f}, {row[k + '_high']:.3f}]"
        if row.get(k + "_low") is not None and row.get(k + "_high") is not None
        else f"{k.removeprefix('evaluation/')} {row[k]:.3f}"
        for k in keys
    )
    return f"step {row['step']}: {', '.join(scores)}"


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for heading, _ in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(row) for _, cell in _COLUMNS))
    return table


def _number(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "-" if row.get(key) is None else format(row[key], form)


def _sequence_ratio(row: Mapping[str, Any]) -> str:
    mean, std = row.get("ratio/sequence_mean"), row.get("ratio/sequence_std")
    return "-" if mean is None or std is None else f"{mean:.5f}±{std:.1e}"


_COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("step", _number("step", "d")),
    ("reward", _number("reward/mean", ".3f")),
    ("solved", _number("reward/solved", ".1%")),
    ("length", _number("rollout/response_tokens_mean", ".1f")),
    ("entropy", _number("policy/entropy", ".3f")),
    ("s", _sequence_ratio),
    ("clipped", _number("clip/sequence", ".1%")),
    ("|grad|", _number("update/grad_norm", ".3g")),
    ("tok/s", _number("rollout/tokens_per_s", ".0f")),
    ("sec", _number("time/step_s", ".1f")),
)
