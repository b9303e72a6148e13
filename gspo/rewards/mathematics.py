"""Mathematical equality: the last box against the gold answer, in worker processes that may hang or burst."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import MathReward
from ..types import Sample, Score
from .verifier import Verifier, quoted
from .workers import Limits, Outcome, Pool, shared_pool

JUDGE = "gspo.rewards.isolated.equality:judge"
REMEMBERED = 100_000
"""Verdicts kept: members of a group often give the same answer, and epochs repeat prompts. Some 30 MB at most."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])[ \t]*")
_BARE = re.compile(r"(?:[^\s$\\]|\\(?![)\]])(?:[a-zA-Z]+)?|\\[^a-zA-Z)\]])+")


def math(config: MathReward) -> Verifier:
    """1 if the content of the response's last `\\boxed{}` equals the gold answer by docs/mathematics.md, else 0.

    A response without a box, with an unclosed last box, or with nothing readable in it scores 0; so does an answer that
    runs into the limits of time, memory or length, with that reason. One that sympy fails to compare abstains: that is no
    fault of the answer's. A gold answer that cannot be read, or runs into a
    limit itself, is an exception, and a worker that fails by itself a `workers.WorkerError`. Works in any thread. The
    limits are of each answer; see `workers.Pool` for what they do not cover.
    """
    court = Court(
        shared_pool(JUDGE, Limits(config.timeout_s, config.memory_mib, config.num_workers)), config.max_characters
    )

    def function(samples: Sequence[Sample]) -> list[Score]:
        boxes = [last_boxed(sample.text) for sample in samples]
        golds = [gold_text(sample.answer) for sample in samples]
        pairs = [None if box is None else (gold, box) for gold, box in zip(golds, boxes, strict=True)]
        verdicts = court.verdicts([pair for pair in pairs if pair is not None])
        for sample, wrong in zip(samples, court.wrong_with(golds), strict=True):
            if wrong:
                error = ValueError(f"the gold answer {quoted(sample.answer)} {wrong}")
                error.add_note(f"at sample {sample.id}")
                raise error
        return [_score(s, pair, pair and verdicts[pair]) for s, pair in zip(samples, pairs, strict=True)]

    def gold_check(answer: Any, columns: Mapping[str, Any]) -> str | None:
        if answer is None:
            return "needs a gold answer, and there is none"
        (wrong,) = court.wrong_with([gold_text(answer)])
        return f"the gold answer {quoted(answer)} {wrong}" if wrong else None

    return Verifier(function, gold_check, lambda answer, columns: f"\\boxed{{{gold_text(answer)}}}")


Verdict = tuple[bool | None, str]
"""Whether two answers are equal, None where that could not be found out; if not, what else there is to say."""


class Court:
    """Questions to the pool, each asked once: what was found is remembered for all groups."""

    def __init__(self, pool: Pool, max_characters: int) -> None:
        self.pool, self.max_characters = pool, max_characters
        self._golds: OrderedDict[str, str] = OrderedDict()
        self._pairs: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._lock = threading.Lock()

    def wrong_with(self, golds: Sequence[str]) -> list[str]:
        """What is wrong with each gold answer, as the rest of a sentence, or nothing: [answers] -> [answers]."""
        found = {gold: wrong for gold in set(golds) if (wrong := self._recall(self._golds, gold)) is not None}
        asked = [gold for gold in dict.fromkeys(golds) if gold not in found]
        for gold, outcome in zip(asked, self.pool.run([{"gold": gold} for gold in asked]), strict=True):
            failed = outcome.error and f"makes its worker fail: {outcome.error}"
            found[gold] = outcome.limit or failed or outcome.result["wrong"]
            self._remember(self._golds, gold, found[gold])
        return [found[gold] for gold in golds]

    def verdicts(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Verdict]:
        """The verdict on each pair of gold answer and answer."""
        found = {pair: verdict for pair in set(pairs) if (verdict := self._recall(self._pairs, pair)) is not None}
        asked = []
        for pair in dict.fromkeys(pairs):
            if len(pair[1]) > self.max_characters:
                found[pair] = (False, f"is longer than {self.max_characters:,} characters")
            elif pair not in found:
                asked.append(pair)
        outcomes = self.pool.run([{"gold": gold, "answer": answer} for gold, answer in asked])
        for pair, outcome in zip(asked, outcomes, strict=True):
            found[pair] = self._hear(pair, outcome)
        return found

    def _hear(self, pair: tuple[str, str], outcome: Outcome) -> Verdict:
        """The verdict of a worker, remembered unless it is a limit: on a busy machine that may be another the next time."""
        if outcome.limit:
            return False, outcome.limit
        if outcome.error:
            (wrong,) = self.wrong_with([pair[0]])
            return (False, wrong) if wrong else (None, f"could not be compared with {quoted(pair[0])}: {outcome.error}")
        self._remember(self._golds, pair[0], outcome.result["wrong"])
        verdict = (outcome.result.get("equal", False), outcome.result.get("why", ""))
        self._remember(self._pairs, pair, verdict)
        return verdict

    def _recall(self, memory: OrderedDict[Any, Any], key: Any) -> Any:
        with self._lock:
            if key in memory:
                memory.move_to_end(key)
            return memory.get(key)

    def _remember(self, memory: OrderedDict[Any, Any], key: Any, value: Any) -> None:
        with self._lock:
            memory[key] = value
            if len(memory) > REMEMBERED:
                memory.popitem(last=False)


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` or `\\fbox{...}` of a text, or None without one, or if it never closes.

    The last is the one that begins last, so of nested boxes the inner one. Without braces (`\\boxed 42`) it is what
    stands up to the next white space or end of the formula.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if text[start : start + 1] != "{":
        bare = _BARE.match(text, start)
        return bare[0].rstrip(".,;") if bare else None
    depth, escaped = 0, False
    for i in range(start, len(text)):
        if not escaped:
            depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 1 : i]
        escaped = text[i] == "\\" and not escaped
    return None


def gold_text(answer: Any) -> str:
    """A gold answer as text: the content of its last box if it has one, else all of it."""
    text = str(answer)
    box = last_boxed(text)
    return text if box is None else box


def _score(sample: Sample, pair: tuple[str, str] | None, verdict: Verdict | None) -> Score:
    if pair is None or verdict is None:
        return Score(
            0.0, "its last \\boxed{} is not closed" if _BOX.search(sample.text) else "the response has no \\boxed{}"
        )
    equal, why = verdict
    if not equal and why:
        return Score(None if equal is None else 0.0, f"{quoted(pair[1])} {why}")
    return Score(float(bool(equal)), f"{quoted(pair[1])} {'equals' if equal else 'is not'} {quoted(sample.answer)}")
