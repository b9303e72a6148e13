"""AdamW's moments in eight bits: near float32's, a quarter of the memory, kept bit by bit over a checkpoint."""

import importlib.util
import json
import math

import pytest
import torch
from conftest import tiny_config

from gspo.config import TrainingConfig
from gspo.loop import train
from gspo.training.optimizer import Optimizer

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install 'gspo[torchao]'"
)


def parameters():
    g = torch.Generator().manual_seed(0)
    return {"matrix": torch.nn.Parameter(torch.randn(64, 128, generator=g)), "norm": torch.nn.Parameter(torch.ones(64))}


def optimizer_of(moments, weights):
    return Optimizer(weights, TrainingConfig(steps=1, learning_rate=1e-2, weight_decay=0.1, moments=moments), 10)


def step(optimizer, number):
    g = torch.Generator().manual_seed(number)
    for master in optimizer.masters.values():
        master.grad.copy_(torch.randn(master.shape, generator=g) + 0.3)
    optimizer.step()
    return optimizer.settle()


@needs_torchao
def test_steps_are_near_those_of_float32_moments_at_a_quarter_of_the_memory():
    both = {moments: (parameters(), []) for moments in ("float32", "8bit")}
    for moments, (weights, size) in both.items():
        optimizer = optimizer_of(moments, weights)
        for number in range(6):
            step(optimizer, number)
        assert optimizer.adamw.param_groups[0]["lr"] == pytest.approx(1e-2)
        size.append(sum(x.nbytes for k, x in optimizer.state().items() if k.startswith("exp_avg") and "matrix" in k))
    (wide, (large,)), (narrow, (small,)) = both["float32"], both["8bit"]
    assert small < 0.27 * large
    start = parameters()
    for name, w in wide.items():
        moved, mine = (w - start[name]).detach(), (narrow[name] - start[name]).detach()
        assert float((moved - mine).norm()) < 0.05 * float(moved.norm())
    assert not torch.equal(wide["matrix"], narrow["matrix"]) and torch.allclose(wide["norm"], narrow["norm"], atol=1e-7)


@needs_torchao
def test_a_continued_run_steps_bit_by_bit_as_one_that_never_stopped():
    weights, copies = parameters(), parameters()
    first = optimizer_of("8bit", weights)
    for number in range(3):
        step(first, number)
    second = optimizer_of("8bit", copies)
    for name, w in weights.items():
        copies[name].data.copy_(w.data)
    second.load_state({k: v.clone() for k, v in first.state().items()})
    for optimizer in (first, second):
        step(optimizer, 3)
    assert all(torch.equal(weights[name], copies[name]) for name in weights)


@needs_torchao
def test_a_gradient_that_is_not_finite_moves_nothing():
    weights = parameters()
    optimizer = optimizer_of("8bit", weights)
    optimizer.gradients[0].fill_(torch.nan)
    optimizer.step()
    assert math.isnan(optimizer.settle()) and optimizer.updates == 0 and not optimizer.adamw.state
    assert all(torch.equal(w, parameters()[name]) for name, w in weights.items())
    assert math.isfinite(step(optimizer, 0)) and optimizer.updates == 1


@needs_torchao
@pytest.mark.parametrize("moments, other", [("8bit", "float32"), ("float32", "8bit")])
def test_moments_of_another_precision_are_refused(moments, other):
    first = optimizer_of(moments, parameters())
    step(first, 0)
    with pytest.raises(ValueError, match="moments of another precision"):
        optimizer_of(other, parameters()).load_state(first.state())


@needs_torchao
def test_a_run_trains_and_resumes_with_them(tmp_path):
    shape = {"model__create__hidden_size": 64, "model__create__intermediate_size": 128}
    train(tiny_config(tmp_path, training__moments="8bit", training__steps=2, **shape))
    run = train(tiny_config(tmp_path, training__moments="8bit", training__steps=3, **shape), resume=True)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 3 and rows[-1]["update/updates"] == 6


def test_a_missing_package_is_refused_with_the_recipe(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'moments = "8bit" needs the package torchao: pip install "gspo\[torchao\]"'):
        TrainingConfig(steps=1, moments="8bit")
