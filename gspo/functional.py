"""The objectives for padded batches: for people who bring their own trainer.

B sequences, L padded length: `policy_loss` takes [B, L] tensors and returns the same loss that the packed form gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .objectives import KL, OBJECTIVES, Clip, Objective, pack


def policy_loss(
    logp_BL: Tensor,
    old_logp_BL: Tensor,
    mask_BL: Tensor,
    advantage: Tensor,
    *,
    objective: str = "gspo",
    clip: tuple[float, float] | None = None,
    kl: KL | None = None,
    reference_logp_BL: Tensor | None = None,
    global_sequences: float | None = None,
    global_tokens: float | None = None,
) -> Objective:
    """The loss to minimise, and diagnosis, of padded log-probabilities [B, L].

    mask_BL is True where the policy sampled the token; anything elsewhere is ignored, NaN included. advantage is
    [B], or [B, L] for objectives with credit by token. clip is (low, high), by default the objective's own. With several
    micro-batches or ranks pass the minibatch's counts as global_sequences and global_tokens and add the losses up.
    Raises ValueError for an unknown objective, shapes that do not fit and rows without a token that counts, and
    NonFiniteError for a NaN or infinity that counts.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}: use one of {', '.join(OBJECTIVES)}")
    if logp_BL.ndim != 2 or logp_BL.shape != old_logp_BL.shape or logp_BL.shape != mask_BL.shape:
        shapes = [tuple(x.shape) for x in (logp_BL, old_logp_BL, mask_BL)]
        raise ValueError(f"logp, old_logp and mask must be [B, L] alike, got {shapes[0]}, {shapes[1]} and {shapes[2]}")
    num_rows, length = logp_BL.shape
    if advantage.shape not in ((num_rows,), (num_rows, length)):
        raise ValueError(f"advantage must be [{num_rows}] or [{num_rows}, {length}], got {tuple(advantage.shape)}")
    algorithm = OBJECTIVES[objective]
    batch = pack(
        old_logp_BL.flatten(),
        torch.arange(num_rows, device=logp_BL.device).repeat_interleave(length),
        advantage.flatten(),
        by_token=advantage.ndim == 2,
        mask_T=mask_BL.flatten(),
        reference_logp_T=None if reference_logp_BL is None else reference_logp_BL.flatten(),
        global_sequences=global_sequences,
        global_tokens=global_tokens,
    )
    return algorithm.function(logp_BL.flatten(), batch, Clip(*clip) if clip else algorithm.clip, kl)
