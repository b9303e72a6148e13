"""The optimizer's laws: steps left out, the learning rate, float32 master weights, and nothing that the host waits for."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from conftest import moments, sampled, tiny_config, tiny_model, tiny_policy

from gspo.config import ModelConfig, TrainingConfig
from gspo.training.optimizer import Optimizer, learning_rate
from gspo.training.packing import TrainingError
from gspo.training.policy import Policy, load_policy
from gspo.training.update import Skips, pack_minibatches, update

LENGTHS = [3, 9, 1, 5, 7, 2, 4, 6]


def test_a_non_finite_gradient_skips_the_step_and_three_in_a_row_stop_with_the_samples(tmp_path):
    policy = tiny_policy()
    config = tiny_config(tmp_path, training__minibatches=4)
    optimizer = Optimizer(policy.trainable, config.training, 4)
    trajectories = sampled(policy, LENGTHS)
    parts = pack_minibatches(trajectories, config, seed=0, device=policy.device)
    before, skips = copy.deepcopy({n: p.detach() for n, p in policy.trainable.items()}), Skips()
    p = next(iter(policy.trainable.values()))
    hook = p.register_hook(lambda g: g * float("nan"))
    with pytest.raises(TrainingError, match="3 updates in a row") as error:
        update(policy, optimizer, parts, config, skips)
    assert skips.total == skips.in_a_row == 3
    assert all(t.id in str(error.value) for m in parts[2].micro_batches for t in m.trajectories)
    assert all((p == before[n]).all() for n, p in policy.trainable.items())
    assert optimizer.updates == 0 and not any(x.any() for x in moments(optimizer))
    hook.remove()
    update(policy, optimizer, parts, config, skips)
    assert skips.total == 3 and skips.in_a_row == 0 and optimizer.updates == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_step_that_is_left_out_leaves_the_next_as_it_would_have_been(dtype):
    def moved(broken: int | None) -> list[torch.Tensor]:
        policy = tiny_policy(dtype, hidden_size=64)
        config = TrainingConfig(steps=1, learning_rate=1e-2, warmup_updates=4, weight_decay=0.1)
        optimizer = Optimizer(policy.trainable, config, 4)
        for number in range(4 if broken is None else 5):
            g = torch.Generator().manual_seed(number if broken is None or number < broken else number - 1)
            for gradient in optimizer.gradients:
                gradient.copy_(torch.randn(gradient.shape, generator=g) * 2.0**16)
            if number == broken:
                optimizer.gradients[0].view(-1)[0] = torch.nan
            optimizer.scaler._scale = torch.tensor(2.0**16)  # an overflow halves it
            optimizer.step()
        assert math.isfinite(optimizer.settle()) and optimizer.updates == 4
        state = optimizer.state()
        state.pop("steps_without_overflow", None)  # which an overflow begins anew
        return [*optimizer.masters.values(), *policy.trainable.values(), *state.values()]

    wanted = moved(None)
    for broken in (0, 2):
        for a, b in zip(moved(broken), wanted, strict=True):
            assert a.shape == b.shape and torch.equal(a.float(), b.float())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("old", ["engine", "trainer"])
def test_the_host_waits_for_nothing_between_a_backward_pass_and_the_next_forward_pass(tmp_path, monkeypatch, old):
    model = ModelConfig(**tiny_model("bfloat16").model_dump() | {"device": "cuda", "kernels": "torch"})
    policy = load_policy(model, temperature=1.0, seed=0)
    wide = {"objective__clip_low": 0.9, "objective__clip_high": 0.9}  # nothing is clipped: no backward pass is left out
    config = tiny_config(tmp_path, model=model.model_dump(), rollout__old_logprobs=old, training__minibatches=4, **wide)
    optimizer = Optimizer(policy.trainable, config.training, 100)
    parts = pack_minibatches(sampled(policy, LENGTHS * 2), config, seed=0, device=policy.device)
    update(policy, optimizer, parts, config, Skips())  # first uses of a library may wait
    backward, score, calls = Optimizer.backward, Policy.score, []

    def watched(*args):
        torch.cuda.set_sync_debug_mode("default")
        backward(*args)
        calls.append(torch.cuda.set_sync_debug_mode("error"))

    def unwatched(*args, **kwargs):
        torch.cuda.set_sync_debug_mode("default")
        return score(*args, **kwargs)

    monkeypatch.setattr(Optimizer, "backward", watched)
    monkeypatch.setattr(Policy, "score", unwatched)
    try:
        update(policy, optimizer, parts, config, Skips())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(calls) == 4


def test_learning_rate_warms_up_and_falls():
    base = {"steps": 1, "learning_rate": 1.0, "warmup_updates": 4}
    linear = TrainingConfig(**base, schedule="linear")
    assert [learning_rate(linear, u, 12) for u in (0, 3, 4, 8, 11)] == [0.25, 1.0, 1.0, 0.5, 0.125]
    cosine = TrainingConfig(**base, schedule="cosine")
    assert learning_rate(cosine, 8, 12) == pytest.approx(0.5)
    assert learning_rate(TrainingConfig(**base), 1000, 12) == 1.0


def test_bfloat16_steps_smaller_than_its_rounding_add_up_in_the_master_weights():
    policy = load_policy(tiny_model("bfloat16"), temperature=1.0, seed=0)
    config = TrainingConfig(steps=1, learning_rate=1e-5)
    optimizer = Optimizer(policy.trainable, config, 1000)
    name, p = next((n, p) for n, p in policy.trainable.items() if "q_proj" in n)
    before, master = p.detach().clone(), optimizer.masters[name].clone()
    for _ in range(200):
        optimizer.masters[name].grad.fill_(1.0)
        optimizer.step()
    moved = master - optimizer.masters[name]
    assert moved.mean().item() == pytest.approx(200 * 1e-5, rel=0.05)
    assert p.dtype == torch.bfloat16 and (p != before).float().mean() > 0.3


def test_gradients_of_bfloat16_weights_add_up_in_float32():
    policy = load_policy(tiny_model("bfloat16"), temperature=1.0, seed=0)
    optimizer = Optimizer(policy.trainable, TrainingConfig(steps=1), 1)
    name, p = next((n, p) for n, p in policy.trainable.items() if "q_proj" in n)
    for _ in range(300):  # in bfloat16 the sum would stop growing at 256
        p.sum().backward()
    assert (optimizer.masters[name].grad == 300).all() and p.grad is None
