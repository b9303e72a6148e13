"""Log-probabilities without [tokens, vocabulary]: equal to the plain computation, in bounded memory."""

import subprocess
import sys

import pytest
import torch

from gspo.training import logprobs
from gspo.training.logprobs import linear_logprobs


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


def peak_beyond_weights_mib(vocabulary: int) -> float:
    """Peak memory of forward and backward of 2,048 tokens, less the matrix and its gradient; in a process of its own."""
    code = f"""
import torch
from pathlib import Path
from gspo.training.logprobs import linear_logprobs
torch.set_num_threads(2)
def peak():  # of this process; getrusage would count what the parent had before
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
h = torch.randn(2048, 64, requires_grad=True)
w = torch.randn({vocabulary}, 64, requires_grad=True)
w.grad = torch.zeros_like(w)
linear_logprobs(h[:8], w[:100], torch.arange(8), temperature=1.0)[0].sum().backward()
before = peak()
linear_logprobs(h, w, torch.arange(2048), temperature=1.0)[0].sum().backward()
print(peak() - before - {vocabulary} * 64 * 4 / 2**20)
"""
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_peak_memory_does_not_grow_with_the_vocabulary():
    small, large = peak_beyond_weights_mib(8_000), peak_beyond_weights_mib(152_000)
    full = 2048 * 152_000 * 4 / 2**20  # [tokens, vocabulary] would take 1,188 MiB
    assert large < small + 64, f"{small:.0f} MiB at 8,000 and {large:.0f} MiB at 152,000"
    assert large < full / 5
