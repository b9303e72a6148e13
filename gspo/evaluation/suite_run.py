"""One suite on one model: what is missing is sampled, scored and written, chunk by chunk; then the scores."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..chat import decode
from ..folder import versions
from ..rewards import Built, score
from ..rollout.engine import Engine, Progress, Request, sample_seed
from ..types import Prompt, Sample, Scored
from .samples_file import SamplesFile, fingerprint, write_json
from .suite import Suite
from .suite_scores import problems_of, rating_of, scores_of


@dataclass(frozen=True, slots=True)
class Task:
    """A suite ready to be run on a model."""

    suite: Suite
    """The suite, its sampling settled."""
    prompts: Sequence[Prompt]
    """Its problems."""
    rewards: Sequence[Built]
    """What a response is worth."""
    folder: Path
    """Where samples and results go."""
    model_name: str
    """What a person calls the model."""
    model: Mapping[str, Any]
    """Its weights as a hash, engine and precision: what decides samples beside the suite."""
    seed: int
    """Seed of the responses. A sample's own is made of it, the problem's id and the sample's number."""

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides a sample and its score, the data as a hash. Samples of different settings never mix.

        The data are the problems with all their columns, which rewards may read; the prompts are the tokens that this
        model's chat template makes of them; the files are those of rewards of your own.
        """
        data = [fingerprint([p.id, p.text, p.answer, p.columns]) for p in self.prompts]
        prompts = fingerprint([list(p.token_ids) for p in self.prompts])
        suite = self.suite.model_dump(mode="json", exclude={"presets", "about", "settings_from", "local"})
        # pass_at decides no sample: more of them may be asked of the same ones.
        suite["sampling"].pop("pass_at")
        made = {"problems": len(data), "data": fingerprint(data), "prompts": prompts, "files": _files(self.suite)}
        return suite | made | {"model": dict(self.model), "seed": self.seed}


def _files(suite: Suite) -> dict[str, str]:
    """By what names it in the suite, the hash of each file that its rewards read or run."""
    named = [str(table[key]) for table in suite.rewards for key in ("function", "rubric_file") if table.get(key)]
    paths = {name: Path(name.partition(".py:")[0] + ".py" if ".py:" in name else name) for name in named}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}


def run_task(
    task: Task, engine: Engine, tokenizer: Any, *, chunk: int, progress: Progress = lambda n: None
) -> dict[str, Any]:
    """The results of a suite, also written as `results.json` into its folder.

    Only samples that the folder lacks are drawn, `chunk` at a time; each chunk is scored and on the disk before the next
    begins, so that a killed run loses one at most. A sample's tokens depend on its own seed alone: a run in pieces gives
    the samples of one in one piece. Raises EvaluationError if the folder holds samples made with other settings, and what
    engine and rewards raise.
    """
    with SamplesFile(task.folder, task.settings) as file:
        wanted = missing(task, file.rows)
        progress(len(task.prompts) * task.suite.sampling.samples - len(wanted))
        for start in range(0, len(wanted), chunk):
            file.append(_sampled(task, wanted[start : start + chunk], engine, tokenizer, progress))
        rows = file.rows
    return _write_results(task, rows)


def missing(task: Task, rows: Sequence[Mapping[str, Any]]) -> list[tuple[Prompt, int]]:
    """Problem and sample number of what is not there yet, in order."""
    have = {(row["problem"], row["index"]) for row in rows}
    return [(p, k) for p in task.prompts for k in range(task.suite.sampling.samples) if (p.id, k) not in have]


def _sampled(
    task: Task, wanted: Sequence[tuple[Prompt, int]], engine: Engine, tokenizer: Any, progress: Progress
) -> list[dict[str, Any]]:
    requests = [Request(f"s0/{p.id}/{k}", p.token_ids, sample_seed(task.seed, 0, p.id, k)) for p, k in wanted]
    completions = engine.generate(requests, task.suite.sampling, progress)
    samples = [
        Sample(r.id, p, c, decode(tokenizer, c.token_ids))
        for r, (p, _), c in zip(requests, wanted, completions, strict=True)
    ]
    scored = score(task.rewards, samples)
    return [_line(s, k) for s, (_, k) in zip(scored, wanted, strict=True)]


def _line(scored: Scored, index: int) -> dict[str, Any]:
    sample = scored.sample
    return {
        "problem": sample.prompt.id,
        "row": sample.prompt.row,
        "index": index,
        "score": scored.total,
        "parts": {name: {"value": part.value, "why": part.why} for name, part in scored.parts.items()},
        "text": sample.text,
        "tokens": sample.num_tokens,
        "finish_reason": sample.completion.finish_reason,
        "seed": sample.completion.seed,
    }


def _write_results(task: Task, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    problems = problems_of(rows, task.suite.solved_at)
    column = task.suite.rating_column
    ratings = {p.id: p.columns.get(column) for p in task.prompts} if column else {}
    settings = task.settings
    results = {
        "suite": task.suite.name,
        "model": task.model_name,
        "about": task.suite.about,
        "settings_from": task.suite.settings_from,
        "settings": settings,
        "fingerprint": fingerprint(settings),
        "versions": versions(),
        "scores": scores_of(task.suite, problems),
        "elo": rating_of(task.suite, problems, ratings),
        "problems": problems,
    }
    write_json(task.folder / "results.json", results)
    return results
