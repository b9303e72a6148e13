"""float16: tiny gradients survive, overflows are left out and counted, and the loss scale lives in checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import moments, sampled, tiny_config, tiny_policy
from safetensors.torch import load_file

from gspo.cold_start import cold_start, imitate
from gspo.config import ColdStartConfig, TrainingConfig
from gspo.loop import train
from gspo.training import optimizer as optimizer_module
from gspo.training.optimizer import Optimizer
from gspo.training.packing import TrainingError, make_micro_batches
from gspo.training.update import MAX_SKIPPED, Skips, pack_minibatches, update

LENGTHS = [3, 9, 1, 5, 7, 2, 4, 6]
CONFIG = TrainingConfig(steps=1, learning_rate=1e-3)


def half_policy():
    """A tiny policy in float16, and a float32 one with the same weights."""
    half, single = tiny_policy("float16"), tiny_policy()
    with torch.no_grad():
        for name, p in single.trainable.items():
            p.copy_(half.trainable[name])
    return half, single


def scaled_to(optimizer, scale):
    optimizer.scaler.load_state_dict({**optimizer.scaler.state_dict(), "scale": scale})
    return optimizer


def after_a_step(policy, loss_factor, trajectories):
    """The norm that a step on a log-likelihood times a factor tells, and the gradient that it used, by AdamW's moments."""
    optimizer = Optimizer(policy.trainable, CONFIG, 1)
    (micro,) = make_micro_batches(trajectories, token_budget=1000)
    optimizer.backward(policy.score(micro)[0].mean() * loss_factor)
    optimizer.step()
    norm = optimizer.settle()
    first = [optimizer.adamw.state[m]["exp_avg"].flatten() for m in optimizer.masters.values()]
    return norm, torch.cat(first) / (1 - CONFIG.beta1)


def test_gradients_too_small_for_float16_survive_by_the_loss_scale(monkeypatch):
    half, single = half_policy()
    some = sampled(single, LENGTHS)
    norm, wanted = after_a_step(single, 1e-6, some)
    half_norm, got = after_a_step(half, 1e-6, some)
    assert half_norm == pytest.approx(norm, rel=0.01) and float((got - wanted).norm() / wanted.norm()) < 0.01
    monkeypatch.setattr(optimizer_module, "INITIAL_SCALE", 1.0)
    _, lost = after_a_step(half_policy()[0], 1e-6, some)
    assert float((lost - wanted).norm() / wanted.norm()) > 0.3


def test_gradients_are_clipped_without_the_loss_scale():
    half, single = half_policy()
    some = sampled(single, LENGTHS)
    (norm, wanted), (half_norm, got) = after_a_step(single, 0.9, some), after_a_step(half, 0.9, some)
    assert half_norm == pytest.approx(norm, rel=0.01) and norm > CONFIG.max_grad_norm
    assert float(got.norm()) == pytest.approx(CONFIG.max_grad_norm, rel=1e-4)
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=1e-4)


def overflowing(folder, *, scale, minibatches):
    """A policy, its optimizer with that loss scale, a function that updates it, and what was left out."""
    policy = tiny_policy("float16")
    config = tiny_config(folder, model__dtype="float16", training__minibatches=minibatches)
    optimizer, skips = scaled_to(Optimizer(policy.trainable, config.training, 100), scale), Skips()
    parts = pack_minibatches(sampled(policy, LENGTHS), config, seed=0, device=policy.device)
    return policy, optimizer, lambda: update(policy, optimizer, parts, config, skips), skips


def test_an_overflow_moves_nothing_halves_the_scale_and_is_counted(tmp_path):
    policy, optimizer, go, skips = overflowing(tmp_path, scale=2.0**40, minibatches=MAX_SKIPPED + 1)
    before = {n: m.clone() for n, m in optimizer.masters.items()}
    out = go()
    assert skips == Skips(total=MAX_SKIPPED + 1, in_a_row=0)
    assert optimizer.scaler.get_scale() == 2.0 ** (40 - MAX_SKIPPED - 1)
    assert all(torch.equal(m, before[n]) for n, m in optimizer.masters.items())
    assert all(torch.equal(p, before[n].half()) for n, p in policy.trainable.items())
    assert optimizer.updates == policy.version == 0 and not any(x.any() for x in moments(optimizer))
    assert out.metrics()["update/grad_norm_by_minibatch"] == [None] * (MAX_SKIPPED + 1)
    while not optimizer.updates:  # the scale comes down until a step is taken
        go()
    assert policy.version == optimizer.updates > 0 and optimizer.scaler.get_scale() >= 1


def test_three_in_a_row_stop_only_once_the_scale_is_at_its_floor(tmp_path):
    policy, optimizer, go, skips = overflowing(tmp_path, scale=4.0, minibatches=8)
    next(iter(policy.trainable.values())).register_hook(lambda g: g * float("inf"))
    with pytest.raises(TrainingError, match="3 updates in a row"):
        go()
    assert skips == Skips(total=2 + MAX_SKIPPED, in_a_row=MAX_SKIPPED)  # 4 -> 2 -> 1, then three
    assert optimizer.scaler.get_scale() == 1 and optimizer.updates == 0


def test_a_minibatch_without_a_signal_needs_no_loss_to_have_been_scaled():
    optimizer = Optimizer(tiny_policy("float16").trainable, CONFIG, 1)
    optimizer.step()
    assert optimizer.settle() == 0 and not optimizer.lowered and optimizer.updates == 1


def test_scale_and_steps_without_overflow_come_back_with_the_state():
    policy = tiny_policy("float16")
    optimizer = scaled_to(Optimizer(policy.trainable, CONFIG, 1), 2.0**40)
    (micro,) = make_micro_batches(sampled(policy, LENGTHS), token_budget=1000)
    optimizer.backward(policy.score(micro)[0].mean())
    optimizer.step()
    for _ in range(2):
        optimizer.step()
    again = Optimizer(tiny_policy("float16").trainable, CONFIG, 1)
    again.load_state(optimizer.state())
    assert again.scaler.state_dict() == optimizer.scaler.state_dict()
    assert again.scaler.get_scale() == 2.0**39 and again.scaler.state_dict()["_growth_tracker"] == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_precisions_have_no_scale_and_the_plain_gradients(dtype):
    plain, policy = tiny_policy(dtype), tiny_policy(dtype)
    optimizer = Optimizer(policy.trainable, CONFIG, 1)
    (micro,) = make_micro_batches(sampled(policy, LENGTHS), token_budget=1000)
    plain.score(micro)[0].mean().backward()
    optimizer.backward(policy.score(micro)[0].mean())
    for name, p in plain.trainable.items():
        assert torch.equal(optimizer.masters[name].grad, p.grad.float())
    assert not any("scale" in key or "overflow" in key for key in optimizer.state())


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4}])
def test_a_run_trains_in_float16_close_to_float32(tmp_path, monkeypatch, lora):
    monkeypatch.setattr(optimizer_module, "INITIAL_SCALE", 2.0**12)  # at 2**16 the adapter's first updates overflow
    if lora:
        pytest.importorskip("peft")
    last, moved = {}, {}
    wide = {"objective__clip_low": 0.5, "objective__clip_high": 0.5}  # no decision may hang on how a ratio is rounded
    for dtype in ("float16", "float32"):
        run = train(tiny_config(tmp_path, name=dtype, model__dtype=dtype, model__lora=lora, **wide))
        last[dtype] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
        folder = run / "checkpoints" / "step-000003"
        moved[dtype] = {k: v for k, v in load_file(folder / "optimizer.safetensors").items() if k.startswith("exp_avg/")}
        assert {w.dtype for w in load_file(folder / "model/model.safetensors").values()} == {getattr(torch, dtype)}
    assert last["float16"]["update/loss_scale"] == 2.0**12 and "update/loss_scale" not in last["float32"]
    assert last["float16"]["update/updates"] == 6 and last["float16"]["update/skipped"] == 0
    assert last["float16"]["reward/mean"] == last["float32"]["reward/mean"]  # the same tokens were drawn
    a, b = (torch.cat([x.flatten() for _, x in sorted(moved[d].items())]) for d in ("float16", "float32"))
    assert float(torch.nn.functional.cosine_similarity(a, b, dim=0)) > 0.99


def test_a_cold_start_leaves_overflows_out_and_tells(tmp_path, monkeypatch):
    monkeypatch.setattr(optimizer_module, "INITIAL_SCALE", 2.0**24)
    table = {"steps": 14, "batch_size": 8, "learning_rate": 1e-3}
    folder = cold_start(tiny_config(tmp_path, model__dtype="float16", cold_start=table)).parents[2]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    left_out = [row["update/grad_norm"] is None for row in rows]
    assert left_out[0] and not left_out[-1]
    assert [row["update/skipped"] for row in rows] == [sum(left_out[: i + 1]) for i in range(len(rows))]


def test_a_cold_start_stops_at_an_overflow_at_the_floor():
    policy = tiny_policy("float16")
    table = ColdStartConfig(steps=1, batch_size=8, learning_rate=1e-3)
    optimizer = scaled_to(Optimizer(policy.trainable, table, 1), 2.0)
    next(iter(policy.trainable.values())).register_hook(lambda g: g * float("inf"))
    some = sampled(policy, LENGTHS)
    assert imitate(policy, optimizer, some)[1] is None
    with pytest.raises(TrainingError, match=f"not finite on {some[0].id}"):
        imitate(policy, optimizer, some)
