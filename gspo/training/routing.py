"""The passes of one update over a mixture of experts: what the routers chose is written down, compared and replayed.

N packed tokens of a micro-batch, L layers with experts, K experts to each token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ..config import Config
from ..moe import Record, RecordError, Routing, RoutingCounts, checked_rows, packed_ids, routing_metrics
from ..types import Metrics, Trajectory
from .packing import MicroBatch, TrainingError, make_micro_batches, on_device
from .policy import Policy
from .pretrained import ModelError
from .sharding import Backward

PROBE_TOKENS, PROBE_PART = 1024, 4
"""Of the samples in which routers are looked at after each minibatch: their tokens, beyond which one more is left out, and
which part of the first minibatch they are at most. A pass of all of it would add a third to an update of few tokens."""


class Passes:
    """Scores micro-batches. For a model without routers that is all."""

    def __init__(self, policy: Policy, config: Config, first: Sequence[Trajectory]) -> None:
        """first: the samples of the first minibatch. Raises TrainingError, by sample, where an engine's record cannot be of
        its sample."""
        self.policy = policy
        self._watcher = None if policy.routing is None else _Watcher(policy.routing, policy, config, first)

    def score(self, micro: MicroBatch, *, at_old: bool, seen: bool = False) -> tuple[Tensor, Tensor]:
        """Policy.score, with the experts that the recipe wants replayed.

        at_old: no weight has moved yet. seen: the same samples were counted before.
        """
        if self._watcher is None:
            return self.policy.score(micro)
        return self._watcher.score(micro, at_old=at_old, seen=seen)

    def old(self, micro_batches: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor]]:
        """Log-probabilities of minibatches to come, before any weight moves; what the routers chose is kept."""
        if self._watcher is None:
            return [[self.policy.score(m)[0] for m in some] for some in micro_batches]
        return self._watcher.old(micro_batches)

    def idle(self, passes: int, backward: Backward | None = None) -> None:
        """Shards.idle, where weights are sharded, with routers that choose for themselves: nothing is replayed any more."""
        if self._watcher is not None:
            self._watcher.routing.replay(None)
        if self.policy.shards is not None:
            self.policy.shards.idle(passes, backward)

    def end(self) -> None:
        """The passes of a minibatch are over, forward and backward: routers choose for themselves again."""
        if self._watcher is not None:
            self._watcher.end()

    def after(self, *, looking: bool) -> None:
        """After the update of a minibatch: what all until now have changed, by one more pass, of a few samples of the first
        one. A collective, of ranks with such samples and of those without. looking: False where it is told otherwise."""
        if self._watcher is None:
            return
        self._watcher.counts_after.append(self._watcher.nothing())
        if looking and self.policy.world.most([int(self._watcher.probe is not None)]) == [1]:
            with torch.no_grad():
                if self._watcher.probe is None:
                    self.idle(1)
                else:
                    self._watcher.after(self._watcher.probe)

    def metrics(self) -> Metrics:
        """`moe/`, of all ranks together; empty for a model without routers. A collective."""
        return {} if self._watcher is None else self._watcher.metrics()


class _Watcher:
    """What `Passes` does for a model with routers."""

    def __init__(self, routing: Routing, policy: Policy, config: Config, first: Sequence[Trajectory]) -> None:
        self.routing, self.policy = routing, policy
        self.replay, self.by_engine = config.training.replay, config.rollout.routed_experts
        self.auxiliary = getattr(policy.model.config, "router_aux_loss_coef", None) is not None
        self.old_records: dict[str, Record] = {}
        self.engine_records: dict[str, Record] = {}
        self.minibatches: list[RoutingCounts] = []
        self.counts, self.counts_after = self.nothing(), list[RoutingCounts]()
        self.probe = probe(first, policy.device)
        self.before: dict[str, Tensor] = {}
        self.seconds, self.bytes = 0.0, 0

    def score(self, micro: MicroBatch, *, at_old: bool, seen: bool) -> tuple[Tensor, Tensor]:
        with self._timed():
            old_NLK = None if at_old else self._ids(micro, self.old_records)
            engine_NLK = self._ids(micro, self._of_engine(micro)) if self.by_engine else None
            replayed_NLK = {"none": None, "trainer": old_NLK, "engine": engine_NLK}[self.replay]
            assert replayed_NLK is not None or self.replay == "none" or (self.replay == "trainer" and at_old)
            self.routing.replay(replayed_NLK)
        out = self.policy.score(micro)
        with self._timed():
            chosen_NLK, own_NLK, logits = self.routing.chosen(), self.routing.own(), self.routing.take_logits()
        if not seen:
            self.counts.add_pass(chosen_NLK, logits if self.auxiliary else ())
            if at_old and engine_NLK is not None:
                self.counts.add_engine(engine_NLK, own_NLK)
            if at_old and self.probe is not None:
                self.before |= _by_sample(micro, own_NLK, self.probe.trajectories)
            if (before_NLK := chosen_NLK if at_old else old_NLK if old_NLK is not None else engine_NLK) is not None:
                self.counts.add_old(before_NLK, chosen_NLK)
            if old_NLK is not None and self.replay != "engine":  # else the engine's: no choice that the policy has left
                self.counts_after[-1].add_old(old_NLK, own_NLK)
        return out

    def after(self, micro: MicroBatch) -> None:
        # As in the passes before: what the engine chose upstream, where that is replayed, is no change of the policy.
        self.routing.replay(self._ids(micro, self._of_engine(micro)) if self.replay == "engine" else None)
        self.policy.score(micro)
        self.routing.replay(None)
        for name, own_PLK in _by_sample(micro, self.routing.own(), micro.trajectories).items():
            self.counts_after[-1].add_old(self.before[name], own_PLK)
        self.routing.take_logits()

    def old(self, micro_batches: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor]]:
        out, kept = [], []
        for some in micro_batches:
            out.append([])
            for micro in some:
                out[-1].append(self.score(micro, at_old=True, seen=False)[0])
                kept.append((micro, self.routing.chosen()))
        first, mine = self.minibatches[-1], self.counts  # of these passes the engine's flips alone count
        first.engine_flips_L += mine.engine_flips_L
        first.totals[3] += mine.totals[3]
        self.counts = self.nothing()
        self.routing.replay(None)
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize()  # what follows waits for the passes anyway, and is timed
        with self._timed():
            for micro, chosen_NLK in kept:
                ids_NLK = chosen_NLK.cpu().numpy()
                self.bytes += ids_NLK.nbytes
                for t, place_P in zip(micro.trajectories, micro.places, strict=True):
                    self.old_records[t.id] = Record(ids_NLK, place_P)
        return out

    def end(self) -> None:
        self.routing.replay(None)
        self.minibatches.append(self.counts)
        self.counts = self.nothing()

    def metrics(self) -> Metrics:
        world = self.policy.world
        both = self.minibatches, self.counts_after
        sums, after = ([part.with_numbers(world.sums(part.numbers())) for part in parts] for parts in both)
        num_bytes, seconds = world.sums([self.bytes, self.seconds])
        return {
            **routing_metrics(sums, after, top_k=self.routing.top_k, auxiliary=self.auxiliary, engine=self.by_engine),
            "moe/replay_bytes": int(num_bytes),
            "moe/replay_s": seconds / world.size,
        }

    def nothing(self) -> RoutingCounts:
        return RoutingCounts.zeros(len(self.routing.layers), self.routing.num_experts, self.policy.device)

    def _ids(self, micro: MicroBatch, records: dict[str, Record]) -> Tensor | None:
        """Ids of a micro-batch [N, L, K], or None where its samples have no record."""
        if micro.trajectories[0].id not in records:
            return None
        ids_NLK = packed_ids([records[t.id] for t in micro.trajectories], micro.places, micro.num_tokens)
        return on_device(ids_NLK, self.policy.device)

    def _of_engine(self, micro: MicroBatch) -> dict[str, Record]:
        for t in micro.trajectories:
            if t.id not in self.engine_records:
                rows = self._rows(t)
                self.bytes += rows.nbytes
                self.engine_records[t.id] = Record(rows, np.arange(len(rows)))
        return self.engine_records

    def _rows(self, t: Trajectory) -> np.ndarray:
        if t.routed_experts is None:
            raise TrainingError(f"sample {t.id}: the engine did not return its routed experts (rollout.routed_experts)")
        shape = len(self.routing.layers), self.routing.top_k
        try:
            return checked_rows(t.id, t.routed_experts, len(t.token_ids), shape, self.routing.num_experts)
        except RecordError as error:
            raise TrainingError(str(error)) from error

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Seconds of the host; what a GPU still does after them is not in it."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


def probe(samples: Sequence[Trajectory], device: torch.device) -> MicroBatch | None:
    """A few of these samples, packed, at least one; None where there are none."""
    chosen, room = list[Trajectory](), PROBE_TOKENS
    for i in np.random.default_rng(0).permutation(len(samples))[: -(-len(samples) // PROBE_PART)]:
        room -= len(samples[i].token_ids)
        if room < 0 and chosen:
            break
        chosen.append(samples[i])
    total = sum(len(t.token_ids) for t in chosen)
    return make_micro_batches(chosen, token_budget=total, device=device)[0] if chosen else None


def _by_sample(micro: MicroBatch, ids_NLK: Tensor, wanted: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Of those wanted that it holds, ids of a sample's tokens but the last, [P, L, K], a shared prompt in each."""
    names, places = {t.id for t in wanted}, zip(micro.trajectories, micro.places, strict=True)
    return {t.id: ids_NLK[on_device(place_P, ids_NLK.device)] for t, place_P in places if t.id in names}


def require_routing(policy: Policy, config: Config) -> None:
    """Raises ModelError where the recipe wants expert choices of a model whose routers do not allow it."""
    routing, replay, name = policy.routing, config.training.replay, type(policy.model).__name__
    if routing is None and (replay != "none" or config.rollout.routed_experts):
        setting = f'training.replay = "{replay}"' if replay != "none" else "rollout.routed_experts = true"
        raise ModelError(
            f"{setting}: no module of {name} returns what a router of experts does (logits, weights, ids): choose a "
            "mixture of experts whose routers do, or leave the setting out"
        )
    if routing is not None and replay != "none" and not routing.replayable:
        raise ModelError(
            f'training.replay = "{replay}": the routers of {name} make their weights in a way that is not known here, so '
            'they cannot be recomputed for given experts: use training.replay = "none"'
        )
