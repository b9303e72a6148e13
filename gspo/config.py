"""The whole configuration, one tree. Every setting says what it does and why its default is what it is.

`recipe.py` reads it from TOML and the command line; docs/recipes.md is generated from the docstrings below.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


def _leaves(annotation: Any) -> set[Any]:
    parts = get_args(annotation)
    return {leaf for part in parts for leaf in _leaves(part)} if parts else {annotation}


class Section(BaseModel):
    """A table of a recipe: frozen, and without room for unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            kinds = _leaves(cls.model_fields[name].annotation) if name in cls.model_fields else set()
            items = value if isinstance(value, list) else [value]
            if any(isinstance(x, bool) for x in items) and kinds & {int, float} and bool not in kinds:
                raise ValueError(f"{name} must be a number, not true or false")  # pydantic would take true as 1
        return values


# ---- model ------------------------------------------------------------------------------------------------


class CreateConfig(Section):
    """A small decoder of transformers' Qwen3 class with random weights, and a tokenizer with one token a character."""

    alphabet: str
    """Every character that prompts and responses may hold; one token each."""
    hidden_size: int = Field(default=128, gt=0)
    """Width of the residual stream. 128 learns two-digit arithmetic in seconds."""
    intermediate_size: int = Field(default=512, gt=0)
    """Width of the feed-forward layer. Four times the default width, as is usual."""
    num_layers: int = Field(default=4, gt=0)
    """Decoder layers."""
    num_heads: int = Field(default=4, gt=0)
    """Query heads."""
    num_kv_heads: int = Field(default=2, gt=0)
    """Key and value heads. Fewer than query heads, so that grouped attention is exercised."""
    max_position_embeddings: int = Field(default=512, gt=0)
    """Longest sequence. Ample for small tasks."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            near = _nearest(self.num_kv_heads, [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0])
            raise ValueError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}: "
                f"use num_kv_heads = {near}"
            )
        if self.hidden_size % (2 * self.num_heads):
            unit = 2 * self.num_heads
            below, above = self.hidden_size // unit * unit, (self.hidden_size // unit + 1) * unit
            raise ValueError(
                f"hidden_size = {self.hidden_size} does not split into num_heads = {self.num_heads} heads of an even "
                f"width: use hidden_size = {_or(below, above)}"
            )
        return self


class LoraConfig(Section):
    """Low-rank adapters through peft: only they are trained."""

    rank: int = Field(default=16, gt=0)
    """Rank of each update. 16 is peft users' common choice."""
    alpha: int = Field(default=32, gt=0)
    """Scale numerator: the update is scaled by alpha / rank. Twice the rank, as is common."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an adapter. Every linear layer but the output matrix."""


class ModelConfig(Section):
    """Which policy is trained."""

    path: str | None = None
    """Folder or hub name of a transformers causal language model. One of `path` and `create` is needed."""
    create: CreateConfig | None = None
    """A small random model instead."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward and backward pass; master weights and moments are float32 in both. float32 is the
    default because GSPO's clip range is narrower than bfloat16's rounding noise."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the GPU where there is one."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off: code from strangers is run only when asked for."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights. Off: full training is the method's setting."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.create is None):
            raise ValueError(
                "set exactly one of path (a folder or hub name) and create (a small random model); "
                "--model.create null or --model.path null takes a recipe's away"
            )
        return self


# ---- data -------------------------------------------------------------------------------------------------


class SourceConfig(Section):
    """What every prompt source has."""

    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages (role, content)."""
    answer_column: str | None = "answer"
    """Column with the gold answer, or "" where rewards need none."""
    template: str | None = None
    """Text made of a row's columns, `"What is {a}*{b}?"`, used instead of the prompt column."""
    system: str | None = None
    """System message put before each chat. None by default: nothing is added that was not asked for."""
    format: Literal["chat", "text"] = "chat"
    """`chat` puts the prompt through the tokenizer's chat template; `text` tokenises it as it stands."""
    faults: Literal["refuse", "drop"] = "refuse"
    """What happens to faulty rows: refuse to start, or drop and count them. Refuse, so that no fault goes unseen."""
    limit: int | None = Field(default=None, gt=0)
    """Use only the first rows, this many. All by default."""


class JsonlSource(SourceConfig):
    """A file with one JSON object a line."""

    source: Literal["jsonl"] = "jsonl"
    """Kind of source."""
    path: str
    """The file."""


class ParquetSource(SourceConfig):
    """A Parquet file."""

    source: Literal["parquet"] = "parquet"
    """Kind of source."""
    path: str
    """The file."""


class DatasetSource(SourceConfig):
    """A local or hub dataset, loaded by the `datasets` library."""

    source: Literal["dataset"] = "dataset"
    """Kind of source."""
    path: str
    """Hub name, or a folder (also one written by `save_to_disk`)."""
    name: str | None = None
    """Configuration of the dataset, if it has several."""
    split: str = "train"
    """Split to read."""
    revision: str | None = None
    """Commit or tag on the hub. None takes the newest, which may change under you."""


class ReasoningGymSource(SourceConfig):
    """A task of reasoning-gym, generated from a seed. Its columns: question, answer, and the task's metadata."""

    source: Literal["reasoning_gym"] = "reasoning_gym"
    """Kind of source."""
    task: str
    """Name of the task, e.g. `chain_sum`."""
    size: int = Field(gt=0)
    """How many problems to generate."""
    seed: int = 0
    """Seed of the problems. reasoning-gym draws problem i from seed + i: two sources share no draw only where their
    seeds are further apart than `size`, so give training 0 and evaluation 1000000, say."""
    parameters: dict[str, Any] = {}
    """The task's own parameters, e.g. `min_terms`. Empty: the task's defaults."""
    prompt_column: str = "question"
    """Column with the prompt: reasoning-gym calls it question."""


class PythonSource(SourceConfig):
    """A Python function that returns rows."""

    source: Literal["python"] = "python"
    """Kind of source."""
    function: str
    """`path/to/file.py:name`; called once with `parameters`, returns an iterable of dicts."""
    parameters: dict[str, Any] = {}
    """Keyword arguments of the function."""


Source = Annotated[
    JsonlSource | ParquetSource | DatasetSource | ReasoningGymSource | PythonSource, Field(discriminator="source")
]


# ---- rewards ----------------------------------------------------------------------------------------------


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
    | FunctionReward,
    Field(discriminator="type"),
]


# ---- rollout ----------------------------------------------------------------------------------------------


class SamplingConfig(Section):
    """How tokens are drawn. Nothing is taken from a model's generation_config but its end-of-sequence ids."""

    temperature: float = Field(default=1.0, ge=0)
    """Logits are divided by it before the softmax; the update's log-probabilities use the rollout's. 1: the model's own
    distribution."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off. In training it must be off: the update's distribution has the full support."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest tokens; 0 is off. In training it must be off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Drop tokens less likely than this share of the likeliest; 0 is off. In training it must be off."""
    max_response_tokens: int = Field(gt=0)
    """Longest response, the end-of-sequence token included. No default: tasks differ by orders of magnitude."""

    @property
    def truncated_support(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class RolloutConfig(SamplingConfig):
    """How the old policy samples."""

    engine: Literal["transformers"] = "transformers"
    """Who generates: transformers, in this process, with the very weights that are trained."""
    prompts_per_step: int = Field(default=32, gt=0)
    """Prompts of one rollout batch. 32 x 8 responses make four minibatches of 64."""
    group_size: int = Field(default=8, ge=2)
    """Responses to each prompt (G). 8: the usual compromise between signal and cost."""
    max_prompt_tokens: int = Field(default=1024, gt=0)
    """Longest prompt after templating; a longer one is a fault of its row."""
    max_rows: int = Field(default=256, gt=0)
    """Responses generated at the same time; the rest wait and refill finished rows. Bounds the KV cache."""
    old_logprobs: Literal["auto", "engine", "trainer"] = "auto"
    """Whose log-probabilities stand below the ratio. `engine`: those of sampling. `trainer`: recomputed before the
    first update, except for the first minibatch, whose own forward pass is at the old policy. `auto`: the engine's
    while their mismatch, measured on the first minibatch, is small beside the clip range, else the trainer's."""

    @model_validator(mode="after")
    def _same_support(self) -> Self:
        if self.temperature == 0:
            raise ValueError("temperature = 0: greedy responses of a group are all alike; use a positive one, e.g. 1.0")
        if self.truncated_support:
            on = [
                f"{k} = {getattr(self, k)}"
                for k, off in (("top_p", 1), ("top_k", 0), ("min_p", 0))
                if getattr(self, k) != off
            ]
            raise ValueError(
                f"{', '.join(on)}: the update's distribution has the full support, so ratios would be wrong; "
                "use top_p = 1.0, top_k = 0, min_p = 0.0 here (they are free in [evaluation])"
            )
        return self


# ---- method -----------------------------------------------------------------------------------------------


class KLConfig(Section):
    """A penalty for leaving a reference policy: the policy as it was when training started."""

    coefficient: float = Field(gt=0)
    """Factor of the penalty."""
    estimator: Literal["k1", "k2", "k3"]
    """With d = log pi - log pi_ref: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d. No default: the choice matters."""
    place: Literal["loss", "reward"]
    """`loss`: added to the loss, aggregated as the objective is. `reward`: summed over the response and taken off the
    reward before advantages. No default: the two have different gradients."""


class ObjectiveConfig(Section):
    """What is maximised."""

    name: Literal["gspo", "gspo_token", "grpo", "dapo"] = "gspo"
    """gspo clips one ratio a sequence; the others are described in docs/objectives.md."""
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """The ratio is clipped below 1 - clip_low. None takes the objective's own: 3e-4 for gspo, 0.2 for grpo."""
    clip_high: float | None = Field(default=None, gt=0)
    """The ratio is clipped above 1 + clip_high. None takes the objective's own: 4e-4 for gspo, 0.2 for grpo."""
    kl: KLConfig | None = None
    """Penalty for leaving the reference policy. Off: verifiable rewards need no leash, and it costs a forward pass."""


class AdvantageConfig(Section):
    """How rewards become advantages."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """`mean`: the group's. `leave_one_out`: the mean of the others (RLOO). The method uses the mean."""
    std: Literal["sample", "population", "none"] = "sample"
    """Divide by the group's standard deviation over G - 1, over G, or not at all (Dr. GRPO). `sample` is what the
    field's frameworks use."""


# ---- training ---------------------------------------------------------------------------------------------


class OptimizerConfig(Section):
    """AdamW, and how its learning rate moves."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate. 1e-6: the field's usual value for billion-parameter models; small models take more."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows warm-up: stay, or fall to 0 at the last update. Constant, so that the length of a run is free."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises linearly from 0."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment. The common value."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment. The common value."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment. The common value."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of matrices (never of norms and biases). 0: a short run needs no pull towards zero."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm. 1: the common value."""
    micro_batch_tokens: int = Field(default=8192, gt=0)
    """Tokens that go through the model at once; the only thing that decides a micro-batch. Bounds memory."""


class TrainingConfig(OptimizerConfig):
    """The update."""

    steps: int = Field(gt=0)
    """Rollout batches to train on."""
    minibatches: int = Field(default=4, gt=0)
    """Gradient steps on each rollout batch. 4: the paper's."""
    groups: Literal["spread", "keep"] = "spread"
    """Whether a group's samples go to any minibatch or all to one. Spread: each minibatch has many prompts' signal."""


class ColdStartConfig(OptimizerConfig):
    """Supervised fine-tuning on the gold answers, before reinforcement learning or alone (`gspo sft`)."""

    steps: int = Field(gt=0)
    """Updates."""
    batch_size: int = Field(default=64, gt=0)
    """Prompts with their answers in each update."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate. 1e-5: usual for fine-tuning."""
    evaluate_every: int = Field(default=0, ge=0)
    """Evaluate every so many updates, as `[evaluation]` says. 0: not during the cold start."""
    stop_at: float | None = None
    """Stop at the first evaluation whose mean reward is at least this, so that something is left to learn. None: take
    all steps."""
    response_column: str | None = None
    """Column with the response to imitate. None takes the answer column."""
    data: Source | None = None
    """Where the pairs come from. None takes the training prompts."""


class EvaluationConfig(SamplingConfig):
    """How the policy is measured, during training and by `gspo eval`."""

    data: Source
    """Held-out prompts."""
    every: int = Field(default=0, ge=0)
    """Evaluate every so many steps; the start and the end are always measured. 0: only those."""
    samples: int = Field(default=1, gt=0)
    """Responses to each prompt; pass@1 is their mean."""
    pass_at: list[Annotated[int, Field(gt=0)]] = [1]
    """The k of each pass@k to report. Each needs at least k samples."""
    overlap: Literal["refuse", "drop", "allow"] = "refuse"
    """What happens to training prompts that are also evaluation prompts: refuse to start, drop them from training, or
    allow them. Refuse: a score on trained problems says little."""
    seed: int = 0
    """Seed of the responses, the same at each evaluation, so that differences are the policy's."""

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if max(self.pass_at, default=1) > self.samples:
            raise ValueError(
                f"pass@{max(self.pass_at)} is undefined with samples = {self.samples}: "
                f"use samples = {max(self.pass_at)} or more"
            )
        return self


class CheckpointConfig(Section):
    """What is kept of a run."""

    every: int = Field(default=20, gt=0)
    """Steps between checkpoints; the last step always has one."""
    keep: int = Field(default=2, gt=0)
    """Newest checkpoints that stay; older ones are deleted. 2: one to fall back on."""


class TrackingConfig(Section):
    """Where metrics go besides metrics.jsonl. All off."""

    tensorboard: bool = False
    """Write event files into the run's folder (extra `tensorboard`)."""
    wandb: str | None = None
    """Project on Weights & Biases (extra `wandb`; the key comes from WANDB_API_KEY)."""
    trackio: str | None = None
    """Project of trackio (extra `trackio`)."""


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
            divisors = _nearest(n, [k for k in range(1, units + 1) if units % k == 0])
            raise ValueError(
                f"{formula} do not split into training.minibatches = {n} equal parts: "
                f"use prompts_per_step = {_or(below, above)}, or minibatches = {divisors}"
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
    def _names_differ(self) -> Self:
        names = [reward_name(r) for r in self.rewards]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"two rewards are called {', '.join(twice)}: give each a name of its own")
        return self


def reward_name(reward: RewardConfig) -> str:
    """The name of a reward in records: its own, or the function's, or the type."""
    if reward.name:
        return reward.name
    return reward.function.rpartition(":")[2] if isinstance(reward, FunctionReward) else reward.type  # type: ignore[attr-defined]


def _nearest(wanted: int, valid: list[int]) -> str:
    """The valid values next to the wanted one, for a sentence. valid: ascending."""
    below, above = [k for k in valid if k < wanted], [k for k in valid if k > wanted]
    return _or(*below[-1:], *above[:1])


def _or(*values: int) -> str:
    return " or ".join(str(k) for k in values if k > 0)
