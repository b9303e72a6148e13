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
    Raises ValueError for an unknown objective, a band that is none, shapes that do not fit, a reference without a KL
    term (or the reverse) and rows without a token that counts, and NonFiniteError for a NaN or infinity that counts.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}: use one of {', '.join(OBJECTIVES)}")
    tensors = {"logp": logp_BL, "old_logp": old_logp_BL, "mask": mask_BL, "reference_logp": reference_logp_BL}
    shapes = {name: tuple(x.shape) for name, x in tensors.items() if x is not None}
    if logp_BL.ndim != 2 or len(set(shapes.values())) != 1:
        raise ValueError(f"all must be [B, L] alike, got {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
    if reference_logp_BL is not None and kl is None:
        raise ValueError("reference_logp is used by a KL term alone: pass kl=KL(coefficient, estimator) too, or neither")
    num_rows, length = logp_BL.shape
    if advantage.shape not in ((num_rows,), (num_rows, length)):
        raise ValueError(f"advantage must be [{num_rows}] or [{num_rows}, {length}], got {tuple(advantage.shape)}")
    for name, count in (("global_sequences", global_sequences), ("global_tokens", global_tokens)):
        if count is not None and not count > 0:
            raise ValueError(f"{name} must be positive, got {count}")
    algorithm = OBJECTIVES[objective]
    band = Clip(*clip) if clip else algorithm.clip
    if not (0 <= band.low < 1 and 0 <= band.high < float("inf")):
        raise ValueError(f"clip {band.low:g}/{band.high:g} is no band [1 - low, 1 + high]: use 0 <= low < 1 and 0 <= high")
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
    return algorithm.function(logp_BL.flatten(), batch, band, kl)
