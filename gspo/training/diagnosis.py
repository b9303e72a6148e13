"""What an update did to the ratios: numbers taken from the passes that were made anyway.

T trained tokens, S sequences. Everything here is measurement; no gradient and no decision of the loss depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..objectives import Batch, Clip, Objective, surrogate
from ..reporting.names import HISTOGRAM, LENGTHS, QUANTILES
from ..types import Metrics
from .correction import Weights

Unit = Literal["sequence", "token"]


@dataclass(frozen=True, slots=True)
class Ratios:
    """The ratios of one micro-batch at the moment of its update, detached; on a GPU until `on_cpu` fetches them."""

    ids: tuple[str, ...]
    """Sample ids [S]."""
    log_ratio_T: Tensor
    """d of each token."""
    log_ratio_S: Tensor
    """log s of each sequence."""
    clipped_T: Tensor
    """The clipped branch was taken."""
    outside_T: Tensor
    """The clipped ratio is outside the band."""
    unit: Unit
    """Whose ratio is clipped."""
    advantage_T: Tensor
    """Advantage of each token."""
    sequence_T: Tensor
    """Sequence of each token."""
    length_S: Tensor
    """Tokens of each sequence."""
    entropy_T: Tensor
    """Entropy of the policy at each token, nats."""
    reference_T: Tensor | None
    """log pi - log pi_ref of each token, where there is a reference."""
    engine_gap_T: Tensor | None
    """log p(engine) - log p(trainer) at the old policy, where the trainer's old log-probabilities are known. On a stale
    token the engine's are of an earlier policy than the trainer's."""
    stale_T: Tensor
    """bool: an earlier policy sampled the token than the one that the update started from."""
    decisions_differ: Tensor | int
    """Clip decisions (of sequences or tokens, by the objective's unit) that would differ with the other old ones, whatever
    a correction made of the advantages."""
    decisions: Tensor | int
    """Clip decisions that were compared: of what holds no stale token."""
    weight: Tensor | None
    """Weights of the correction, [T] or [S] by its level, where it is on."""
    limited: Tensor | None
    """bool: that weight was capped or masked."""

    def on_cpu(self) -> Ratios:
        """The same in the host's memory. It waits, once, for all that the GPU has still to do."""
        tensors = {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        fetched = {name: x.to("cpu", non_blocking=True) for name, x in tensors.items()}
        if self.log_ratio_T.is_cuda:
            torch.cuda.current_stream(self.log_ratio_T.device).synchronize()
        counts = {name: int(x) for name, x in fetched.items() if name in ("decisions_differ", "decisions")}
        return replace(self, **fetched | counts)


def observe(
    ids: tuple[str, ...],
    logp_T: Tensor,
    entropy_T: Tensor,
    engine_T: Tensor,
    trainer_T: Tensor | None,
    stale_T: Tensor,
    batch: Batch,
    result: Objective,
    clip: Clip,
    unit: Unit,
    corrected: tuple[Batch, Weights | None],
) -> Ratios:
    """Ratios of a micro-batch. engine_T and trainer_T are the old log-probabilities of either side (None: unknown).

    batch: as it was before a correction weighed the advantages. corrected: what the objective saw, and the weights.
    """
    logp_T, weights = logp_T.detach(), corrected[1]
    differ: Tensor | int = 0
    compared: Tensor | int = 0
    if trainer_T is not None:
        sides = [_clip_decisions(logp_T - old_T, batch, clip, unit) for old_T in (engine_T, trainer_T)]
        fresh = ~stale_T if unit == "token" else batch.sum_S(stale_T.to(logp_T.dtype)) == 0
        differ, compared = ((sides[0] != sides[1]) & fresh).sum(), fresh.sum()
    gap_T = None if trainer_T is None else engine_T - trainer_T
    reference_T = None if batch.reference_logp_T is None else logp_T - batch.reference_logp_T
    kept = {
        "log_ratio_T": result.log_ratio_T,
        "log_ratio_S": result.log_ratio_S,
        "clipped_T": result.clipped_T,
        "outside_T": result.outside_T,
        "advantage_T": corrected[0].advantage_T,
        "sequence_T": batch.sequence_T,
        "length_S": batch.length_S,
        "entropy_T": entropy_T,
        "reference_T": reference_T,
        "engine_gap_T": gap_T,
        "stale_T": stale_T,
        "weight": None if weights is None else weights.weight,
        "limited": None if weights is None else weights.limited,
    }
    detached = {name: None if x is None else x.detach() for name, x in kept.items()}
    return Ratios(ids=ids, unit=unit, decisions_differ=differ, decisions=compared, **detached)  # type: ignore[arg-type]


def _clip_decisions(log_ratio_T: Tensor, batch: Batch, clip: Clip, unit: Unit) -> Tensor:
    if unit == "token":
        return surrogate(log_ratio_T, batch.advantage_T, clip)[1]
    log_s_T = batch.mean_S(log_ratio_T)[batch.sequence_T]
    clipped_T = surrogate(log_s_T, batch.advantage_T, clip)[1]
    return batch.sum_S(clipped_T.to(log_s_T.dtype)) > 0


def mismatch_size(ratios: Sequence[Ratios], unit: Unit) -> float | None:
    """Root mean square of (ratio - 1) that the gap between engine and trainer alone makes, in the objective's unit.

    Stale tokens are left out: their gap is what the policy moved since. None where nothing was measured.
    """
    return _size([_gap(r, unit) for r in ratios if r.engine_gap_T is not None])


def staleness_metrics(minibatches: Sequence[Sequence[Ratios]], *, on: bool) -> Metrics:
    """`partial/staleness`: what the policy's moves since sampling make of the ratios that hold stale tokens; empty where no
    sample goes on over several steps."""
    if not on:
        return {}
    known = [r for part in minibatches for r in part if r.engine_gap_T is not None]
    return {"partial/staleness": _size([_gap(r, r.unit, stale=True) for r in known])}


def _size(gaps: Sequence[Tensor]) -> float | None:
    gap = torch.cat([*gaps]) if gaps else torch.empty(0)
    return float(gap.double().neg().expm1().square().mean().sqrt()) if len(gap) else None


def _gap(r: Ratios, unit: Unit, *, stale: bool = False) -> Tensor:
    """The gap of each fresh token or, by sequence, the mean over its fresh tokens, where it has any. stale: of each stale
    token, or the mean over each whole sequence that has any."""
    assert r.engine_gap_T is not None
    wanted_T = r.stale_T if stale else ~r.stale_T
    if unit == "token":
        return r.engine_gap_T[wanted_T]
    zero_S = torch.zeros_like(r.length_S)
    count_S = zero_S.index_add(0, r.sequence_T, wanted_T.to(zero_S.dtype))
    if stale:
        total_S, over_S = zero_S.index_add(0, r.sequence_T, r.engine_gap_T), r.length_S
    else:
        total_S, over_S = zero_S.index_add(0, r.sequence_T, torch.where(wanted_T, r.engine_gap_T, 0)), count_S
    return (total_S / over_S)[count_S > 0]


def ratio_metrics(minibatches: Sequence[Sequence[Ratios]]) -> Metrics:
    """`policy/`, `ratio/` and `clip/` of one rollout batch; lists by minibatch. Nothing trained: all null."""
    every = [r for part in minibatches for r in part]
    log_w, log_s = _join(every, "log_ratio_T"), _join(every, "log_ratio_S")
    largest = max(every, key=lambda r: float(r.log_ratio_T.abs().max()), default=None)
    at = None if largest is None else int(largest.sequence_T[largest.log_ratio_T.abs().argmax()])
    return {
        "policy/entropy": _mean(_join(every, "entropy_T")),
        **_distribution("ratio/sequence", log_s),
        **_distribution("ratio/token", log_w),
        "ratio/largest_log_ratio": None if largest is None else float(largest.log_ratio_T.abs().max()),
        "ratio/sequence_at_largest": None if largest is None or at is None else _exp(largest.log_ratio_S[at]),
        "clip/sequence": _mean(_any_S(every, "clipped_T")),
        "clip/token": _mean(_join(every, "clipped_T")),
        "clip/positive": _mean(_join(every, "clipped_T")[_join(every, "advantage_T") > 0]),
        "clip/negative": _mean(_join(every, "clipped_T")[_join(every, "advantage_T") < 0]),
        "clip/outside_band": _mean(_outside(every)),
        "clip/sequence_by_minibatch": [_mean(_any_S(part, "clipped_T")) for part in minibatches],
        "clip/token_by_minibatch": [_mean(_join(part, "clipped_T")) for part in minibatches],
        "clip/outside_band_by_minibatch": [_mean(_outside(part)) for part in minibatches],
    }


def mismatch_metrics(minibatches: Sequence[Sequence[Ratios]], *, recomputed: bool) -> Metrics:
    """`mismatch/`: engine against trainer at the old policy, wherever both are known without an extra pass, on the tokens
    that are not stale."""
    known = [r for part in minibatches for r in part if r.engine_gap_T is not None]
    gap_T = torch.cat([_gap(r, "token") for r in known]) if known else torch.empty(0)
    s_S = torch.cat([_gap(r, "sequence").double().neg().exp() for r in known]) if known else torch.empty(0)
    fresh_S = [torch.zeros_like(r.length_S).index_add(0, r.sequence_T, (~r.stale_T).to(r.length_S.dtype)) for r in known]
    length_S = torch.cat([n[n > 0] for n in fresh_S]) if known else torch.empty(0)
    bin_S = np.searchsorted(LENGTHS, length_S.numpy())
    by_length = [s_S[bin_S == i] for i in range(len(LENGTHS) + 1)]
    return {
        "mismatch/k1": _mean(gap_T),
        "mismatch/k3": _mean(torch.expm1(-gap_T) + gap_T),
        "mismatch/largest_log_ratio": float(gap_T.abs().max()) if len(gap_T) else None,
        "mismatch/sequence_mean": _mean(s_S),
        "mismatch/sequence_std": _std(s_S),
        "mismatch/sequence_mean_by_length": [_mean(s) for s in by_length],
        "mismatch/sequence_std_by_length": [_std(s) for s in by_length],
        "mismatch/sequences_by_length": [len(s) for s in by_length],
        "mismatch/decisions_differ": sum(r.decisions_differ for r in known),
        "mismatch/decisions": sum(r.decisions for r in known),
        "mismatch/recomputed": int(recomputed),
    }


def correction_metrics(minibatches: Sequence[Sequence[Ratios]], *, on: bool) -> Metrics:
    """`correction/`: the weights between trainer and engine; empty where the correction is off."""
    if not on:
        return {}
    every = [r for part in minibatches for r in part]
    weight, limited = _join(every, "weight"), _join(every, "limited")
    return {"correction/weight_mean": _mean(weight), "correction/truncated": _mean(limited)}


def by_sample(minibatches: Sequence[Sequence[Ratios]]) -> dict[str, tuple[float, bool, float]]:
    """Sample id to its s at its own update, whether it was clipped (at any token), and its tokens' largest |d|."""
    out = {}
    for r in (r for part in minibatches for r in part):
        zeros_S = torch.zeros(len(r.ids))
        clipped_S = zeros_S.index_add(0, r.sequence_T, r.clipped_T.float()) > 0
        largest_S = zeros_S.scatter_reduce(0, r.sequence_T, r.log_ratio_T.abs().float(), "amax")
        for i, name in enumerate(r.ids):
            out[name] = (_exp(r.log_ratio_S[i]), bool(clipped_S[i]), float(largest_S[i]))
    return out


def reference_kl(minibatches: Sequence[Sequence[Ratios]]) -> Metrics:
    """`kl/reference`: the k3 estimate of KL(policy, reference) a token; empty without a reference."""
    known = [r for part in minibatches for r in part if r.reference_T is not None]
    if not known:
        return {}
    log_ratio_T = _join(known, "reference_T").double()
    return {"kl/reference": _mean(torch.expm1(-log_ratio_T) + log_ratio_T)}


def _join(ratios: Sequence[Ratios], name: str) -> Tensor:
    return torch.cat([getattr(r, name) for r in ratios]) if ratios else torch.empty(0)


def _any_S(ratios: Sequence[Ratios], name: str) -> Tensor:
    """1 for each sequence in which a token is marked, else 0."""
    marks = [torch.zeros(len(r.ids)).index_add(0, r.sequence_T, getattr(r, name).float()).clamp(max=1) for r in ratios]
    return torch.cat(marks) if marks else torch.empty(0)


def _outside(ratios: Sequence[Ratios]) -> Tensor:
    """1 for each ratio of the objective's own unit that is outside the band, else 0."""
    by_sequence = ratios and ratios[0].unit == "sequence"
    return _any_S(ratios, "outside_T") if by_sequence else _join(ratios, "outside_T")


def _exp(log_ratio: Tensor) -> float:
    return float(log_ratio.double().exp())  # in float32 it would be infinite from 89 nats


def _mean(x: Tensor) -> float | None:
    return float(x.double().mean()) if len(x) else None


def _std(x: Tensor) -> float | None:
    return float(x.double().std()) if len(x) > 1 else None


def _distribution(name: str, log_ratio: Tensor) -> Metrics:
    ratio, logs = log_ratio.double().exp().numpy(), log_ratio.double().numpy()
    counts = np.bincount(np.searchsorted(HISTOGRAM, logs), minlength=len(HISTOGRAM) + 1)
    return {
        f"{name}_mean": float(ratio.mean()) if len(ratio) else None,
        f"{name}_std": float(ratio.std(ddof=1)) if len(ratio) > 1 else None,
        f"{name}_quantiles": [float(q) for q in np.quantile(ratio, QUANTILES)] if len(ratio) else None,
        f"{name}_histogram": counts.tolist(),
    }
