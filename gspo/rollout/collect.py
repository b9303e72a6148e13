"""Prompts to samples: a group of episodes to each prompt, all turn by turn together, within a step or over several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from ..chat import EncodeError, continuation, decode
from ..config import SamplingConfig
from ..environments import SINGLE_TURN, Environment, EpisodeError
from ..environments.protocol import checked
from ..types import Completion, Message, Prompt, Reply, Sample, Turn, Unfinished
from .engine import Engine, Progress, Request, sample_seed, turn_seed

NOTHING = np.zeros(0, np.int64)

Group = list[Sample | Unfinished]
"""The samples of one prompt instance."""


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
    """group_size samples to each prompt, one list a prompt instance, in their order; raises what `begin` and `go_on` do."""
    begun = begin(prompts, group_size=group_size, seed=seed, step=step)
    return whole(go_on(engine, begun, sampling, tokenizer, progress=progress, environment=environment))


def begin(prompts: Sequence[Prompt], *, group_size: int, seed: int, step: int) -> list[Group]:
    """Groups of which nothing is sampled yet, one a prompt instance.

    Raises ValueError if two prompts share an id: they would share their random numbers too.
    """
    if len({p.id for p in prompts}) < len(prompts):
        raise ValueError("prompts that are sampled together need ids of their own: seeds are made from them")
    return [
        [Unfinished(f"s{step}/{p.id}/{k}", p, sample_seed(seed, step, p.id, k)) for k in range(group_size)] for p in prompts
    ]


def whole(groups: Iterable[Group]) -> list[list[Sample]]:
    """The groups of which every sample is finished."""
    return [list(g) for g in groups if all(isinstance(s, Sample) for s in g)]  # type: ignore[arg-type]


def unfinished(groups: Iterable[Group]) -> list[Group]:
    """The other groups."""
    return [g for g in groups if any(isinstance(s, Unfinished) for s in g)]


def num_tokens(groups: Iterable[Group]) -> int:
    """Tokens that the policy has sampled of them."""
    return sum(s.num_tokens for group in groups for s in group)


def go_on(
    engine: Engine,
    groups: Sequence[Group],
    sampling: SamplingConfig,
    tokenizer: Any,
    budget: int | None = None,
    progress: Progress = lambda n: None,
    environment: Environment = SINGLE_TURN,
) -> list[Group]:
    """The groups with what is unfinished sampled to its end, or until an episode has `budget` tokens more: it is then
    suspended, in the middle of a response or between two.

    In each turn the engine samples for all episodes that go on, then the environment answers each. An episode ends when the
    environment says so, after its max_turns, with a response that its limit of tokens cut, or where no token is left after
    the reply: max_response_tokens bounds all that follows the prompt, replies included.

    A suspended episode goes on with its own random numbers: under unchanged weights it becomes what it would have become
    without a budget, up to the engine's rounding. Its environment is made anew and asked again.

    Raises EpisodeError, by sample, for an environment that fails or answers with what cannot be used, or otherwise than it
    did before the episode was suspended.
    """
    budget = budget or sampling.max_response_tokens
    by_token = progress if environment.is_single_turn else lambda n: None  # a response is then not yet a sample
    with ThreadPoolExecutor(environment.workers) as pool:
        in_threads: Callable[..., Iterable[Any]] = pool.map if environment.workers > 1 else map
        todo = [s for group in groups for s in group if isinstance(s, Unfinished)]
        running = list(in_threads(lambda s: _Running(s, environment, sampling.max_response_tokens, budget), todo))
        live = running
        while live:
            completions = engine.generate([e.request() for e in live], sampling, by_token)
            answered = [e for e, completion in zip(live, completions, strict=True) if e.took(completion)]
            texts = [e.text(tokenizer) for e in answered]
            for e, text, reply in zip(answered, texts, in_threads(_Running.reply, answered, texts), strict=True):
                e.end_turn(text, reply, tokenizer)
            going_on = [e for e in live if not e.whole and e.allowance]
            if not environment.is_single_turn:
                progress(len(live) - len(going_on))
            live = going_on
    results = (e.result() for e in running)
    return [[s if isinstance(s, Sample) else next(results) for s in group] for group in groups]


class _Running:
    """One episode while it runs."""

    def __init__(self, begun: Unfinished, environment: Environment, most: int, budget: int) -> None:
        """most: tokens after the prompt at most. budget: tokens to sample now at most."""
        self.begun, self.name, self.prompt, self.environment = begun, begun.id, begun.prompt, environment
        self.turns, self.response = list(begun.turns), begun.response
        self.ids, self.left, self.allowance = list(begun.prompt.token_ids), most, budget
        """All that the policy has read or sampled before the response under way; tokens that may follow that, and now."""
        for turn in self.turns:
            self._append(turn)
        self.whole = self.cut = False
        self.messages = list(begun.prompt.messages or [Message(role="user", content=begun.prompt.text)])
        try:
            self.state = environment.resumed(begun.prompt.columns, self.turns)
        except Exception as error:  # the environment is the user's own: say whose failure it is
            name = self.name
            raise EpisodeError(f"the environment cannot start sample {name}: {type(error).__name__}: {error}") from error
        for turn in self.turns:
            if environment.resume is None:
                self._require_same(self.reply(turn.text), turn.reply)
            else:
                self.messages.append(Message(role="assistant", content=turn.text))
            self.messages += turn.reply.messages

    def request(self) -> Request:
        """What to sample of the response under way, after all that was read and sampled before."""
        sampled = [] if self.response is None else self.response.token_ids.tolist()
        seed, limit = turn_seed(self.begun.seed, len(self.turns)), min(self._limit - len(sampled), self.allowance)
        return Request(self.name, (*self.ids, *sampled), seed, limit, len(sampled))

    @property
    def _limit(self) -> int:
        """Tokens of the response under way at most."""
        return min(self.left, self.environment.max_turn_tokens or self.left)

    def took(self, completion: Completion) -> bool:
        """Takes down what was sampled; whether the response is done."""
        self.allowance -= len(completion.token_ids)
        self.response = completion if self.response is None else self.response.followed_by(completion)
        return completion.finish_reason == "stop" or len(self.response.token_ids) == self._limit

    def text(self, tokenizer: Any) -> str:
        """What the model said, special tokens left out."""
        return "" if self.response is None else decode(tokenizer, self.response.token_ids)

    def reply(self, text: str) -> Reply:
        """The environment's answer to a response."""
        self.messages.append(Message(role="assistant", content=text))
        try:
            return checked(self.state.step(list(self.messages)), self.name)
        except EpisodeError:
            raise
        except Exception as error:
            raise EpisodeError(f"the environment failed on sample {self.name}: {type(error).__name__}: {error}") from error

    def _require_same(self, now: Reply, before: Reply) -> None:
        """An environment that is asked again answers as it did."""
        said = [([(m["role"], m["content"]) for m in r.messages], bool(r.done), r.reward) for r in (now, before)]
        if said[0] != said[1]:
            raise EpisodeError(
                f"the environment answers sample {self.name} otherwise than before it was suspended ({said[0]}, then "
                f"{said[1]}): one that draws random numbers or keeps state outside its episodes needs "
                "rollout.max_step_tokens to be left out"
            )

    def end_turn(self, text: str, reply: Reply, tokenizer: Any) -> None:
        """Takes down a turn."""
        completion, self.response = self.response, None
        assert completion is not None
        left = self.left - len(completion.token_ids)
        self.cut = completion.finish_reason == "length"
        between = NOTHING
        if not (self.cut or reply.done or len(self.turns) + 1 == self.environment.max_turns):
            between = self._between(int(completion.token_ids[-1]), reply, tokenizer)
            if len(between) >= left:  # no token could follow
                self.cut, between = True, NOTHING
        self.turns.append(Turn(completion, text, reply, between))
        self._append(self.turns[-1])
        self.messages += reply.messages
        self.whole = len(between) == 0

    def _append(self, turn: Turn) -> None:
        self.ids += [*turn.completion.token_ids.tolist(), *turn.reply_ids.tolist()]
        self.left -= len(turn.completion.token_ids) + len(turn.reply_ids)

    def _between(self, last: int, reply: Reply, tokenizer: Any) -> np.ndarray:
        try:
            ids = continuation(tokenizer, reply.messages, last=last, chat=self.prompt.messages is not None)
        except EncodeError as error:
            raise EpisodeError(f"the reply to sample {self.name} cannot be put into tokens: {error}") from error
        if not ids:
            raise EpisodeError(f"the reply to sample {self.name} has no tokens: the model would be asked nothing")
        return np.array(ids, np.int64)

    def result(self) -> Sample | Unfinished:
        """The episode as it stands."""
        if self.whole:
            return joined(self.name, self.prompt, self.turns, cut=self.cut)
        return replace(self.begun, turns=tuple(self.turns), response=self.response)


def joined(name: str, prompt: Prompt, turns: Sequence[Turn], *, cut: bool) -> Sample:
    """A finished episode. cut: whether a limit of tokens ended it."""
    completion = reduce(Completion.followed_by, (turn.completion for turn in turns))
    if completion.finish_reason != (reason := "length" if cut else "stop"):
        completion = replace(completion, finish_reason=reason)
    return Sample(name, prompt, completion, turns[-1].text, tuple(turns))
