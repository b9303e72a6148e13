"""What a response is worth."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from .section import Section


class RewardConfig(Section):
    """What every reward has."""

    weight: float = 1.0
    """Factor of this reward in the sum. 1: a single reward needs no thought."""
    name: str | None = None
    """Name in records. The type (or the function's name) by default; needed where two would be alike."""
    on_error: Literal["raise", "abstain"] = "raise"
    """What an exception in the reward does: stop training, or leave the sample out and count it. It is never a 0."""


class ExactReward(RewardConfig):
    """1 if the response, stripped of white space, equals the gold answer as a string, else 0."""

    type: Literal["exact"] = "exact"
    """Kind of reward."""


class NumericReward(RewardConfig):
    """1 if the whole response is a number that equals the gold answer, else 0."""

    type: Literal["numeric"] = "numeric"
    """Kind of reward."""
    tolerance: float = Field(default=0.0, ge=0)
    """Largest absolute difference that counts as equal. 0: exact."""


class LastNumberReward(RewardConfig):
    """1 if the last number in the response equals the gold answer, else 0."""

    type: Literal["last_number"] = "last_number"
    """Kind of reward."""
    tolerance: float = Field(default=0.0, ge=0)
    """Largest absolute difference that counts as equal. 0: exact."""


class MathReward(RewardConfig):
    """1 if the response's last `\\boxed{}` equals the gold answer by the rules of docs/mathematics.md, else 0."""

    type: Literal["math"] = "math"
    """Kind of reward."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Seconds on the wall clock for one answer; one that needs more scores 0. 5: a thousand times what a short one needs,
    so that a busy machine is no reason."""
    memory_mib: int = Field(default=1024, ge=256)
    """MiB of address space of a worker process; an answer that needs more scores 0. A worker alone takes 100."""
    num_workers: int = Field(default=2, ge=1)
    """Worker processes for each process that trains. 2: one hanging answer does not stop the others."""
    max_characters: int = Field(default=2000, ge=1)
    """Characters of a box beyond which an answer scores 0 unread. 2,000: the longest of the MATH answers has 160."""


class FormatReward(RewardConfig):
    """1 if a regular expression matches the whole response, else 0."""

    type: Literal["format"] = "format"
    """Kind of reward."""
    pattern: str
    """Python regular expression; `.` matches newlines too."""


class ReasoningGymReward(RewardConfig):
    """The score of the reasoning-gym task that the prompt came from. A wrong answer is not 0 in every task."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    """Kind of reward."""


class LengthPenalty(RewardConfig):
    """0 up to `free_tokens` response tokens, then falling linearly to -1 at `max_tokens` (DAPO, arXiv:2503.14476,
    equation 13)."""

    type: Literal["length_penalty"] = "length_penalty"
    """Kind of reward."""
    free_tokens: int = Field(ge=0)
    """Response tokens that cost nothing."""
    max_tokens: int = Field(gt=0)
    """Response tokens from which the penalty is -1."""

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.max_tokens <= self.free_tokens:
            raise ValueError(f"max_tokens ({self.max_tokens}) must be larger than free_tokens ({self.free_tokens})")
        return self


class CodeReward(RewardConfig):
    """1 if the program in the response passes all tests of its row in a sandbox, else 0.

    The program is the last closed fenced block. Tests are input/output pairs (`{"inputs": [...], "outputs": [...]}`, with
    `"fn_name"` for calls instead of standard input; a list of `{"input": ..., "output": ...}`), or Python with assertions,
    as text or a list of texts. docs/sandbox.md has the walls and their gaps.
    """

    type: Literal["code"] = "code"
    """Kind of reward."""
    tests: str | None = None
    """Column with the tests. None: the gold answer."""
    entry_point: str = "entry_point"
    """Column with the name of the function that the tests call; rows without it have none, and names that only the
    program can define are looked for."""
    setup: str = "test_setup_code"
    """Column with Python that runs before the assertions; rows without it have none."""
    given: str | None = None
    """Column with Python that stands before the program, HumanEval's `prompt`: its imports and helpers are there for the
    program and, out of its reach, for the tests. A response without the entry point continues it."""
    fence: Literal["optional", "required"] = "optional"
    """Whether a response without a fenced block is a program as a whole, or scores 0. Optional: base models write none."""
    compare: Literal["tokens", "lines", "exact"] = "tokens"
    """When outputs are equal: same words whatever the white space, same lines up to white space at their ends, or same
    bytes. Tokens: what most judges of contests do."""
    tolerance: float = Field(default=1e-6, ge=0, lt=1)
    """Error, absolute or relative, of words that the expected output writes with a point or exponent, by `tokens`.
    1e-6: what contests ask for."""
    sandbox: Literal["auto", "bubblewrap", "namespaces", "landlock", "filter", "limits"] = "auto"
    """The walls. Auto: the first of bubblewrap, namespaces and landlock that stands here, or no training. `filter` lets
    programs read this machine's files; `limits` lets them do anything but hang, so only where nothing is of worth."""
    cpu_s: int = Field(default=10, gt=0)
    """Seconds of computing, of each program and pair. 10: reference solutions of HumanEval and MBPP need less than 3."""
    wall_s: float = Field(default=20.0, gt=0)
    """Seconds by the clock. Twice cpu_s, since others use the machine too."""
    memory_mib: int = Field(default=1024, ge=64)
    """Address space. 1024: room for a thread with a stack of 512 MiB, a habit of contest programs."""
    output_kib: int = Field(default=1024, gt=0)
    """Most that a program may write to its standard output or error. 1024: expected outputs of contests stay below."""
    workers: int | None = Field(default=None, gt=0)
    """Programs that run beside each other. None: as many as this process has CPU cores."""


class FunctionReward(RewardConfig):
    """Your own function: takes a list of samples, returns a number, a Score or None (abstain) for each."""

    type: Literal["function"] = "function"
    """Kind of reward."""
    function: str
    """`path/to/file.py:name`, sync or async."""
    parameters: dict[str, Any] = {}
    """Keyword arguments passed to it after the samples."""


Reward = Annotated[
    ExactReward
    | NumericReward
    | LastNumberReward
    | MathReward
    | FormatReward
    | ReasoningGymReward
    | LengthPenalty
    | CodeReward
    | FunctionReward,
    Field(discriminator="type"),
]


def reward_name(reward: RewardConfig) -> str:
    """The name of a reward in records: its own, or the function's, or the type."""
    if reward.name:
        return reward.name
    return reward.function.rpartition(":")[2] if isinstance(reward, FunctionReward) else reward.type  # type: ignore[attr-defined]
