"""Supervised fine-tuning: imitate the gold responses. The same data, packing, optimizer and checkpoints as the loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from . import chat, data
from .config import ColdStartConfig, Config
from .distributed import ALONE, World
from .environments import open_environment
from .evaluation.evaluate import sample_and_score, summarise
from .folder import Clock, leave_folder, newest_checkpoint, open_folder
from .prompts import Say, load_prompts, training_and_evaluation_prompts
from .recipe import RecipeError
from .reporting.records import RunRecords
from .reporting.terminal import Terminal
from .rewards import build
from .rollout.transformers import TransformersEngine
from .signals import Interrupted, Signals
from .training import checkpoint
from .training.optimizer import Optimizer
from .training.packing import TrainingError, make_micro_batches
from .training.policy import Policy, load_policy, require_length, shard
from .training.routing import require_routing
from .training.sharding import share_by_tokens
from .types import Metrics, Prompt, Trajectory


def cold_start(config: Config, *, resume: bool = False, world: World = ALONE) -> Path:
    """Fine-tune as `[cold_start]` says and return the folder of the resulting model.

    Records and checkpoints go to `cold_start/` in the run's folder; what is finished there is not done again.
    Raises RecipeError without a `[cold_start]` table, DataError for faulty data, TrainingError for a gradient that is
    not finite, and Interrupted, after a checkpoint, when a signal asked to stop. All ranks of a world call it.
    """
    if config.cold_start is None:
        raise RecipeError("the recipe has no [cold_start] table: there is nothing to imitate")
    open_environment(config.environment).close()  # one that does not open is found now, not at the first evaluation
    folder = world.first(lambda: open_folder(config, resume=resume))
    try:
        return _imitated(config, config.cold_start, folder / "cold_start", world)
    finally:
        leave_folder(folder)


def _imitated(config: Config, table: ColdStartConfig, folder: Path, world: World) -> Path:
    found = world.first(lambda: newest_checkpoint(folder, resume=True, say=print))
    if found and found.state["finished"]:
        return found.model
    done = found.state["step"] if found else 0
    silent = not world.is_main
    with (
        Terminal(f"{config.name} cold start", table.steps, done=done, silent=silent) as terminal,
        Signals(world) as signals,
    ):
        weights = found.model if found and config.model.lora is None else None
        policy = load_policy(config.model, temperature=config.rollout.temperature, seed=config.seed, path=weights)
        require_length(policy, config)
        require_routing(policy, config)
        shard(policy, world)
        prompts, examples, measure = load_examples(config, policy, terminal.note)
        optimizer = Optimizer(policy.trainable, table, table.steps, policy.dtype)
        records, clock, cursor = RunRecords(folder), Clock(), data.Cursor()
        if found:
            found.restore(optimizer)
            cursor = data.Cursor.of(found.state["cursor"])
        if world.is_main:
            records.truncate_after(done)
        for step in range(done + 1, table.steps + 1):
            batch, cursor = data.take(prompts, cursor, table.batch_size, config.seed)
            rate = optimizer.learning_rate
            loss, norm = imitate(policy, optimizer, [examples[p.row] for p in batch])
            row: Metrics = {"step": step, "time": time.time(), "cold_start/loss": loss, "update/grad_norm": norm}
            row["update/skipped"] = step - optimizer.updates
            if table.evaluate_every and step % table.evaluate_every == 0:
                row |= measure()
            if world.is_main:
                records.append({**row, "update/learning_rate": rate, "time/step_s": clock.take()["time/step_s"]})
            terminal.step(row)
            asked = signals.asked()
            finished = step == table.steps or _good_enough(row, table)
            every = config.checkpoint.every
            if finished or asked or (every is not None and step % every == 0):
                state, keep = {"cursor": cursor.state(), "finished": finished}, config.checkpoint.keep
                saved = checkpoint.save(folder / "checkpoints", policy, optimizer, state, step=step, keep=keep)
                if finished:
                    return checkpoint.load(saved).model
            if asked:
                raise Interrupted(asked)
    raise AssertionError("unreachable: the last step finishes the cold start")


def _good_enough(row: Metrics, table: ColdStartConfig) -> bool:
    return table.stop_at is not None and row.get("evaluation/reward", -math.inf) >= table.stop_at


def load_examples(
    config: Config, policy: Policy, say: Say
) -> tuple[list[Prompt], dict[int, Trajectory], Callable[[], Metrics]]:
    """The prompts of the cold start, by row the tokens to imitate (prompt, response, end of sequence), and a function
    that measures the policy on the evaluation prompts.

    Evaluation prompts are kept out as `evaluation.overlap` says. Raises DataError for a response that is missing, empty
    or longer than the limits, by row.
    """
    table, rewards = config.cold_start, build(config.rewards)
    assert table is not None
    prompts, evaluation = training_and_evaluation_prompts(config, policy.tokenizer, rewards, say)
    if table.data is not None:
        limit, where = config.rollout.max_prompt_tokens, "cold_start.data"
        prompts = load_prompts(
            table.data,
            policy.tokenizer,
            [],
            max_prompt_tokens=limit,
            where=where,
            say=say,
            environment=config.environment,
        )
        if config.evaluation is not None:
            prompts, _ = data.separate(prompts, evaluation, config.evaluation.overlap)
    examples = {p.row: _example(p, config, policy) for p in prompts}
    faults = [data.Fault(row, what) for row, what in examples.items() if isinstance(what, str)]
    whole = {row: example for row, example in examples.items() if not isinstance(example, str)}
    source, where = (config.data, "cold start, data") if table.data is None else (table.data, "cold_start.data")
    prompts, dropped = data.settle([p for p in prompts if p.row in whole], faults, source, where)
    if dropped:
        say(f"{where}: dropped {dropped} rows with faulty responses, e.g. row {faults[0].row}: {faults[0].what}")
    if len(prompts) < table.batch_size:
        raise data.DataError(f"cold start: {len(prompts)} prompts do not fill cold_start.batch_size = {table.batch_size}")
    engine = TransformersEngine(policy, max_rows=config.rollout.max_rows)

    def measure() -> Metrics:
        assert config.evaluation is not None
        with policy.whole(), closing(open_environment(config.environment)) as environment:
            mine = policy.world.share(evaluation)
            scored = sample_and_score(engine, mine, rewards, config.evaluation, policy.tokenizer, environment=environment)
        return summarise(policy.world.merge(scored), config.evaluation, solved_at=config.solved_at).metrics

    return prompts, whole, measure


def _example(prompt: Prompt, config: Config, policy: Policy) -> Trajectory | str:
    """The tokens to imitate, or what is wrong with the row."""
    table = config.cold_start
    assert table is not None
    response = prompt.answer if table.response_column is None else prompt.columns.get(table.response_column)
    if response is None or not str(response).strip():
        return f"no response to imitate in {table.response_column or 'the answer column'}"
    try:
        ids = [*chat.encode_response(policy.tokenizer, str(response)), policy.end_id]
    except chat.EncodeError as error:
        return f"response: {error}"
    tokens = np.array([*prompt.token_ids, *ids])
    for name, limit, have in (
        ("rollout.max_response_tokens", config.rollout.max_response_tokens, len(ids)),
        ("cold_start.micro_batch_tokens", table.micro_batch_tokens, len(tokens)),
    ):
        if have > limit:
            return f"{have} tokens to imitate, more than {name} = {limit}"
    trained = np.arange(len(tokens)) >= len(prompt.token_ids)
    return Trajectory(f"row {prompt.row}", str(prompt.row), tokens, trained, np.zeros(len(ids), np.float32), 0.0)


def imitate(policy: Policy, optimizer: Optimizer, examples: Sequence[Trajectory]) -> tuple[float, float | None]:
    """One update on the mean negative log-likelihood of the response tokens; returns it and the gradient norm, which is
    None where float16 overflowed, the update was left out and the loss scale lowered.

    At temperature 1 whatever the sampling temperature. Ranks share the examples by tokens. Raises TrainingError if the
    gradient is not finite otherwise.
    """
    total, loss, world = sum(t.num_trained for t in examples), 0.0, policy.world
    mine, budget = share_by_tokens(examples, world), optimizer.config.micro_batch_tokens
    micro_batches = make_micro_batches(mine, token_budget=budget, device=policy.device)
    for micro in micro_batches:
        logp_T, _ = policy.score(micro, temperature=1.0)
        share = -logp_T.sum() / total
        loss += float(share.detach())
        optimizer.backward(share)
    if policy.shards:
        policy.shards.idle(world.most([len(micro_batches)])[0] - len(micro_batches), optimizer.backward)
    optimizer.step()
    (loss,), norm = world.sums([loss]), optimizer.settle()
    if optimizer.lowered:
        return loss, None
    if not math.isfinite(norm):
        raise TrainingError(f"cold start: the gradient is not finite on {', '.join(t.id for t in examples)}")
    return loss, norm
