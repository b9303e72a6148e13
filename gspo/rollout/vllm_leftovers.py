"""What a start of vLLM leaves in tables of torch, of its own modules and of the environment, where it would outlive the
engine. And the random numbers of the process, which it sets to 0 whatever the recipe's seed is: rewards and environments
may draw from them.

A hook on torch's compiler that each model registers keeps the model, weights and all; compiled code among the globals of
the model's module keeps CUDA graphs. On an H200, vLLM 0.25.1, each start of a model of 2 MiB left 64 MiB of GPU memory and
13 MiB of the host's.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

MODELS = "vllm.model_executor.models."
"""Where vLLM keeps its models."""
COMPILED = "__compiled_fn_"
"""How torch begins the name of compiled code among a module's globals."""


class Leftovers:
    """What one start has left. Nothing that others left, before or since, is touched."""

    def __init__(self) -> None:
        self._hooks: set[int] = set()
        self._compiled: set[tuple[str, str]] = set()
        self._graphs: set[Any] = set()
        self._environment: dict[str, tuple[str | None, str | None]] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Surrounds the start, which may fail."""
        hooks, compiled, graphs = set(_hooks()), _compiled(), _graphs()
        python, numpy = random.getstate(), np.random.get_state()
        environment = dict(os.environ)
        try:
            with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            self._hooks |= set(_hooks()) - hooks
            self._compiled |= _compiled() - compiled
            self._graphs |= _graphs() - graphs
            changed = {*environment.items()} ^ {*os.environ.items()}
            self._environment |= {name: (environment.get(name), os.environ.get(name)) for name, _ in changed}

    def clear(self) -> None:
        """Take all of it out, once the engine has ended."""
        for number in self._hooks:
            _hooks().pop(number, None)
        for module, name in self._compiled:
            vars(sys.modules[module]).pop(name, None)
            _artifacts().pop(name, None)
        for wrapper in self._graphs:
            wrapper.clear_graphs()
        for name, (before, left) in self._environment.items():
            if os.environ.get(name) == left:
                os.environ.pop(name, None)
                if before is not None:
                    os.environ[name] = before
        self._hooks, self._compiled, self._graphs, self._environment = set(), set(), set(), {}


def _hooks() -> dict[int, Any]:
    """Torch's table of hooks on compiled bytecode."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "_bytecode_hooks", {})


def _artifacts() -> dict[str, Any]:
    """Torch's table of compiled code that may be written to disk, by the same names."""
    module = sys.modules.get("torch._dynamo.precompile_context")
    return getattr(getattr(module, "PrecompileContext", None), "_backend_artifacts_by_key", {})


def _compiled() -> set[tuple[str, str]]:
    """Compiled code of vLLM's models: module, and name in it."""
    modules = [(name, module) for name, module in [*sys.modules.items()] if name.startswith(MODELS)]
    return {(name, key) for name, module in modules for key in vars(module) if key.startswith(COMPILED)}


def _graphs() -> set[Any]:
    """What holds vLLM's CUDA graphs."""
    module = sys.modules.get("vllm.compilation.cuda_graph")
    return set() if module is None else set(module.CUDAGraphWrapper._all_instances)
