"""The environment in which a model calls tools until it answers without a call."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..config import ToolEnvironment
from ..types import Message, Reply, ToolCall
from .calls import Call, find_calls
from .pool import Pool
from .protocol import Environment
from .schemas import schemas, tool_name


def tools(config: ToolEnvironment) -> Environment:
    """The environment of a recipe with tools. Raises EpisodeError for a tool that cannot be found or described."""
    schemas(config)  # before any work: a fault in a function shows here
    pool = Pool(config)
    return Environment(
        start=lambda columns: ToolEpisode(config, pool),
        max_turns=config.max_turns,
        max_turn_tokens=config.max_turn_tokens,
        workers=config.workers,
        close=pool.close,
        resume=lambda columns, turns: ToolEpisode(config, pool, sum(len(turn.reply.calls) for turn in turns)),
    )


class ToolEpisode:
    """One episode: how many calls it has made."""

    def __init__(self, config: ToolEnvironment, pool: Pool, num_calls: int = 0) -> None:
        self.config, self.pool, self.num_calls = config, pool, num_calls
        self.names = [tool_name(spec) for spec in config.tools]

    def step(self, messages: Sequence[Message]) -> Reply:
        """Runs the calls of the last message, one after the other; a response without a call ends the episode."""
        calls = find_calls(messages[-1]["content"], self.config.call_format)
        if not calls:
            return Reply(done=True)
        made = tuple(self._made(call) for call in calls)
        outputs = [call.output for call in made]
        if self.config.role == "user":  # in one message: some templates refuse two users in a row
            outputs = ["\n\n".join(outputs)]
        return Reply(tuple(Message(role=self.config.role, content=output) for output in outputs), calls=made)

    def _made(self, call: Call) -> ToolCall:
        self.num_calls += 1
        ok, output = self._run(call)
        arguments = call.text if call.fault else json.dumps(call.arguments)
        return ToolCall(call.name, arguments, output if ok else f"Error: {output}", failed=not ok)

    def _run(self, call: Call) -> tuple[bool, str]:
        if self.num_calls > self.config.max_calls:
            return False, f"the limit of {self.config.max_calls} tool calls is reached: answer without one"
        if call.fault:
            return False, call.fault
        if call.name not in self.names:
            return False, f"there is no tool {call.name[:60]!r}: there is {', '.join(self.names)}"
        return self.pool.call(call.name, call.arguments)
