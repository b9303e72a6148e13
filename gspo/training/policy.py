"""The policy: a transformers model with its tokenizer, scored in packed form, and its weights by name.

N packed tokens, T trained tokens, H width.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

from ..chat import eos_ids
from ..config import Config, LoraConfig, ModelConfig
from ..distributed import World
from ..moe import Routing, find_routing
from .attention import NAME as ATTENTION
from .attention import Layout, Segment
from .create import create
from .kernels import KernelError, checkpoint_layers, compile_layers, uncompiled, use_liger
from .logprobs import linear_logprobs
from .packing import MicroBatch
from .pretrained import ModelError, from_pretrained
from .sharding import Shards, full, gathered
from .varlen import flash_attention

disable_progress_bar()  # of loading and saving: a run has its own display

HEAD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest difference between logits of the packed path and of the model's own forward, as a share of the logits' norm.
Observed: 1e-6 and 0.008; float16 rounds eight times finer than bfloat16."""


@dataclass
class Policy:
    """A causal language model that is sampled from and trained. Make it with `load_policy`."""

    model: Any
    """The transformers model; with LoRA its layers hold the adapters."""
    tokenizer: Any
    """Its tokenizer."""
    device: torch.device
    """Where it lives."""
    temperature: float
    """The sampling temperature: all log-probabilities are those of logits / temperature."""
    adapter: Any = None
    """The peft model around `model`, or None when all weights are trained."""
    version: int = 0
    """Weight updates so far."""
    eos_ids: frozenset[int] = field(default_factory=frozenset)
    """Every id that ends a response."""
    float32_head: bool = False
    """Whether logits come from a float32 product, whatever the precision of the weights."""
    shards: Shards | None = None
    """The weights dealt over ranks, or None where this process has them all. See `shard`."""
    routing: Routing | None = None
    """The routers of a mixture of experts, or None where none were found."""

    def score(self, batch: MicroBatch, *, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each trained token, float32 [T]; gradients flow through the former.

        At the sampling temperature unless told otherwise. Dropout is off, always: the ratio compares two policies, not
        two masks.
        """
        return (self.shards or self._score)(batch, temperature)

    def _score(self, batch: MicroBatch, temperature: float | None) -> tuple[Tensor, Tensor]:
        hidden_NH = self.hidden(batch.token_ids_N[None], batch.position_N[None], layout=batch.layout).squeeze(0)
        hidden_TH = hidden_NH.index_select(0, batch.predict_T)
        return linear_logprobs(
            hidden_TH,
            self.head,
            batch.target_T,
            temperature=temperature or self.temperature,
            float32_head=self.float32_head,
        )

    def hidden(self, token_ids: Tensor, positions: Tensor, **kwargs: Any) -> Tensor:
        """Last hidden states [B, N, H] of token ids [B, N] at positions [B, N]. With a cache, layers run uncompiled."""
        sampling = "cache" in kwargs
        with uncompiled() if sampling else nullcontext():
            return self.backbone(input_ids=token_ids, position_ids=positions, use_cache=sampling, **{
                self.cache_name if k == "cache" else k: v for k, v in kwargs.items()
            }).last_hidden_state  # fmt: skip

    @property
    def backbone(self) -> nn.Module:
        """The decoder without its output matrix."""
        return self.model.get_decoder()

    @property
    def head(self) -> Tensor:
        """The output matrix [V, H], with its adapter if it has one: then made when it is asked for, with gradients."""
        layer = self.model.get_output_embeddings()
        return _merged(layer) if hasattr(layer, "base_layer") else layer.weight

    @property
    def dtype(self) -> torch.dtype:
        """The precision of forward and backward passes."""
        return self.shards.dtype if self.shards else next(self.model.parameters()).dtype

    @property
    def world(self) -> World:
        """The ranks that have a part in these weights."""
        return self.shards.world if self.shards else World()

    def whole(self) -> AbstractContextManager[None]:
        """Where weights are sharded: all of them gathered on each rank, see Shards.whole. Elsewhere nothing."""
        return self.shards.whole() if self.shards else nullcontext()

    @property
    def cache_name(self) -> str:
        """What this release of transformers calls the key-value cache in forward."""
        return "cache" if "cache" in inspect.signature(type(self.backbone).forward).parameters else "past_key_values"

    @property
    def end_id(self) -> int:
        """The id that a response to imitate ends with: the tokenizer's, or the lowest of those that end one."""
        own = self.tokenizer.eos_token_id
        return min(self.eos_ids) if own is None else own

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that training moves, by name; tied ones once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """Every weight by its Hugging Face name, adapters merged in; tied weights once, the base left untouched.

        Where weights are sharded each is put together as it is asked for, by all ranks together.
        """
        layers = dict(self.model.named_modules())
        for name, tensor in self.model.named_parameters():
            layer = layers.get(name.removesuffix(".base_layer.weight"))
            if "lora_" not in name:  # a merged matrix is made when it is asked for: never two models at once
                whole = full(tensor.detach()) if layer is None else _merged(layer).detach()
                yield name.replace(".base_layer.", "."), whole.to(self.dtype) if self.shards else whole
        saved = self.model.state_dict().keys()  # what a checkpoint holds besides: an expert's bias of choice, say
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in saved)

    def gathered(self) -> dict[str, Tensor] | None:
        """Where weights are sharded, all of them in the memory of the first rank's host, for `save`; elsewhere None."""
        return gathered(self.named_weights(), self.world) if self.shards else None

    def save(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write model and tokenizer in Hugging Face format, adapters merged; with LoRA also the adapter in `adapter/`.

        weights: what `gathered` returned, where weights are sharded; one rank alone then saves.
        """
        if self.adapter is None:
            self.model.save_pretrained(folder, **({} if weights is None else {"state_dict": weights}))
        else:
            self.model.save_pretrained(folder, state_dict=dict(self.named_weights()))
            self.adapter.save_pretrained(folder / "adapter", save_embedding_layers=False)  # they are the base's
        self.tokenizer.save_pretrained(folder)


def require_length(policy: Policy, config: Config) -> None:
    """Raises ModelError if the model's positions end before the longest sample of training or evaluation does."""
    longest = config.longest_sample
    positions = getattr(policy.model.config, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise ModelError(
            f"the longest sample has {longest} tokens (rollout.max_prompt_tokens plus max_response_tokens), but the model "
            f"has {positions} positions: lower one of the two to fit"
        )


def load_policy(config: ModelConfig, *, temperature: float, seed: int, path: str | Path | None = None) -> Policy:
    """The policy of a recipe; `path` overrides where its weights come from (a cold start's, a checkpoint's).

    Raises ModelError for a model that cannot be found, or whose architecture the packed path does not reproduce.
    """
    torch.manual_seed(seed)
    device = _device(config.device)
    dtype = getattr(torch, config.dtype)
    if path is None and config.create is not None:
        model, tokenizer = create(config.create)
    else:
        model, tokenizer = from_pretrained(str(path or config.path), config)
    model = model.to(device=device, dtype=dtype).eval()
    _clear_generation_settings(model)
    _check_architecture(model)
    adapter = _add_lora(model, config.lora) if config.lora else None
    policy = Policy(model, tokenizer, device, temperature, adapter, float32_head=config.head_dtype == "float32")
    policy.eos_ids = eos_ids(model.config, model.generation_config, tokenizer, len(policy.head))
    _choose_packed_path(policy, config.kernels, config.checkpointing)
    return policy


def require_one_rank(config: Config, world: World) -> None:
    """Raises ModelError, before any work is done, for what several ranks cannot train."""
    tables = {"training": config.training, "cold_start": config.cold_start}
    refused = {f'{name}.moments = "8bit"': table is not None and table.moments == "8bit" for name, table in tables.items()}
    refused["[model.lora]"] = config.model.lora is not None
    for setting, here in refused.items():
        if here and world.size > 1:
            raise ModelError(
                f"{setting} is for one process, and these are {world.size}: leave it out, or leave torchrun out"
            )


def shard(policy: Policy, world: World) -> None:
    """Deal the policy's weights, the same on all ranks, over the ranks; with one rank nothing happens. A collective.

    From here on its parameters are the float32 master weights. Raises ModelError for a model that cannot be dealt.
    """
    if world.size == 1:
        return
    try:
        policy.shards = Shards(policy.model, policy._score, world, policy.device)
    except ValueError as error:
        raise ModelError(str(error)) from error


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError('model.device = "cuda", but torch sees no GPU: use "auto" or "cpu"')
    return torch.device(name)


def _clear_generation_settings(model: Any) -> None:
    """Keep a model's end-of-sequence ids and drop every sampling setting: recipes alone say how tokens are drawn."""
    old = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=old.bos_token_id, eos_token_id=old.eos_token_id, pad_token_id=old.pad_token_id
    )


def _check_architecture(model: Any) -> None:
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    window = getattr(model.config, "sliding_window", None)
    if getattr(model.config, "use_sliding_window", True) is False:
        window = None
    if kinds != {"full_attention"} or (window is not None and window < model.config.max_position_embeddings):
        raise ModelError(
            f"{type(model).__name__} has layers of the kinds {', '.join(sorted(kinds))} and a sliding window of {window}: "
            "packed training handles full attention only; choose a model without sliding windows or recurrent layers"
        )
    if model.get_output_embeddings() is None or model.get_output_embeddings().bias is not None:
        raise ModelError(
            f"{type(model).__name__} has no plain output matrix: log-probabilities cannot be computed in chunks"
        )


def _add_lora(model: Any, config: LoraConfig) -> Any:
    try:
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model
    except ImportError:
        raise ModelError("model.lora needs the package peft: pip install 'gspo[peft]'") from None
    targets = config.target_modules
    peft_config = PeftConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    outer = (model.get_input_embeddings(), model.get_output_embeddings())
    try:
        with warnings.catch_warnings(action="ignore"):  # of tied matrices with adapters, which are refused below
            adapter = get_peft_model(model, peft_config, autocast_adapter_dtype=False)
        for layer in model.modules():  # every adapter must be one that a checkpoint can merge
            if hasattr(layer, "get_delta_weight") and hasattr(layer, "base_layer"):
                _merged(layer)
    except Exception as error:  # peft's own kinds of refusal are many
        raise ModelError(f"model.lora: target_modules = {targets!r} do not fit this model: {error}") from error
    if outer[0] is not model.get_input_embeddings():
        raise ModelError("model.lora: adapters on the embeddings are not handled: leave them out of target_modules")
    if outer[1] is not model.get_output_embeddings() and outer[1].weight is outer[0].weight:
        raise ModelError(
            "model.lora: the output matrix of this model is that of its embeddings, and an adapter would part them: leave "
            "it out of target_modules"
        )
    return adapter


def _merged(layer: Any) -> Tensor:
    """base + scale B A of an adapted layer, in float32 before rounding to the base's precision."""
    base = layer.base_layer.weight
    return (base.float() + layer.get_delta_weight("default").float()).to(base.dtype)


def _compiling_pays(policy: Policy) -> bool:
    """Whether it was measured to: of a dense decoder on a GPU."""
    return policy.device.type == "cuda" and policy.routing is None


@torch.no_grad()
def _choose_packed_path(policy: Policy, kernels: str, checkpointing: str) -> None:
    """Go over to packed attention and the kernels asked for, and compare with the model's own forward on a few tokens.

    No architecture is wrong silently: raises ModelError where the two differ.
    """
    generator = torch.Generator().manual_seed(0)
    length = 8
    ids = torch.randint(len(policy.head), (2, length), generator=generator).to(policy.device)
    positions = torch.arange(length, device=policy.device).expand(2, -1)

    def forward() -> Tensor:
        return policy.model(input_ids=ids, position_ids=positions, use_cache=False).logits.flatten(0, 1).float()

    routing = policy.routing = find_routing(getattr(policy.backbone, "layers", [policy.backbone]), forward)
    plain = forward()
    if not bool(plain.isfinite().all()):
        raise ModelError(
            f"{type(policy.model).__name__}: its logits are NaN or infinite: its weights are broken, or beyond model.dtype"
        )
    if routing is not None and routing.replayable:
        routing.replay(routing.chosen())  # an expert that rounding flips is no other architecture
    policy.model.set_attn_implementation(ATTENTION)
    try:
        if kernels == "liger":
            use_liger(policy.model)
        if kernels == "compile" or (kernels == "auto" and _compiling_pays(policy)):
            compile_layers(policy.backbone)
        if checkpointing != "none":
            checkpoint_layers(policy.backbone, checkpointing)
        if policy.device.type == "cuda":
            flash_attention(policy.head.device.index)  # said now what the first layer would trip over
        layout = Layout.of([Segment(length), Segment(length)], policy.device)
        hidden = policy.hidden(ids.reshape(1, -1), positions.reshape(1, -1), layout=layout)[0]
    except KernelError as error:
        raise ModelError(str(error)) from error
    except RuntimeError as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        why = f"{type(policy.model).__name__}: torch cannot compile its layers ({str(error).strip().splitlines()[0]})"
        raise ModelError(f'{why}: install a C++ compiler (g++) if there is none, or set model.kernels = "torch"') from error
    if routing is not None:
        routing.replay(None)
    difference = float(((hidden @ policy.head.T).float() - plain).norm() / plain.norm())
    if not difference <= HEAD_TOLERANCE[policy.head.dtype]:
        raise ModelError(
            f"{type(policy.model).__name__}: packed logits differ from the model's own by {difference:.2g} of their norm: "
            "this architecture does more in attention or after its output matrix, and cannot be trained here"
        )
