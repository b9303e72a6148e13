"""What could not be trained is refused before a cold start has cost anything."""

import pytest
from conftest import tiny_config

from gspo.check import check_recipe
from gspo.environments import EpisodeError
from gspo.loop import train
from gspo.training.policy import ModelError

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
