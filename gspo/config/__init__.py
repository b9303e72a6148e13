"""The whole configuration, one tree. Every setting says what it does and why its default is what it is.

`recipe.py` reads it from TOML and the command line; docs/recipes.md is generated from the docstrings here.
"""

from __future__ import annotations

import math
import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from .environment import Environment, EnvironmentConfig, FunctionEnvironment, ToolEnvironment, VerifiersEnvironment
from .model import CreateConfig, LoraConfig, ModelConfig
from .rewards import (
    CodeReward,
    EnvironmentReward,
    ExactReward,
    FormatReward,
    FunctionReward,
    JudgeReward,
    LastNumberReward,
    LengthPenalty,
    MathReward,
    ModelReward,
    NumericReward,
    ReasoningGymReward,
    Reward,
    RewardConfig,
    VerifiersReward,
    reward_name,
)
from .rollout import CorrectionConfig, RolloutConfig, SamplingConfig, VllmConfig
from .section import Section, either, nearest
from .sources import (
    DatasetSource,
    JsonlSource,
    ParquetSource,
    PythonSource,
    ReasoningGymSource,
    Source,
    SourceConfig,
    VerifiersSource,
)
from .training import (
    AdvantageConfig,
    CheckpointConfig,
    ColdStartConfig,
    EvaluationConfig,
    KLConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TrackingConfig,
    TrainingConfig,
)

__all__ = [
    "AdvantageConfig",
    "CheckpointConfig",
    "CodeReward",
    "ColdStartConfig",
    "Config",
    "CorrectionConfig",
    "CreateConfig",
    "DatasetSource",
    "Environment",
    "EnvironmentConfig",
    "EnvironmentReward",
    "EvaluationConfig",
    "ExactReward",
    "FormatReward",
    "FunctionEnvironment",
    "FunctionReward",
    "JsonlSource",
    "JudgeReward",
    "KLConfig",
    "LastNumberReward",
    "LengthPenalty",
    "LoraConfig",
    "MathReward",
    "ModelConfig",
    "ModelReward",
    "NumericReward",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParquetSource",
    "PythonSource",
    "ReasoningGymReward",
    "ReasoningGymSource",
    "Reward",
    "RewardConfig",
    "RolloutConfig",
    "SamplingConfig",
    "Section",
    "Source",
    "SourceConfig",
    "ToolEnvironment",
    "TrackingConfig",
    "TrainingConfig",
    "VerifiersEnvironment",
    "VerifiersReward",
    "VerifiersSource",
    "VllmConfig",
    "reward_name",
]


class Config(Section):
    """A run."""

    name: str
    """Name of the run's folder: letters, digits, dots, hyphens and underscores, first a letter or digit."""
    output: str = "runs"
    """Folder that holds the runs."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of everything: weights, data order, samples, minibatches."""
    solved_at: float = 1.0
    """A response counts as solved when its total reward is at least this. 1: full marks of one reward."""
    model: ModelConfig
    """Which policy is trained."""
    data: Source
    """Training prompts."""
    rewards: list[Reward] = Field(min_length=1)
    """One table `[[rewards]]` a reward; their weighted sum is the reward."""
    rollout: RolloutConfig
    """How the old policy samples."""
    environment: Environment | None = None
    """What goes on after a response. None: a single turn."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """What is maximised."""
    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""
    training: TrainingConfig
    """The update."""
    cold_start: ColdStartConfig | None = None
    """Supervised fine-tuning first. None: start from the model as it is."""
    evaluation: EvaluationConfig | None = None
    """How the policy is measured. None: only on its training rewards."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept."""
    tracking: TrackingConfig = TrackingConfig()
    """Where metrics go besides metrics.jsonl."""

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest prompt with the longest response, in training or evaluation."""
        tables = [table for table in (self.rollout, self.evaluation) if table is not None]
        return self.rollout.max_prompt_tokens + max(table.max_response_tokens for table in tables)

    @field_validator("name")
    @classmethod
    def _folder_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"{name!r} cannot name a folder: use letters, digits, dots, hyphens and underscores, "
                "first a letter or digit"
            )
        return name

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        n, prompts, size = self.training.minibatches, self.rollout.prompts_per_step, self.rollout.group_size
        if self.training.groups == "keep":
            formula, units, step = f"rollout.prompts_per_step = {prompts} groups", prompts, n
        else:
            units, step = prompts * size, n // math.gcd(n, size)
            formula = f"rollout.prompts_per_step x rollout.group_size = {prompts} x {size} = {units} samples"
        if units % n:
            below, above = prompts // step * step, (prompts // step + 1) * step
            divisors = nearest(n, [k for k in range(1, units + 1) if units % k == 0])
            raise ValueError(
                f"{formula} do not split into training.minibatches = {n} equal parts: "
                f"use prompts_per_step = {either(below, above)}, or minibatches = {divisors}"
            )
        return self

    @model_validator(mode="after")
    def _longest_sample_fits(self) -> Self:
        longest = self.rollout.max_prompt_tokens + self.rollout.max_response_tokens
        if self.training.micro_batch_tokens < longest:
            raise ValueError(
                f"training.micro_batch_tokens = {self.training.micro_batch_tokens} is smaller than the longest sample, "
                f"rollout.max_prompt_tokens + rollout.max_response_tokens = {self.rollout.max_prompt_tokens} + "
                f"{self.rollout.max_response_tokens}: use {longest} or more"
            )
        create = self.model.create
        if create is not None and create.max_position_embeddings < longest:
            raise ValueError(
                f"model.create.max_position_embeddings = {create.max_position_embeddings} is smaller than the longest "
                f"sample, rollout.max_prompt_tokens + rollout.max_response_tokens = {self.rollout.max_prompt_tokens} + "
                f"{self.rollout.max_response_tokens}: use {longest} or more, or a smaller rollout.max_prompt_tokens"
            )
        return self

    @model_validator(mode="after")
    def _replay_has_a_record(self) -> Self:
        replay, old = self.training.replay, self.rollout.old_logprobs
        if replay == "trainer" and old != "trainer":
            raise ValueError(
                'training.replay = "trainer" repeats what the trainer chose when it scored the samples, which '
                f'rollout.old_logprobs = "{old}" may leave out: use old_logprobs = "trainer"'
            )
        if replay == "engine" and not self.rollout.routed_experts:
            raise ValueError(
                'training.replay = "engine" needs the engine\'s choices: set rollout.routed_experts = true, or use '
                'training.replay = "trainer" or "none"'
            )
        return self

    @model_validator(mode="after")
    def _cold_start_can_be_measured(self) -> Self:
        cold = self.cold_start
        if cold is not None and cold.evaluate_every and self.evaluation is None:
            raise ValueError("cold_start.evaluate_every needs an [evaluation] table to evaluate on")
        if cold is not None and cold.stop_at is not None and not cold.evaluate_every:
            raise ValueError("cold_start.stop_at needs evaluations to compare with: set cold_start.evaluate_every, e.g. 10")
        return self

    @model_validator(mode="after")
    def _penalised_rewards_are_not_divided(self) -> Self:
        kl = self.objective.kl
        if kl is not None and kl.place == "reward" and self.advantage.std != "none":
            raise ValueError(
                f'objective.kl.place = "reward" with advantage.std = "{self.advantage.std}": where the rewards of a group '
                "are equal, dividing by their deviation blows a penalty of rounding size up to advantages of 1: "
                'use advantage.std = "none", or objective.kl.place = "loss"'
            )
        return self

    @model_validator(mode="after")
    def _weights_fit_the_objective(self) -> Self:
        correction = self.rollout.correction
        if correction is not None and correction.level == "token" and self.objective.name == "gspo":
            raise ValueError(
                'rollout.correction.level = "token" with objective.name = "gspo": it weighs one advantage a sequence; '
                'use level = "sequence_mean" or "sequence_product", or objective.name = "gspo_token", "grpo" or "dapo"'
            )
        return self

    @model_validator(mode="after")
    def _turns_have_rewards(self) -> Self:
        by_turn, rewards = self.advantage.credit == "turn", [r for r in self.rewards if isinstance(r, EnvironmentReward)]
        if rewards and self.environment is None:
            raise ValueError('a reward of type = "environment" needs an [environment] table, whose rewards it adds up')
        if by_turn and not rewards:
            raise ValueError(
                'advantage.credit = "turn" needs the rewards of turns: add [[rewards]] with type = "environment"'
            )
        if by_turn and self.objective.name == "gspo":
            raise ValueError(
                'advantage.credit = "turn" with objective.name = "gspo", which has one advantage a sequence: '
                'use objective.name = "gspo_token", "grpo" or "dapo"'
            )
        if by_turn and self.objective.kl is not None and self.objective.kl.place == "reward":
            raise ValueError(
                'advantage.credit = "turn" with objective.kl.place = "reward": the penalty is of a whole episode; use '
                'objective.kl.place = "loss"'
            )
        return self

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Self:
        for name, table, updates, formula in (
            ("training", self.training, self.training.steps * self.training.minibatches, "training.steps x minibatches"),
            ("cold_start", self.cold_start, self.cold_start.steps if self.cold_start else 0, "cold_start.steps"),
        ):
            if table is not None and table.warmup_updates > updates:
                raise ValueError(
                    f"{name}.warmup_updates = {table.warmup_updates} is more than the run's {formula} = {updates}: the "
                    f"learning rate would never be reached; use {updates} or less"
                )
        return self

    @model_validator(mode="after")
    def _can_be_solved(self) -> Self:
        best = sum(r.weight * max(r.RANGE, key=lambda x, w=r.weight: w * x) for r in self.rewards if r.RANGE)
        if all(r.RANGE for r in self.rewards) and self.solved_at > best + 1e-9:
            raise ValueError(
                f"solved_at = {self.solved_at:g} is more than the rewards can add up to, {best:g}: no response would count "
                f"as solved; use {best:g} or less"
            )
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [reward_name(r) for r in self.rewards]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"two rewards are called {', '.join(twice)}: give each a name of its own")
        return self
