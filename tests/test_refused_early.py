"""What could not be trained is refused before a cold start has cost anything."""

import importlib.util
import json
import re

import pytest
import torch
from conftest import tiny_config, tiny_policy

from gspo.check import check_recipe
from gspo.environments import EpisodeError
from gspo.loop import train
from gspo.recipe import RecipeError
from gspo.rollout.engine import EngineError
from gspo.rollout.engines import require_engine
from gspo.rollout.vllm_package import ENVIRONMENT, require_environment, users_settings, what_to_do
from gspo.training.policy import load_policy
from gspo.training.pretrained import ModelError

COLD = {"steps": 4, "batch_size": 8, "learning_rate": 1e-3}
MISSING = {"type": "function", "function": "nowhere.py:Nothing", "max_turns": 2}


def no_step_was_taken(folder):
    return not (folder / "tiny" / "cold_start" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"training__replay": "trainer", "rollout__old_logprobs": "trainer"},
        {"training__replay": "engine", "rollout__routed_experts": True},
        {"rollout__routed_experts": True},
    ],
    ids=str,
)
def test_experts_of_a_model_without_any(tmp_path, changes):
    with pytest.raises(ModelError, match="no module of Qwen3ForCausalLM"):
        train(tiny_config(tmp_path, cold_start=COLD, **changes))
    assert no_step_was_taken(tmp_path)


def test_an_environment_that_does_not_open(tmp_path):
    config = tiny_config(tmp_path, cold_start=COLD, environment=MISSING)
    with pytest.raises(EpisodeError, match="nowhere"):
        train(config)
    assert no_step_was_taken(tmp_path)
    with pytest.raises(EpisodeError, match="nowhere"):
        check_recipe(config, limit=2)


@pytest.mark.parametrize(("shape", "width"), [({"head_dim": 24}, 24), ({"hidden_size": 80, "num_attention_heads": 2}, 40)])
def test_a_folder_whose_heads_are_too_narrow_for_vllm_on_a_cpu(tmp_path, monkeypatch, shape, width):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = tiny_config(tmp_path, model={"path": str(tmp_path), "device": "cpu"}, rollout__engine="vllm")
    with pytest.raises(EngineError, match=f"this model's are {width}"):
        require_engine(config)
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 64}))
    require_engine(config)
    (tmp_path / "config.json").write_text("[]")  # what is wrong with a folder is said when it is loaded
    require_engine(config)


def test_a_setting_of_vllm_that_is_not_ours_is_refused_and_not_overridden(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(EngineError, match=r"VLLM_USE_V2_MODEL_RUNNER=1 is set in the environment.* with 0: unset it"):
        require_environment("float32")
    assert "VLLM_USE_V2_MODEL_RUNNER" in users_settings()
    told = what_to_do(ValueError("invalid literal for int()"), users_settings(), on_cpu=True)
    assert told.startswith("unset ") and "VLLM_USE_V2_MODEL_RUNNER" in told
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    require_environment("float32")
    assert "VLLM_USE_V2_MODEL_RUNNER" not in users_settings()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "1", "VLLM_ENABLE_V1_MULTIPROCESSING=1 is set .* runs here with 0: unset it"),
        ("VLLM_LOGGING_LEVEL", "loud", "VLLM_LOGGING_LEVEL=loud is set in the environment and no level of logging: unset"),
        ("VLLM_CACHE_ROOT", "/proc/nowhere", r"cache /proc/nowhere cannot be written to \(.*: set VLLM_CACHE_ROOT to a"),
        ("VLLM_CACHE_ROOT", "read-only", r"cache .*/read-only cannot be written to \(.*: set VLLM_CACHE_ROOT"),
        ("VLLM_CACHE_ROOT", "~nosuchuser/x", "no-such-compiler is not found"),  # a home that is not known is no fault
        ("XDG_CACHE_HOME", "/proc/nowhere", r"cache /proc/nowhere/vllm cannot be written to \(.*: set VLLM_CACHE_ROOT"),
        ("CXX", "no-such-compiler", "a C.. compiler, and no-such-compiler is not found: install g.., or name yours"),
    ],
    ids=lambda text: text.split()[0][:30],
)
def test_what_vllm_cannot_start_with_is_said_before_a_cold_start_and_by_check(tmp_path, monkeypatch, name, value, told):
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.chdir(tmp_path)
    if value == "read-only":  # to root too
        (tmp_path / value).mkdir()
        (tmp_path / value / "gspo").symlink_to("/proc")
        value = str(tmp_path / value)
    if value.startswith("~"):
        monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(name, value)
    shape = {"alphabet": "0123456789+-= ", "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1}
    config = tiny_config(tmp_path, model={"create": shape, "device": "cpu"}, rollout__engine="vllm", cold_start=COLD)
    with pytest.raises(EngineError, match=told):
        train(config)
    assert no_step_was_taken(tmp_path)
    assert re.search(f"training here would stop: .*{told}", "".join(check_recipe(config, limit=1).notes))


def test_a_folder_of_a_model_that_is_not_there_or_has_another_shape_than_it_says(tmp_path):
    def load(path):
        model = {"path": str(path), "device": "cpu"}
        return load_policy(tiny_config(tmp_path, model=model).model, temperature=1.0, seed=0)

    for path in (f"{tmp_path}/nothing", "models/of/nobody"):
        with pytest.raises(ModelError, match=f"model {path}: there is no such folder"):
            load(path)
    with pytest.raises(ModelError, match="model ~/model: ~ is not read here: write the folder out"):
        load("~/model")
    tiny_policy().save(tmp_path / "model")
    shape = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape | {"intermediate_size": 48}))
    with pytest.raises(ModelError, match=r"its model.layers.0.mlp.* is \(.*\), by its config.json it would be \(.*48"):
        load(tmp_path / "model")


@pytest.mark.parametrize("place", ["/proc/nowhere", "/etc/hostname", "/tmp/" + 300 * "x"])
def test_an_output_folder_that_cannot_be_made(tmp_path, place):
    with pytest.raises(RecipeError, match=f"the folder {place}/tiny cannot be made or written to .* with --output"):
        train(tiny_config(tmp_path, output=place))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_folder_whose_weights_are_broken_is_not_taken_for_another_architecture(tmp_path, value):
    policy = tiny_policy()
    with torch.no_grad():
        next(iter(policy.trainable.values())).fill_(value)
    policy.save(tmp_path / "model")
    config = tiny_config(tmp_path, model={"path": str(tmp_path / "model"), "device": "cpu"}).model
    with pytest.raises(ModelError, match="logits are NaN or infinite"):
        load_policy(config, temperature=1.0, seed=0)
