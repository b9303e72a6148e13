"""Correction for an engine that does not sample exactly from the trainer's old policy: weights on the advantages.

T trained tokens, S sequences. With d = log p(trainer, old) - log p(engine) of a token, the weight is exp(d) of each token
(`token`), exp(sum of d) of each sequence (`sequence_product`: the plain importance weight of a whole response), or
exp(mean of d) of each sequence (`sequence_mean`: its geometric mean over tokens, length-normalised as GSPO's s is).

Sources: capped weights, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; masked
ones and the length-normalised form, Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the
Training-Inference Mismatch". verl calls the three levels token, sequence and geometric; TRL has token_truncate, token_mask,
sequence_truncate and sequence_mask, whose sequence weight is the plain product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config import CorrectionConfig
from ..objectives import Batch


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a micro-batch, one for each token [T] or sequence [S] by the level of the correction. Detached."""

    weight: Tensor
    """What the advantage is multiplied by, never negative."""
    limited: Tensor
    """bool: capped or masked."""
    by_token: bool
    """Whether they are [T]."""


def correction_weights(trainer_T: Tensor, engine_T: Tensor, batch: Batch, correction: CorrectionConfig) -> Weights:
    """Weights from the old log-probabilities of either side [T]; 1 where the two are equal.

    Masked tokens of the batch count as equal. Not covered: a difference that is not finite, to be refused before.
    """
    log_weight = torch.where(batch.mask_T, trainer_T.detach() - engine_T.detach(), 0).to(batch.old_logp_T.dtype)
    if correction.level != "token":
        log_weight = (batch.sum_S if correction.level == "sequence_product" else batch.mean_S)(log_weight)
    weight = log_weight.exp()  # an overflow is infinite, and thus above any cap
    above = weight > correction.high
    if correction.mode == "truncate":
        return Weights(weight.masked_fill(above, correction.high), above, correction.level == "token")
    assert correction.low is not None
    outside = above | (weight < correction.low)
    return Weights(weight.masked_fill(outside, 0.0), outside, correction.level == "token")


def weighted(batch: Batch, weights: Weights) -> Batch:
    """The batch with each advantage times its weight; counts, and with them every denominator, stay.

    As weights are not negative, min(ratio A, clip(ratio) A) w = min(ratio w A, clip(ratio) w A): what an objective
    clips is the same, and a KL term is not weighted. Advantages by sequence become ones by token at that level.
    """
    if weights.by_token:
        return replace(batch, advantage_T=batch.advantage_T * weights.weight, advantage_S=None)
    by_S = None if batch.advantage_S is None else batch.advantage_S * weights.weight
    return replace(batch, advantage_T=batch.advantage_T * weights.weight[batch.sequence_T], advantage_S=by_S)
