"""Which policy is trained."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .section import Section, either, nearest


class CreateConfig(Section):
    """A small decoder of transformers' Qwen3 class with random weights, and a tokenizer with one token a character."""

    alphabet: str
    """Every character that prompts and responses may hold; one token each."""
    hidden_size: int = Field(default=128, gt=0)
    """Width of the residual stream. 128 learns two-digit arithmetic in seconds."""
    intermediate_size: int = Field(default=512, gt=0)
    """Width of the feed-forward layer, without experts. Four times the default width, as is usual."""
    num_layers: int = Field(default=4, gt=0)
    """Decoder layers."""
    num_heads: int = Field(default=4, gt=0)
    """Query heads."""
    num_kv_heads: int = Field(default=2, gt=0)
    """Key and value heads. Fewer than query heads, so that grouped attention is exercised."""
    max_position_embeddings: int = Field(default=512, gt=0)
    """Longest sequence. Ample for small tasks."""
    num_experts: int | None = Field(default=None, gt=1)
    """Experts of each layer, of transformers' Qwen3-MoE class. None: a dense decoder, which is enough for most purposes."""
    experts_per_token: int | None = Field(default=None, gt=0)
    """Experts that compute each token (top-k). Needed with num_experts, and for it alone."""
    moe_intermediate_size: int | None = Field(default=None, gt=0)
    """Width of each expert. Needed with num_experts, and for it alone."""

    @model_validator(mode="after")
    def _experts_are_whole(self) -> Self:
        names = ("num_experts", "experts_per_token", "moe_intermediate_size")
        if missing := [name for name in names if getattr(self, name) is None]:
            if len(missing) < len(names):
                raise ValueError(f"{', '.join(names)} go together: set {' and '.join(missing)} too, or none of them")
        elif self.experts_per_token > self.num_experts:  # pyright: ignore[reportOperatorIssue]
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} is more than num_experts = {self.num_experts}: "
                f"use {self.num_experts} or fewer"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            near = nearest(self.num_kv_heads, [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0])
            raise ValueError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}: "
                f"use num_kv_heads = {near}"
            )
        if self.hidden_size % (2 * self.num_heads):
            unit = 2 * self.num_heads
            below, above = self.hidden_size // unit * unit, (self.hidden_size // unit + 1) * unit
            raise ValueError(
                f"hidden_size = {self.hidden_size} does not split into num_heads = {self.num_heads} heads of an even "
                f"width: use hidden_size = {either(below, above)}"
            )
        return self


class LoraConfig(Section):
    """Low-rank adapters through peft: only they are trained."""

    rank: int = Field(default=16, gt=0)
    """Rank of each update. 16 is peft users' common choice."""
    alpha: int = Field(default=32, gt=0)
    """Scale numerator: the update is scaled by alpha / rank. Twice the rank, as is common."""
    target_modules: Annotated[list[str], Field(min_length=1)] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an adapter. Every linear layer but the output matrix."""


class ModelConfig(Section):
    """Which policy is trained."""

    path: str | None = None
    """Folder or hub name of a transformers causal language model. One of `path` and `create` is needed."""
    create: CreateConfig | None = None
    """A small random model instead."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the forward and backward pass; master weights and moments are float32 in all. float32 is the
    default because GSPO's clip range is narrower than bfloat16's rounding noise. float16 rounds eight times finer than
    bfloat16 but holds nothing above 65,504: its loss is scaled, and updates that overflow are left out and counted."""
    head_dtype: Literal["same", "float32"] = "same"
    """Precision of the product with the output matrix, in training and in the embedded engine: that of `dtype`, or float32.
    The latter takes the rounding of logits away, and costs time and a float32 copy of the matrix; hence off."""
    kernels: Literal["auto", "torch", "compile", "liger"] = "auto"
    """What computes the decoder's layers in the update. `torch`: operation by operation, as the model is written.
    `compile`: fused by torch.compile, about half a minute at the start. `liger`: norms, rotations and gated activations by
    Liger's kernels (extra `liger`), on a GPU. `auto`: `compile` of a dense model on a GPU, where an update took 0.53 of its
    time (liger: 0.59); else `torch`: of a mixture of experts compiling took a minute, and was not seen to pay."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes instead of keeping: nothing, the feed-forward blocks (a small decoder then keeps
    0.63 of its activations, for a tenth more arithmetic), or whole layers (nearly all, for a third more). None: smaller
    micro-batches come first."""
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
