"""Drawing tokens: one distribution a row, one random number a row, each row's numbers from its own seed.

R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..config import SamplingConfig

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seed_R: np.ndarray, index_R: np.ndarray) -> np.ndarray:
    """Number `index` of each seed's stream, float64 in [0, 1): SplitMix64 (Steele, Lea, Flood 2014) as a counter.

    A counter needs no state: row order, refilling and resuming cannot change what a sample draws.
    """
    with np.errstate(over="ignore"):
        z = seed_R + (index_R.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(logits_RV: Tensor, sampling: SamplingConfig, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row and its float32 log-probability under the distribution drawn from: int64 [R], float32 [R].

    Temperature first, then top-k, top-p and min-p, each on what the one before left; then the inverse of the cumulative
    distribution at uniform_R, summed in float64 so that unlikely tokens of large vocabularies keep their share.
    Temperature 0 takes the likeliest token, with log-probability 0.
    """
    if sampling.temperature == 0:
        token_R = logits_RV.argmax(-1)
        return token_R, torch.where(logits_RV.isfinite().all(-1), 0.0, torch.nan)
    logits_RV = logits_RV.float()
    if sampling.temperature != 1:
        logits_RV = logits_RV / sampling.temperature
    if sampling.truncated_support:
        logits_RV = _truncate(logits_RV, sampling)
    logp_RV = logits_RV.log_softmax(-1)
    cumulative_RV = logp_RV.double().exp_().cumsum_(-1)
    # Below the last sum by at least one rounding step, so that a token of probability 0 is never reached.
    at_R = (uniform_R * cumulative_RV[:, -1]).minimum(cumulative_RV[:, -1] * (1 - 2**-52))
    token_R = torch.searchsorted(cumulative_RV, at_R[:, None], right=True)[:, 0].clamp_(max=logits_RV.shape[1] - 1)
    return token_R, logp_RV.gather(1, token_R[:, None])[:, 0]


def _truncate(logits_RV: Tensor, sampling: SamplingConfig) -> Tensor:
    if 0 < sampling.top_k < logits_RV.shape[1]:
        kth_R1 = logits_RV.topk(sampling.top_k).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < kth_R1, -torch.inf)
    if sampling.top_p < 1:
        sorted_RV, order_RV = logits_RV.sort(descending=True)
        probs_RV = sorted_RV.softmax(-1)
        before_RV = probs_RV.cumsum(-1) - probs_RV  # the likeliest token always stays: nothing is before it
        drop_RV = (before_RV >= sampling.top_p).scatter(1, order_RV, before_RV >= sampling.top_p)
        logits_RV = logits_RV.masked_fill(drop_RV, -torch.inf)
    if sampling.min_p > 0:
        floor_R1 = logits_RV.max(-1, keepdim=True).values + torch.tensor(sampling.min_p).log()
        logits_RV = logits_RV.masked_fill(logits_RV < floor_R1, -torch.inf)
    return logits_RV
