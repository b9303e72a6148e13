"""Prompts to samples: a group of episodes to each prompt, all turn by turn together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from ..chat import EncodeError, continuation, decode
from ..config import SamplingConfig
from ..environments import SINGLE_TURN, Environment, EpisodeError
from ..environments.protocol import checked
from ..types import Completion, Message, Prompt, Reply, Sample, Turn
from .engine import Engine, Progress, Request, sample_seed, turn_seed

NOTHING = np.zeros(0, np.int64)


def collect(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    tokenizer: Any,
    *,
    group_size: int,
    seed: int,
    step: int,
    progress: Progress = lambda n: None,
    environment: Environment = SINGLE_TURN,
) -> list[list[Sample]]:
    """group_size samples to each prompt, one list a prompt instance, in their order.

    In each turn the engine samples for all episodes that go on, then the environment answers each. An episode ends when the
    environment says so, after its max_turns, with a response that its limit of tokens cut, or where no token is left after
    the reply: max_response_tokens bounds all that follows the prompt, replies included.

    Raises ValueError if two prompts share an id: they would share their random numbers too. Raises EpisodeError, by sample,
    for an environment that fails or answers with what cannot be used.
    """
    if len({p.id for p in prompts}) < len(prompts):
        raise ValueError("prompts that are sampled together need ids of their own: seeds are made from them")
    groups = [
        [
            _Running(f"s{step}/{p.id}/{k}", p, sample_seed(seed, step, p.id, k), environment, sampling.max_response_tokens)
            for k in range(group_size)
        ]
        for p in prompts
    ]
    live = [episode for group in groups for episode in group]
    by_token = progress if environment.is_single_turn else lambda n: None  # a response is then not yet a sample
    with ThreadPoolExecutor(environment.workers) as pool:
        while live:
            completions = engine.generate([e.request() for e in live], sampling, by_token)
            texts = [decode(tokenizer, c.token_ids) for c in completions]
            replies = pool.map(_Running.reply, live, texts) if environment.workers > 1 else map(_Running.reply, live, texts)
            parts = zip(live, completions, texts, replies, strict=True)
            going_on = [e for e, completion, text, reply in parts if e.goes_on(completion, text, reply, tokenizer)]
            if not environment.is_single_turn:
                progress(len(live) - len(going_on))
            live = going_on
    return [[episode.sample() for episode in group] for group in groups]


class _Running:
    """One episode while it runs."""

    def __init__(self, name: str, prompt: Prompt, seed: int, environment: Environment, budget: int) -> None:
        self.name, self.prompt, self.seed, self.environment = name, prompt, seed, environment
        self.left = budget
        """Tokens that may still follow."""
        self.ids = list(prompt.token_ids)
        """All that the policy has read or sampled."""
        self.messages = list(prompt.messages or [Message(role="user", content=prompt.text)])
        self.turns: list[Turn] = []
        self.cut = False
        try:
            self.state = environment.start(prompt.columns)
        except Exception as error:  # the environment is the user's own: say whose failure it is
            raise EpisodeError(f"the environment cannot start sample {name}: {type(error).__name__}: {error}") from error

    def request(self) -> Request:
        """The next response to sample, after all that was read and sampled before."""
        limit = min(self.left, self.environment.max_turn_tokens or self.left)
        return Request(self.name, tuple(self.ids), turn_seed(self.seed, len(self.turns)), limit)

    def reply(self, text: str) -> Reply:
        """The environment's answer to a response."""
        self.messages.append(Message(role="assistant", content=text))
        try:
            return checked(self.state.step(list(self.messages)), self.name)
        except EpisodeError:
            raise
        except Exception as error:
            raise EpisodeError(f"the environment failed on sample {self.name}: {type(error).__name__}: {error}") from error

    def goes_on(self, completion: Completion, text: str, reply: Reply, tokenizer: Any) -> bool:
        """Takes down a turn; whether another follows."""
        self.left -= len(completion.token_ids)
        self.cut = completion.finish_reason == "length"
        between = NOTHING
        if not (self.cut or reply.done or len(self.turns) + 1 == self.environment.max_turns):
            between = self._between(int(completion.token_ids[-1]), reply, tokenizer)
            if len(between) >= self.left:  # no token could follow
                self.cut, between = True, NOTHING
        self.turns.append(Turn(completion, text, reply, between))
        self.ids += [*completion.token_ids.tolist(), *between.tolist()]
        self.left -= len(between)
        self.messages += reply.messages
        return len(between) > 0

    def _between(self, last: int, reply: Reply, tokenizer: Any) -> np.ndarray:
        try:
            ids = continuation(tokenizer, reply.messages, last=last, chat=self.prompt.messages is not None)
        except EncodeError as error:
            raise EpisodeError(f"the reply to sample {self.name} cannot be put into tokens: {error}") from error
        if not ids:
            raise EpisodeError(f"the reply to sample {self.name} has no tokens: the model would be asked nothing")
        return np.array(ids, np.int64)

    def sample(self) -> Sample:
        """The finished episode."""
        first, last = self.turns[0].completion, self.turns[-1]
        completion = first
        if len(self.turns) > 1:
            tokens, logprobs = (
                np.concatenate([getattr(turn.completion, name) for turn in self.turns])
                for name in ("token_ids", "logprobs")
            )
            experts = last.completion.routed_experts  # the last turn's: the engine read all before it anew
            completion = replace(first, token_ids=tokens, logprobs=logprobs, routed_experts=experts)
        if completion.finish_reason != (reason := "length" if self.cut else "stop"):
            completion = replace(completion, finish_reason=reason)
        return Sample(self.name, self.prompt, completion, last.text, tuple(self.turns))
