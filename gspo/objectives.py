"""The objectives: what each maximises, in packed form. Pure functions; gradients come from autograd alone.

Dimension letters: T tokens of a micro-batch, S sequences in it. `x_T[t]` belongs to sequence `sequence_T[t]`.

An objective is one function `(logp_T, batch, clip, kl) -> Objective`: it owns its ratio, its clip range and its
aggregation, and stands in `OBJECTIVES` under its name. Sums are divided by counts over the whole minibatch, so the
losses (and gradients) of micro-batches or ranks add up to those of the whole.

Sources: gspo and gspo_token, Zheng et al. 2025 (arXiv:2507.18071), equations 5 to 7 and 13 to 14; grpo, Shao et al.
2024 (arXiv:2402.03300), equation 3; dapo, Yu et al. 2025 (arXiv:2503.14476), equation 8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


class Clip(NamedTuple):
    """The band [1 - low, 1 + high] of the ratio."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class KL:
    """A penalty `coefficient * estimate(log pi - log pi_ref)` inside the loss."""

    coefficient: float
    estimator: Estimator


class NonFiniteError(ValueError):
    """A log-probability that counts is NaN or infinite; `sequence` is its sequence index in the batch."""

    def __init__(self, what: str, sequence: int) -> None:
        super().__init__(f"{what} of a trained token in sequence {sequence} is not finite")
        self.what, self.sequence = what, sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything but the current log-probabilities that an objective needs. Make it with `pack`."""

    old_logp_T: Tensor
    """Log-probabilities under the policy that sampled, at the sampling temperature. float32 (float64 in checks)."""
    sequence_T: Tensor
    """int64, the index in 0..S-1 of each token's sequence."""
    mask_T: Tensor
    """bool, True where the policy sampled the token. Values elsewhere change nothing, NaN included."""
    advantage_T: Tensor
    """Advantage of each token."""
    advantage_S: Tensor | None
    """Advantage of each sequence; None where advantages differ by token."""
    length_S: Tensor
    """Number of tokens that count in each sequence, at least 1; floating point."""
    global_sequences: float
    """Sequences of the whole minibatch, over all micro-batches and ranks, those without a signal included."""
    global_tokens: float
    """Tokens that count in the whole minibatch, over all micro-batches and ranks."""
    reference_logp_T: Tensor | None = None
    """Log-probabilities under the reference policy, where a KL term needs them."""

    def log_ratio_T(self, logp_T: Tensor) -> Tensor:
        """d = log pi - log pi_old of each token that counts, 0 elsewhere. Raises NonFiniteError."""
        return self._difference_T("log-probability", logp_T, self.old_logp_T)

    def mean_S(self, x_T: Tensor) -> Tensor:
        """Mean over the tokens of each sequence that count. x_T must be 0 where masked."""
        return self.sum_S(x_T) / self.length_S

    def sum_S(self, x_T: Tensor) -> Tensor:
        """Sum over the tokens of each sequence."""
        return x_T.new_zeros(len(self.length_S)).index_add(0, self.sequence_T, x_T)

    def penalty_T(self, logp_T: Tensor, kl: KL | None) -> Tensor:
        """coefficient x estimate of KL(pi, pi_ref) at each token; zeros without a KL term."""
        if kl is None:
            return torch.zeros_like(self.old_logp_T)
        if self.reference_logp_T is None:
            raise ValueError("a KL term needs the reference policy's log-probabilities: pass reference_logp")
        log_ratio_T = self._difference_T("log-probability", logp_T, self.reference_logp_T)
        return kl.coefficient * estimate_kl(log_ratio_T, kl.estimator)

    def _difference_T(self, what: str, logp_T: Tensor, below_T: Tensor) -> Tensor:
        check_finite(what, logp_T, self.sequence_T, self.mask_T)
        return torch.where(self.mask_T, wide(logp_T), 0) - torch.where(self.mask_T, below_T, 0)


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of a micro-batch and what diagnosis needs. All but the loss is detached."""

    loss: Tensor
    """Scalar: this micro-batch's share of the minibatch's loss."""
    log_ratio_T: Tensor
    """d of each token, 0 where masked."""
    log_ratio_S: Tensor
    """log s, the mean of d over each sequence."""
    clipped_T: Tensor
    """bool: the clipped branch was taken at this token (or at its sequence), so that its gradient is zero."""
    outside_T: Tensor
    """bool: the ratio that the objective clips is outside the band, whatever the advantage's sign."""


def pack(
    old_logp_T: Tensor,
    sequence_T: Tensor,
    advantage: Tensor,
    *,
    by_token: bool = False,
    mask_T: Tensor | None = None,
    reference_logp_T: Tensor | None = None,
    global_sequences: float | None = None,
    global_tokens: float | None = None,
) -> Batch:
    """A Batch, checked. `advantage` is [S], or [T] with `by_token`. Counts default to those of this batch.

    Raises ValueError for shapes that do not fit and for a sequence without a token that counts, and NonFiniteError for
    a NaN or infinity among the values that count.
    """
    mask_T = torch.ones_like(sequence_T, dtype=torch.bool) if mask_T is None else mask_T.bool()
    old_T, advantage = wide(old_logp_T.detach()), wide(advantage.detach())
    by_token_T = {"advantage": advantage if by_token else None, "reference log-probability": reference_logp_T}
    for name, x in {"sequence": sequence_T, "mask": mask_T, **by_token_T}.items():
        if x is not None and x.shape != old_T.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, old log-probabilities have {tuple(old_T.shape)}")
    if not len(old_T):
        raise ValueError("a batch without a token has no loss: leave it out")
    num_sequences = int(sequence_T.max()) + 1 if by_token else len(advantage)
    if int(sequence_T.max()) >= num_sequences:
        raise ValueError(f"a token belongs to sequence {int(sequence_T.max())}, but there are {num_sequences} advantages")
    length_S = torch.bincount(sequence_T[mask_T], minlength=num_sequences).to(old_T.dtype)
    if bool((length_S == 0).any()):
        raise ValueError(f"sequence {int((length_S == 0).nonzero()[0])} has no token that counts: leave it out")
    advantage_T = advantage if by_token else advantage[sequence_T]
    check_finite("old log-probability", old_T, sequence_T, mask_T)
    check_finite("advantage", advantage_T, sequence_T, mask_T)
    if reference_logp_T is not None:
        reference_logp_T = wide(reference_logp_T.detach())
        check_finite("reference log-probability", reference_logp_T, sequence_T, mask_T)
    return Batch(
        old_logp_T=old_T,
        sequence_T=sequence_T,
        mask_T=mask_T,
        advantage_T=torch.where(mask_T, advantage_T, 0),
        advantage_S=None if by_token else advantage,
        length_S=length_S,
        global_sequences=num_sequences if global_sequences is None else global_sequences,
        global_tokens=float(length_S.sum()) if global_tokens is None else global_tokens,
        reference_logp_T=reference_logp_T,
    )


def wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()


def check_finite(what: str, x_T: Tensor, sequence_T: Tensor, mask_T: Tensor) -> None:
    """Raises NonFiniteError for the first sequence with a NaN or infinity where mask_T is True."""
    bad_T = mask_T & ~torch.isfinite(x_T.detach())
    if bool(bad_T.any()):
        raise NonFiniteError(what, int(sequence_T[bad_T][0]))


def estimate_kl(log_ratio_T: Tensor, estimator: Estimator) -> Tensor:
    """One-sample estimates of KL(pi, pi_ref) from d = log pi - log pi_ref, for tokens drawn from pi.

    k1 = d (unbiased), k2 = d^2 / 2 (never negative; its gradient is that of the KL), k3 = exp(-d) - 1 + d (unbiased and
    never negative). Schulman, "Approximating KL divergence", 2020.
    """
    if estimator == "k1":
        return log_ratio_T
    if estimator == "k2":
        return log_ratio_T.square() / 2
    if estimator == "k3":
        return torch.expm1(-log_ratio_T) + log_ratio_T
    raise ValueError(f"unknown estimator {estimator!r}: use k1, k2 or k3")


def surrogate(log_ratio: Tensor, advantage: Tensor, clip: Clip) -> tuple[Tensor, Tensor, Tensor]:
    """min(ratio A, clip(ratio) A), whether the clipped branch was taken, and whether the ratio is outside the band.

    All of one shape, by token or by sequence. With A > 0 only the upper bound clips, with A < 0 only the lower one.
    The exponential is taken only where its gradient counts: elsewhere an overflow times zero would be NaN.
    """
    ratio = log_ratio.detach().exp()
    above, below = ratio > 1 + clip.high, ratio < 1 - clip.low
    clipped = torch.where(advantage > 0, above, below & (advantage < 0))
    bound = torch.full_like(ratio, 1 - clip.low).masked_fill(advantage > 0, 1 + clip.high)  # of the ratio's precision
    live = ~clipped & (advantage != 0)
    value = torch.where(live, torch.where(live, log_ratio, 0).exp(), bound) * advantage
    return value, clipped, above | below


GSPO_CLIP = Clip(3e-4, 4e-4)  # the paper's, section 5.1: s is a mean over tokens and moves little
GRPO_CLIP = Clip(0.2, 0.2)  # PPO's; the paper's comparison uses 0.2 and 0.27
DAPO_CLIP = Clip(0.2, 0.28)  # "clip higher", DAPO section 3.1


def gspo(logp_T: Tensor, batch: Batch, clip: Clip = GSPO_CLIP, kl: KL | None = None) -> Objective:
    """One ratio a sequence, s = exp(mean d), clipped by sequence, averaged over sequences. [T] -> scalar loss.

    Raises ValueError if advantages differ by token: that is gspo_token.
    """
    if batch.advantage_S is None:
        raise ValueError("gspo needs one advantage a sequence: use gspo_token for advantages by token")
    log_ratio_T = batch.log_ratio_T(logp_T)
    log_ratio_S = batch.mean_S(log_ratio_T)
    value_S, clipped_S, outside_S = surrogate(log_ratio_S, batch.advantage_S, clip)
    total = (value_S - batch.mean_S(batch.penalty_T(logp_T, kl))).sum()
    on_T = batch.sequence_T
    return _objective(-total / batch.global_sequences, batch, log_ratio_T, clipped_S[on_T], outside_S[on_T])


def gspo_token(logp_T: Tensor, batch: Batch, clip: Clip = GSPO_CLIP, kl: KL | None = None) -> Objective:
    """Value s, gradient through each token, advantage by token; averaged over tokens, then sequences. [T] -> scalar."""
    log_ratio_T = batch.log_ratio_T(logp_T)
    log_ratio_S = batch.mean_S(log_ratio_T).detach()
    through_T = log_ratio_S[batch.sequence_T] + (log_ratio_T - log_ratio_T.detach())
    value_T, clipped_T, outside_T = surrogate(through_T, batch.advantage_T, clip)
    total = batch.mean_S(value_T - batch.penalty_T(logp_T, kl)).sum()
    return _objective(-total / batch.global_sequences, batch, log_ratio_T, clipped_T, outside_T)


def grpo(logp_T: Tensor, batch: Batch, clip: Clip = GRPO_CLIP, kl: KL | None = None) -> Objective:
    """One ratio a token, clipped by token; averaged over the tokens of a sequence, then sequences. [T] -> scalar."""
    log_ratio_T = batch.log_ratio_T(logp_T)
    value_T, clipped_T, outside_T = surrogate(log_ratio_T, batch.advantage_T, clip)
    total = batch.mean_S(value_T - batch.penalty_T(logp_T, kl)).sum()
    return _objective(-total / batch.global_sequences, batch, log_ratio_T, clipped_T, outside_T)


def dapo(logp_T: Tensor, batch: Batch, clip: Clip = DAPO_CLIP, kl: KL | None = None) -> Objective:
    """One ratio a token, clipped by token with a higher upper bound; averaged over all tokens. [T] -> scalar."""
    log_ratio_T = batch.log_ratio_T(logp_T)
    value_T, clipped_T, outside_T = surrogate(log_ratio_T, batch.advantage_T, clip)
    total = (value_T - batch.penalty_T(logp_T, kl)).sum()
    return _objective(-total / batch.global_tokens, batch, log_ratio_T, clipped_T, outside_T)


def _objective(loss: Tensor, batch: Batch, log_ratio_T: Tensor, clipped_T: Tensor, outside_T: Tensor) -> Objective:
    log_ratio_T = log_ratio_T.detach()
    return Objective(loss, log_ratio_T, batch.mean_S(log_ratio_T), clipped_T & batch.mask_T, outside_T & batch.mask_T)


class Algorithm(NamedTuple):
    """An objective's function, its own clip range, and the unit whose ratio it clips."""

    function: Callable[[Tensor, Batch, Clip, KL | None], Objective]
    clip: Clip
    unit: Literal["sequence", "token"]


OBJECTIVES: dict[str, Algorithm] = {
    "gspo": Algorithm(gspo, GSPO_CLIP, "sequence"),
    "gspo_token": Algorithm(gspo_token, GSPO_CLIP, "sequence"),
    "grpo": Algorithm(grpo, GRPO_CLIP, "token"),
    "dapo": Algorithm(dapo, DAPO_CLIP, "token"),
}


def clip_warning(name: str, clip: Clip) -> str | None:
    """Plain words about a clip range made for the other kind of ratio, or None."""
    own, unit = OBJECTIVES[name].clip, OBJECTIVES[name].unit
    if unit == "sequence" and max(clip) > 0.02:
        return (
            f"clip {clip.low:g}/{clip.high:g} is a range for token ratios: {name} clips a mean over the whole "
            f"response, which hardly ever moves that far, so nothing will be clipped; the paper uses "
            f"{own.low:g}/{own.high:g}"
        )
    if unit == "token" and min(clip) < 0.01:
        return (
            f"clip {clip.low:g}/{clip.high:g} is a range for sequence ratios: {name} clips each token's ratio, "
            f"so nearly every token will be clipped after the first minibatch; usual is {own.low:g}/{own.high:g}"
        )
    return None
