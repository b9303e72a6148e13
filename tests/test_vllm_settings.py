"""What a recipe says of vLLM reaches vLLM. But for the last test a stand-in for its class notes what it is started with,
and starts nothing, so that what only a GPU can do is held here too."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny_config, tiny_policy
from test_vllm import SHAPE, policy_of, pytestmark, requests, start

from gspo.config import SamplingConfig
from gspo.rollout.engine import EngineError
from gspo.rollout.engines import open_engine
from gspo.rollout.vllm_package import environment

__all__ = ["pytestmark"]


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """(settings of a recipe) to what vLLM's class is called with on a GPU, and TRITON_F32_DEFAULT at that moment."""
    for name in environment("float32"):
        monkeypatch.setenv(name, "")  # so that it is taken out again at the end
        monkeypatch.delenv(name)

    def of(**changes: Any) -> dict[str, Any]:
        noted: dict[str, Any] = {}
        said: list[str] = []

        def llm(model: str, **settings: Any) -> None:
            noted.update(settings, products=os.environ.get("TRITON_F32_DEFAULT"))
            raise RuntimeError("far enough")

        policy = tiny_policy(**SHAPE)
        monkeypatch.setattr("gspo.rollout.vllm.import_vllm", lambda: SimpleNamespace(LLM=llm))
        monkeypatch.setattr("gspo.rollout.vllm._require_platform", lambda policy: None)
        monkeypatch.setattr("gspo.rollout.engines.require_engine", lambda config: None)
        monkeypatch.setattr(policy, "device", torch.device("cuda"))
        with pytest.raises(EngineError, match="did not start: far enough"):
            open_engine(tiny_config(tmp_path, rollout__engine="vllm", **changes), policy, said.append)
        return noted | {"said": " ".join(said)}

    return of


def test_a_recipes_settings_reach_vllm(asked):
    own = {"dtype": "bfloat16", "head_dtype": "float32", "sleep": True, "memory_fraction": 0.23}
    noted = asked(rollout__vllm=own, rollout__max_rows=7)
    assert noted["dtype"] == "bfloat16" and noted["hf_overrides"] == {"head_dtype": "float32"}
    assert noted["enable_sleep_mode"] is True and noted["gpu_memory_utilization"] == 0.23
    assert noted["max_num_seqs"] == 7 and noted["generation_config"] == "vllm" and noted["load_format"] == "dummy"
    assert noted["products"] is None  # a matter of float32 alone
    assert "memory_fraction is of a GPU's memory, and not used on a CPU" in noted["said"]  # where the recipe's model lies


def test_what_a_recipe_leaves_out_is_the_models(asked):
    noted = asked()
    assert noted["dtype"] == "float32" and "hf_overrides" not in noted and noted["enable_sleep_mode"] is False
    assert "memory_fraction" not in noted["said"]
    assert noted["products"] == "ieee"  # whole products: Triton's default in float32 keeps ten bits


def test_every_sample_is_asked_for_without_a_setting_of_the_models(monkeypatch):
    """Beside the token that is drawn here nothing may have a say: no penalty, no bias, no truncation."""
    noted = []
    with start(policy_of("tied")) as engine:
        add = engine._llm.llm_engine.add_request

        def note(name: str, prompt: Any, params: Any) -> None:
            noted.append(params)
            add(name, prompt, params)

        monkeypatch.setattr(engine._llm.llm_engine, "add_request", note)
        engine.generate(requests(), SamplingConfig(max_response_tokens=4, temperature=0.7, top_p=0.9, top_k=5))
    assert len(noted) == len(requests())
    for params in noted:
        assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1, 0, 0)
        assert (params.temperature, params.top_p, params.min_p, params.min_tokens) == (0, 1, 0, 0)
        assert params.top_k in (0, -1) and not params.logit_bias and not params.bad_words and params.logprobs is None
