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
    """1 if math-verify finds the response's last `\\boxed{}` equal to the gold answer, else 0."""

    type: Literal["math"] = "math"
    """Kind of reward."""
    timeout_s: int = Field(default=5, gt=0)
    """Seconds for parsing, and again for comparing, one answer. math-verify's own default."""


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


class VerifiersReward(RewardConfig):
    """The weighted sum of the reward functions of the `verifiers` environment that the prompt came from."""

    type: Literal["verifiers"] = "verifiers"
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


class EnvironmentReward(RewardConfig):
    """The sum of what the environment gave to the turns of an episode; turns that it did not score count as 0."""

    type: Literal["environment"] = "environment"
    """Kind of reward."""


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
    | VerifiersReward
    | LengthPenalty
    | EnvironmentReward
    | FunctionReward,
    Field(discriminator="type"),
]


def reward_name(reward: RewardConfig) -> str:
    """The name of a reward in records: its own, or the function's, or the type."""
    if reward.name:
        return reward.name
    return reward.function.rpartition(":")[2] if isinstance(reward, FunctionReward) else reward.type  # type: ignore[attr-defined]
