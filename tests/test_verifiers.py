"""Environments of the package `verifiers`, by a module with its interface: data, rewards, and what is refused."""

from __future__ import annotations

import sys
import types

import pytest

from gspo import verifiers_package
from gspo.config import VerifiersReward, VerifiersSource
from gspo.data import DataError
from gspo.data.sources import load_rows
from gspo.rewards import RewardError, build, gold_checks, score
from gspo.types import Completion, Prompt, Sample

ROWS = [{"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4", "task": "sums", "info": {"digits": 1}}]


class Rubric:
    def __init__(self, funcs, weights):
        self.funcs, self.weights, self.class_objects = funcs, weights, {"parser": str.strip}


async def right(completion, answer, parser):
    return float(parser(completion[-1]["content"]) == answer)


def brief(completion, info, **kwargs):
    return kwargs["state"]["info"]["digits"] / len(completion[0]["content"])


def fails(prompt):
    raise ZeroDivisionError(prompt[0]["content"])


def together(prompts):
    return [0.0]


@pytest.fixture
def package(monkeypatch):
    """A module with the interface of verifiers 0.1."""
    module = types.ModuleType("verifiers")

    class MultiTurnEnv:
        pass

    class SingleTurnEnv(MultiTurnEnv):
        def __init__(self, rubric):
            self.rubric, self.get_dataset = rubric, lambda: ROWS

    class EnvGroup:
        pass

    made = {
        "sums": lambda: SingleTurnEnv(Rubric([right, brief, fails], [1.0, 0.5, 0.0])),
        "several": lambda: SingleTurnEnv(types.SimpleNamespace(rubrics=[Rubric([right], [2.0]), Rubric([brief], [1.0])])),
        "broken": lambda: SingleTurnEnv(Rubric([fails], [1.0])),
        "group": lambda: SingleTurnEnv(Rubric([together], [1.0])),
        "several environments": EnvGroup,
    }
    module.SingleTurnEnv, module.MultiTurnEnv = SingleTurnEnv, MultiTurnEnv  # type: ignore[attr-defined]
    module.load_environment = lambda name, **parameters: made[name](**parameters)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", module)
    verifiers_package._load.cache_clear()
    yield module
    verifiers_package._load.cache_clear()


def sample(name, text):
    (row,) = load_rows(VerifiersSource(environment=name))
    prompt = Prompt(0, tuple(row["prompt"]), "2+2?", (1,), row["answer"], row, "r0")
    return Sample("s1/r0/0", prompt, Completion.__new__(Completion), text)


def reward(name, *texts, **settings):
    return [s.total for s in score(build([VerifiersReward(**settings)]), [sample(name, text) for text in texts])]


def test_the_rubric_of_an_environment_is_the_reward(package):
    assert reward("sums", "4", " 4 ", "12") == [1.5, 1 + 0.5 / 3, 0.25]
    assert reward("several", "4") == [3.0]


def test_a_function_that_fails_is_not_a_reward_of_0(package):
    with pytest.raises(RewardError, match="ZeroDivisionError: 2\\+2\\? at sample s1/r0/0"):
        reward("broken", "4")
    assert reward("broken", "4", on_error="abstain") == [None]


def test_what_is_not_supported_is_said(package):
    with pytest.raises(DataError, match="is a EnvGroup, not a SingleTurnEnv or MultiTurnEnv"):
        load_rows(VerifiersSource(environment="several environments"))
    with pytest.raises(DataError, match="cannot load the environment nothing"):
        load_rows(VerifiersSource(environment="nothing"))
    with pytest.raises(DataError, match="has no data for eval"):
        load_rows(VerifiersSource(environment="sums", split="eval"))
    with pytest.raises(RewardError, match="scores a group of responses together"):
        reward("group", "4")
    del package.load_environment
    verifiers_package._load.cache_clear()
    with pytest.raises(DataError, match="another interface"):
        load_rows(VerifiersSource(environment="sums"))


def test_rows_of_another_source_are_refused_before_training(package):
    (check,) = gold_checks(build([VerifiersReward()]))
    assert check("4", {"answer": "4"}) and not check("4", load_rows(VerifiersSource(environment="sums"))[0])
