"""The command line. Everything heavy is imported after the words are understood, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

SETTINGS = "Any setting of the recipe can be given as --table.key VALUE, e.g. --training.learning_rate 1e-6."


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for an error said in a sentence, 128 + n after signal n."""
    parser = _parser()
    if any(not word.strip() for word in (sys.argv[1:] if words is None else words)):
        parser.error("an empty word on the command line: leave it out")
    options, overrides = parser.parse_known_args(words)
    if overrides and options.command == "report":
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    if options.command in ("eval", "report") and _num_processes() > 1:
        parser.error(f"gspo {options.command} runs in one process: start it without torchrun")
    if any(word.endswith(".toml") for word in overrides):
        parser.error(f"the recipe comes first, its settings after it: gspo {options.command} RECIPE --table.key VALUE")
    from .signals import Interrupted

    try:
        return options.run(options, overrides) or 0
    except Interrupted as error:
        _say(str(error))
        return 128 + error.number
    except KeyboardInterrupt:
        _say("stopped at once; the last checkpoint stands")
        return 130
    except _expected_errors() as error:
        _say(str(error))
        return 1


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
        ("eval", _eval, "measure a model on the recipe's held-out prompts"),
    ):
        command = commands.add_parser(name, help=text, description=text, epilog=SETTINGS, allow_abbrev=False)
        command.add_argument("recipe", type=Path, help="a TOML file")
        command.set_defaults(run=function)
        if name != "eval":
            command.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint of the run")
        else:
            command.add_argument(
                "--from", dest="model", type=Path, help="a run, a checkpoint or a model; by default the recipe's"
            )
    report = commands.add_parser("report", help="write a run's report.html", description="Write RUN/report.html.")
    report.add_argument("folder", type=Path, metavar="RUN", help="the folder of a run")
    report.set_defaults(run=_report)
    return parser


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
    from .evaluation.command import evaluate_model
    from .recipe import load

    print(evaluate_model(load(options.recipe, overrides), options.model))


def _report(options: argparse.Namespace, overrides: list[str]) -> None:
    from .recipe import RecipeError
    from .reporting.html import write_report

    try:
        print(f"report: {write_report(options.folder)}")
    except (OSError, ValueError) as error:  # a folder that is no run, or damaged records; both name the file
        raise RecipeError(str(error)) from error


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
    from .training.policy import ModelError

    return (
        ChatError, CheckpointError, DataError, EngineError, EpisodeError, EvaluationError, FunctionError,
        ModelError, OSError, RankError, RecipeError, RecordsError, RewardError, TrackerMissing, TrainingError,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
