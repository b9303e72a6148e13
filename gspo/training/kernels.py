"""Faster layers from kept libraries: torch.compile, and Liger's kernels. Neither changes the mathematics."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KINDS
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
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise KernelError(
            f'model.kernels = "compile": {type(backbone).__name__} has no list of layers to compile: use "torch"'
        )
    for layer in layers:
        layer.compile(dynamic=True)


def uncompiled() -> Any:
    """A context in which compiled layers run as they are written: for shapes that come once."""
    return torch.compiler.set_stance("force_eager")
