"""`gspo eval`: a model on the held-out prompts of a recipe."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

from ..config import Config
from ..environments import open_environment
from ..prompts import load_prompts
from ..recipe import RecipeError
from ..reporting.terminal import Terminal
from ..rewards import build, notes
from ..rollout.engines import open_engine, open_probe, prove, require_engine
from ..signals import Signals
from ..training import checkpoint
from ..training.policy import load_policy, require_length
from .evaluate import evaluate


def evaluate_model(config: Config, model: Path | None) -> str:
    """The scores of a model, one `name value` a line.

    model: the folder of a run (its newest whole checkpoint is taken, the cold start's where there is no other), of a
    checkpoint, or of a model; None takes the recipe's. Raises RecipeError if the recipe has no evaluation or the folder
    holds no model.
    """
    if config.evaluation is None:
        raise RecipeError("the recipe has no [evaluation] table: there is nothing to measure on")
    require_engine(config)
    path = None if model is None else find_model(model)
    with Terminal("evaluation", 1, title=str(path or config.model.path or "a model with random weights")) as terminal:
        policy = load_policy(config.model, temperature=config.evaluation.temperature or 1.0, seed=config.seed, path=path)
        require_length(policy, config)
        rewards = build(config.rewards)
        for said in notes(rewards):
            terminal.note(said)
        prompts = load_prompts(
            config.evaluation.data,
            policy.tokenizer,
            rewards,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            where="evaluation.data",
            say=terminal.note,
            environment=config.environment,
        )
        with ExitStack() as stack:
            stack.enter_context(stack.enter_context(Signals()).interruptible())
            environment = stack.enter_context(closing(open_environment(config.environment)))
            engine = stack.enter_context(closing(open_engine(config, policy, terminal.note)))
            prove(engine, policy, open_probe(config, policy, prompts))
            with terminal.generation(len(prompts) * config.evaluation.samples) as progress:
                done = evaluate(
                    engine,
                    prompts,
                    rewards,
                    config.evaluation,
                    policy.tokenizer,
                    solved_at=config.solved_at,
                    progress=progress,
                    environment=environment,
                )
        terminal.step({"step": 1, **done.metrics})
    return "\n".join(f"{key.removeprefix('evaluation/'):<24} {value}" for key, value in done.metrics.items())


def find_model(folder: Path) -> Path:
    """The model inside a run, a checkpoint or a model folder. Raises RecipeError if there is none."""
    if (folder / checkpoint.MANIFEST).exists():
        return checkpoint.load(folder).model
    for checkpoints in (folder / "checkpoints", folder / "cold_start" / "checkpoints"):
        if found := checkpoint.newest(checkpoints, print):
            return found.model
        if any(checkpoints.glob("step-*")):
            raise RecipeError(f"{checkpoints}: holds no whole checkpoint")
    if not (folder / "tokenizer_config.json").exists():
        raise RecipeError(f"{folder}: holds neither a whole checkpoint nor a model with its tokenizer")
    return folder
