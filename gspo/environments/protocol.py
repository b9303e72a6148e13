"""What an environment is: messages in, messages out. It never sees a token."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..types import Message, Reply, Turn


class EpisodeError(Exception):
    """An environment that cannot be built, or failed; the message names it, and the sample."""


class Episode(Protocol):
    """The state of one episode. Any object with this method will do."""

    def step(self, messages: Sequence[Message]) -> Reply:
        """The answer to the last message, which is the model's, given the whole conversation so far."""
        ...


@dataclass(frozen=True, slots=True)
class Environment:
    """How episodes of a prompt go on after the first response. The first messages are the prompt's own, so that all
    episodes of a group start alike."""

    start: Callable[[Mapping[str, Any]], Episode]
    """A new episode, from the columns of the prompt's row."""
    max_turns: int = 1
    """Responses of an episode at most."""
    max_turn_tokens: int | None = None
    """Tokens of one response at most; None: as many as are left of the episode's."""
    workers: int = 1
    """Episodes whose step runs at the same time, in threads."""
    close: Callable[[], None] = lambda: None
    """Gives back what it holds: processes."""
    resume: Callable[[Mapping[str, Any], Sequence[Turn]], Episode] | None = None
    """An episode as it was after these turns, from the columns of the prompt's row. None: it is started and asked again."""

    @property
    def is_single_turn(self) -> bool:
        """Whether no reply is ever read by the model."""
        return self.max_turns == 1

    def resumed(self, columns: Mapping[str, Any], turns: Sequence[Turn]) -> Episode:
        """An episode after these turns where `resume` can tell, else a new one."""
        return self.resume(columns, turns) if self.resume and turns else self.start(columns)


class _Once:
    def step(self, messages: Sequence[Message]) -> Reply:
        return Reply(done=True)


SINGLE_TURN = Environment(start=lambda columns: _Once())
"""The environment of a recipe without one: every response ends its episode."""


def checked(reply: Any, sample: str) -> Reply:
    """The reply, believed in nothing. Raises EpisodeError, by sample, for one that cannot be used."""
    if not isinstance(reply, Reply):
        raise EpisodeError(
            f"the environment answered sample {sample} with a {type(reply).__name__}, not a gspo.types.Reply"
        )
    reward = reply.reward
    if reward is not None and not (isinstance(reward, numbers.Real) and math.isfinite(reward)):
        raise EpisodeError(
            f"the environment gave a turn of sample {sample} the reward {reward!r}, not a finite number or None"
        )
    for message in reply.messages:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise EpisodeError(
                f"the environment answered sample {sample} with {message!r}, not a message of role and content"
            )
    if not reply.done and not reply.messages:
        raise EpisodeError(
            f"the environment neither ended the episode of sample {sample} nor said anything: set done = True"
        )
    return reply if reward is None else replace(reply, reward=float(reward))  # a Fraction cannot be recorded
