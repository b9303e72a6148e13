"""Model and tokenizer out of a folder or from a hub, whole and fitting each other, or a sentence that says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..chat import character_tokenizer
from ..config import ModelConfig


class ModelError(Exception):
    """A model that cannot be trained here; the message says why and what to do."""


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of the recipe's model, without its weights. Raises ModelError if it cannot be loaded."""
    if config.create is not None:
        return character_tokenizer(config.create.alphabet)
    _require_folder(str(config.path))
    try:
        return AutoTokenizer.from_pretrained(str(config.path), trust_remote_code=config.trust_remote_code)
    except Exception as error:  # whatever a broken or foreign folder makes the libraries raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"model {config.path}: its tokenizer cannot be loaded: {first}") from error


def from_pretrained(path: str, config: ModelConfig) -> tuple[Any, Any]:
    """Model and tokenizer. Raises ModelError for a folder that lacks something, or whose parts do not fit."""
    code = {"trust_remote_code": config.trust_remote_code}
    _require_folder(path)
    if (Path(path) / "adapter_config.json").exists():
        raise ModelError(
            f"model {path}: holds an adapter, not a whole model: merge it first (a checkpoint's model/ is merged)"
        )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, config.dtype), use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=True, **code,
        )  # fmt: skip
        model, info = loaded
        tokenizer = AutoTokenizer.from_pretrained(path, **code)
    except Exception as error:  # whatever a broken or foreign folder makes the libraries raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"model {path}: cannot be loaded as a causal language model with its tokenizer: {first}"
        ) from error
    if other := sorted(info["mismatched_keys"]):
        name, there, wanted = other[0]
        raise ModelError(
            f"model {path}: its {name} is {tuple(there)}, by its config.json it would be {tuple(wanted)}: mend the folder"
        )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"model {path}: lacks weights that would start at random, e.g. {missing[0]}: mend the folder")
    largest = max(tokenizer.get_vocab().values())
    if (rows := model.get_input_embeddings().weight.shape[0]) <= largest:
        raise ModelError(
            f"model {path}: has {rows} token embeddings, but its tokenizer's ids go up to {largest}: they do not fit"
        )
    _align(model)
    return model, tokenizer


def _require_folder(path: str) -> None:
    """Raises ModelError for a path of a disk, not of a hub, where there is no folder."""
    if path.startswith("~"):
        raise ModelError(f"model {path}: ~ is not read here: write the folder out")
    if (path.startswith(("/", ".")) or path.count("/") > 1) and not Path(path).is_dir():
        raise ModelError(f"model {path}: there is no such folder")


def _align(model: nn.Module) -> None:
    """Copy what does not begin at a multiple of 64 bytes, as torch's own tensors do. Weights mapped from a file begin
    anywhere, and some processors' matrix products then round otherwise: a resumed run would differ in its last bits."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()
