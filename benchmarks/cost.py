"""Cost curves of the update: seconds and peak memory against tokens, response length, group size and vocabulary.

    python benchmarks/cost.py                  # a GPU, Qwen3-0.6B's shape
    python benchmarks/cost.py --small          # a CPU, under a minute; ends with code 1 if growth is not what it should be

One update is one optimizer step on a rollout batch with made-up tokens. `pack`: all tokens in one micro-batch. `batch`:
more tokens, micro-batches of one size. `length`: the same number of tokens, in longer and longer responses. `group`: the
same responses, more and more of them to one prompt. `vocabulary`: the same tokens, a larger output matrix. Seconds are the
least of several repeats that go over the sizes in turn; on a CPU they are one thread's CPU seconds, which other programs
lengthen least. Memory is the most that an update adds to what was held before it: weights, gradients and AdamW's moments.
What is fitted and what is held against what: docs/speed.md.

Not covered: generation, several GPUs, clipped sequences.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from growth import Verdict, exponent, grows_as, grows_linearly, line, slope_below, stays_flat
from workload import SHAPES, Interval, as_sampled, flops_of_samples, make_model, parsed, positive, recipe, trajectories

SECONDS_BOUND = 2.0
"""Of the cost of one more token, upper half over lower half: a line has 1, a square 4; caches and launches blur a line to
about 1.4."""
MEMORY_BOUND = 1.5
"""The same of memory, which does not depend on chance."""
FLAT_BOUND = {"seconds": 1.4, "memory": 1.3}
"""Largest over first of what should not grow."""
POWER_BOUND = 1.25
"""Of seconds as a power of counted FLOPs: attention, whose share rises with length, needs more time a FLOP than matrix
products, so a little above 1 is right; cubic attention would give about 2."""
HEADS_OF_MEMORY = 3.0
"""Float32 output matrices that an update may hold for a while, beside those that are always held: its fresh gradient, what
autograd adds it to, and a temporary."""
SLACK_GIB = {"cpu": 4 / 1024, "cuda": 32 / 1024}
"""Growth of memory that is none: what an allocator rounds up to."""


@dataclass(frozen=True, slots=True)
class Point:
    """One size of a curve."""

    x: int
    """The size: tokens, or a vocabulary."""
    lengths: tuple[int, ...]
    """Tokens of each response."""
    prompt: int
    """Tokens of each prompt."""
    group: int
    """Responses a prompt."""
    micro_tokens: int
    """Largest micro-batch."""
    vocabulary: int
    """Rows of the output matrix."""

    @property
    def tokens(self) -> int:
        """Of all samples, prompts included."""
        return sum(self.prompt + n for n in self.lengths)


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the curves are."""

    shape: str
    """The model, by its name in SHAPES."""
    prompt: int
    """Tokens of each prompt."""
    response: int
    """Tokens of each response, where they are not what changes."""
    pack: tuple[int, ...]
    """Tokens a micro-batch."""
    batch: tuple[int, ...]
    """Tokens a batch."""
    micro_tokens: int
    """Largest micro-batch of the others."""
    length: tuple[int, ...]
    """Response lengths."""
    length_tokens: int
    """Response tokens of each batch of that curve."""
    group: tuple[int, ...]
    """Group sizes."""
    vocabulary: tuple[int, ...]
    """Vocabularies."""


FULL = Scale(
    "0.6B", 128, 384, (4096, 8192, 16384, 32768), (2048, 4096, 8192, 16384, 32768, 65536, 131072), 16384,
    (256, 512, 1024, 2048, 4096, 8192, 16384, 32768), 32768, (2, 4, 8, 16, 32, 64), (37984, 75968, 151936, 303872),
)  # fmt: skip
SMALL = Scale(
    "tiny", 16, 48, (1024, 2048, 4096, 8192, 16384), (1024, 2048, 4096, 8192, 16384), 1024,
    (64, 128, 256, 512, 1024), 2048, (2, 4, 8, 16, 32), (12000, 17000, 24000, 34000, 48000),
)  # fmt: skip
"""Vocabularies start where one chunk of logits is full: below that the chunk itself still grows."""


def points(curve: str, scale: Scale) -> list[Point]:
    """The sizes of a curve."""
    sample, vocabulary = scale.prompt + scale.response, SHAPES[scale.shape]["vocab_size"]

    def same(tokens: int, x: int, micro: int, *, group: int = 4, rows: int = vocabulary) -> Point:
        lengths = (scale.response,) * (tokens // sample)
        return Point(x, lengths, scale.prompt, min(group, len(lengths)), micro, rows)

    if curve == "pack":
        return [same(n, n, n) for n in scale.pack]
    if curve == "batch":
        return [same(n, n, scale.micro_tokens) for n in scale.batch]
    if curve == "group":
        tokens = max(scale.group) * sample
        return [same(tokens, n, scale.micro_tokens, group=n) for n in scale.group]
    if curve == "vocabulary":
        return [same(scale.micro_tokens, n, scale.micro_tokens, rows=n) for n in scale.vocabulary]
    longest = max(scale.length) + scale.prompt
    found = []
    for n in scale.length:
        lengths = (n,) * (scale.length_tokens // n)
        found.append(Point(n, lengths, scale.prompt, 1, max(longest, scale.micro_tokens), vocabulary))
    return found


CURVES = ("pack", "batch", "length", "group", "vocabulary")


# ---- measuring --------------------------------------------------------------------------------------------


class Updates:
    """One model, and updates of it at any size."""

    def __init__(self, shape: dict[str, int], device: str, kernels: str) -> None:
        from gspo.config import ModelConfig
        from gspo.training.flops import FlopCounter
        from gspo.training.optimizer import Optimizer
        from gspo.training.policy import load_policy

        dtype: Any = "bfloat16" if device == "cuda" else "float32"
        with tempfile.TemporaryDirectory() as name:
            folder = make_model(Path(name), shape, dtype, device)
            self.chosen = ModelConfig(path=str(folder), device=device, dtype=dtype, kernels=kernels)  # type: ignore[arg-type]
            self.policy = load_policy(self.chosen, temperature=1.0, seed=0)
        self.counter, self.interval = FlopCounter(self.policy), Interval(self.policy.device)
        self.optimizer = Optimizer(self.policy.trainable, recipe(self.chosen, **self.sizes(2)).training, 10**6)
        self.samples: dict[Point, list[Any]] = {}

    def sizes(self, micro_tokens: int) -> dict[str, Any]:
        """What the recipe of one optimizer step needs to know."""
        return {"old_logprobs": "engine", "minibatches": 1, "micro_tokens": micro_tokens}

    def once(self, point: Point) -> dict[str, float]:
        """Seconds and the GiB that an update adds, with its counted FLOPs."""
        from gspo.training.update import Skips, pack_minibatches, update

        config = recipe(self.chosen, **self.sizes(point.micro_tokens))
        if point not in self.samples:
            made = trajectories(len(self.policy.head), point.lengths, prompt=point.prompt, group=point.group)
            self.samples[point] = as_sampled(self.policy, made, token_budget=point.micro_tokens)
        self.interval.begin()
        parts = pack_minibatches(self.samples[point], config, seed=0, device=self.policy.device)
        update(self.policy, self.optimizer, parts, config, Skips())
        took = self.interval.end()
        flops = flops_of_samples(self.counter, [(point.prompt, n) for n in point.lengths])
        seconds = took["seconds" if self.interval.on_gpu else "cpu_seconds"]
        return {"seconds": seconds, "memory": took["peak_gib"] - took["held_gib"], "flops": flops}


class Models:
    """The model of each vocabulary; a GPU holds one at a time."""

    def __init__(self, shape: dict[str, int], device: str, kernels: str) -> None:
        self.shape, self.device, self.kernels = shape, device, kernels
        self.found: dict[int, Updates] = {}

    def of(self, point: Point) -> Updates:
        """The one that this size wants, made when it is first wanted."""
        if point.vocabulary not in self.found:
            if self.device == "cuda":
                self.found.clear()
                torch.cuda.empty_cache()
            shape = self.shape | {"vocab_size": point.vocabulary}
            self.found[point.vocabulary] = Updates(shape, self.device, self.kernels)
        return self.found[point.vocabulary]


def measure(curve: str, scale: Scale, models: Models, *, repeats: int, retries: int = 0) -> list[dict[str, float]]:
    """A row for each size: x, tokens, seconds and memory, the least of the repeats; rounds go over all sizes.

    While the seconds do not pass, up to `retries` times as many rounds again are added: the least only gets nearer.
    """
    sizes = points(curve, scale)
    first = {"seconds": float("inf"), "memory": float("inf")}
    rows = [{"x": p.x, "tokens": p.tokens, "responses": len(p.lengths), **first} for p in sizes]
    in_turn = not (models.device == "cuda" and curve == "vocabulary")  # there each size has a model to itself

    def note(row: dict[str, Any], took: dict[str, float]) -> None:
        row |= took | {key: min(row[key], took[key]) for key in first}

    for point, row in zip(sizes, rows, strict=True):
        models.of(point).once(point)  # the first update makes AdamW's moments, and compiles
        for _ in range(0 if in_turn else repeats):
            note(row, models.of(point).once(point))
    for k in range(repeats * (1 + retries) if in_turn else 0):
        if k and k % repeats == 0 and seconds_verdict(curve, rows).ok:
            break
        for point, row in zip(sizes, rows, strict=True):
            note(row, models.of(point).once(point))
    return rows


# ---- judging ----------------------------------------------------------------------------------------------


def column(rows: Sequence[dict[str, float]], key: str) -> list[float]:
    """One key of all rows."""
    return [row[key] for row in rows]


def seconds_verdict(curve: str, rows: Sequence[dict[str, float]]) -> Verdict:
    """Whether time grows as it should."""
    x, seconds = column(rows, "x"), column(rows, "seconds")
    if curve == "length":
        per_response, work = ([row[key] / row["responses"] for row in rows] for key in ("seconds", "flops"))
        return grows_as(work, per_response, bound=POWER_BOUND)
    if curve == "group":
        return stays_flat(x, seconds, bound=FLAT_BOUND["seconds"])
    return grows_linearly(x, seconds, bound=SECONDS_BOUND)


def memory_verdict(curve: str, rows: Sequence[dict[str, float]], scale: Scale, device: str) -> Verdict:
    """Whether peak memory beyond what is held grows as it should."""
    x, memory, slack = column(rows, "x"), column(rows, "memory"), SLACK_GIB[device]
    if curve == "pack":
        return grows_linearly(x, memory, bound=MEMORY_BOUND, slack=slack)
    if curve == "vocabulary":
        width = SHAPES[scale.shape]["hidden_size"]
        bytes_a_row = [m * 2**30 for m in memory]
        return slope_below(x, bytes_a_row, bound=HEADS_OF_MEMORY * 4 * width, unit="bytes a row of the output matrix")
    if curve == "batch":  # from where micro-batches are full, with shared prompts too
        full = [(a, m) for a, m in zip(x, memory, strict=True) if a >= 2 * scale.micro_tokens]
        x, memory = [a for a, _ in full], [m for _, m in full]
    return stays_flat(x, memory, bound=FLAT_BOUND["memory"], slack=slack)


def fits(curve: str, rows: Sequence[dict[str, float]]) -> str:
    """The fitted lines of a curve, in a sentence."""
    x, seconds, memory = (column(rows, key) for key in ("x", "seconds", "memory"))
    if curve == "length":
        a_token = [row["seconds"] / row["tokens"] for row in rows]
        linear, quadratic = line(x, a_token)
        power = exponent(x, [row["seconds"] / row["responses"] for row in rows])
        return (
            f"a token costs {linear * 1e6:.3g} µs + {quadratic * 1e9:.3g} ns for each token of its response, which is "
            f"attention's quadratic part; a response's seconds grow as its length to the power {power:.2f}"
        )
    start, slope = line(x, seconds)
    held, more = line(x, memory)
    unit = {"group": "response a prompt", "vocabulary": "row of the output matrix"}.get(curve, "token")
    return (
        f"seconds = {start:.3g} + {slope * 1e6:.3g} µs a {unit}, exponent {exponent(x, seconds):.2f}; "
        f"memory = {held * 1024:.3g} MiB + {more * 2**20:.3g} KiB a {unit}"
    )


def report(curve: str, rows: Sequence[dict[str, float]], scale: Scale, device: str) -> bool:
    """Print a curve as a table with its fits and verdicts; False where it grows as it should not."""
    print(f"\n### {curve}\n\n| {curve} | tokens | seconds | µs a token | TFLOP/s | MiB added |\n|---|---|---|---|---|---|")
    for row in rows:
        seconds = row["seconds"]
        rate, micros, mib = row["flops"] / seconds / 1e12, seconds / row["tokens"] * 1e6, row["memory"] * 1024
        print(f"| {row['x']:,} | {row['tokens']:,} | {seconds:.4f} | {micros:.2f} | {rate:.3g} | {mib:.1f} |")
    print(f"\n{fits(curve, rows)}.\n")
    verdicts = {"seconds": seconds_verdict(curve, rows), "memory": memory_verdict(curve, rows, scale, device)}
    for what, verdict in verdicts.items():
        print(f"- {what}: {'as it should be' if verdict.ok else '**NOT AS IT SHOULD BE**'}: {verdict.why}.", flush=True)
    return all(v.ok for v in verdicts.values())


# ---- the command ------------------------------------------------------------------------------------------


Rows = dict[str, list[dict[str, float]]]


def child(args: argparse.Namespace, repeats: int, **environment: str) -> Rows:
    """The curves, measured in a process of its own."""
    words = [sys.executable, __file__, "--here", "--curves", *args.curves, "--device", args.device]
    words += ["--kernels", args.kernels, "--repeats", str(repeats), *(["--small"] if args.small else [])]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    found = [text for text in done.stdout.splitlines() if text.startswith("RESULT ")]
    if not found:
        raise SystemExit(f"measuring ended with code {done.returncode} and without a result")
    return json.loads(found[0].removeprefix("RESULT "))


def measured(args: argparse.Namespace) -> Rows:
    """Seconds and memory of all curves. On a CPU they come from two processes: what makes memory exact makes it slow.

    There the allocator has to give back at once what is freed, or the peak depends on luck.
    """
    found = child(args, args.repeats)
    if args.device == "cpu":
        exact = child(args, 1, MALLOC_MMAP_THRESHOLD_="65536")
        for curve, rows in found.items():
            for row, other in zip(rows, exact[curve], strict=True):
                row["memory"] = other["memory"]
    return found


def measure_here(args: argparse.Namespace, scale: Scale) -> Rows:
    """All curves in this process; further rounds only where seconds are what is wanted."""
    if args.device == "cpu":
        torch.set_num_threads(1)
    models = Models(SHAPES[scale.shape], args.device, args.kernels)
    retries = 3 if args.repeats > 1 else 0
    return {curve: measure(curve, scale, models, repeats=args.repeats, retries=retries) for curve in args.curves}


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small sizes of a small model")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", choices=("auto", "torch", "liger", "compile"), default="auto")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--json", default="", help="file for the rows")
    parser.add_argument("--here", action="store_true", help="measure in this process (used by the script itself)")
    return parsed(parser, words)


def main(words: list[str] | None = None) -> int:
    args = parse(words)
    scale = SMALL if args.small else FULL
    if args.here:
        print("RESULT " + json.dumps(measure_here(args, scale)))
        return 0
    print(f"torch {torch.__version__}, {args.device}, {json.dumps(asdict(scale))}")
    every = measured(args)
    passed = [report(curve, rows, scale, args.device) for curve, rows in every.items()]  # all are shown
    good = all(passed)
    if args.json:
        Path(args.json).write_text(json.dumps(every, indent=1))
    print("\nGrowth is as it should be." if good else "\nGrowth is NOT as it should be.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
