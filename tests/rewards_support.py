"""What the tests of rewards share."""

import numpy as np
import pytest
from pydantic import TypeAdapter

from gspo.config import Reward
from gspo.rewards import Built, RewardError, build, score
from gspo.types import Completion, Prompt, Sample

ONE_REWARD = TypeAdapter(Reward)


def sample(text, answer=None, number=0, num_tokens=3, columns=None):
    prompt = Prompt(number, None, "?", (1,), answer, columns or {}, f"e0-r{number}")
    completion = Completion(np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.float32), "stop", 0, 0)
    return Sample(f"s1/e0-r{number}/0", prompt, completion, text)


def reward(**settings):
    (built,) = build([ONE_REWARD.validate_python(settings)])
    return built


def verdict(built, one):
    (scored,) = score([built], [one])
    return scored.parts[built.name]


def value(text, answer, **settings):
    return verdict(reward(**settings), sample(text, answer)).value


def own(function, name="own", weight=1.0, on_error="raise"):
    return Built(name, weight, on_error, function, None)


def refused(call, *words):
    with pytest.raises(RewardError) as caught:
        call()
    for word in words:
        assert str(word) in str(caught.value), str(caught.value)
    return str(caught.value)
