"""The padded entry: its inputs, its refusals, and objectives of one's own."""

import math

import pytest
import torch
from objectives_support import NAMES, padded, random_case
from torch import Tensor

from gspo.functional import policy_loss
from gspo.objectives import KL, OBJECTIVES, Algorithm, Batch, Clip, Objective, surrogate

MASK = [[True, True, False], [True, True, True]]
CASE = random_case(1, [2, 3], MASK, 0.1, False)
BY_TOKEN = random_case(1, [2, 3], MASK, 0.1, True)


def test_the_default_is_gspo_at_the_papers_clip_range():
    default = policy_loss(CASE.new, CASE.old, CASE.mask, CASE.advantage)
    named = policy_loss(CASE.new, CASE.old, CASE.mask, CASE.advantage, objective="gspo", clip=(3e-4, 4e-4))
    assert torch.equal(default.loss, named.loss)


@pytest.mark.parametrize("name", NAMES[1:])
def test_one_advantage_a_row_is_that_advantage_at_each_token(name):
    spread = CASE.advantage[:, None].expand(2, 3)
    one = policy_loss(CASE.new, CASE.old, CASE.mask, CASE.advantage, objective=name)
    each = policy_loss(CASE.new, CASE.old, CASE.mask, spread, objective=name)
    assert torch.equal(one.loss, each.loss)


@pytest.mark.parametrize("mask", [CASE.mask.float(), CASE.mask.int()])
def test_masks_may_be_numbers(mask):
    want = policy_loss(CASE.new, CASE.old, CASE.mask, CASE.advantage)
    assert torch.equal(policy_loss(CASE.new, CASE.old, mask, CASE.advantage).loss, want.loss)


@pytest.mark.parametrize("name", NAMES)
def test_global_counts_scale_the_loss(name):
    whole, gradient = padded(name, CASE)
    part, smaller = padded(name, CASE, global_sequences=8, global_tokens=20)  # of 2 sequences, 5 tokens here
    assert part.loss.item() == pytest.approx(whole.loss.item() / 4, rel=1e-12)
    torch.testing.assert_close(smaller, gradient / 4, rtol=1e-12, atol=0)


def test_gspo_refuses_advantages_by_token():
    with pytest.raises(ValueError, match="gspo needs one advantage a sequence: use gspo_token"):
        padded("gspo", BY_TOKEN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "gpso"}, "unknown objective 'gpso': use one of gspo, gspo_token, grpo, dapo"),
        (
            {"old_logp_BL": torch.zeros(2, 2)},
            r"must be \[B, L\] alike, got logp \(2, 3\), old_logp \(2, 2\), mask \(2, 3\)",
        ),
        ({"mask_BL": torch.ones(3, 2)}, r"mask \(3, 2\)"),
        ({"logp_BL": torch.zeros(6)}, r"must be \[B, L\] alike, got logp \(6,\)"),
        ({"advantage": torch.ones(3)}, r"advantage must be \[2\] or \[2, 3\], got \(3,\)"),
        ({"advantage": torch.ones(2, 1)}, r"advantage must be \[2\] or \[2, 3\], got \(2, 1\)"),
        ({"mask_BL": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "sequence 1 has no token that counts: leave it out"),
        ({"kl": KL(0.1, "k3")}, "a KL term needs the reference policy's log-probabilities: pass reference_logp"),
        ({"reference_logp_BL": CASE.reference}, "reference_logp is used by a KL term alone"),
        ({"reference_logp_BL": CASE.reference.T, "kl": KL(0.1, "k3")}, r"reference_logp \(3, 2\)"),
        ({"clip": (1.0, 0.2)}, "clip 1/0.2 is no band"),
        ({"clip": (-0.1, 0.2)}, "is no band"),
        ({"clip": (0.1, math.nan)}, "is no band"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(change, message):
    arguments = {"logp_BL": CASE.new, "old_logp_BL": CASE.old, "mask_BL": CASE.mask, "advantage": CASE.advantage}
    with pytest.raises(ValueError, match=message):
        policy_loss(**arguments | change)


def test_an_empty_batch_is_refused_in_a_sentence():
    empty = torch.zeros(0, 4)
    with pytest.raises(ValueError, match="a batch without a token has no loss"):
        policy_loss(empty, empty, empty, torch.zeros(0))


def test_an_objective_of_ones_own_is_one_function_and_one_line(monkeypatch):
    """A PPO: token ratios, advantages by token (a value model's), averaged over tokens."""

    def ppo(logp_T: Tensor, batch: Batch, clip: Clip = Clip(0.2, 0.2), kl: KL | None = None) -> Objective:  # noqa: B008
        log_ratio_T = batch.log_ratio_T(logp_T)
        value_T, clipped_T, outside_T = surrogate(log_ratio_T, batch.advantage_T, clip)
        loss = -(value_T - batch.penalty_T(logp_T, kl)).sum() / batch.global_tokens
        on_S = batch.mean_S(log_ratio_T.detach())
        return Objective(loss, log_ratio_T.detach(), on_S, clipped_T & batch.mask_T, outside_T & batch.mask_T)

    monkeypatch.setitem(OBJECTIVES, "ppo", Algorithm(ppo, Clip(0.2, 0.2), "token"))
    out, gradient = padded("ppo", BY_TOKEN)
    ratio = (BY_TOKEN.new - BY_TOKEN.old).exp()
    terms = torch.minimum(ratio * BY_TOKEN.advantage, ratio.clamp(0.8, 1.2) * BY_TOKEN.advantage)
    assert out.loss.item() == pytest.approx(-terms[BY_TOKEN.mask].mean().item(), rel=1e-12)
    assert not gradient[~BY_TOKEN.mask].any() and gradient[BY_TOKEN.mask].any()
