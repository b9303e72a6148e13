"""`gspo check`: what the rewards of a recipe make of its gold answers, and of answers that deserve nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from .chat import EncodeError, encode_response
from .config import Config, Source
from .environments import open_environment
from .prompts import load_prompts
from .reporting.text import visible
from .rewards import Built, RewardError, build, notes, score
from .rollout.engine import EngineError
from .rollout.engines import require_engine
from .training.pretrained import load_tokenizer
from .types import Completion, Prompt, Sample, Score

REFUSAL = "I cannot answer this question."
"""The answer without gold: what a model says that does not try."""

WRONG: dict[str, Callable[[Prompt], str]] = {
    "empty": lambda prompt: "",
    "refusal": lambda prompt: REFUSAL,
    "echo": lambda prompt: prompt.text,
}
"""The kinds of answers that deserve nothing."""

CHUNK = 256
"""Rows scored together: enough for batched rewards, little to do again where one of them raises."""

NUM_SHOWN = 10
"""Rows of one reward and kind of answer in the table of what failed, so that all kinds are seen; the counts hold all."""

WIDTH = 72
"""Characters of a reason in that table."""

TOTAL = "(sum)"
"""The name, in tables, of the weighted sum of all rewards."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """One answer that did not get what it should."""

    where: str
    """The recipe's table of prompts: `data` or `evaluation.data`."""
    row: int | None
    """Row number in its source, counted from 0; None for all rows."""
    reward: str
    """Name of the reward."""
    kind: str
    """`gold`, `empty`, `refusal` or `echo`."""
    value: float | None
    """What the reward gave, or None where it gave nothing."""
    why: str
    """One sentence."""


@dataclass(slots=True)
class Checked:
    """What was found; grows while rows are looked at."""

    failures: list[Failure] = field(default_factory=list)
    """Answers that failed: the first NUM_SHOWN of each source, reward and kind."""
    counts: dict[tuple[str, str, str], Counter[str]] = field(default_factory=dict)
    """(where, reward, kind) to how many answers `passed`, `failed`, had `no verdict` and were `not written`."""
    notes: list[str] = field(default_factory=list)
    """What could not be proven, or would stop training here, and why."""

    @property
    def num_failed(self) -> int:
        """Answers that failed."""
        return sum(count["failed"] for count in self.counts.values())

    @property
    def text(self) -> str:
        """The tables, escaped and shortened, and a last line with the result."""
        return "\n".join(_report(self))

    def count(self, where: str, reward: str, kind: str, outcome: str) -> None:
        """One answer more."""
        self.counts.setdefault((where, reward, kind), Counter())[outcome] += 1

    def fail(self, failure: Failure) -> None:
        """One answer more that failed."""
        self.count(failure.where, failure.reward, failure.kind, "failed")
        if self.counts[failure.where, failure.reward, failure.kind]["failed"] <= NUM_SHOWN:
            self.failures.append(failure)


def check_recipe(config: Config, limit: int | None = None, say: Say = print) -> Checked:
    """Score gold, empty, refusing and prompt-echoing answers to the recipe's prompts, without the policy's weights.

    limit: rows of each of `data` and `evaluation.data`; None takes all. A gold answer must get the reward's top, written
    as the reward reads it (`Verifier.gold_response`), and must fit into the response's limit of tokens. The others must
    not get the top, alone or in the sum (`solved_at`). No verdict fails a gold answer; it fails the others where
    training would stop for it, or where no answer of its kind got one. What cannot be proven is said in `notes`.

    Raises DataError, RewardError, ModelError and EpisodeError for what stops training too. Not covered: answers in other
    words than these; whether a gold answer is right; rewards without a top (length penalties, reward models,
    environments), which are not run; the engine, but for what is said of it before a start.
    """
    tokenizer, rewards = load_tokenizer(config.model), build(config.rewards)
    open_environment(config.environment).close()  # one that does not open stops training too
    checked = Checked(notes=[note for b in rewards if (note := _unproven(b))])
    for said in notes(rewards):
        say(said)
    try:
        require_engine(config)  # answers can be checked without; training would stop
    except EngineError as error:
        checked.notes.append(f"training here would stop: {error}")
    sources: list[tuple[str, Source, int]] = [("data", config.data, config.rollout.max_response_tokens)]
    if config.evaluation is not None:
        sources.append(("evaluation.data", config.evaluation.data, config.evaluation.max_response_tokens))
    for where, source, longest in sources:
        prompts = load_prompts(
            _first(source, limit),
            tokenizer,
            rewards,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            where=where,
            say=say,
        )
        look = _Look(where, tokenizer, rewards, longest, config.solved_at, checked)
        for chunk in _chunks(prompts):
            look.at_gold(chunk)
            for kind, write in WRONG.items():
                look.at_wrong(chunk, kind, write)
    _fail_what_never_got_a_verdict(checked)
    return checked


@dataclass(frozen=True, slots=True)
class _Look:
    """Answers to the prompts of one source, put before the rewards."""

    where: str
    tokenizer: Any
    rewards: Sequence[Built]
    longest: int
    solved_at: float
    checked: Checked

    def at_gold(self, prompts: Sequence[Prompt]) -> None:
        for b in self.rewards:
            if b.gold_response is None or b.top is None:
                continue
            samples = [s for p in prompts if (s := self._gold(b, p)) is not None]
            for sample, (given, _) in zip(samples, _scores(b, samples), strict=True):
                if given.value is not None and given.value >= b.top:
                    self.checked.count(self.where, b.name, "gold", "passed")
                else:
                    self._fail(sample.prompt, b.name, "gold", given)

    def at_wrong(self, prompts: Sequence[Prompt], kind: str, write: Callable[[Prompt], str]) -> None:
        samples = []
        for prompt in prompts:
            try:
                samples.append(_sample(prompt, kind, write(prompt), self.tokenizer))
            except EncodeError:
                self.checked.count(self.where, "", kind, "not written")
        tops = [b for b in self.rewards if b.top is not None]
        columns = [_scores(b, samples) for b in tops]
        for i, sample in enumerate(samples):
            failed = [self._wrong(b, sample, kind, *column[i]) for b, column in zip(tops, columns, strict=True)]
            if len(tops) == len(self.rewards) > 1 and not any(failed):
                self._sum(sample.prompt, kind, [column[i][0].value for column in columns])

    def _wrong(self, b: Built, sample: Sample, kind: str, given: Score, crashed: bool) -> bool:
        """Whether the answer failed."""
        if given.value is None and not (crashed and b.on_error == "raise"):
            self.checked.count(self.where, b.name, kind, "no verdict")
            return False
        if given.value is None or (b.top is not None and given.value >= b.top):
            self._fail(sample.prompt, b.name, kind, given)
            return True
        self.checked.count(self.where, b.name, kind, "passed")
        return False

    def _sum(self, prompt: Prompt, kind: str, values: Sequence[float | None]) -> None:
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return  # the sample takes no part in training
        total = math.fsum(b.weight * value for b, value in zip(self.rewards, known, strict=True))
        if total >= self.solved_at:
            self._fail(prompt, TOTAL, kind, Score(total, f"reaches solved_at = {self.solved_at:g}"))
        else:
            self.checked.count(self.where, TOTAL, kind, "passed")

    def _gold(self, b: Built, prompt: Prompt) -> Sample | None:
        """The gold answer as a response, or None where it cannot be one: that has failed then."""
        assert b.gold_response is not None
        text = b.gold_response(prompt.answer, prompt.columns)
        if not isinstance(text, str):
            raise RewardError(f"reward {b.name}: gold_response gave a {type(text).__name__} for row {prompt.row}, not text")
        try:
            sample = _sample(prompt, "gold", text, self.tokenizer)
        except EncodeError as error:
            self._fail(prompt, b.name, "gold", Score(None, f"the policy cannot write it: {error}"))
            return None
        if sample.num_tokens < self.longest:  # one more ends the response
            return sample
        why = f"it is {sample.num_tokens} tokens and an end, more than max_response_tokens = {self.longest}"
        self._fail(prompt, b.name, "gold", Score(None, why))
        return None

    def _fail(self, prompt: Prompt, reward: str, kind: str, given: Score) -> None:
        self.checked.fail(Failure(self.where, prompt.row, reward, kind, given.value, given.why))


def _scores(b: Built, samples: Sequence[Sample]) -> list[tuple[Score, bool]]:
    """A reward's verdict on each sample, and whether it raised for it. Whatever stops all of training travels."""
    strict = replace(b, on_error="raise")
    try:
        return [(scored.parts[b.name], False) for scored in score([strict], samples)]
    except RewardError as error:
        if not _is_about_a_sample(error):
            raise
        if len(samples) == 1:
            return [(Score(None, str(error)), True)]
        return [one for sample in samples for one in _scores(b, [sample])]


def _is_about_a_sample(error: RewardError) -> bool:
    """Whether the reward raised something that `on_error` decides about."""
    return isinstance(error.__cause__, Exception) and not isinstance(error.__cause__, RewardError)


def _sample(prompt: Prompt, kind: str, text: str, tokenizer: Any) -> Sample:
    ids = np.array(encode_response(tokenizer, text), np.int64)
    return Sample(f"{prompt.id}/{kind}", prompt, Completion(ids, np.zeros(len(ids), np.float32), "stop", 0, 0), text)


def _first(source: Source, limit: int | None) -> Source:
    limits = [n for n in (limit, source.limit) if n is not None]
    return source.model_copy(update={"limit": min(limits, default=None)})


def _chunks(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    rest = iter(prompts)
    while chunk := list(islice(rest, CHUNK)):
        yield chunk


def _unproven(b: Built) -> str | None:
    if b.top is None:
        return f"reward {b.name}: no value of it means that a response is right: not run, nor the sum looked at"
    if b.gold_response is None:
        return f"reward {b.name}: does not say how a gold answer is written: gold answers are not proven for it"
    return None


def _fail_what_never_got_a_verdict(checked: Checked) -> None:
    for (where, reward, kind), count in checked.counts.items():
        if count["no verdict"] and not count["passed"] + count["failed"]:
            count["failed"] = count.pop("no verdict")
            checked.failures.append(Failure(where, None, reward, kind, None, "no answer of this kind got a verdict"))


def _report(checked: Checked) -> Iterator[str]:
    columns = ("passed", "failed", "no verdict")
    rows = [[*key, *(f"{count[c]:,}" for c in columns)] for key, count in checked.counts.items() if key[1]]
    yield from _table(["prompts", "reward", "answer", *columns], rows)
    for (where, reward, kind), count in checked.counts.items():
        if not reward:
            tried = f"{where}: {count['not written']:,} answers {kind} were not tried"
            yield f"{tried}: the policy's tokenizer cannot write them"
    yield from checked.notes
    if checked.failures:
        more = any(count["failed"] > NUM_SHOWN for count in checked.counts.values())
        yield f"\nWhat failed{f', the first {NUM_SHOWN} of each kind' if more else ''}:"
        yield from _table(["prompts", "row", "reward", "answer", "score", "why"], [_row(f) for f in checked.failures])
    if checked.num_failed:
        one = checked.num_failed == 1
        yield f"\n{checked.num_failed:,} answer{'' if one else 's'} did not get what {'it' if one else 'they'} should"
    else:
        yield "every answer that was tried got what it should" if rows else "nothing was tried"


def _table(head: list[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    lines = [head, *([visible(cell, keep="") for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _row(f: Failure) -> list[str]:
    row, value = "all" if f.row is None else str(f.row), "none" if f.value is None else f"{f.value:g}"
    return [f.where, row, f.reward, f.kind, value, f.why if len(f.why) <= WIDTH else f.why[: WIDTH - 1] + "…"]
