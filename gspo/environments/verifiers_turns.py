"""Environments of several turns of the package `verifiers` (0.1), tools among them, played turn by turn by our engines.

The package's own loop asks a model over HTTP for text. Here its parts are called one by one: a response becomes a step of
the state's trajectory, stop conditions are asked, the environment's answer is what the model reads next.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import VerifiersEnvironment
from ..types import Message, Reply, ToolCall
from ..verifiers_package import VerifiersError, judge, load_environment
from .calls import Call, find_calls
from .protocol import Environment, EpisodeError


def verifiers(config: VerifiersEnvironment) -> Environment:
    """The environment that the recipe names. Raises EpisodeError where it cannot be loaded."""
    environment = loaded(config)
    return Environment(
        start=lambda columns: VerifiersEpisode(environment, config, columns),
        max_turns=config.max_turns,
        max_turn_tokens=config.max_turn_tokens,
        workers=config.workers,
    )


def loaded(config: VerifiersEnvironment) -> Any:
    """The package's object. Raises EpisodeError."""
    try:
        return load_environment(config.environment, config.parameters)
    except VerifiersError as error:
        raise EpisodeError(f"environment: {error}") from error


def oai_tools(config: VerifiersEnvironment) -> tuple[Mapping[str, Any], ...]:
    """The schemas of its tools; none where it has none. Raises EpisodeError."""
    return tuple(getattr(loaded(config), "oai_tools", None) or ())


class VerifiersEpisode:
    """One episode: the package's own state, and all messages so far as the package sees them.

    The rubric is asked when the episode ends, or at the last of max_turns; an episode that a limit of tokens cuts is not
    judged. An exception of the package's, its own kinds among them, is one here.
    """

    def __init__(self, environment: Any, config: VerifiersEnvironment, columns: Mapping[str, Any]) -> None:
        self.environment, self.config, self.columns = environment, config, columns
        self.state: Any = None
        self.history: list[Any] = []
        self.num_turns = 0

    def step(self, messages: Sequence[Message]) -> Reply:
        """The environment's answer to the last message. Each step has an event loop of its own."""
        return asyncio.run(self._step(messages))

    async def _step(self, messages: Sequence[Message]) -> Reply:
        if self.state is None:
            await self._start(list(messages[:-1]))
        calls = self._calls(messages[-1]["content"])
        await self._add(
            {**messages[-1], **({"tool_calls": list(map(_tool_call, range(len(calls)), calls))} if calls else {})}
        )
        done, said = await self._answer()
        self.num_turns += 1
        score = None
        if done or self.num_turns == self.config.max_turns:
            await self.environment.render_completion(self.state)
            score = (await judge(self.environment, self._told())).value
        replies = tuple(Message(role=m["role"], content=_text(m)) for m in said)
        return Reply(replies, done=done, reward=score, calls=self._made(calls, replies))

    async def _start(self, prompt: list[Any]) -> None:
        row = {"prompt": prompt, "example_id": 0, "answer": "", "task": "default", "info": {}}
        row |= {key: self.columns[key] for key in row if key != "prompt" and self.columns.get(key) is not None}
        self.state = await self.environment.init_state(row, client=None, model="")
        self.state = await self.environment.setup_state(self.state) or self.state
        if await self.environment.get_prompt_messages(self.state) != prompt:
            raise EpisodeError(
                f"the environment {self.config.environment} writes the first prompt by itself, from its state: the model "
                "has read that of the row"
            )
        self.history = prompt

    def _calls(self, text: str) -> list[Call]:
        return find_calls(text, self.config.call_format) if getattr(self.environment, "oai_tools", None) else []

    async def _add(self, message: Any) -> None:
        step = {
            "prompt": self.history, "completion": [message], "response": None, "tokens": None, "reward": None,
            "advantage": None, "is_truncated": False, "trajectory_id": self.state["trajectory_id"], "extras": {},
        }  # fmt: skip
        await self.environment.add_trajectory_step(self.state, step)
        self.history = [*self.history, message]

    async def _answer(self) -> tuple[bool, list[Any]]:
        """Whether the episode is over, and what the environment says."""
        if await self.environment.is_completed(self.state):
            return True, []
        prompt = list(await self.environment.get_prompt_messages(self.state))
        if (last := self.state.get("final_env_response")) is not None:
            return await self.environment.is_completed(self.state), list(last)
        known = len(self.history)
        if prompt[:known] != self.history:
            raise EpisodeError(
                f"the environment {self.config.environment} rewrites earlier messages: what the model has sampled cannot "
                "be changed behind it"
            )
        self.history = prompt
        return False, prompt[known:]

    def _told(self) -> dict[str, Any]:
        """What the reward functions may ask for."""
        named = {name: self.state.get(name) for name in ("prompt", "completion", "answer", "task", "info")}
        return named | {"state": self.state}

    def _made(self, calls: Sequence[Call], replies: Sequence[Message]) -> tuple[ToolCall, ...]:
        """The calls for the records. What went wrong inside a tool the package only tells the model."""
        outputs = [m["content"] for m in replies if m["role"] == "tool"] + [""] * len(calls)
        known = getattr(self.environment, "tool_map", {})
        return tuple(
            ToolCall(call.name, _arguments(call), output, failed=bool(call.fault) or call.name not in known)
            for call, output in zip(calls, outputs, strict=False)
        )


def _tool_call(number: int, call: Call) -> dict[str, Any]:
    """A call as OpenAI's interface has it."""
    return {"id": f"call_{number}", "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}


def _arguments(call: Call) -> str:
    """As JSON, or what was written where it could not be read."""
    return call.text if call.fault else json.dumps(call.arguments)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise EpisodeError(f"the environment says {message!r:.200}, whose content is no text")
    return content
