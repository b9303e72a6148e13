"""What goes on after a response."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from .section import Section


class EnvironmentConfig(Section):
    """What every environment has. rollout.max_response_tokens (in an evaluation: its own) bounds a whole episode after the
    prompt, with what the policy read between its responses."""

    max_turns: int = Field(default=8, gt=0)
    """Responses of an episode at most; the last gets no reply. 8: enough for a few calls, and bounds the cost."""
    max_turn_tokens: int | None = Field(default=None, gt=0)
    """Tokens of one response at most; one that reaches it ends its episode. None: what is left of the episode's."""


class FunctionEnvironment(EnvironmentConfig):
    """Your own: called with a row's columns for each episode, it returns an object whose `step(messages)` returns a
    `gspo.types.Reply`. A class will do."""

    type: Literal["function"] = "function"
    """Kind of environment."""
    function: str
    """`path/to/file.py:name`."""
    parameters: dict[str, Any] = {}
    """Keyword arguments passed to it after the columns."""
    roles: list[str] = Field(default=["user"], min_length=1)
    """Roles of the messages that it replies with; the chat template is tried on each before training. A user's: every
    template has them."""
    workers: int = Field(default=1, gt=0)
    """Episodes whose `step` runs at the same time, in threads. 1: nothing is asked of your code."""


class ToolEnvironment(EnvironmentConfig):
    """The model calls Python functions until it answers without a call. Each runs in a process of its own, killed at its
    time limit; whatever goes wrong in a call is told to the model."""

    type: Literal["tools"] = "tools"
    """Kind of environment."""
    tools: list[str] = Field(min_length=1)
    """`calculator`, `search`, or `path/to/file.py:name` of a function with annotated arguments and a docstring that has an
    `Args:` section, of which the schema is made."""
    parameters: dict[str, dict[str, Any]] = {}
    """By a tool's name arguments that are yours to give and not the model's, `{ search = { folder = "notes" } }`."""
    call_format: Literal["hermes", "json"] = "hermes"
    """How the model writes a call. `hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen does.
    `json`: the whole response is such an object, or a list of them, as Llama 3.1's and Mistral's are once their special
    tokens are left out. What stands before a last `</think>` is no call."""
    tell: Literal["template", "nothing"] = "template"
    """Whether the chat template tells the model of its tools. `nothing`: for templates that cannot; the prompts then say it
    themselves, e.g. in data.system."""
    role: Literal["tool", "user"] = "tool"
    """Role of the messages with a tool's output. `user`: for templates that know no tools."""
    max_calls: int = Field(default=8, gt=0)
    """Calls of an episode at most; for each more the model is told so. 8: one a turn."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Seconds of one call; then its process is killed and the model told. 10: long for a lookup, short for a step."""
    max_output_characters: int = Field(default=4000, gt=0)
    """Characters of a tool's output; the rest is cut and the model told how much. 4000: about a thousand tokens."""
    workers: int = Field(default=2, gt=0)
    """Processes that run tools, each with all of them. 2: calls are short beside sampling."""

    @model_validator(mode="after")
    def _parameters_belong_to_tools(self) -> Self:
        names = [spec.rpartition(":")[2] for spec in self.tools]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"two tools are called {', '.join(twice)}: the model could not tell them apart")
        if strange := sorted(set(self.parameters) - set(names)):
            raise ValueError(f"parameters of {', '.join(strange)}, but the tools are {', '.join(names)}")
        return self


class VerifiersEnvironment(EnvironmentConfig):
    """An environment of several turns of the package `verifiers` (0.1), which has to be installed beside it; its own limit
    of turns counts too. Its rubric judges each episode: the reward is of type = "environment", the data of source =
    "verifiers"."""

    type: Literal["verifiers"] = "verifiers"
    """Kind of environment."""
    environment: str
    """Its name, as `verifiers.load_environment` takes it."""
    parameters: dict[str, Any] = {}
    """Keyword arguments of its `load_environment`; those of the data, so that it is loaded once."""
    call_format: Literal["hermes", "json"] = "hermes"
    """How the model calls its tools, if it has any; as for type = "tools"."""
    tell: Literal["template", "nothing"] = "template"
    """Whether the chat template tells the model of its tools; as for type = "tools"."""
    workers: int = Field(default=1, gt=0)
    """Episodes whose `step` runs at the same time, in threads. 1: nothing is asked of its code."""


Environment = Annotated[FunctionEnvironment | ToolEnvironment | VerifiersEnvironment, Field(discriminator="type")]
