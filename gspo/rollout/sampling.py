"""Drawing tokens: one distribution a row, one random number a row, each row's numbers from its own seed.

R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..config import SamplingConfig

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

BLOCK = 512
"""Tokens of a block, where a vocabulary is searched in two levels. On an H100 one running sum over 128 rows of 152,000
takes 0.3 ms, a fifteenth of a whole decoding step; sums of blocks take a sixth of that."""


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
    token_R = _invert(logp_RV, uniform_R)
    return token_R, logp_RV.gather(1, token_R[:, None])[:, 0]


def _invert(logp_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The token at uniform_R of each row's cumulative distribution: int64 [R].

    Large vocabularies in two levels, blocks of tokens and then tokens of one block: a float64 running sum over all of a
    row is the slowest part of drawing on a GPU.
    """
    rows, vocabulary = logp_RV.shape
    if vocabulary < 4 * BLOCK:
        return _search(logp_RV.double().exp_(), uniform_R)[0]
    p_RNB = pad(logp_RV.exp(), (0, -vocabulary % BLOCK)).view(rows, -1, BLOCK)
    block_R, rest_R = _search(p_RNB.sum(-1, dtype=torch.float64), uniform_R)
    inside_RB = p_RNB[torch.arange(rows, device=logp_RV.device), block_R].double()
    return (block_R * BLOCK + _search(inside_RB, rest_R)[0]).clamp_(max=vocabulary - 1)


def _search(p_RN: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Which of N masses uniform_R of their sum falls on, and how far into it: int64 [R], float64 [R] in [0, 1)."""
    cumulative_RN = p_RN.cumsum(-1)
    # Below the last sum by at least one rounding step, so that a mass of 0 is never reached.
    at_R = (uniform_R * cumulative_RN[:, -1]).minimum(cumulative_RN[:, -1] * (1 - 2**-52))
    index_R = torch.searchsorted(cumulative_RN, at_R[:, None], right=True)[:, 0].clamp_(max=p_RN.shape[1] - 1)
    above_R, mass_R = (x.gather(1, index_R[:, None])[:, 0] for x in (cumulative_RN, p_RN))
    return index_R, (1 - (above_R - at_R) / mass_R).clamp_(0, 1 - 2**-52)


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
