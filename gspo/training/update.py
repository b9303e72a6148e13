"""The update: n minibatch steps on one rollout batch, micro-batch by micro-batch.

T trained tokens of a micro-batch, S sequences in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ..config import Config
from ..distributed import ALONE, World
from ..objectives import KL, OBJECTIVES, Batch, Clip, NonFiniteError, check_finite, pack
from ..types import Metrics, Trajectory
from .correction import Weights, correction_weights, weighted
from .diagnosis import Ratios, mismatch_size, observe
from .look_ahead import Pass, clipped_tokens, moving
from .optimizer import Optimizer
from .packing import MicroBatch, TrainingError, make_micro_batches, on_device, split_minibatches
from .policy import Policy
from .routing import Passes
from .sharding import share_by_tokens

MISMATCH_FRACTION = 0.1
"""`auto` keeps the engine's log-probabilities while their mismatch is below this share of the narrower clip bound: then
noise moves a ratio by a tenth of the band, and few clip decisions can depend on it."""

MAX_SKIPPED = 3
"""Non-finite gradients in a row after which training stops: one is an accident, three are a broken run. Overflows of
float16 count only where the loss scale is at its lowest: until then halving it is how the scale is found."""


LOOK_AHEAD_FROM = 0.5
"""Share of a minibatch's tokens that stood in sequences clipped throughout, from which the next one is looked at first.
With a backward pass twice a forward pass, that costs 1 + 3 (1 - share) forward passes not 3: fewer from a third on."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The samples of one gradient step."""

    trajectories: list[Trajectory]
    """All of them: the loss is divided by their number, whether they carry a signal or not."""
    micro_batches: list[MicroBatch]
    """Those with a signal, packed; of several ranks this one's share."""
    idle: int = 0
    """How many more another rank has: passes that this one takes part in without samples."""


@dataclass(slots=True)
class Skips:
    """Updates left out because their gradient was not finite; lives as long as the run."""

    total: int = 0
    """Since the start."""
    in_a_row: int = 0
    """Since the last update that was taken, less overflows that lowered the loss scale."""


@dataclass(slots=True)
class Updated:
    """What the updates on one rollout batch did."""

    ratios: list[list[Ratios]] = field(default_factory=list)
    """Diagnosis, by minibatch and micro-batch."""
    grad_norms: list[float] = field(default_factory=list)
    """Gradient norm of each minibatch before clipping."""
    losses: list[float] = field(default_factory=list)
    """Loss of each minibatch."""
    recomputed: bool = False
    """Whether the trainer's old log-probabilities stand below later minibatches' ratios."""
    mismatch: float | None = None
    """Engine against trainer on the first minibatch, in the objective's unit: root mean square of (ratio - 1). None where
    it had no sample with a signal."""
    stale: bool = False
    """Whether a later minibatch holds tokens that an earlier policy sampled."""
    threshold: float = 0.0
    """The largest mismatch with which `auto` keeps the engine's log-probabilities."""
    learning_rate: float = 0.0
    """Of the last minibatch."""
    looked_ahead: int = 0
    """Minibatches of which only the sequences that were not clipped went through forward and backward together."""
    routing: Metrics = field(default_factory=dict)
    """`moe/`; empty for a model without routers."""

    def metrics(self) -> Metrics:
        """`objective/`, `update/`, what `auto` goes by, and `moe/`; what was not finite is null."""
        norms = [_finite(n) for n in self.grad_norms]
        finite = [n for n in norms if n is not None]
        return {
            "objective/loss": _finite(sum(self.losses) / len(self.losses)),
            "update/grad_norm": sum(finite) / len(finite) if finite else None,
            "update/grad_norm_by_minibatch": norms,
            "update/learning_rate": self.learning_rate,
            "update/looked_ahead": self.looked_ahead,
            "mismatch/size": None if self.mismatch is None else _finite(self.mismatch),
            "mismatch/threshold": self.threshold,
            **self.routing,
        }


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def update(
    policy: Policy,
    optimizer: Optimizer,
    minibatches: Sequence[Minibatch],
    config: Config,
    skips: Skips,
) -> Updated:
    """A gradient step on the objective for each minibatch; `skips` counts those left out.

    Raises TrainingError, by sample id, for a log-probability that is not finite and for three gradients in a row that
    are not. The step before may then not be counted yet, in `policy.version` and `skips`.
    """
    out = Updated(threshold=MISMATCH_FRACTION * min(chosen_clip(config)))
    old: list[list[Tensor]] = []
    scorer = Passes(policy, config, [t for m in minibatches[0].micro_batches for t in m.trajectories])
    for i, part in enumerate(minibatches):
        todo = list(zip(part.micro_batches, old[i - 1] if i else [None] * len(part.micro_batches), strict=True))
        if i and _looks_ahead(policy.world, out.ratios[-1], config):
            out.looked_ahead += 1
            passes = [_forward(scorer, part, *one, config, out, train=False) for one in todo]
            with torch.no_grad():
                scorer.idle(part.idle)
            live = moving(passes, config)
            idle = policy.world.most([len(live)])[0] - len(live)
            for micro, grad_T in live:
                optimizer.backward(scorer.score(micro, at_old=False, seen=True)[0], grad_T)
        else:
            passes, idle = [_accumulate(scorer, optimizer, part, *one, config, out) for one in todo], part.idle
        scorer.idle(idle, optimizer.backward)
        scorer.end()
        out.losses.append(sum(one.loss for one in passes))
        out.ratios.append([one.ratios for one in passes])
        if i == 0:
            old = _old_logprobs(scorer, minibatches[1:], config, out)
        else:  # nothing to wait for: that step came before the forward pass whose ratios are here
            out.grad_norms.append(_settled(policy, optimizer, minibatches[i - 1], skips))
        out.learning_rate = optimizer.learning_rate
        optimizer.step()
        told = out.recomputed and config.training.replay != "engine"  # by the passes of the next minibatch
        scorer.after(looking=not told or part is minibatches[-1])
    out.losses, out.ratios = policy.world.sums(out.losses), _over_ranks(policy, out.ratios)
    out.grad_norms.append(_settled(policy, optimizer, minibatches[-1], skips))
    out.routing = scorer.metrics()
    return out


def _over_ranks(policy: Policy, mine: Sequence[Sequence[Ratios]]) -> list[list[Ratios]]:
    """By minibatch, the diagnosis of the micro-batches of all ranks."""
    parts = zip(*policy.world.gather(mine), strict=True)
    return [[r for by_rank in part for r in by_rank] for part in parts]


def why_recomputed(updated: Updated, config: Config) -> str | None:
    """In one sentence why `auto` recomputed, or None where it did not or another choice was made."""
    if config.rollout.old_logprobs != "auto" or not updated.recomputed:
        return None
    told = "old log-probabilities are recomputed by the trainer: "
    if updated.stale:
        return told + (
            "some tokens were sampled by an earlier policy, and ratios count from the policy of this step; what lies "
            "between the two is in partial/staleness, and rollout.correction weighs it"
        )
    if updated.mismatch is None:
        return told + "the first minibatch had no sample with a signal, so engine and trainer could not be compared"
    what = "s" if OBJECTIVES[config.objective.name].unit == "sequence" else "token ratios"
    clip = chosen_clip(config)
    return told + (
        f"engine against trainer alone moves {what} by {updated.mismatch:.1e} (root mean square), more than "
        f"{MISMATCH_FRACTION:g} of the clip range {clip.low:g}/{clip.high:g}"
    )


def pack_minibatches(
    trajectories: Sequence[Trajectory], config: Config, *, seed: int, device: torch.device, world: World = ALONE
) -> list[Minibatch]:
    """Deal a rollout batch into minibatches, and pack those of its samples that carry a signal.

    All ranks call it with the same batch; each packs its share of every minibatch, as many tokens as the others'.
    """
    parts = split_minibatches(
        trajectories, num_minibatches=config.training.minibatches, groups=config.training.groups, seed=seed
    )
    kl, budget = loss_kl(config), config.training.micro_batch_tokens
    live = [[t for t in part if kl is not None or np.any(t.advantage)] for part in parts]
    packed = [make_micro_batches(share_by_tokens(some, world, device), token_budget=budget, device=device) for some in live]
    most = world.most([len(micro_batches) for micro_batches in packed])
    return [Minibatch(part, mine, num - len(mine)) for part, mine, num in zip(parts, packed, most, strict=True)]


def chosen_clip(config: Config) -> Clip:
    """The recipe's clip range, the objective's own where the recipe is silent."""
    own, chosen = OBJECTIVES[config.objective.name].clip, config.objective
    return Clip(
        own.low if chosen.clip_low is None else chosen.clip_low,
        own.high if chosen.clip_high is None else chosen.clip_high,
    )


def loss_kl(config: Config) -> KL | None:
    """The KL term inside the loss, if there is one."""
    kl = config.objective.kl
    return KL(kl.coefficient, kl.estimator) if kl is not None and kl.place == "loss" else None


def engine_logprobs(micro: MicroBatch) -> Tensor:
    """The engine's log-probabilities of the trained tokens [T]."""
    return _concatenated([t.engine_logprobs for t in micro.trajectories], micro)


def stale_tokens(micro: MicroBatch) -> Tensor:
    """Which of the trained tokens [T] an earlier policy sampled than the one that the update starts from."""
    stale = [np.zeros(t.num_trained, bool) if t.stale is None else t.stale for t in micro.trajectories]
    return on_device(np.concatenate(stale), micro.token_ids_N.device)


def _accumulate(
    scorer: Passes,
    optimizer: Optimizer,
    part: Minibatch,
    micro: MicroBatch,
    old_T: Tensor | None,
    config: Config,
    out: Updated,
) -> Pass:
    """Forward and backward of one micro-batch; gradients add up.

    A micro-batch whose every sequence is clipped has a gradient of zero, and its backward pass is left out, but for sharded
    weights: there every rank takes part in every pass, and what is clipped is left out by looking ahead alone.
    """
    one = _forward(scorer, part, micro, old_T, config, out, train=True)
    if scorer.policy.shards or bool(one.grad_T.any()):
        optimizer.backward(one.logp_T, one.grad_T)
    return replace(one, logp_T=one.logp_T.detach())  # what is kept holds no activations


def _forward(
    scorer: Passes,
    part: Minibatch,
    micro: MicroBatch,
    old_T: Tensor | None,
    config: Config,
    out: Updated,
    *,
    train: bool,
) -> Pass:
    """Forward pass and loss of one micro-batch; with `train` gradients may flow back. old_T is None in the first minibatch.

    In the first minibatch the forward pass is at the old policy: unless the engine's are wanted, its log-probabilities are
    the old ones.
    """
    algorithm, clip = OBJECTIVES[config.objective.name], chosen_clip(config)
    with torch.set_grad_enabled(train):
        logp_T, entropy_T = scorer.score(micro, at_old=old_T is None)
    leaf_T = logp_T.detach().requires_grad_()  # so that the loss's own gradient is found without a pass through the model
    engine_T = engine_logprobs(micro)
    trainer_T = logp_T.detach() if old_T is None else (old_T if out.recomputed else None)
    if old_T is None:
        old_T = engine_T if config.rollout.old_logprobs == "engine" else logp_T.detach()
    try:
        check_finite("engine's log-probability", engine_T, micro.sequence_T, torch.ones_like(micro.sequence_T).bool())
        batch = _objective_batch(micro, old_T, part)
        corrected = _corrected(batch, trainer_T, engine_T, config)
        result = algorithm.function(leaf_T, corrected[0], clip, loss_kl(config))
    except NonFiniteError as error:
        raise TrainingError(
            f"the {error.what} of sample {micro.trajectories[error.sequence].id} is NaN or infinite: the weights or the "
            "sample are broken; resume from an earlier checkpoint with a smaller learning rate"
        ) from error
    (grad_T,) = torch.autograd.grad(result.loss, leaf_T)
    ids = tuple(t.id for t in micro.trajectories)
    sides = engine_T, trainer_T, stale_tokens(micro)
    ratios = observe(ids, logp_T, entropy_T, *sides, batch, result, clip, algorithm.unit, corrected)
    # The host has waited for the forward pass here, to see that all is finite; later it would wait for the backward pass.
    return Pass(micro, logp_T, grad_T, float(result.loss.detach()), ratios.on_cpu())


def _looks_ahead(world: World, last: Sequence[Ratios], config: Config) -> bool:
    """Whether what is clipped has no gradient at all, and of the last minibatch enough was, on all ranks together."""
    if loss_kl(config) is not None:
        return False
    clipped, total = world.sums(clipped_tokens(last))
    return total > 0 and clipped >= LOOK_AHEAD_FROM * total


def _corrected(batch: Batch, trainer_T: Tensor | None, engine_T: Tensor, config: Config) -> tuple[Batch, Weights | None]:
    """The batch with its advantages weighted, where the recipe wants that; it then wants the trainer's old ones too."""
    correction = config.rollout.correction
    if correction is None:
        return batch, None
    assert trainer_T is not None
    weights = correction_weights(trainer_T, engine_T, batch, correction)
    return weighted(batch, weights), weights


def _old_logprobs(scorer: Passes, later: Sequence[Minibatch], config: Config, out: Updated) -> list[list[Tensor]]:
    """Old log-probabilities of the later minibatches, before any weight moves; by the very micro-batches of the update."""
    policy = scorer.policy
    (first,) = _over_ranks(policy, out.ratios[:1])
    out.mismatch = mismatch_size(first, OBJECTIVES[config.objective.name].unit)
    too_large = out.mismatch is None or not out.mismatch <= out.threshold  # what was not measured may be any size
    # The engine's of a stale token are another policy's: no measure of noise makes the two sides alike.
    out.stale = any(t.stale is not None for part in later for t in part.trajectories)
    wanted = {"engine": False, "trainer": True, "auto": too_large or out.stale}[config.rollout.old_logprobs]
    out.recomputed = wanted and any(part.micro_batches or part.idle for part in later)
    if not out.recomputed:
        return [[engine_logprobs(m) for m in part.micro_batches] for part in later]
    with torch.no_grad():
        old = scorer.old([part.micro_batches for part in later])
        scorer.idle(sum(part.idle for part in later))
    return old


def _settled(policy: Policy, optimizer: Optimizer, part: Minibatch, skips: Skips) -> float:
    """The gradient norm of a minibatch's step, which is counted as taken or as left out."""
    norm = optimizer.settle()
    if math.isfinite(norm):
        policy.version += 1
        skips.in_a_row = 0
        return norm
    skips.total += 1
    if optimizer.lowered:
        return norm
    skips.in_a_row += 1
    if skips.in_a_row >= MAX_SKIPPED:
        optimizer.zero_grad()  # there may be those of the next minibatch
        ids = [t.id for m in part.micro_batches for t in m.trajectories]
        raise TrainingError(
            f"the gradient was NaN or infinite in {skips.in_a_row} updates in a row; samples of the last: {', '.join(ids)}"
        )
    return norm


def _objective_batch(micro: MicroBatch, old_T: Tensor, part: Minibatch) -> Batch:
    advantages = [t.advantage for t in micro.trajectories]
    by_token = any(isinstance(a, np.ndarray) for a in advantages)
    if by_token:
        spread = [np.broadcast_to(np.float32(t.advantage), t.num_trained) for t in micro.trajectories]
        advantage = _concatenated(spread, micro)
    else:
        advantage = on_device(np.array(advantages, np.float32), micro.token_ids_N.device)
    references = [t.reference_logprobs for t in micro.trajectories if t.reference_logprobs is not None]
    return pack(
        old_T,
        micro.sequence_T,
        advantage,
        by_token=by_token,
        reference_logp_T=_concatenated(references, micro) if references else None,
        global_sequences=len(part.trajectories),
        global_tokens=sum(t.num_trained for t in part.trajectories),
    )


def _concatenated(arrays: Sequence[np.ndarray], micro: MicroBatch) -> Tensor:
    return on_device(np.concatenate(arrays).astype(np.float32), micro.token_ids_N.device)
