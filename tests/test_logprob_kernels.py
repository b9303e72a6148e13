"""A GPU's kernels for rows of logits, interpreted on the CPU: equal to torch's operations, whatever the logits."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which comes with torch for GPUs: pip install triton"
)


CASES = ["usual", "temperature", "large", "masked", "masked_block", "one_block", "nan", "infinite", "bfloat16", "strided"]


@pytest.fixture(scope="module")
def told() -> str:
    """What the cases print, in a process of their own: triton decides when it is imported whether to interpret."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_torch(told, case):
    assert f"{case}: equal\n" in told, told[-3000:]


def main(case: str) -> None:
    import torch

    sys.path.insert(0, str(Path(__file__).parent.parent))
    from gspo.training import logprob_kernels as kernels

    kernels.LAUNCH["BLOCK"] = 64
    g = torch.Generator().manual_seed(0)
    temperature = 0.7 if case == "temperature" else 1.0
    logits = torch.randn(5, 40 if case == "one_block" else 300, generator=g) * (1e4 if case == "large" else 3)
    if case == "masked":
        logits[:, 7:200:3] = float("-inf")
    if case == "masked_block":
        logits[:, :70] = float("-inf")
    if case == "strided":
        logits = torch.cat([logits, logits], 1)[:, : logits.shape[1]]
    if case == "bfloat16":
        logits = logits.bfloat16()
    target = torch.tensor([0, 17, 39, 5, 1]) if case != "masked_block" else torch.tensor([70, 299, 100, 200, 71])
    broken = {"nan": float("nan"), "infinite": float("inf")}.get(case)
    if broken is not None:
        logits[2, 33] = broken

    exact = logits.double() / temperature
    norm = exact.logsumexp(-1)
    chosen = exact.gather(1, target[:, None])[:, 0] - norm
    p = (exact - norm[:, None]).exp()
    entropy = -torch.where(p > 0, p * (exact - norm[:, None]), 0.0).sum(-1)

    got = kernels.row_statistics(logits, target, temperature)
    for mine, wanted in zip(got, (chosen, entropy, norm), strict=True):
        for row in range(5):
            if broken is not None and row == 2:
                assert not mine[row].isfinite(), (case, mine)
            else:
                torch.testing.assert_close(mine[row].double(), wanted[row], rtol=1e-5, atol=1e-5)
    if broken is not None:
        return
    upstream = torch.randn(5, generator=g)
    one_hot = torch.nn.functional.one_hot(target, logits.shape[1])
    wanted = (one_hot - p) * (upstream / temperature)[:, None]
    work = logits.clone()
    kernels.logits_to_gradient(work, target, norm.float(), upstream, temperature)
    tolerance = {"rtol": 8e-3, "atol": 1e-4} if case == "bfloat16" else {"rtol": 1e-4, "atol": 2e-6}
    if case == "large":  # float32 holds a logit of 1e4 to 1e-3, so the exponential of a difference to a thousandth
        tolerance = {"rtol": 2e-3, "atol": 2e-6}
    torch.testing.assert_close(work.double(), wanted.to(work.dtype).double(), **tolerance)


if __name__ == "__main__":
    for name in CASES:
        try:
            main(name)
            print(f"{name}: equal", flush=True)
        except AssertionError as error:
            print(f"{name}: {error}", flush=True)
