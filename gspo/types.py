"""The records that walk from room to room. Frozen: a room makes a new record, it never edits another's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

import numpy as np


class Message(TypedDict):
    """One chat message."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, ready to be answered: a row of a prompt source after templating and tokenising."""

    row: int
    """Row number in its source, counted from 0."""
    messages: tuple[Message, ...] | None
    """The chat, or None for a plain-text prompt."""
    text: str
    """What a person reads: the plain prompt, or the contents of the chat's messages."""
    token_ids: tuple[int, ...]
    """What the model reads, after the chat template. [prompt tokens]"""
    answer: Any
    """The gold answer, or None where the rewards need none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every column of the row, for rewards."""
    id: str = ""
    """This use of the row, `e{epoch}-r{row}` in training and `r{row}` in evaluation: groups are keyed by it, never by
    text or position, and it is part of each sample's seed."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response, as the engine returns it."""

    token_ids: np.ndarray
    """int64 [response tokens], the end-of-sequence token included where one was sampled."""
    logprobs: np.ndarray
    """float32 [response tokens]: log-probability of each token under the distribution it was sampled from."""
    finish_reason: Literal["stop", "length"]
    """`stop`: an end-of-sequence token was sampled. `length`: the limit of response tokens was reached."""
    weight_version: int
    """Number of weight updates that the policy had seen when it sampled the first token."""
    seed: int
    """Seed of this sample's own random stream."""
    later: tuple[tuple[int, int], ...] = ()
    """Where later policies went on with it: (weight version, tokens) of each run of tokens behind those of weight_version,
    in their order. Empty where one policy sampled all."""
    routed_experts: np.ndarray | None = None
    """Of a mixture of experts, where the recipe asks for it: uint8 or int16 [tokens, layers with experts, experts a token],
    which experts computed each token of prompt and response but the last. The last token may have a row too."""

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(weight version, tokens) of all runs of tokens, in their order."""
        first = len(self.token_ids) - sum(count for _, count in self.later)
        return ((self.weight_version, first), *self.later)

    @property
    def version_T(self) -> np.ndarray:
        """int64 [response tokens]: the weight version that sampled each."""
        return np.repeat(*np.array(self.versions, np.int64).T)

    def followed_by(self, more: Completion) -> Completion:
        """Both as one: the tokens of `more` behind these, with their own log-probabilities and weight versions; the seed is
        this one's, the finish reason that of `more`."""
        runs = [self.versions[0]]
        for version, count in (*self.later, *more.versions):
            if version == runs[-1][0]:
                runs[-1] = (version, runs[-1][1] + count)
            else:
                runs.append((version, count))
        return replace(
            self,
            token_ids=np.concatenate([self.token_ids, more.token_ids]),
            logprobs=np.concatenate([self.logprobs, more.logprobs]),
            finish_reason=more.finish_reason,
            later=tuple(runs[1:]),
            routed_experts=more.routed_experts,  # of all: the engine read what stood before anew
        )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, as the model asked for it."""

    name: str
    """The tool's name as the model wrote it; empty where the call could not be read."""
    arguments: str
    """The arguments as JSON, or the whole call as it stands where it could not be read."""
    output: str
    """What the model was told."""
    failed: bool
    """Whether it was told of a fault: an unknown tool, unreadable JSON, wrong arguments, an exception, a time limit."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An environment's answer to one response. `Reply(done=True)` ends the episode without a word."""

    messages: tuple[Message, ...] = ()
    """What the model is told before its next response."""
    done: bool = False
    """Whether the episode ends here; its messages are then for the records alone."""
    reward: float | None = None
    """What this response is worth, or None where the environment does not score this turn."""
    calls: tuple[ToolCall, ...] = ()
    """Tools that were called for it, for the records."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of an episode, and what came back."""

    completion: Completion
    """As the engine returned it."""
    text: str
    """The response decoded, special tokens left out."""
    reply: Reply
    """The environment's answer."""
    reply_ids: np.ndarray
    """int64 [tokens between this response and the next]: the template's and the reply's, which the policy read and did not
    sample. Empty after the last response."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with one response, or one episode of several: what a reward sees."""

    id: str
    """`s{step}/{prompt id}/{index in the group}`; errors name it."""
    prompt: Prompt
    completion: Completion
    """All that the policy sampled: of an episode the responses joined, the seed of the first, `length` where a limit of
    tokens ended it."""
    text: str
    """The response decoded, special tokens left out; of an episode the last one."""
    turns: tuple[Turn, ...] = ()
    """The responses one by one with what came back, in their order. Empty where a sample was not made by `collect`."""

    @property
    def answer(self) -> Any:
        """The gold answer of the prompt."""
        return self.prompt.answer

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy sampled, end-of-sequence tokens included."""
        return len(self.completion.token_ids)

    @property
    def num_reply_tokens(self) -> int:
        """Tokens between the responses of an episode, which the policy did not sample."""
        return sum(len(turn.reply_ids) for turn in self.turns)

    @property
    def conversation(self) -> list[Message]:
        """The chat from the prompt to the last response; a plain-text prompt is a user's message."""
        messages = list(self.prompt.messages or [Message(role="user", content=self.prompt.text)])
        for turn in self.turns:
            messages += [
                Message(role="assistant", content=turn.text),
                *(turn.reply.messages if len(turn.reply_ids) else ()),
            ]
        return messages


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A sample that is still to be sampled, or goes on in a later step: all that is known of it."""

    id: str
    """The sample's id, made when it was begun."""
    prompt: Prompt
    seed: int
    """Seed of the sample; each turn's own is made from it."""
    turns: tuple[Turn, ...] = ()
    """The turns that are done."""
    response: Completion | None = None
    """What was sampled of the response under way; None between two turns."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy has sampled."""
        under_way = () if self.response is None else (self.response,)
        return sum(len(c.token_ids) for c in (*(turn.completion for turn in self.turns), *under_way))


@dataclass(frozen=True, slots=True)
class Score:
    """One reward's verdict on one sample."""

    value: float | None
    """The reward, or None: the verifier abstains, and the sample takes no part in statistics or training."""
    why: str = ""
    """One short sentence for people."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A sample with the verdicts of all rewards, and their weighted sum."""

    sample: Sample
    total: float | None
    """Sum of weight x value over the rewards, or None if one of them abstained."""
    parts: Mapping[str, Score]
    """Verdict of each reward by its name."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What is trained on: tokens, who sampled them, and the advantage."""

    id: str
    """The sample's id."""
    group: str
    """The prompt's id: samples of one group share it."""
    token_ids: np.ndarray
    """int64 [prompt + response tokens]."""
    trained: np.ndarray
    """bool [prompt + response tokens]: True where the policy sampled the token."""
    engine_logprobs: np.ndarray
    """float32 [trained tokens]: the engine's log-probability of each trained token."""
    advantage: float | np.ndarray
    """One advantage for the response, or float32 [trained tokens] for objectives with credit by token."""
    reference_logprobs: np.ndarray | None = None
    """float32 [trained tokens]: the reference policy's log-probabilities, where a KL term needs them."""
    stale: np.ndarray | None = None
    """bool [trained tokens]: whether a policy before the one that the update starts from sampled it. None: none."""
    routed_experts: np.ndarray | None = None
    """As in Completion: the experts by which the engine computed each token but the last."""

    @property
    def num_trained(self) -> int:
        """Tokens that count in loss, length and ratio."""
        return len(self.engine_logprobs)


Advantage = float | tuple[float, ...] | None
"""Of a sample, of each of its turns, or None: a verifier abstained."""

Metrics = dict[str, Any]
"""Metric name `stage/name` to a number, or to a list of numbers for quantiles and histograms."""

Conversation = Sequence[Message]
