"""Layers that are faster or hold less: torch.compile, Liger's kernels, checkpointing. None changes the mathematics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LIGER_PARTS = {"rope": True, "rms_norm": True, "swiglu": True, "cross_entropy": False, "fused_linear_cross_entropy": False}
"""The layers' own work. The losses are not ours to take: they know nothing of log-probabilities by token."""


class KernelError(Exception):
    """A model that these kernels do not fit; the message says why and what to do."""


def use_liger(model: Any) -> None:
    """Replace norms, rotations and gated activations of a transformers model by Liger's Triton kernels (Hsu et al.,
    arXiv:2410.10989). They are replaced in transformers' own module too: for all models of this kind in this process.

    Raises KernelError where the package, a GPU, or kernels for this kind of model are missing.
    """
    kind = model.config.model_type
    try:
        from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
            _apply_liger_kernel_to_instance,
        )
        from liger_kernel.transformers.monkey_patch import (  # pyright: ignore[reportMissingImports]
            MODEL_TYPE_TO_APPLY_LIGER_FN as KINDS,
        )
    except ImportError as error:
        raise KernelError("model.kernels = 'liger' needs the package liger-kernel: pip install 'gspo[liger]'") from error
    if model.device.type != "cuda":
        raise KernelError(f'model.kernels = "liger" needs a GPU, and this model is on {model.device.type}: use "torch"')
    if kind not in KINDS:
        raise KernelError(
            f'model.kernels = "liger": Liger has no kernels for models of the kind {kind}: use "compile" or "torch"'
        )
    _apply_liger_kernel_to_instance(model, **LIGER_PARTS)


def compile_layers(backbone: nn.Module) -> None:
    """Have torch compile each decoder layer at its first use; all of one kind share the code, for any number of tokens.

    Raises KernelError where the model keeps its layers elsewhere than transformers' decoders do.
    """
    for layer in _layers(backbone, 'model.kernels = "compile"', "torch"):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def checkpoint_layers(backbone: nn.Module, kind: str) -> None:
    """Recompute activations in the backward pass (Chen et al., arXiv:1604.06174): of whole layers ("full"), or of their
    feed-forward blocks, which hold about a third ("selective"). After compile_layers: a compiled layer is recomputed so.

    Raises KernelError where the model keeps layers or blocks elsewhere than transformers' decoders do.
    """
    setting = f'model.checkpointing = "{kind}"'
    for layer in _layers(backbone, setting, "none"):
        block = layer if kind == "full" else getattr(layer, "mlp", None)
        if block is None:
            raise KernelError(f'{setting}: {type(layer).__name__} has no block named mlp: use "full" or "none"')
        own = getattr(block.forward, "__func__", None)
        if own is None:  # compiled: a function of this layer alone, and what surrounds it is not looked into
            block.forward = functools.partial(_checkpointed, block.forward)
        else:
            block.forward = MethodType(_checkpointing(own), block)


@functools.cache
def _checkpointing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """One method for all blocks of a kind: a compiled layer around them would be compiled anew for each other one."""

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return _checkpointed(forward, *args, **kwargs)

    return checkpointed


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """There is no random number in a layer, so no state of a generator is kept."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _layers(backbone: nn.Module, setting: str, instead: str) -> nn.ModuleList:
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise KernelError(f'{setting}: {type(backbone).__name__} has no list of layers: use "{instead}"')
    return layers


def uncompiled() -> Any:
    """A context in which compiled layers run as they are written: for shapes that come once."""
    return torch.compiler.set_stance("force_eager")
