"""What a start of vLLM leaves in global tables goes with the engine; what others left stays."""

import os
import random
import sys
import weakref
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch._dynamo.convert_frame
import torch._dynamo.precompile_context

from gspo.config import SamplingConfig
from gspo.rollout.engine import EngineError, Request
from gspo.rollout.vllm import VllmEngine
from gspo.rollout.vllm_draws import Draws
from gspo.rollout.vllm_leftovers import Leftovers

HOOKS = torch._dynamo.convert_frame._bytecode_hooks
ARTIFACTS: Any = torch._dynamo.precompile_context.PrecompileContext._backend_artifacts_by_key


class Wrapper:
    """As vLLM's holder of CUDA graphs."""

    _all_instances: ClassVar[weakref.WeakSet["Wrapper"]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.graphs = ["graph"]
        self._all_instances.add(self)

    def clear_graphs(self) -> None:
        self.graphs.clear()


@pytest.fixture
def models(monkeypatch):
    """A module of vLLM's models, and vLLM's module for graphs."""
    models, graphs = ModuleType("vllm.model_executor.models.some"), ModuleType("vllm.compilation.cuda_graph")
    vars(graphs)["CUDAGraphWrapper"] = Wrapper
    for module in (models, graphs):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return models


def left(models: ModuleType, name: str):
    """What a start leaves: a hook, compiled code, an artifact of it, graphs."""
    handle = torch._dynamo.convert_frame.register_bytecode_hook(lambda code, new_code: None)
    setattr(models, f"__compiled_fn_{name}", object())
    ARTIFACTS[f"__compiled_fn_{name}"] = object()
    return handle, Wrapper()


def there(models: ModuleType, name: str, what) -> list[bool]:
    handle, wrapper = what
    return [
        handle.id in HOOKS,
        hasattr(models, f"__compiled_fn_{name}"),
        f"__compiled_fn_{name}" in ARTIFACTS,
        bool(wrapper.graphs),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_start_left_goes_and_all_else_stays(models, fails):
    leftovers, error = Leftovers(), RuntimeError("no memory")
    before = left(models, "before")
    try:
        with leftovers.watched():
            own = left(models, "own")
            if fails:
                raise error
    except RuntimeError as raised:
        assert fails and raised is error
    since = left(models, "since")
    assert there(models, "own", own) == [True] * 4
    leftovers.clear()
    leftovers.clear()
    assert there(models, "own", own) == [False] * 4
    for name, what in {"before": before, "since": since}.items():
        assert there(models, name, what) == [True] * 4
        what[0].remove()
        del ARTIFACTS[f"__compiled_fn_{name}"]


def test_the_random_numbers_of_the_process_go_on_as_if_nothing_had_started():
    def numbers() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    def seed(n: int) -> None:
        random.seed(n)
        np.random.seed(n)
        torch.manual_seed(n)

    seed(7)
    wanted = numbers()
    seed(7)
    with Leftovers().watched():
        seed(0)
    assert numbers() == wanted


def test_the_environment_is_again_as_it_was_but_for_what_others_set_since(monkeypatch):
    for name, value in {"KEPT": "1", "CHANGED": "1", "GONE": "1", "THEIRS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NEW", raising=False)
    with (leftovers := Leftovers()).watched():
        os.environ |= {"CHANGED": "2", "NEW": "2", "THEIRS": "2"}
        del os.environ["GONE"]
    os.environ["THEIRS"] = "3"
    leftovers.clear()
    assert [os.environ.get(name) for name in ("KEPT", "CHANGED", "GONE", "NEW", "THEIRS")] == ["1", "1", "1", None, "3"]


def test_a_closed_engine_says_so():
    engine: Any = VllmEngine.__new__(VllmEngine)
    engine._model, engine.draws = None, Draws()
    sampling = SamplingConfig(max_response_tokens=1)
    for use in (lambda: engine.generate([Request("s", (1,), 0)], sampling), lambda: engine.load(None)):
        with pytest.raises(EngineError, match="was closed: start a new one"):
            use()


def test_where_vllm_is_not_there_nothing_is_found(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("vllm")]:
        monkeypatch.delitem(sys.modules, name)
    with (leftovers := Leftovers()).watched():
        handle = torch._dynamo.convert_frame.register_bytecode_hook(lambda code, new_code: None)
    assert (leftovers._hooks, leftovers._compiled, leftovers._graphs) == ({handle.id}, set(), set())
    leftovers.clear()
    assert handle.id not in HOOKS
