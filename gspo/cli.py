"""The command line. Everything heavy is imported after the words are understood, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

READ_ONLY = ("report", "compare", "watch")
"""Commands that read the records of runs, and nothing else."""

SETTINGS = "Any setting of the recipe can be given as --table.key VALUE, e.g. --training.learning_rate 1e-6."


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for an error said in a sentence, 128 + n after signal n."""
    parser = _parser()
    if any(not word.strip() for word in (sys.argv[1:] if words is None else words)):
        parser.error("an empty word on the command line: leave it out")
    options, overrides = parser.parse_known_args(words)
    if overrides and options.command in (*READ_ONLY, "compare-evals"):
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    if options.command in ("eval", "check", "compare-evals", *READ_ONLY) and _num_processes() > 1:
        parser.error(f"gspo {options.command} runs in one process: start it without torchrun")
    if options.command in READ_ONLY:
        return _read_only(options)
    if any(word.endswith(".toml") for word in overrides):
        parser.error(f"the recipe comes first, its settings after it: gspo {options.command} RECIPE --table.key VALUE")
    from .signals import Interrupted

    try:
        return options.run(options, overrides) or 0
    except Interrupted as error:
        _say(f"{error}; {_what_stands(options)}" if options.command == "eval" else str(error))
        return 128 + error.number
    except KeyboardInterrupt:
        _say(f"stopped at once; {_what_stands(options)}")
        return 130
    except _expected_errors() as error:
        _say(str(error))
        return 1
    except _out_of_memory() as error:
        _say(
            f"out of memory: {str(error).splitlines()[0].rstrip('.')}: lower training.micro_batch_tokens or "
            "rollout.max_rows; with the engine vllm lower rollout.vllm.memory_fraction, or set rollout.vllm.sleep = true"
        )
        return 1


def _what_stands(options: argparse.Namespace) -> str:
    """After a command was stopped."""
    if options.command != "eval":
        return "the last checkpoint, if one was written, stands"
    return "the same words go on from the samples that are written" if options.suites else "nothing of it is kept"


def _read_only(options: argparse.Namespace) -> int:
    """A command that only reads records: torch, and the errors of rooms that need it, are not imported for it."""
    from .reporting.records import RecordsError

    try:
        options.run(options)
    except KeyboardInterrupt:
        return 130
    except (OSError, RecordsError) as error:
        _say(str(error))
        return 1
    return 0


def _say(sentence: str) -> None:
    """A last sentence, in one piece; among several processes with the number of the one that says it."""
    rank = f"rank {os.environ.get('RANK', '0')}: " if _num_processes() > 1 and not sentence.startswith("rank ") else ""
    sys.stderr.write(f"gspo: {rank}{sentence}\n")


def _num_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gspo",
        description="Reinforcement learning of language models with verifiable rewards, around GSPO.",
        epilog=SETTINGS,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function, text in (
        ("train", _train, "cold start (if the recipe has one), training, evaluation and report"),
        ("sft", _sft, "the cold start alone: supervised fine-tuning on the gold answers"),
        ("eval", _eval, "measure a model on a recipe's held-out prompts, or on suites"),
        ("check", _check, "prove that gold answers are rewarded, and empty, evasive and echoing ones are not"),
    ):
        command = commands.add_parser(name, help=text, description=text, epilog=SETTINGS, allow_abbrev=False)
        command.set_defaults(run=function)
        if name == "eval":
            _add_evaluation(command)
            continue
        command.add_argument("recipe", type=Path, help="a TOML file")
        if name == "check":
            command.add_argument("--limit", type=_positive, help="look at the first rows only, this many of each source")
        else:
            command.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint of the run")
    text = "compare two evaluations on the same problems, with a p-value"
    both = commands.add_parser("compare-evals", help=text, description=text, allow_abbrev=False)
    both.add_argument("first", type=Path, help="the folder of an evaluation by suites, or of one suite in it")
    both.add_argument("second", type=Path, help="the other one")
    both.add_argument("--output", type=Path, help="also write the comparison there, as JSON")
    both.set_defaults(run=_compare_evaluations)
    _add_read_only(commands)
    return parser


def _add_read_only(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser("report", help="write a run's report.html", description="Write RUN/report.html.")
    report.add_argument("folder", type=Path, metavar="RUN", help="the folder of a run")
    report.set_defaults(run=_report)
    text = "runs side by side, with bands and intervals over seeds"
    about = "Runs that differ in nothing but the seed are one arm. Prints final scores and writes a page with the curves."
    both = commands.add_parser("compare", help=text, description=about, allow_abbrev=False)
    both.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="the folder of a run")
    both.add_argument("--by", choices=("steps", "samples", "seconds", "gpu-seconds"), default="steps", help="along what")
    both.add_argument("--output", type=Path, default=Path("comparison.html"), metavar="FILE", help="the page")
    both.set_defaults(run=_compare)
    text = "a run's report, live, while it trains"
    about = "Serve the report of a run on the loopback address, drawn anew as the run goes on, until Ctrl-C."
    watch = commands.add_parser("watch", help=text, description=about, allow_abbrev=False)
    watch.add_argument("folder", type=Path, metavar="RUN", help="the folder of a run")
    watch.add_argument("--port", type=_port, default=0, help="0, the default, takes any that is free")
    watch.set_defaults(run=_watch)


def _add_evaluation(command: argparse.ArgumentParser) -> None:
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument("what", metavar="RECIPE|MODEL", help="a TOML file; with --suite a run, a checkpoint or a model")
    command.add_argument("--from", dest="model", type=Path, help="a run, a checkpoint or a model; by default the recipe's")
    command.add_argument(
        "--suite",
        dest="suites",
        action="append",
        metavar="NAME",
        help="aime24, gsm8k, ..., or a suite's file; may be repeated",
    )
    command.epilog = (
        f"{SETTINGS}\n\nWith --suite there is no recipe, and these are the settings:\n\n{_suite_parser().format_help()}"
    )


def _suite_parser() -> argparse.ArgumentParser:
    """What may follow `gspo eval MODEL --suite NAME`. A parser of its own: a recipe's settings have some of these names."""
    parser = argparse.ArgumentParser(prog="gspo eval MODEL --suite NAME", add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="read problems from local files; by default from the hub")
    add("--preset", metavar="NAME", help="sampling settings that the suite knows by this name, e.g. qwen3")
    add("--samples", type=int, metavar="K", help="responses to each problem")
    add("--pass-at", type=int, nargs="+", metavar="K", help="the k of each pass@k")
    add("--temperature", type=float, help="0 takes the likeliest token")
    add("--top-p", type=float)
    add("--top-k", type=int)
    add("--max-response-tokens", type=int)
    add("--format", choices=("chat", "text"), help="text: no chat template, for base models")
    add("--limit", type=int, metavar="N", help="only the first N problems of each suite")
    add("--engine", choices=("transformers", "vllm"), default="transformers")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--rows", type=int, default=64, help="responses generated at the same time")
    add("--seed", type=int, default=0)
    add(
        "--output", type=Path, metavar="FOLDER", help="by default evaluations/ and the model's name; goes on if it is there"
    )
    return parser


SUITE_CHANGES = ("samples", "pass_at", "temperature", "top_p", "top_k", "max_response_tokens", "format")
"""Options that replace a setting of the suite."""


def _version() -> str:
    from . import __version__

    return f"gspo {__version__}"


def _train(options: argparse.Namespace, overrides: list[str]) -> None:
    from .loop import train
    from .recipe import load

    folder = train(load(options.recipe, overrides), resume=options.resume)
    if os.environ.get("RANK", "0") == "0":
        print(f"report: {folder / 'report.html'}")


def _sft(options: argparse.Namespace, overrides: list[str]) -> None:
    from .cold_start import cold_start
    from .distributed import open_world
    from .recipe import load
    from .training.policy import require_one_rank

    config = load(options.recipe, overrides)
    with open_world(config.model.device) as world:
        require_one_rank(config, world)
        folder = cold_start(config, resume=options.resume, world=world)
    if world.is_main:
        print(f"model: {folder}")


def _eval(options: argparse.Namespace, overrides: list[str]) -> None:
    if options.suites:
        return _eval_suites(options, overrides)
    from .evaluation.command import evaluate_model
    from .recipe import load

    print(evaluate_model(load(options.what, overrides), options.model))


def _eval_suites(options: argparse.Namespace, words: list[str]) -> None:
    parser = _suite_parser()
    given = vars(parser.parse_args(words))
    if options.model is not None:
        parser.error("--from goes with a recipe; with --suite the model is the first word")
    if wrong := [f"--{k} {given[k]}" for k in ("limit", "rows") if given[k] is not None and given[k] < 1]:
        parser.error(f"{', '.join(wrong)}: must be 1 or more")
    from .evaluation.suite_command import Options, evaluate_suites

    changes = {k: v for k in SUITE_CHANGES if (v := given.pop(k)) is not None}
    print(evaluate_suites(Options(model=options.what, suites=options.suites, changes=changes, **given)))


def _compare_evaluations(options: argparse.Namespace, overrides: list[str]) -> None:
    from .evaluation.comparison import compare

    print(compare(options.first, options.second, output=options.output))


def _check(options: argparse.Namespace, overrides: list[str]) -> int:
    from .check import check_recipe
    from .recipe import load

    checked = check_recipe(load(options.recipe, overrides), options.limit, say=print)
    print(checked.text)
    return int(bool(checked.num_failed))


def _positive(word: str) -> int:
    if not word.isascii() or not word.isdecimal() or int(word) == 0:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number above 0")
    return int(word)


def _port(word: str) -> int:
    if not word.isascii() or not word.isdecimal() or int(word) > 65535:
        raise argparse.ArgumentTypeError(f"{word!r} is no port: 0 to 65535")
    return int(word)


def _report(options: argparse.Namespace) -> None:
    from .reporting.html import write_report

    print(f"report: {write_report(options.folder)}")


def _compare(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.text import Text

    from .reporting.compare import compare, footnotes, require_page, table, write_page

    require_page(options.output)
    comparison = compare(options.folders, options.by)
    page = write_page(comparison, options.output)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # nobody's window: a file or a pipe, where a folded table cannot be read
    console.print(table(comparison))
    for sentence in footnotes(comparison):
        console.print(Text(sentence))
    print(f"page: {page}")


def _watch(options: argparse.Namespace) -> None:
    from .reporting.watch import watch

    watch(options.folder, port=options.port)


def _expected_errors() -> tuple[type[Exception], ...]:
    """Errors whose message is the whole story; any other keeps its traceback."""
    from .chat import ChatError
    from .data import DataError
    from .distributed import RankError
    from .environments import EpisodeError
    from .evaluation.evaluate import EvaluationError
    from .functions import FunctionError
    from .recipe import RecipeError
    from .reporting.records import RecordsError
    from .reporting.trackers import TrackerMissing
    from .rewards import RewardError
    from .rollout.engine import EngineError
    from .training.checkpoint import CheckpointError
    from .training.packing import TrainingError
    from .training.pretrained import ModelError

    return (
        ChatError, CheckpointError, DataError, EngineError, EpisodeError, EvaluationError, FunctionError,
        ModelError, OSError, RankError, RecipeError, RecordsError, RewardError, TrackerMissing, TrainingError,
    )  # fmt: skip


def _out_of_memory() -> type[Exception]:
    """Of a GPU, wherever it is: what holds weights, moments and caches is made in many places."""
    from torch import OutOfMemoryError

    return OutOfMemoryError


if __name__ == "__main__":
    sys.exit(main())
