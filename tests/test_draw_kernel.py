"""A GPU's kernel that draws, interpreted on the CPU: the tokens and log-probabilities of torch's own operations."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from gspo.config import SamplingConfig
from gspo.rollout.vllm_draws import has_kernel

interpreted = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which comes with torch for GPUs: pip install triton"
)

EQUAL = [
    "usual", "cold", "hot", "bfloat16", "float16", "large", "far below 0", "one token", "a block less 1", "a block",
    "a block and 1", "blocks", "blocks and 1", "whole size", "masked", "masked blocks", "one possible",
]  # fmt: skip
"""Logits of which kernel and `draw` must make the same."""

LAWS = [
    "the distribution is exact", "unlikely tokens keep their share", "impossible tokens are never drawn",
    "broken rows are told and harm no other", "rows do not know each other", "draws by one launch are the others",
]  # fmt: skip


@pytest.fixture(scope="module")
def told() -> str:
    """What the cases print, in a process of their own: triton decides when it is imported whether to interpret."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


@interpreted
@pytest.mark.parametrize("case", EQUAL)
def test_the_kernel_draws_as_torch_does(told, case):
    assert f"{case}: holds\n" in told, told[-3000:]


@interpreted
@pytest.mark.parametrize("law", LAWS)
def test_a_law_of_the_kernel(told, law):
    assert f"{law}: holds\n" in told, told[-3000:]


@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        ({}, "cuda", True), ({"temperature": 0.7}, "cuda", True), ({}, "cpu", False), ({"temperature": 0.0}, "cuda", False),
        ({"top_k": 3}, "cuda", False), ({"top_p": 0.9}, "cuda", False), ({"min_p": 0.1}, "cuda", False),
    ],
    ids=str,
)  # fmt: skip
def test_the_kernel_is_for_a_gpu_and_the_whole_softmax(settings, device, expected):
    assert has_kernel(SamplingConfig(max_response_tokens=1, **settings), torch.device(device)) is expected


BLOCK, INFINITY, NEXT_TO_1 = 64, float("inf"), 1 - 2**-53


def marked(logits, u, temperature=1.0):
    """Tokens and log-probabilities by the kernel, from a copy within a larger tensor; what it writes is checked here."""
    from gspo.rollout.draw_kernel import mark_draws

    rows, vocabulary = logits.shape
    around = torch.full((rows + 2, vocabulary + 2 * BLOCK), 1e4, dtype=logits.dtype)
    work = around[1:-1, BLOCK:-BLOCK]
    work.copy_(logits)
    logps = torch.full((3 * rows,), 7.0)
    at = torch.randperm(3 * rows, generator=torch.Generator().manual_seed(1))[:rows]
    mark_draws(work, torch.stack((u, at.double()), 1), logps, temperature)
    drawn = work.argmax(1)  # as vLLM does
    changed = (work != logits) & ~(work.isnan() & logits.isnan())
    assert bool((changed.sum(1) <= 1).all()) and bool((work[changed] == INFINITY).all()), "one logit of a row is raised"
    assert bool((work == INFINITY).any(1).all())
    work.fill_(1e4)
    assert bool((around == 1e4).all()), "nothing beside the logits is written"
    written = logps != 7
    assert int(written.sum()) == rows and bool(written[at].all()), "nothing but the log-probabilities asked for"
    return drawn, logps[at]


def interval(logits, token, temperature):
    """Where a token's share of the cumulative distribution begins and ends, and its log-probability, in float64."""
    logp = (logits.double() / temperature).log_softmax(-1)
    end = logp.exp().cumsum(-1)
    return (x.gather(1, token[:, None])[:, 0] for x in (end - logp.exp(), end, logp))


def same(case: str) -> None:
    from gspo.rollout.sampling import draw

    g = torch.Generator().manual_seed(0)
    rows, temperature = (8 if case == "whole size" else 25), {"cold": 0.3, "hot": 1.7}.get(case, 1.0)
    sizes = {"one token": 1, "a block less 1": 63, "a block": 64, "a block and 1": 65, "blocks": 256, "blocks and 1": 257}
    logits = torch.randn(rows, sizes.get(case, 151_936 if case == "whole size" else 300), generator=g) * 3
    if case == "large":
        logits *= 1e3
    if case == "far below 0":
        logits -= 3e4
    if case == "masked":
        logits[:, 7:200:3] = -INFINITY
    if case == "masked blocks":
        logits[::2, :130], logits[1::2, 100:] = -INFINITY, -INFINITY
    if case == "one possible":
        logits = torch.full_like(logits, -INFINITY).scatter(1, torch.arange(0, 300, 12)[:, None], -4.0)
    if case in ("bfloat16", "float16"):
        logits = logits.to(getattr(torch, case))
    u = torch.rand(rows, generator=g, dtype=torch.float64)
    u[0], u[1] = 0.0, NEXT_TO_1
    token, logp = marked(logits, u, temperature)
    theirs, _ = draw(logits, SamplingConfig(max_response_tokens=1, temperature=temperature), u)
    begin, end, exact = interval(logits, token, temperature)
    assert bool(((begin <= u + 1e-6) & (u - 1e-6 <= end)).all()), (token, u, begin, end)
    near = ((u - begin).abs() < 1e-6) | ((u - end).abs() < 1e-6)
    assert bool(((token == theirs) | near).all()), (token, theirs)
    assert int((token == theirs).sum()) >= rows - 1  # of so few numbers hardly one lies at a boundary
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp.double(), exact, rtol=1e-6, atol=1e-5)


def exact_distribution() -> None:
    """Over an even grid of numbers every token comes as often as its probability says, to one."""
    logits = torch.randn(1, 150, generator=torch.Generator().manual_seed(2)) * 1.5
    num = 200
    token, _ = marked(logits.expand(num, -1).contiguous(), (torch.arange(num, dtype=torch.float64) + 0.5) / num, 0.9)
    assert bool((token[1:] >= token[:-1]).all())
    expected = (logits.double() / 0.9).softmax(-1)[0] * num
    counts = torch.bincount(token, minlength=150)
    assert float((counts - expected).abs().max()) < 1.01


def unlikely() -> None:
    """A token that float32 would leave without a place: 2**-30 of the sum each, after one that has nearly all of it."""
    import math

    logits = torch.full((32, 5 * BLOCK), -30 * math.log(2.0))
    logits[:, 0] = 0.0
    share = 2.0**-30 / (1 + (5 * BLOCK - 1) * 2.0**-30)
    wanted = torch.arange(5, 5 + 9 * 32, 9)
    token, logp = marked(logits, 1 - (5 * BLOCK - wanted - 0.5).double() * share)
    assert token.tolist() == wanted.tolist()
    torch.testing.assert_close(logp.double(), torch.full((32,), math.log(share), dtype=torch.float64), rtol=0, atol=1e-5)


def impossible() -> None:
    """Even for numbers that lie on the boundaries of intervals, at both ends and next to blocks without mass."""
    possible = torch.tensor([BLOCK + 3, 2 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 9])
    u = torch.tensor([0.0, 0.25, 0.5, 0.75, NEXT_TO_1, 0.25 - 2**-54, 0.5 - 2**-54, 0.75 - 2**-53], dtype=torch.float64)
    logits = torch.full((8, 6 * BLOCK - 5), -INFINITY)
    logits[:, possible] = 2.0
    token, logp = marked(logits, u)
    assert token.tolist() == possible[[0, 1, 2, 3, 3, 0, 1, 2]].tolist()
    torch.testing.assert_close(logp, torch.full((8,), 0.25).log())

    g = torch.Generator().manual_seed(3)
    logits = torch.randn(60, 3 * BLOCK + 1, generator=g) * 4
    logits[torch.rand(logits.shape, generator=g) < 0.7] = -INFINITY
    end = logits.double().softmax(-1).cumsum(-1)
    u = end.gather(1, torch.randint(0, end.shape[1], (60, 1), generator=g))[:, 0].clamp(max=NEXT_TO_1)
    token, _ = marked(logits, u)
    assert bool(logits.gather(1, token[:, None]).isfinite().all())
    numbers = torch.tensor([0.0, 2.0**-53, NEXT_TO_1, 1 - 2.0**-52]).double().repeat(15)
    token, _ = marked(logits, numbers)
    first, last = (logits > -INFINITY).int().argmax(1), end.shape[1] - 1 - (logits > -INFINITY).int().flip(1).argmax(1)
    assert bool((token == torch.where(numbers < 0.5, first, last))[numbers != 1 - 2.0**-52].all())


def broken() -> None:
    """Their log-probability is NaN, and what vLLM takes is a token all the same; the rows between are as ever."""
    g = torch.Generator().manual_seed(4)
    u = torch.tensor([0.3, 0.0, NEXT_TO_1, 0.5, 0.9, 0.1, 0.6, NEXT_TO_1, 0.2], dtype=torch.float64)
    for vocabulary in (5, BLOCK, 3 * BLOCK + 7):
        logits = torch.randn(9, vocabulary, generator=g)
        healthy, healthy_logp = marked(logits, u)
        logits[1, -1] = logits[2, 0] = logits[5] = torch.nan
        logits[3, 4], logits[6, -1] = INFINITY, INFINITY
        logits[7] = -INFINITY
        token, logp = marked(logits, u)
        assert logp.isnan().tolist() == [False, True, True, True, False, True, True, True, False], logp
        whole = [0, 4, 8]
        assert torch.equal(token[whole], healthy[whole]) and torch.equal(logp[whole], healthy_logp[whole])


def by_itself() -> None:
    """The order of rows and their number change nothing, to the last bit."""
    g = torch.Generator().manual_seed(5)
    logits, u = torch.randn(12, 200, generator=g) * 2, torch.rand(12, generator=g, dtype=torch.float64)
    token, logp = marked(logits, u)
    order = torch.randperm(12, generator=g)
    for rows in (order, order[:1], order[3:8]):
        again, logp_again = marked(logits[rows], u[rows])
        assert torch.equal(again, token[rows]) and torch.equal(logp_again, logp[rows])


def one_launch() -> None:
    """Either way of the logits processor makes each sample's own draw the argmax, and writes down its log-probability.

    The step after a response's last token is written to the place that it has left over.
    """
    import numpy as np

    from gspo.rollout.engine import Request
    from gspo.rollout.sampling import draw, uniform
    from gspo.rollout.vllm_draws import Draws

    g = torch.Generator().manual_seed(6)
    requests = [Request(f"s{i}", (1,), 2**63 + 977 * i, drawn=i % 3) for i in range(9)]
    sampling = SamplingConfig(max_response_tokens=4, temperature=0.8)
    expected, several, one = torch.full((9, 5), torch.nan), Draws(), Draws()
    for draws in (several, one):
        draws.begin(requests, sampling, torch.device("cpu"))
    one.one_launch = True
    for samples, tokens in (([4, 0, 8, 2], [0, 3, 4, 9]), ([1], [0]), ([3, 2, 1], [2, 1, 3])):
        logits = torch.randn(len(samples), 333, generator=g)
        asked = [requests[i] for i in samples]
        seeds, index = np.array([r.seed for r in asked], np.uint64), np.array([r.drawn for r in asked]) + tokens
        drawn, logp = draw(logits, sampling, torch.from_numpy(uniform(seeds, index)))
        expected[samples, [min(t, 4) for t in tokens]] = logp
        for draws in (several, one):
            assert torch.equal(draws.mark(logits.clone(), np.array(samples), np.array(tokens)).argmax(1), drawn)
            torch.testing.assert_close(draws.logps, expected, rtol=0, atol=1e-5, equal_nan=True)


def main() -> None:
    """Run every case and print how it went."""
    from gspo.rollout import draw_kernel

    block = draw_kernel.LAUNCH["BLOCK"]
    laws = [exact_distribution, unlikely, impossible, broken, by_itself, one_launch]
    for name, check in [(c, None) for c in EQUAL] + list(zip(LAWS, laws, strict=True)):
        draw_kernel.LAUNCH["BLOCK"] = block if name == "whole size" else BLOCK
        try:
            same(name) if check is None else check()
            print(f"{name}: holds", flush=True)
        except AssertionError as error:
            print(f"{name}: {error!r}", flush=True)


if __name__ == "__main__":
    main()
