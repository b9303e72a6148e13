"""The objectives against the worked examples, the invariants and a plain reference."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from objectives_support import NAMES, Case, cases, expected, near_a_bound, packed, padded, random_case

from gspo.objectives import (
    DAPO_CLIP,
    GRPO_CLIP,
    GSPO_CLIP,
    KL,
    OBJECTIVES,
    Clip,
    NonFiniteError,
    clip_warning,
    estimate_kl,
    pack,
    surrogate,
)
from gspo.training.logprobs import linear_logprobs

PENALTIES = [None, *(KL(0.1, estimator) for estimator in ("k1", "k2", "k3"))]
HOLES = [[True, False, True, False, False, False], [True] * 6, [False, True, True, True, False, False]]
FIXED = replace(random_case(7, [3, 6, 4], HOLES, 0.05, False), advantage=torch.tensor([1.0, -1.0, 0.5]).double())
few = settings(max_examples=60, deadline=None)


def from_log_ratios(d: list[float], advantage: float = 1.0, mask: list[bool] | None = None) -> Case:
    new = torch.tensor([d], dtype=torch.float64)
    on = torch.ones_like(new, dtype=torch.bool) if mask is None else torch.tensor([mask])
    return Case(new, torch.zeros_like(new), on, torch.tensor([advantage]).double(), torch.zeros_like(new))


def usable(name: str, case: Case) -> None:
    assume(not (name == "gspo" and case.advantage.ndim == 2) and not near_a_bound(name, case))


# ---- worked examples --------------------------------------------------------------------------------------


def test_two_wild_tokens_of_512_leave_s_near_one_and_keep_their_weights_in_grpo():
    case = from_log_ratios([0.0] * 510 + [math.log(1.9), math.log(0.4)])
    out, gradient = padded("gspo", case, clip=(0.5, 0.5))
    assert out.log_ratio_S.exp().item() == pytest.approx(0.99946, abs=5e-6)
    assert torch.allclose(gradient, torch.full_like(gradient, -out.log_ratio_S.exp().item() / 512), rtol=1e-12)
    _, gradient = padded("grpo", case, clip=(0.9, 0.95))
    assert (-gradient[0, -2:] * 512).tolist() == pytest.approx([1.9, 0.4], rel=1e-12)


@pytest.mark.parametrize(("length", "s"), [(1, 2.0), (100, 1.00696)])
def test_a_doubled_token_weighs_by_the_length(length, s):
    d = [math.log(2e-4) - math.log(1e-4)] + [0.0] * (length - 1)
    out, _ = padded("gspo", from_log_ratios(d))
    assert out.log_ratio_S.exp().item() == pytest.approx(s, abs=5e-6)


@pytest.mark.parametrize(("length", "low", "high"), [(10, 0.107, 6.19), (100, 2e-10, 8.3e7)])
def test_token_clipping_bounds_no_sequence(length, low, high):
    for ratio, product in ((0.8, low), (1.2, high)):
        out, _ = padded("grpo", from_log_ratios([math.log(ratio)] * length, advantage=1.0), clip=(0.2 + 1e-9, 0.2 + 1e-9))
        assert not out.clipped_T.any() and not out.outside_T.any()
        assert out.log_ratio_T.sum().exp().item() == pytest.approx(product, rel=0.03)


@pytest.mark.parametrize("hidden", [5.0, math.nan, math.inf, -math.inf, -1e30])
def test_s_of_the_masked_example_whatever_is_masked(hidden):
    out, gradient = padded("gspo", from_log_ratios([0.3, -0.1, 0.1, hidden], mask=[True, True, True, False]))
    assert out.log_ratio_S.exp().item() == pytest.approx(1.10517, abs=5e-6)
    assert gradient[0, 3] == 0


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo"])
def test_loss_zero_and_gradients_of_lengths_two_and_eight(name):
    mask = torch.arange(8)[None] < torch.tensor([[2], [8]])
    zeros = torch.zeros(2, 8)
    out, gradient = padded(name, Case(zeros, zeros, mask, torch.tensor([1.0, -1.0]), zeros))
    assert out.loss == 0
    assert gradient.tolist() == [[-0.25, -0.25] + [0.0] * 6, [0.0625] * 8]


def test_micro_batches_of_three_and_one_add_up_to_two():
    new = torch.zeros(4, 1, dtype=torch.float64)
    case = Case(new, new, new == 0, torch.tensor([-1.0, -1, -1, -5]).double(), new)
    _, whole = padded("gspo", case)
    for split in ([[0, 1, 2], [3]], [[0], [1], [2], [3]], [[3, 1], [0, 2]]):
        parts = [padded("gspo", case.take(rows), global_sequences=4) for rows in split]
        assert sum(out.loss.item() for out, _ in parts) == pytest.approx(2.0, abs=1e-15)
        for rows, (_, gradient) in zip(split, parts, strict=True):
            assert torch.equal(gradient, whole[rows])


def test_the_temperature_stands_on_both_sides_of_the_ratio():
    identity, target = torch.eye(2, dtype=torch.float64), torch.tensor([0])
    logits = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    new = linear_logprobs(logits, identity, target, temperature=0.5)[0]
    assert new.item() == pytest.approx(-0.01815, abs=5e-6)
    out, _ = padded("gspo", Case(new[None], new[None].clone(), new[None] < 0, torch.ones(1).double(), new[None]))
    assert out.log_ratio_S.item() == 0


# ---- against the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(case=cases(), kl=st.sampled_from(PENALTIES))
@few
def test_value_gradient_and_clips_are_the_references_in_float64(name, case, kl):
    usable(name, case)
    want = expected(name, case, kl)
    for out, gradient in (padded(name, case, kl), packed(name, case, kl)):
        assert out.loss.item() == pytest.approx(want.loss, rel=1e-12, abs=1e-12)
        np.testing.assert_allclose(gradient.numpy(), np.array(want.gradient), rtol=1e-11, atol=1e-12)
    clipped = padded(name, case, kl)[0].clipped_T.reshape(case.mask.shape)
    assert clipped.tolist() == want.clipped


@pytest.mark.parametrize("name", NAMES)
@given(case=cases(), kl=st.sampled_from(PENALTIES))
@few
def test_float32_inputs_agree_with_the_reference_to_a_millionth(name, case, kl):
    case = case.to(torch.float32)
    usable(name, case)
    want = expected(name, case, kl)
    scale = max(1.0, max(abs(r) for row in want.ratios for r in row))
    for out, gradient in (padded(name, case, kl), packed(name, case, kl)):
        assert out.loss.dtype == torch.float32
        assert out.loss.item() == pytest.approx(want.loss, rel=1e-6, abs=1e-6 * scale)
        np.testing.assert_allclose(gradient.numpy(), np.array(want.gradient), rtol=1e-6, atol=1e-6 * scale)


@pytest.mark.parametrize("kl", PENALTIES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clip", [Clip(0.5, 0.5), Clip(0.001, 0.001)])
def test_autograd_agrees_with_finite_differences(name, kl, clip):
    case, on = FIXED, FIXED.mask

    def loss(new_T: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(3)[:, None].expand_as(on)[on]
        batch = pack(case.old[on], rows, case.advantage, reference_logp_T=case.reference[on])
        return OBJECTIVES[name].function(new_T, batch, clip, kl).loss

    assert torch.autograd.gradcheck(loss, case.new[on].clone().requires_grad_(), eps=1e-7, atol=1e-6, rtol=1e-5)


def test_gspo_token_differentiates_through_each_token_with_s_held():
    case = random_case(3, [4, 2], [[True] * 4, [True, True, False, False]], 0.02, True)
    _, gradient = padded("gspo_token", case, clip=(0.5, 0.5))
    s = ((case.new - case.old) * case.mask).sum(1) / case.mask.sum(1)
    new = case.new.clone().requires_grad_()
    held = s.exp()[:, None] * (new - case.new).exp() * case.advantage  # s pi_t / sg[pi_t], s a constant
    (-(held * case.mask).sum(1) / case.mask.sum(1)).mean().backward()
    assert torch.allclose(gradient, new.grad, rtol=1e-12)


# ---- invariants -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(case=cases(), kl=st.sampled_from(PENALTIES))
@few
def test_padded_packed_and_single_sequences_agree(name, case, kl):
    usable(name, case)
    (one, gradient_one), (two, gradient_two) = padded(name, case, kl), packed(name, case, kl)
    counts = {"global_sequences": len(case.mask), "global_tokens": float(case.mask.sum())}
    singles = [padded(name, case.take([i]), kl, **counts) for i in range(len(case.mask))]
    total = sum(out.loss.item() for out, _ in singles)
    assert one.loss.item() == pytest.approx(two.loss.item(), rel=1e-12, abs=1e-13)
    assert one.loss.item() == pytest.approx(total, rel=1e-12, abs=1e-13)
    torch.testing.assert_close(gradient_one, gradient_two, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient_one, torch.cat([g for _, g in singles]), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(one.log_ratio_S, two.log_ratio_S, rtol=1e-12, atol=1e-14)
    assert torch.equal(one.clipped_T.reshape(case.mask.shape)[case.mask], two.clipped_T)
    assert torch.equal(one.outside_T.reshape(case.mask.shape)[case.mask], two.outside_T)


@pytest.mark.parametrize("name", NAMES)
@given(case=cases(most=7), kl=st.sampled_from(PENALTIES), data=st.data())
@few
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(name, case, kl, data):
    usable(name, case)
    number = len(case.mask)
    part_of = data.draw(st.lists(st.integers(0, 3), min_size=number, max_size=number))
    order = data.draw(st.permutations(range(number)))
    counts = {"global_sequences": number, "global_tokens": float(case.mask.sum())}
    whole, gradient = padded(name, case, kl)
    loss, summed = 0.0, torch.zeros_like(gradient)
    for part in set(part_of):
        rows = [i for i in order if part_of[i] == part]
        out, piece = padded(name, case.take(rows), kl, **counts)
        loss += out.loss.item()
        summed[rows] += piece
    assert loss == pytest.approx(whole.loss.item(), rel=1e-12, abs=1e-13)
    torch.testing.assert_close(summed, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
@given(case=cases(), kl=st.sampled_from(PENALTIES), poison=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
@few
def test_masked_tokens_change_nothing(name, case, kl, poison):
    usable(name, case)
    hidden = ~case.mask
    parts = {k: getattr(case, k).masked_fill(hidden, poison) for k in ("new", "old", "reference")}
    advantage = case.advantage.masked_fill(hidden, poison) if case.advantage.ndim == 2 else case.advantage
    (clean, gradient), (out, same) = (
        padded(name, case, kl),
        padded(name, replace(case, **parts, advantage=advantage), kl),
    )
    assert torch.equal(clean.loss, out.loss) and torch.equal(gradient, same)
    assert not same[hidden].any()
    for told in (out.log_ratio_T, out.clipped_T, out.outside_T):
        assert not told.reshape(hidden.shape)[hidden].any()
    for field in ("log_ratio_T", "log_ratio_S", "clipped_T", "outside_T"):
        assert torch.equal(getattr(clean, field), getattr(out, field))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("part", "what"),
    [
        ("new", "log-probability"),
        ("old", "old log-probability"),
        ("advantage", "advantage"),
        ("reference", "reference log-probability"),
    ],
)
def test_an_unmasked_value_that_is_not_finite_stops_with_its_sequence(name, bad, part, what):
    broken = getattr(FIXED, part).clone()
    broken[(1,) if part == "advantage" else (1, 4)] = bad
    case = replace(FIXED, **{part: broken})
    with pytest.raises(NonFiniteError, match=f"^{what} of a trained token in sequence 1 is not finite") as caught:
        padded(name, case, KL(0.1, "k3"))
    assert caught.value.sequence == 1


@pytest.mark.parametrize("name", NAMES)
@given(case=cases(by_token=False))
@few
def test_on_policy_s_is_one_and_the_gradient_is_reinforces(name, case):
    case = replace(case, new=case.old)
    out, gradient = padded(name, case)
    assert not out.log_ratio_S.any() and not out.clipped_T.any() and not out.outside_T.any()
    new = case.old.clone().requires_grad_()
    each = (new * case.mask * case.advantage[:, None]).sum(1)
    reinforce = each.sum() / case.mask.sum() if name == "dapo" else (each / case.mask.sum(1)).mean()
    (want,) = torch.autograd.grad(-reinforce, new)
    torch.testing.assert_close(gradient, want, rtol=1e-12, atol=1e-15)


@given(case=cases(by_token=False), kl=st.sampled_from(PENALTIES))
@few
def test_gspo_token_with_equal_advantages_is_gspo(case, kl):
    usable("gspo", case)
    spread = replace(case, advantage=case.by_token)
    want, gradient = padded("gspo", case, kl)
    for same in (case, spread):
        out, other = padded("gspo_token", same, kl)
        assert out.loss.item() == pytest.approx(want.loss.item(), rel=1e-12, abs=1e-13)
        assert torch.equal(out.clipped_T, want.clipped_T) and torch.equal(out.outside_T, want.outside_T)
        torch.testing.assert_close(other, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("d", "advantage"), [(1000.0, 1.0), (-1000.0, -1.0), (1000.0, 0.0), (-1000.0, 0.0)])
def test_clipped_and_signalless_sequences_have_exactly_no_gradient_even_where_exp_overflows(name, dtype, d, advantage):
    out, gradient = padded(name, from_log_ratios([d, d], advantage).to(dtype))
    assert torch.isfinite(out.loss) and gradient.tolist() == [[0.0, 0.0]]
    assert out.clipped_T.all() == (advantage != 0) and out.outside_T.all()


@pytest.mark.parametrize(("d", "advantage", "clipped"), [(1.0, 1, 1), (1.0, -1, 0), (-1.0, 1, 0), (-1.0, -1, 1)])
def test_positive_advantages_clip_above_alone_and_negative_ones_below_alone(d, advantage, clipped):
    value, taken, outside = surrogate(torch.tensor([d]), torch.tensor([float(advantage)]), Clip(0.2, 0.3))
    bound = 1.3 if d > 0 else 0.8
    assert value.item() == pytest.approx(min(math.exp(d) * advantage, bound * advantage))
    assert (taken.item(), outside.item()) == (bool(clipped), True)


# ---- KL ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "slope"), [("k1", lambda d: 1), ("k2", lambda d: d), ("k3", lambda d: 1 - math.exp(-d))]
)
@pytest.mark.parametrize("d", [-2.0, -1e-3, 0.0, 1e-3, 2.0])
def test_kl_estimates_and_their_slopes(estimator, slope, d):
    values = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}
    x = torch.tensor(d, dtype=torch.float64, requires_grad=True)
    y = estimate_kl(x, estimator)
    y.backward()
    assert y.item() == pytest.approx(values[estimator], rel=1e-9, abs=1e-15)
    assert x.grad.item() == pytest.approx(slope(d), rel=1e-12, abs=1e-15)


def test_k1_and_k3_are_unbiased_and_k3_never_negative():
    p, q = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.4, 0.2]], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):
        assert (p * estimate_kl((p / q).log(), estimator)).sum().item() == pytest.approx(exact.item(), rel=1e-12)
    assert (estimate_kl(torch.linspace(-3, 3, 101), "k3") >= 0).all()
    with pytest.raises(ValueError, match="unknown estimator 'k4': use k1, k2 or k3"):
        estimate_kl(p, "k4")  # type: ignore[arg-type]


# ---- packing and clip ranges ------------------------------------------------------------------------------


def test_pack_refuses_what_does_not_fit():
    old, rows, advantage = torch.zeros(3), torch.tensor([0, 0, 1]), torch.ones(2)
    for change, message in (
        ({"sequence_T": rows[:2]}, r"sequence has shape \(2,\), old log-probabilities have \(3,\)"),
        ({"mask_T": torch.ones(2).bool()}, r"mask has shape \(2,\)"),
        ({"reference_logp_T": torch.zeros(2)}, r"reference log-probability has shape \(2,\)"),
        ({"advantage": torch.ones(2), "by_token": True}, r"advantage has shape \(2,\)"),
        ({"advantage": torch.ones(1)}, "a token belongs to sequence 1, but there are 1 advantages"),
        ({"advantage": torch.ones(3)}, "sequence 2 has no token that counts: leave it out"),
        ({"old_logp_T": torch.zeros(0), "sequence_T": rows[:0]}, "a batch without a token has no loss: leave it out"),
    ):
        arguments = {"old_logp_T": old, "sequence_T": rows, "advantage": advantage} | change
        with pytest.raises(ValueError, match=message):
            pack(arguments.pop("old_logp_T"), arguments.pop("sequence_T"), arguments.pop("advantage"), **arguments)


def test_half_precision_is_widened_and_inputs_keep_no_gradient():
    old = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    batch = pack(old, torch.tensor([0, 0]), torch.ones(1, dtype=torch.bfloat16))
    assert batch.old_logp_T.dtype == batch.advantage_T.dtype == torch.float32 and not batch.old_logp_T.requires_grad
    new = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    out = OBJECTIVES["gspo"].function(new, batch, GSPO_CLIP, None)
    assert out.loss.dtype == torch.float32


def test_default_clip_ranges_are_the_methods_and_raise_no_warning():
    assert (GSPO_CLIP, GRPO_CLIP, DAPO_CLIP) == ((3e-4, 4e-4), (0.2, 0.2), (0.2, 0.28))
    assert {name: algorithm.clip for name, algorithm in OBJECTIVES.items()} == {
        "gspo": GSPO_CLIP,
        "gspo_token": GSPO_CLIP,
        "grpo": GRPO_CLIP,
        "dapo": DAPO_CLIP,
    }
    assert not any(clip_warning(name, algorithm.clip) for name, algorithm in OBJECTIVES.items())
    assert clip_warning("grpo", Clip(0.2, 0.27)) is None


@pytest.mark.parametrize(
    ("name", "clip", "words"),
    [
        ("gspo", Clip(0.2, 0.2), r"clip 0\.2/0\.2 is a range for token ratios: gspo .* the paper uses 0\.0003/0\.0004"),
        ("gspo_token", Clip(3e-4, 0.28), "clip 0.0003/0.28 is a range for token ratios: gspo_token"),
        ("grpo", Clip(3e-4, 4e-4), r"clip 0\.0003/0\.0004 is a range for sequence ratios: grpo .* usual is 0\.2/0\.2"),
        ("dapo", Clip(3e-4, 0.28), r"sequence ratios: dapo .* usual is 0\.2/0\.28"),
    ],
)
def test_a_clip_range_for_the_other_kind_of_ratio_is_warned_about(name, clip, words):
    assert re.search(words, clip_warning(name, clip) or "")
