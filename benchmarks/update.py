"""The update alone, ours against TRL's: seconds, tokens a second, model FLOP utilisation and peak memory, as one table.

    pip install -e '.[bench,liger]' && python benchmarks/update.py 0.6B

MODEL is one of Qwen3's shapes (0.6B, 1.7B, 4B; or tiny; random weights) or a folder. 128 responses, 8 to a prompt of 128
tokens, four optimizer steps. W1: every response has 1,024 tokens; W2: lengths drawn from a skewed distribution, 64 to
2,048, mean about 450; both sides get the same token ids. Each side is a process of its own with its model loaded, and they
take turns: one update of TRL's, one of ours, then in the other order. Where the memory of one GPU does not hold both, they
run one after the other, and the table says so. TRL is tried with each of --trl-micro first, and runs with its fastest. What
is inside an interval, and the formula of utilisation: docs/speed.md.

    python benchmarks/update.py tiny --device cpu --dtype float32 --shrink 16 --responses 32   # in seconds, without a GPU
    python benchmarks/update.py 0.6B --against none --kernels torch liger compile              # our kernels alone

Not covered: generation, several GPUs, rollouts whose sequences are clipped (weights stand still here, and nothing is).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from sides import Child, Failed, Ours, OursSettings, Side, Task, Theirs, TheirSettings
from workload import LENGTHS, SHAPES, best_rate, make_model, parsed, positive

KERNELS = ("auto", "torch", "liger", "compile")
CHOICES = {"checkpointing": ("none", "selective", "full"), "moments": ("float32", "8bit")}
OLD = ("trainer", "engine")
WARMUPS = 2
FITS = 0.94
"""Share of a GPU's memory that both processes may take together; the rest is CUDA's own."""

Row = dict[str, float]


class Bench:
    """The children of a comparison, kept while they can be used again, and what was measured."""

    OURS: type[Side] = Ours
    THEIRS: type[Side] = Theirs

    def __init__(self, args: argparse.Namespace, model: Path, logs: Path) -> None:
        self.args, self.logs = args, logs
        self.task = Task(
            model=str(model),
            device=args.device,
            dtype=args.dtype,
            responses=args.responses,
            group=args.group,
            prompt=max(1, args.prompt // args.shrink),
            shrink=args.shrink,
            minibatches=args.minibatches,
            threads=args.threads,
        )
        self.children: dict[type, Child] = {}
        self.best_micro: dict[str, int] = {}
        self.measured: dict[str, dict[str, list[Row]]] = {}

    def child(self, side: type, settings: OursSettings | TheirSettings) -> Child:
        """The side's process with these settings; one with others ends first. Raises Failed."""
        old = self.children.get(side)
        if old is not None and old.key == (side, self.task, settings) and old.process.is_alive():
            return old
        self.close(side)
        self.children[side] = Child(side, self.task, settings, self.logs / f"{side.__name__}.log")
        return self.children[side].ready()

    def close(self, *sides: type) -> None:
        """End these sides' processes, all of them without an argument."""
        for side in sides or tuple(self.children):
            if child := self.children.pop(side, None):
                child.close()

    def theirs(self, micro: int) -> Child:
        """TRL's process. Raises Failed."""
        return self.child(self.THEIRS, TheirSettings(**self.trls(micro)))

    def trls(self, micro: int) -> dict[str, Any]:
        """What is given to TRL's side, of an update and of a whole step."""
        args, liger = self.args, self.args.device == "cuda" and not self.args.no_liger
        weights = args.trl_weights or args.dtype
        return {"weights": weights, "micro": micro, "liger": liger, "attention": args.trl_attention}

    def ours(self, kernels: str) -> Child:
        """Our process. Raises Failed."""
        return self.child(self.OURS, OursSettings(**self.own(kernels)))

    def own(self, kernels: str) -> dict[str, Any]:
        """Settings of our side alone."""
        args = self.args
        names = {
            "head": args.head,
            "micro_tokens": args.micro,
            "checkpointing": args.checkpointing,
            "moments": args.moments,
        }
        return {"kernels": kernels, **names}

    def choose_micro(self) -> None:
        """TRL's fastest micro-batch for each kind of lengths, each tried alone on the machine."""
        if len(self.args.trl_micro) == 1:
            self.best_micro = dict.fromkeys(self.args.lengths, self.args.trl_micro[0])
            return
        took: dict[tuple[str, int], float] = {}
        for micro in self.args.trl_micro:
            for lengths in self.args.lengths:
                try:
                    child = self.theirs(micro)
                    child.update(lengths)
                    took[lengths, micro] = min(self._measured(child, lengths)["seconds"] for _ in range(2))
                except Failed:  # most likely out of memory; the sentence is on the terminal
                    self.close(self.THEIRS)
        self.close()
        for lengths in self.args.lengths:
            tried = {m: s for (name, m), s in took.items() if name == lengths}
            told = {m: round(s, 3) for m, s in tried.items()}
            print(f"{lengths}: TRL's seconds by sequences a micro-batch:", told, file=sys.stderr, flush=True)
            if not tried:
                raise Failed(f"TRL ran with none of the micro-batches {self.args.trl_micro} at {lengths}")
            self.best_micro[lengths] = min(tried, key=lambda m: tried[m])

    # ---- one comparison -----------------------------------------------------------------------------------

    def compare(self, kernels: str, lengths: str) -> tuple[dict[str, list[Row]], str]:
        """Measured updates by name, `TRL` and ours by old log-probabilities, and how the two sides ran."""
        if self.args.against == "none":
            ours = self.ours(kernels)
            self._warm(ours, lengths)
            return self._rounds({old: (ours, old) for old in self.args.old}, lengths, again=False), "alone"
        try:
            mode = "one after the other" if self.args.apart else self._both_fit(kernels, lengths)
        except Failed:
            mode = "one after the other"
        if mode == "one after the other":
            return self._apart(kernels, lengths), mode
        ours, theirs = self.ours(kernels), self.theirs(self.best_micro[lengths])
        names = {"TRL": (theirs, ""), **{old: (ours, old) for old in self.args.old}}
        return self._rounds(names, lengths, again=mode != "in turn"), mode

    def _both_fit(self, kernels: str, lengths: str) -> str:
        """Warm both up, and find out how they share the GPU's memory. Raises Failed where one finds too little."""
        ours = self.ours(kernels)
        self._warm(ours, lengths)
        peak_ours, held_ours = ours.memory()["reserved_gib"], ours.memory(release=True)["reserved_gib"]
        theirs = self.theirs(self.best_micro[lengths])
        self._warm(theirs, lengths)
        memory = theirs.memory()
        limit = FITS * memory["total_gib"]
        peak_theirs, held_theirs = memory["reserved_gib"], theirs.memory(release=True)["reserved_gib"]
        if peak_ours + peak_theirs <= limit:
            self._warm(ours, lengths)
            self._warm(theirs, lengths)
            return "in turn"
        if max(peak_ours + held_theirs, peak_theirs + held_ours) <= limit:
            return "in turn, the idle one's cache given back"
        return "one after the other"

    def _warm(self, child: Child, lengths: str) -> None:
        for old in self.args.old if child.key[0] is self.OURS else ("",):
            for _ in range(WARMUPS):
                child.update(lengths, old_logprobs=old)

    def _measured(self, child: Child, lengths: str, old: str = "engine") -> Row:
        row = child.update(lengths, old_logprobs=old)
        if self.args.device == "cpu" and self.args.threads == 1:
            row["seconds"] = row["cpu_seconds"]  # which other programs lengthen least
        return row

    def _rounds(self, names: dict[str, tuple[Child, str]], lengths: str, *, again: bool) -> dict[str, list[Row]]:
        """Repeats in which the sides take turns, each second round in the other order.

        again: an update that is not measured comes before each turn, and the cache is given back after it.
        """
        out: dict[str, list[Row]] = {name: [] for name in names}
        for k in range(self.args.repeats):
            for name in list(names)[:: -1 if k % 2 else 1]:
                child, old = names[name]
                if again:
                    child.update(lengths, old_logprobs=old)
                out[name].append(self._measured(child, lengths, old))
                taken = out[name][-1]["seconds"]  # told as it comes: the table stands at the end of minutes
                print(f"{lengths}, {name}: {taken:.3f} s ({k + 1} of {self.args.repeats})", file=sys.stderr, flush=True)
                if again:
                    child.memory(release=True)
        if self.args.profile:
            for name, (child, old) in names.items():
                child.update(lengths, old_logprobs=old, profile=f"{self.args.profile}/{lengths}-{name}.txt")
        return out

    def _apart(self, kernels: str, lengths: str) -> dict[str, list[Row]]:
        """One side after the other, each alone on the machine; a side that cannot run has no rows."""
        out: dict[str, list[Row]] = {}
        for side in (self.THEIRS, self.OURS):
            self.close()
            try:
                child = self.theirs(self.best_micro[lengths]) if side is self.THEIRS else self.ours(kernels)
                self._warm(child, lengths)
                names = {"TRL": (child, "")} if side is self.THEIRS else {old: (child, old) for old in self.args.old}
                out |= self._rounds(names, lengths, again=False)
            except Failed as error:
                print(f"{lengths}, {side.__name__} alone on the machine: {error}", flush=True)
        self.close()
        if not out:
            raise Failed(f"neither side ran at {lengths}")
        return out


# ---- the table --------------------------------------------------------------------------------------------

HEAD = (
    "| lengths | side | seconds: median (all) | TRL / ours | response tokens/s | utilisation | generation s | peak GiB "
    "| held before |",
    "|---|---|---|---|---|---|---|---|---|",
)


def table_rows(measured: dict[str, list[Row]], labels: dict[str, str], lengths: str, tokens: int, rate: float) -> list[str]:
    """A line of the table for each side; the ratio is of medians, with the range over rounds."""
    lines = []
    theirs = [row["seconds"] for row in measured.get("TRL", [])]
    for name, rows in measured.items():
        seconds = [row["seconds"] for row in rows]
        median = statistics.median(seconds)
        ratio = ""
        if theirs and name != "TRL":
            each = [a / b for a, b in zip(theirs, seconds, strict=True)]
            ratio = f"**{statistics.median(theirs) / median:.2f}** ({min(each):.2f} to {max(each):.2f})"
        told = f"{median:.3f} ({', '.join(f'{s:.3f}' for s in seconds)})"
        peak, held = max(r["peak_gib"] for r in rows), statistics.median(r["held_gib"] for r in rows)
        flops = statistics.median(r.get("flops", 0.0) for r in rows)
        share = f"{flops / median / rate:.3f}" if flops else "-"
        generation = f"{statistics.median(r['collect_s'] for r in rows):.3f}" if "collect_s" in rows[0] else "-"
        middle = f"{tokens / median:,.0f} | {share} | {generation}"
        lines.append(f"| {lengths} | {labels[name]} | {told} | {ratio} | {middle} | {peak:.2f} | {held:.2f} |")
    return lines


def about(args: argparse.Namespace) -> str:
    """Machine and versions, in a line."""
    names = ("gspo", "trl", "liger-kernel", "flash-attn-4", "transformers", "torch")
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} absent")
    where = f"{args.threads} CPU threads a side" if args.threads > 1 else "CPU seconds of one thread a side"
    if args.device == "cuda":
        found_gpu = torch.cuda.get_device_properties(0)
        where = f"{found_gpu.name}, {found_gpu.total_memory / 2**30:.0f} GiB"
    return f"{', '.join(found)}; {where}"


def setting(args: argparse.Namespace, task: Task) -> str:
    """What both sides were given, in a line."""
    theirs = ""
    if args.against == "trl":
        liger = "without" if args.no_liger or args.device != "cuda" else "with"
        theirs = f", TRL's weights {args.trl_weights or args.dtype}, {liger} Liger, attention by {args.trl_attention}"
    return (
        f"{args.model}, {args.dtype}, {task.responses} responses, {task.group} a prompt of {task.prompt} tokens, "
        f"{task.minibatches} optimizer steps, ours {args.micro} tokens a micro-batch, checkpointing "
        f"{args.checkpointing}, moments {args.moments}{theirs}"
    )


@dataclass(frozen=True, slots=True)
class Command:
    """What the commands that compare sides differ in."""

    bench: type[Bench] = Bench
    """Who runs the sides."""
    old: tuple[str, ...] = OLD
    """Choices of --old."""
    chosen: tuple[str, ...] = OLD
    """Those that run unless told otherwise."""
    description: str = __doc__
    """For --help."""
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    """Adds options."""


def parse(words: list[str] | None = None, command: Command = Command()) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=command.description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"{', '.join(SHAPES)}, or a folder of a language model")
    parser.add_argument("--against", choices=("trl", "none"), default="trl")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=["auto"], help="ours, one comparison each")
    whose = {"choices": command.old, "default": list(command.chosen)}
    parser.add_argument("--old", nargs="+", **whose, help="whose old log-probabilities, ours alone")
    parser.add_argument("--micro", type=positive, default=18432, help="training.micro_batch_tokens")
    for name in ("checkpointing", "moments"):
        parser.add_argument(f"--{name}", choices=CHOICES[name], default=CHOICES[name][0], help="ours")
    parser.add_argument(
        "--trl-micro", nargs="+", type=positive, default=[8, 16, 32], help="sequences a micro-batch, to try"
    )
    parser.add_argument("--trl-weights", default="", help="precision of TRL's weights and moments; that of --dtype")
    parser.add_argument("--trl-attention", default="sdpa", help="attn_implementation of TRL's model, for transformers")
    parser.add_argument("--no-liger", action="store_true", help="TRL without Liger's kernels")
    parser.add_argument("--head", choices=("same", "float32"), default="same")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--apart", action="store_true", help="do not even try to hold both sides at once")
    for name, value in {"repeats": 5, "responses": 128, "group": 8, "prompt": 128, "minibatches": 4}.items():
        parser.add_argument(f"--{name}", type=positive, default=value)
    parser.add_argument("--shrink", type=positive, default=1, help="divides the lengths of prompts and responses")
    parser.add_argument(
        "--threads", type=positive, default=1, help="of each side; with one, seconds on a CPU are CPU seconds"
    )
    parser.add_argument("--profile", default="", help="folder for a table of kernels a side, after the timing")
    parser.add_argument("--json", default="", help="file for every measured update")
    command.options(parser)
    args = parsed(parser, words)
    for name in ("group", "minibatches"):
        if args.responses % getattr(args, name):
            parser.error(f"--responses {args.responses} is not a multiple of --{name} {getattr(args, name)}")
    args.trl_micro = sorted({min(m, args.responses // args.minibatches) for m in args.trl_micro})
    for micro in args.trl_micro if args.against == "trl" else ():
        if args.responses % (micro * args.minibatches):
            parser.error(f"{args.responses} responses are not a multiple of {args.minibatches} minibatches x {micro}")
    if args.against == "trl" and args.dtype == "float16":
        parser.error("TRL has no float16 update to compare with: use --dtype bfloat16, or --against none")
    return args


def main(words: list[str] | None = None, command: Command = Command()) -> int:
    """Run the comparison and print its table; 1 where nothing could be measured."""
    args = parse(words, command)
    printed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(args.model)
        if args.model in SHAPES:
            folder = make_model(Path(name, "model"), SHAPES[args.model], args.dtype, args.device)
            if args.device == "cuda":
                torch.cuda.empty_cache()
        rate, whence = best_rate(torch.device(args.device), args.dtype)
        bench = command.bench(args, folder, Path(tempfile.mkdtemp(prefix="update-logs-")))
        print(f"{about(args)}\n{setting(args, bench.task)}; utilisation against {whence}\n", flush=True)
        failed = ""
        try:
            if args.against == "trl":
                bench.choose_micro()
            for kernels in args.kernels:
                for lengths in args.lengths:
                    lines = comparison(bench, kernels, lengths, rate)
                    print("\n".join(lines if printed else [*HEAD, *lines]), flush=True)
                    printed = True
        except Failed as error:
            failed = f"failed: {error}; the processes' logs are in {bench.logs}"
        finally:
            bench.close()
    if args.json:
        Path(args.json).write_text(json.dumps(bench.measured, indent=1))
    if failed:
        print(failed, file=sys.stderr)
    sides = len(args.old) + (args.against == "trl")
    return 1 if failed or any(len(found) < sides for found in bench.measured.values()) else 0


def comparison(bench: Bench, kernels: str, lengths: str, rate: float) -> list[str]:
    """The lines of one comparison."""
    measured, mode = bench.compare(kernels, lengths)
    task = bench.task
    bench.measured[f"{kernels}, {lengths}, {mode}"] = measured
    assert len({row["checksum"] for rows in measured.values() for row in rows}) == 1, "the sides had different tokens"
    wanted = [len(t.token_ids) - task.prompt for t in task.samples(lengths, 1000)]
    told = f"{lengths}: {sum(wanted)} response tokens, {min(wanted)} to {max(wanted)}; {kernels}: {mode}"
    print(told, file=sys.stderr, flush=True)
    labels = {"TRL": f"TRL, micro-batch {bench.best_micro.get(lengths)}"}
    labels |= {old: f"ours, {kernels}, old by {old}; {mode}" for old in bench.args.old}
    return table_rows(measured, labels, lengths, sum(wanted), rate)


if __name__ == "__main__":
    sys.exit(main())
