"""Routers of a transformers model, found by their interface, not by the model's name: what they chose, and made to choose.

N tokens of a forward pass, L layers with experts, E experts, K of them to each token (top-k).

A router is a module of a decoder layer whose forward returns three tensors: logits [N, E], the weights of the chosen
experts [N, K] and their ids [N, K], of an integer type. So do transformers' models since 5.17: Qwen2- and Qwen3-MoE,
Mixtral, OLMoE, DeepSeek V2 and V3, GLM-4-MoE, MiniMax M2, ERNIE 4.5, GPT-OSS. Not covered are models that choose inside
a block (DBRX), and routers that return the three in another order (Granite up to 5.19): for them no router is found.

Ids are replayed, weights come from the live logits in the router's own way, so that it keeps its gradient. The way is
not looked up either: of the three that exist (WAYS), with the chosen weights summing to 1 or not, times the router's
scaling factor, it is the one that gives the router's own weights for its own choice. Where none does, the router can be
watched, and replay is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda logits_NE, ids_NK: logits_NE.float().softmax(-1).gather(1, ids_NK),
    "softmax of the chosen": lambda logits_NE, ids_NK: logits_NE.gather(1, ids_NK).softmax(-1),
    "sigmoid": lambda logits_NE, ids_NK: logits_NE.float().sigmoid().gather(1, ids_NK),
}
"""From logits [N, E] and ids [N, K] to weights [N, K], before they are normalised and scaled."""

SPREAD = 3.0
"""Standard deviation of the logits with which the ways are told apart: near zero, softmax and sigmoid look alike."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """How a router makes weights of logits, once its choice is made."""

    way: str
    """A key of WAYS."""
    normalised: bool
    """Whether weights are divided by their sum over the chosen."""
    factor: float
    """What they are multiplied by."""

    def __call__(self, logits_NE: Tensor, ids_NK: Tensor) -> Tensor:
        weight_NK = WAYS[self.way](logits_NE, ids_NK)
        if self.normalised:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        return weight_NK if self.factor == 1 else weight_NK * self.factor


class Routing:
    """The routers of one model, each watched in every forward pass from now on."""

    def __init__(self, routers: Sequence[nn.Module], layers: Sequence[int], weighings: Sequence[Weighing | None]) -> None:
        self.routers: list[Any] = list(routers)
        self.layers = tuple(layers)
        """Numbers of the decoder layers that they belong to, [L]."""
        self.num_experts, self.top_k = 0, 0
        self.replayable = None not in weighings
        """Whether the weights of all routers can be recomputed for given ids."""
        for router, weighing in zip(self.routers, weighings, strict=True):
            router.replayed_NK = router.chosen_NK = router.own_NK = router.logits_NE = None
            router.forward = MethodType(_watched(type(router).forward, weighing), router)

    @property
    def dtype(self) -> type[np.integer]:
        """The smallest type of expert ids: uint8, or int16 beyond 256 experts (of uint16 torch can do little)."""
        return np.uint8 if self.num_experts <= 256 else np.int16

    def replay(self, ids_NLK: Tensor | None) -> None:
        """From now on every router chooses these experts, None: its own.

        They stay until the next call, so that layers that are computed anew in a backward pass choose as they did.
        """
        for i, router in enumerate(self.routers):
            router.replayed_NK = None if ids_NLK is None else ids_NLK[:, i].long()

    def chosen(self) -> Tensor:
        """Which experts computed the tokens of the last forward pass, [N, L, K]."""
        return self._stacked([router.chosen_NK for router in self.routers])

    def own(self) -> Tensor:
        """Which experts the routers chose in it of themselves, [N, L, K]: the same where nothing was replayed."""
        return self._stacked([router.own_NK for router in self.routers])

    def _stacked(self, ids: Sequence[Tensor]) -> Tensor:
        dtype = getattr(torch, self.dtype.__name__)
        return torch.stack([ids_NK.to(dtype) for ids_NK in ids], 1)

    def take_logits(self) -> list[Tensor]:
        """By layer the logits of the last forward pass, [N, E], detached; they are let go of."""
        out = [router.logits_NE for router in self.routers]
        for router in self.routers:
            router.logits_NE = None
        return out


@functools.cache
def _watched(forward: Callable[..., Any], weighing: Weighing | None) -> Callable[..., Any]:
    """One method for all routers of a kind: compiled layers around them then share their code."""

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        logits_NE, weight_NK, self.own_NK = forward(self, *args, **kwargs)
        ids_NK = self.own_NK
        if self.replayed_NK is not None and weighing is not None:
            ids_NK = self.replayed_NK
            weight_NK = weighing(logits_NE, ids_NK).to(weight_NK.dtype)
        self.chosen_NK, self.logits_NE = ids_NK, logits_NE.detach()
        return logits_NE, weight_NK, ids_NK

    return watched


def find_routing(layers: Sequence[nn.Module], forward: Callable[[], Any]) -> Routing | None:
    """Watch the routers in these decoder layers; None where there are none. forward: runs the model on a few tokens.

    To be called before layers are compiled or sharded.
    """
    seen: dict[nn.Module, tuple[Any, ...]] = {}
    place = {module: i for i, layer in enumerate(layers) for module in layer.modules()}

    def look(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if _is_choice(out):
            seen[module] = args, kwargs, out

    hooks = [module.register_forward_hook(look, with_kwargs=True) for module in place]
    try:
        with torch.no_grad():
            forward()
            weighings = [_weighing(router, *found) for router, found in seen.items()]
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        return None
    routing = Routing(list(seen), [place[router] for router in seen], weighings)
    logits_NE, _, ids_NK = next(iter(seen.values()))[2]
    routing.num_experts, routing.top_k = logits_NE.shape[1], ids_NK.shape[1]
    return routing


def _is_choice(out: Any) -> bool:
    """Whether a module's output is logits [N, E], weights [N, K] and ids [N, K]."""
    if not (isinstance(out, tuple) and len(out) == 3 and all(isinstance(x, Tensor) and x.ndim == 2 for x in out)):
        return False
    logits, weights, ids = out
    kinds = logits.is_floating_point(), weights.is_floating_point(), ids.is_floating_point()
    return kinds == (True, True, False) and len(logits) == len(ids) and weights.shape == ids.shape


def _weighing(router: Any, args: Any, kwargs: Any, out: Any) -> Weighing | None:
    """What turns the router's logits into its weights, by trial on the tokens that it has seen, magnified."""
    hidden, *rest = args
    logits_NE, weight_NK, ids_NK = type(router).forward(router, hidden * (SPREAD / out[0].float().std()), *rest, **kwargs)
    factor = float(getattr(router, "routed_scaling_factor", 1.0))
    errors = {}
    for weighing in (Weighing(way, normalised, factor) for way in WAYS for normalised in (False, True)):
        mine_NK = weighing(logits_NE, ids_NK).to(weight_NK.dtype)
        errors[weighing] = float((mine_NK.float() / weight_NK.float() - 1).abs().max())
    best = min(errors, key=lambda weighing: errors[weighing])
    return best if errors[best] <= 8 * max(torch.finfo(x.dtype).eps for x in (weight_NK, logits_NE)) else None
