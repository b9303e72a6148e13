"""`gspo eval MODEL --suite NAME`: a model on suites, without a recipe."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..config import Config
from ..recipe import build as build_config
from ..reporting.terminal import Terminal
from ..rewards import build, notes
from ..rollout.engines import open_engine, open_probe, prove, require_engine
from ..signals import Signals
from ..training.policy import Policy, load_policy
from .command import find_model
from .evaluate import EvaluationError
from .samples_file import require_same
from .suite import Suite, load_suite, rewards_of
from .suite_rows import suite_prompts, suite_rows
from .suite_run import Task, run_task
from .suite_scores import table

NUM_PROBED = 4096
"""Weights of each tensor that go into a model's hash: a step of training moves all of them."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    model: str
    """A run, a checkpoint, a model folder or a hub name."""
    suites: Sequence[str]
    """Names or files."""
    data: Path | None = None
    """Folder of local files, or one file; None takes the hub."""
    preset: str | None = None
    """Sampling settings of that name, of every suite."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Sampling settings and prompt format that replace every suite's."""
    limit: int | None = None
    """The first problems of each suite, this many."""
    engine: str = "transformers"
    """Who generates."""
    dtype: str = "bfloat16"
    """Precision of the model: what models are published and served in."""
    device: str = "auto"
    """Where it computes."""
    rows: int = 64
    """Responses generated at the same time. 64: a small model's cache stays under a gigabyte; a GPU takes more."""
    seed: int = 0
    """Seed of the responses."""
    output: Path | None = None
    """Folder of the results; None: evaluations/ and the model's name."""


def evaluate_suites(options: Options) -> str:
    """Run every suite, and return their table; samples and results are in the output's folder, one folder a suite.

    Raises EvaluationError, before anything is sampled, for suites, data, rewards, lengths and settings that do not fit.
    """
    suites = [load_suite(name, preset=options.preset, changes=options.changes) for name in options.suites]
    if twice := {s.name for s in suites if [t.name for t in suites].count(s.name) > 1}:
        raise EvaluationError(f"{', '.join(sorted(twice))} is named twice: each suite has one folder, name it once")
    rewards = [build(rewards_of(suite)) for suite in suites]
    rows = [suite_rows(suite, options.data, options.limit) for suite in suites]
    path = str(find_model(Path(options.model))) if Path(options.model).exists() else options.model
    require_engine(_config(options, path, 1, 1))
    output = options.output or Path("evaluations") / _folder_name(options.model)
    if output.exists() and not output.is_dir():
        raise EvaluationError(f"--output {output}: is a file; results are a folder: name another place")
    total = sum(len(r) * s.sampling.samples for s, r in zip(suites, rows, strict=True))
    with Terminal("evaluation", len(suites), title=path) as terminal:
        policy = load_policy(_config(options, path, 1, 1).model, temperature=1.0, seed=options.seed)
        model = {"weights": weights_hash(policy), "engine": options.engine, "dtype": options.dtype}
        tasks = [
            Task(suite, suite_prompts(suite, r, policy.tokenizer, b), b, output / suite.name, path, model, options.seed)
            for suite, r, b in zip(suites, rows, rewards, strict=True)
        ]
        config = _sized(options, path, policy, tasks)
        for task in tasks:
            require_same(task.folder, task.settings)
            for line in (*suite_settings(task.suite), *notes(task.rewards)):
                terminal.note(line)
        with Signals() as signals, signals.interruptible(), closing(open_engine(config, policy, terminal.note)) as engine:
            prove(engine, policy, open_probe(config, policy, tasks[0].prompts))
            with terminal.generation(total) as progress:
                results = []
                for number, task in enumerate(tasks, 1):
                    done = run_task(task, engine, policy.tokenizer, chunk=2 * options.rows, progress=progress)
                    results.append(done)
                    terminal.step({"step": number})
                    terminal.note(f"{task.suite.name}: {task.folder / 'results.json'}")
    return table(results)


def weights_hash(policy: Policy) -> str:
    """SHA-256 over names, shapes and up to NUM_PROBED evenly spread weights of each tensor, in hexadecimal.

    It tells a model from another and from itself after a step of training. Not covered: a change of few single weights.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(policy.model.state_dict().items()):
        step = max(1, tensor.numel() // NUM_PROBED)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().reshape(-1)[::step].to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()


def _sized(options: Options, path: str, policy: Policy, tasks: Sequence[Task]) -> Config:
    """The settings of an engine that holds the longest sample. Raises EvaluationError if the model does not."""
    positions = getattr(policy.model.config, "max_position_embeddings", None)
    for task in tasks:
        prompt, response = max(len(p.token_ids) for p in task.prompts), task.suite.sampling.max_response_tokens
        if positions is not None and prompt + response > positions:
            room = f"--max-response-tokens {positions - prompt} or less" if prompt < positions else "another model"
            raise EvaluationError(
                f"suite {task.suite.name}: its longest prompt ({prompt} tokens) and response ({response}) need "
                f"{prompt + response} positions, and the model has {positions}: use {room}"
            )
    longest_prompt = max(len(p.token_ids) for task in tasks for p in task.prompts)
    return _config(options, path, longest_prompt, max(t.suite.sampling.max_response_tokens for t in tasks))


def _config(options: Options, path: str, prompt: int, response: int) -> Config:
    """Engines take their settings from a recipe: one that loads this model, and trains nothing."""
    return build_config(
        {
            "name": "evaluation",
            "seed": options.seed,
            "model": {"path": path, "dtype": options.dtype, "device": options.device},
            "data": {"source": "jsonl", "path": "nothing is trained"},
            "rewards": [{"type": "exact"}],
            "rollout": {
                "engine": options.engine,
                "max_rows": options.rows,
                "max_prompt_tokens": prompt,
                "max_response_tokens": response,
            },
            "training": {"steps": 1, "micro_batch_tokens": max(8192, prompt + response)},
        },
        "gspo eval",
    )


def _folder_name(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", model.strip("/").rpartition("/")[2]) or "model"


def suite_settings(suite: Suite) -> list[str]:
    """A suite in three lines, for people: what it asks, how it samples, and where these settings come from."""
    sampling = ", ".join(f"{k} = {v}" for k, v in suite.sampling.model_dump().items())
    return [f"{suite.name}: {suite.about}", f"  {sampling}", f"  {' '.join(suite.settings_from.split())}"]
