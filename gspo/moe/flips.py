"""How a mixture of experts chooses: flips between two choices, load, dead experts, the auxiliary loss. Measurement alone.

N tokens, L layers with experts, E experts, K of them to each token. A flip is an expert that one side chose for a token in
a layer and the other did not; their order means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..types import Metrics


@dataclass(slots=True)
class RoutingCounts:
    """What was counted in the passes of a minibatch; float64, so that counts of ranks and minibatches add up exactly."""

    load_LE: Tensor
    """How often each expert was chosen."""
    top_E: Tensor
    """How often each expert was among the K largest logits, over layers."""
    probability_E: Tensor
    """Sum of the router's softmax, over tokens and layers."""
    flips_L: Tensor
    """Choices of the old policy that were not made again."""
    engine_flips_L: Tensor
    """Choices of the engine that the old policy did not make."""
    totals: Tensor
    """[4]: tokens that passed; those compared with the old policy; of these, with any flip; those compared with the
    engine."""

    @staticmethod
    def zeros(num_layers: int, num_experts: int, device: torch.device | str = "cpu") -> RoutingCounts:
        """Nothing counted yet."""
        sizes = (num_layers, num_experts), num_experts, num_experts, num_layers, num_layers, 4
        return RoutingCounts(*(torch.zeros(size, dtype=torch.float64, device=device) for size in sizes))

    def add_pass(self, chosen_NLK: Tensor, logits: Sequence[Tensor]) -> None:
        """Count the choices of a pass. logits: [N, E] of each layer, or none where no auxiliary loss is wanted."""
        index_LN = chosen_NLK.permute(1, 0, 2).flatten(1).long()
        self.load_LE.scatter_add_(1, index_LN, torch.ones_like(index_LN, dtype=torch.float64))
        self.totals[0] += len(chosen_NLK)
        for logits_NE in logits:
            top = logits_NE.topk(chosen_NLK.shape[-1], -1).indices.flatten()
            self.top_E.scatter_add_(0, top, torch.ones_like(top, dtype=torch.float64))
            self.probability_E += logits_NE.float().softmax(-1).sum(0)

    def add_old(self, old_NLK: Tensor, chosen_NLK: Tensor) -> None:
        """Compare the old policy's choices with those of a pass."""
        flipped_NL = flips(old_NLK, chosen_NLK)
        self.flips_L += flipped_NL.sum(0)
        self.totals[1] += len(flipped_NL)
        self.totals[2] += (flipped_NL > 0).any(-1).sum()

    def add_engine(self, engine_NLK: Tensor, chosen_NLK: Tensor) -> None:
        """Compare the engine's choices with those of a pass at the old policy."""
        self.engine_flips_L += flips(engine_NLK, chosen_NLK).sum(0)
        self.totals[3] += len(chosen_NLK)

    def numbers(self) -> list[float]:
        """All counts in one list, to be added up over ranks."""
        return torch.cat([getattr(self, f.name).flatten() for f in fields(self)]).tolist()

    def with_numbers(self, numbers: Sequence[float]) -> RoutingCounts:
        """Counts of the same shapes with the values of such a list."""
        parts = [getattr(self, f.name) for f in fields(self)]
        flat = torch.tensor(numbers, dtype=torch.float64).split([part.numel() for part in parts])
        return RoutingCounts(*(x.view(part.shape) for x, part in zip(flat, parts, strict=True)))


def flips(old_NLK: Tensor, new_NLK: Tensor) -> Tensor:
    """Of each token and layer, how many of the old experts are not among the new: int64 [N, L]."""
    parts = zip(old_NLK.unbind(1), new_NLK.unbind(1), strict=True)  # by layer: K x K comparisons of all would be large
    return torch.stack([(old[:, :, None] != new[:, None, :]).all(-1).sum(-1) for old, new in parts], 1)


def routing_metrics(
    minibatches: Sequence[RoutingCounts], after: Sequence[RoutingCounts], *, top_k: int, auxiliary: bool, engine: bool
) -> Metrics:
    """`moe/` of one rollout batch, but for the cost of replay. Null where there was nothing to count or compare.

    after: of a pass after each minibatch's update, empty where there was none; auxiliary: whether the model has a router
    loss; engine: whether the engine returned what it chose.
    """
    last = minibatches[-1]
    load_LE = sum((counts.load_LE for counts in minibatches), torch.zeros_like(last.load_LE))
    passed = sum(float(counts.totals[0]) for counts in minibatches)
    out: Metrics = {
        "moe/flips_by_minibatch": [_share(c.flips_L.mean(), float(c.totals[1]) * top_k) for c in minibatches],
        "moe/flips_by_layer": _shares(last.flips_L, float(last.totals[1]) * top_k),
        "moe/tokens_flipped": _share(last.totals[2], float(last.totals[1])),
        "moe/flips_after_by_minibatch": [_share(c.flips_L.mean(), float(c.totals[1]) * top_k) for c in after],
        "moe/flips_after_by_minibatch_and_layer": [_shares(c.flips_L, float(c.totals[1]) * top_k, 6) for c in after],
        "moe/flips_after_by_layer": _shares(after[-1].flips_L, float(after[-1].totals[1]) * top_k),
        "moe/tokens_flipped_after_by_minibatch": [_share(c.totals[2], float(c.totals[1])) for c in after],
        "moe/tokens_flipped_after": _share(after[-1].totals[2], float(after[-1].totals[1])),
        "moe/load_by_layer": (load_LE.amax(1) / load_LE.mean(1)).tolist() if passed else None,
        "moe/dead_experts_by_layer": (load_LE == 0).sum(1).tolist() if passed else None,
    }
    if auxiliary:
        out["moe/auxiliary_loss"] = auxiliary_loss(minibatches)
    if engine:
        compared = sum(float(counts.totals[3]) for counts in minibatches) * top_k
        flips_L = sum((counts.engine_flips_L for counts in minibatches), torch.zeros_like(last.flips_L))
        out["moe/engine_flips"] = _share(flips_L.mean(), compared)
        out["moe/engine_flips_by_layer"] = _shares(flips_L, compared)
    return out


def auxiliary_loss(minibatches: Sequence[RoutingCounts]) -> float | None:
    """E times the sum over experts of (share of tokens that rank it among their K) x (its mean probability): transformers'
    formula over all layers (Fedus et al., arXiv:2101.03961, 4-6), over all tokens that passed, without its coefficient.

    K where the load is even. By logits, also where other experts are replayed.
    """
    rows = sum(float(counts.totals[0]) for counts in minibatches) * len(minibatches[0].flips_L)
    if not rows:
        return None
    top_E, probability_E = (
        torch.stack([getattr(c, name) for c in minibatches]).sum(0) / rows for name in ("top_E", "probability_E")
    )
    return len(top_E) * float((top_E * probability_E).sum())


def _share(count: Tensor, of: float) -> float | None:
    return float(count) / of if of else None


def _shares(count_L: Tensor, of: float, decimals: int | None = None) -> list[float] | None:
    """decimals: where there is a list for each minibatch, so that records stay small; None: all."""
    if not of:
        return None
    return (count_L / of if decimals is None else (count_L / of).round(decimals=decimals)).tolist()
