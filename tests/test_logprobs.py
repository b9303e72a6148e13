"""Log-probabilities without [tokens, vocabulary]: equal to the plain computation, in bounded memory."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import sampled, tiny_model

from gspo.rollout import transformers as transformers_engine
from gspo.training import logprobs
from gspo.training.logprobs import head_weight, linear_logprobs
from gspo.training.packing import make_micro_batches
from gspo.training.policy import load_policy


def plain(hidden, weight, target, temperature):
    logits = (hidden @ weight.T) / temperature
    logp = logits.log_softmax(-1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
@pytest.mark.parametrize("chunk", [1, 30, 10_000])
def test_chunked_equals_plain_in_value_and_gradient(monkeypatch, temperature, chunk):
    monkeypatch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", chunk)
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 5, dtype=torch.float64, generator=g) for n in (7, 11))
    target, upstream = torch.randint(11, (7,), generator=g), torch.randn(7, dtype=torch.float64, generator=g)
    results = []
    for function in (plain, lambda *x: linear_logprobs(*x[:3], temperature=x[3])):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logp, entropy = function(h, w, target, temperature)
        (logp * upstream).sum().backward()
        results.append((logp.detach(), entropy.detach(), h.grad, w.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_tokens_without_a_gradient_cost_no_logits_in_backward(monkeypatch):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 5, dtype=torch.float64, generator=g).requires_grad_() for n in (7, 11))
    target, upstream = torch.randint(11, (7,), generator=g), torch.tensor([0, 1.5, 0, 0, -2, 0, 0], dtype=torch.float64)
    (plain(hidden, weight, target, 1.0)[0] * upstream).sum().backward()
    wanted = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    rows, gradient = [], logprobs._gradient
    monkeypatch.setattr(logprobs, "_gradient", lambda logits, *x: rows.append(len(logits)) or gradient(logits, *x))
    (linear_logprobs(hidden, weight, target, temperature=1.0)[0] * upstream).sum().backward()
    for mine, theirs in zip((hidden.grad, weight.grad), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert sum(rows) == 2


def test_gradient_equals_finite_differences():
    g = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 3, dtype=torch.float64, generator=g).requires_grad_() for n in (4, 6))
    target = torch.randint(6, (4,), generator=g)
    assert torch.autograd.gradcheck(lambda h, w: linear_logprobs(h, w, target, temperature=0.7)[0], (hidden, weight))


def test_worked_example_of_temperature():
    hidden, weight = torch.tensor([[2.0, 0.0]]), torch.eye(2)
    logp, _ = linear_logprobs(hidden, weight, torch.tensor([0]), temperature=0.5)
    assert logp.item() == pytest.approx(-0.01815, abs=5e-6)


def test_bfloat16_softmax_runs_in_float32():
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(16, 8, generator=g).bfloat16(), torch.randn(40, 8, generator=g).bfloat16()
    logp, _ = linear_logprobs(hidden, weight, torch.arange(16), temperature=1.0)
    wanted = (hidden @ weight.T).float().log_softmax(-1).gather(1, torch.arange(16)[:, None])[:, 0]
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, wanted, rtol=1e-6, atol=1e-6)


NARROW = [torch.bfloat16, torch.float16]


def narrow(dtype):
    """Hidden states [64, 48], an output matrix [300, 48], both in dtype, and targets."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 48, generator=g).to(dtype) for n in (64, 300))
    return hidden, weight, torch.randint(300, (64,), generator=g)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_float32_head_is_closer_to_float64_than_the_weights_own_precision(dtype):
    hidden, weight, target = narrow(dtype)
    wanted = plain(hidden.double(), weight.double(), target, 1.0)
    same, wide = (linear_logprobs(hidden, weight, target, temperature=1.0, float32_head=w) for w in (False, True))
    for x, near, far in zip(wanted, wide, same, strict=True):
        assert near.dtype == torch.float32
        assert (near - x).abs().max() < 3e-5 < 3e-4 < (far - x).abs().max()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("chunk", [1000, 1_000_000])
def test_gradients_of_a_float32_head_are_those_of_plain_autograd(monkeypatch, dtype, chunk):
    monkeypatch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", chunk)
    hidden, weight, target = narrow(dtype)
    upstream, results = torch.linspace(-1, 1, 64), []
    for function in (
        lambda h, w: plain(h.float(), w.float(), target, 0.7)[0],
        lambda h, w: linear_logprobs(h, w, target, temperature=0.7, float32_head=True)[0],
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        (function(h, w) * upstream).sum().backward()
        results.append((h.grad, w.grad))
    rounding = torch.finfo(dtype).eps  # both round their float32 sum once
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype == dtype
        torch.testing.assert_close(a, b, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_engine_and_trainer_agree_with_a_float32_head_as_well_as_without(dtype):
    policies = {
        head: load_policy(tiny_model(dtype).model_copy(update={"head_dtype": head}), temperature=1.0, seed=0)
        for head in ("same", "float32")
    }
    gap = {}
    for engine, policy in policies.items():
        trajectories = sampled(policy, [3, 9, 1, 5, 7, 2, 4, 6] * 2)
        (micro,) = make_micro_batches(trajectories, token_budget=1000)
        told_T = torch.from_numpy(np.concatenate([t.engine_logprobs for t in micro.trajectories]))
        for trainer, other in policies.items():
            gap[engine, trainer] = float((other.score(micro)[0].detach() - told_T).square().mean().sqrt())
    assert gap["float32", "float32"] < 1.1 * gap["same", "same"]
    assert gap["float32", "same"] > 1.5 * gap["float32", "float32"]  # each side takes the setting up


def test_the_engine_copies_the_matrix_once_a_call_however_many_tokens_it_draws(monkeypatch):
    config = tiny_model("bfloat16").model_copy(update={"head_dtype": "float32"})
    policy, made = load_policy(config, temperature=1.0, seed=0), []

    def counted(*args, **kwargs):
        made.append(head_weight(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(transformers_engine, "head_weight", counted)
    assert max(t.num_trained for t in sampled(policy, [3, 5])) > 1
    assert [head.dtype for head in made] == [torch.float32]


def peak_beyond_weights_mib(vocabulary: int, dtype: str = "float32", float32_head: bool = False) -> float:
    """Peak memory of forward and backward of 2,048 tokens, less a float32 matrix; in a process of its own."""
    code = f"""
import torch
from pathlib import Path
from gspo.training.logprobs import linear_logprobs
torch.set_num_threads(2)
def peak():  # of this process; getrusage would count what the parent had before
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
h = torch.randn(2048, 64, dtype=torch.{dtype}, requires_grad=True)
w = torch.randn({vocabulary}, 64, dtype=torch.{dtype}, requires_grad=True)
w.grad = torch.zeros_like(w)
chosen = dict(temperature=1.0, float32_head={float32_head})
linear_logprobs(h[:8], w[:100], torch.arange(8), **chosen)[0].sum().backward()
before = peak()
linear_logprobs(h, w, torch.arange(2048), **chosen)[0].sum().backward()
print(peak() - before - {vocabulary} * 64 * 4 / 2**20)
"""
    returns = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back at once: else the peak depends on luck
    words = [sys.executable, "-c", code]
    return float(subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | returns).stdout)


def test_peak_memory_does_not_grow_with_the_vocabulary():
    small, large = peak_beyond_weights_mib(8_000), peak_beyond_weights_mib(152_000)
    full = 2048 * 152_000 * 4 / 2**20  # [tokens, vocabulary] would take 1,188 MiB
    assert large < small + 64, f"{small:.0f} MiB at 8,000 and {large:.0f} MiB at 152,000"
    assert large < full / 5


def test_a_float32_head_costs_a_copy_of_the_matrix_not_tokens_times_vocabulary():
    small, large = (peak_beyond_weights_mib(v, "bfloat16", True) for v in (8_000, 152_000))
    copy = (152_000 - 8_000) * 64 * 4 / 2**20
    assert large < small + copy + 16, f"{small:.0f} MiB at 8,000 and {large:.0f} MiB at 152,000"
