"""What is maximised, how, and how it is measured and kept."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from .rollout import SamplingConfig
from .section import Section
from .sources import Source


class KLConfig(Section):
    """A penalty for leaving a reference policy: the policy as it was when training started."""

    coefficient: float = Field(gt=0, le=1e6)
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
    clip_high: float | None = Field(default=None, gt=0, le=1e6)
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
    credit: Literal["response", "turn"] = "response"
    """Who shares an advantage: all tokens of a response or episode, or those of a turn, by the rewards of an environment;
    docs/environments.md has the formula. `response`: the method's."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """With `turn`: a turn is credited with its reward and, for each turn further off, this factor times the later ones. 1:
    the sum of all, as a turn may prepare the next. 0: its own alone."""


# ---- training ---------------------------------------------------------------------------------------------


class OptimizerConfig(Section):
    """AdamW, and how its learning rate moves."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate. 1e-6: the field's usual value for billion-parameter models; small models take more."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows warm-up: stay, or fall towards 0, which the update after the last would have. Constant, so that the
    length of a run is free."""
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
    moments: Literal["float32", "8bit"] = "float32"
    """Precision of AdamW's two moments. `8bit`: of matrices, by torchao (extra `torchao`): a quarter of their memory, and
    rounding that the method was not tested with; hence not the default."""
    micro_batch_tokens: int = Field(default=8192, gt=0)
    """Tokens that go through the model at once; the only thing that decides a micro-batch. Bounds memory."""

    @field_validator("moments")
    @classmethod
    def _package_is_there(cls, moments: str) -> str:
        if moments == "8bit" and importlib.util.find_spec("torchao") is None:
            raise ValueError('moments = "8bit" needs the package torchao: pip install "gspo[torchao]"')
        return moments


class TrainingConfig(OptimizerConfig):
    """The update."""

    steps: int = Field(gt=0)
    """Rollout batches to train on."""
    minibatches: int = Field(default=4, gt=0)
    """Gradient steps on each rollout batch. 4: the paper's."""
    groups: Literal["spread", "keep"] = "spread"
    """Whether a group's samples go to any minibatch or all to one. Spread: each minibatch has many prompts' signal. Keep: a
    prompt that is long beside its responses is computed once for all of them, and not once in each minibatch."""
    replay: Literal["none", "trainer", "engine"] = "none"
    """Of a mixture of experts, whose choice of experts the update's passes repeat, docs/moe.md. `trainer`: what the old
    policy's scoring pass chose, in all minibatches after the first (R2). `engine`: what the engine chose while it sampled,
    in all passes (R3). None: gspo does not need it, and it costs memory and time."""


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

    every: int | None = Field(default=20, gt=0)
    """Steps between checkpoints; the last step always has one. null: none but where a signal stops the run, for runs of
    which the records alone are wanted; what is trained is then lost, and --resume begins anew."""
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
