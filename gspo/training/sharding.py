"""A policy's weights dealt over ranks by FSDP2 (torch's fully_shard), each rank holding a part of every tensor.

The parts are the float32 master weights. A layer's weights are gathered in the model's precision when it computes, forward
and again backward; its gradients are then added up over ranks in float32, as sums: losses are divided by counts over all
ranks before. The embeddings, the last norm and the output matrix make one group, which stays gathered from forward to
backward, so that log-probabilities may read the matrix outside of any layer's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..distributed import World
from ..types import Trajectory
from .packing import Family, MicroBatch, families, make_micro_batches, num_tokens

UNEVEN = 1.1
"""Tokens of a rank over the mean, from which samples that share a prompt are dealt one by one: the others would wait for it
longer than a prompt computed twice takes, at a tenth of the tokens or less."""

GROUP_BYTES = 2**28
"""Weights of consecutive layers that are gathered together, at least. Each gathering costs the host's processor
milliseconds, in which a GPU has computed a small layer; by NVLink this much arrives in one."""

Score = Callable[[MicroBatch, float | None], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor], None]
"""Of log-probabilities, with the gradient of the loss with respect to them."""


class Shards:
    """The sharded weights of one policy. Every method is a collective: all ranks call it, in the same order."""

    def __init__(self, model: Any, score: Score, world: World, device: torch.device) -> None:
        """Deal the weights of a model that is the same on all ranks, and lies whole on each.

        score: the pass over a micro-batch that trains, without sharding. Raises ValueError where the model keeps its
        layers elsewhere than transformers' decoders do.
        """
        layers = getattr(model.get_decoder(), "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ValueError(f"{type(model).__name__} has no list of layers to shard: train it in one process")
        self.world, self.dtype = world, model.get_output_embeddings().weight.dtype
        self.root: Any = _Root(model, score)
        self.nothing = _nothing(device)
        self._whole = False
        mesh = init_device_mesh(device.type, (world.size,))
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        groups = [*_groups(layers), [self.root]]
        for group in groups:
            for p in [p for module in group for p in module.parameters()]:
                if not isinstance(p, DTensor):
                    p.data = p.data.float()  # exact; from here on the master weights
            fully_shard(group, mesh=mesh, mp_policy=policy)
        self._modules: list[Any] = [group[0] for group in groups]  # each speaks for its group
        for module in self._modules:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        with torch.no_grad():
            self(self.nothing, None)  # the first pass tells torch which module is the root

    def __call__(self, batch: MicroBatch, temperature: float | None) -> tuple[Tensor, Tensor]:
        """Policy.score, with weights gathered layer by layer. Every rank makes as many passes as the others."""
        out = self.root(batch, temperature)
        if not torch.is_grad_enabled() and not self._whole:
            self.root.reshard()  # only a backward pass does it by itself; an update would leave what is gathered stale
        return out

    def idle(self, passes: int, backward: Backward | None = None) -> None:
        """Take part in passes that others make for samples of theirs: a few tokens, and gradients that are zero."""
        for _ in range(passes):
            logp_T, _ = self(self.nothing, None)
            if backward is not None:
                backward(logp_T, torch.zeros_like(logp_T))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every weight gathered on every rank, for work without gradients that ranks do apart: sampling, scoring.

        Entering is a collective; passes inside are not. Takes the memory of a whole model in its precision.
        """
        if self._whole:
            yield
            return
        self._whole = True
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            self._whole = False
            for module in self._modules:  # a pass that a signal broke off left its layers thinking that they are in it
                module.set_reshard_after_forward(True, recurse=False)
                module.reshard()
            self.root.set_reshard_after_forward(False, recurse=False)


def _groups(layers: nn.ModuleList) -> list[list[Any]]:
    """Consecutive layers, of GROUP_BYTES or more together but for the last."""
    groups, room = [], 0
    for layer in layers:
        if room <= 0:
            groups.append([])
            room = GROUP_BYTES
        groups[-1].append(layer)
        room -= sum(p.numel() * p.element_size() for p in layer.parameters())
    return groups


class _Root(nn.Module):
    """The module whose forward is the whole pass, so that FSDP's hooks surround also what reads the output matrix."""

    def __init__(self, model: nn.Module, score: Score) -> None:
        super().__init__()
        self.model = model
        self._score = score

    def forward(self, batch: MicroBatch, temperature: float | None) -> tuple[Tensor, Tensor]:
        logp_T, entropy_T = self._score(batch, temperature)
        return logp_T.clone(), entropy_T  # FSDP hangs its hook on the output, which must be no view of another tensor


def full(tensor: Tensor) -> Tensor:
    """A tensor put together from the parts of all ranks; one that is not sharded as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, dealt and placed as another one is."""
    there = tensor.to(other.device)
    if not isinstance(other, DTensor):
        return there
    return distribute_tensor(there, other.device_mesh, other.placements, src_data_rank=None)


def part(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank, and of its gradient, as a plain tensor in the same memory; an unsharded one as it
    is."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole: Any = tensor.detach()
    mine = whole.to_local()
    if tensor.grad is not None:
        mine.grad = part(tensor.grad)
    return mine


def dealt(mine: Tensor, other: Tensor) -> Tensor:
    """The sharded tensor, shaped and placed as another one is, of which this rank's part is `mine`."""
    if not isinstance(other, DTensor):
        return mine
    where = {"device_mesh": other.device_mesh, "placements": other.placements, "run_check": False}
    return DTensor.from_local(mine, **where, shape=other.shape, stride=other.stride())


def added_up(norm: Tensor, other: Tensor) -> Tensor:
    """The norm of a vector dealt over the ranks that `other` is dealt over, out of the norms of the ranks' parts."""
    if not isinstance(other, DTensor):
        return norm
    square = norm.double().square()
    dist.all_reduce(square, group=other.device_mesh.get_group())
    return square.sqrt().to(norm.dtype)


def largest(x: Tensor, other: Tensor) -> None:
    """Make `x` the largest that a rank has, of the ranks that `other` is dealt over."""
    if isinstance(other, DTensor):
        dist.all_reduce(x, dist.ReduceOp.MAX, group=other.device_mesh.get_group())


def gathered(named: Iterable[tuple[str, Tensor]], world: World) -> dict[str, Tensor]:
    """Named tensors put together one at a time, in the memory of the first rank's host; elsewhere nothing is kept."""
    out = {}
    for name, tensor in named:
        one = full(tensor.detach())
        if world.is_main:
            out[name] = one.cpu().contiguous()
    return out


def share_by_tokens(
    trajectories: Iterable[Trajectory], world: World, device: torch.device | str = "cpu"
) -> list[Trajectory]:
    """This rank's part of what all ranks have: longest first, each to the rank with the fewest tokens so far.

    Samples that share a prompt stay together where packing leaves it out, unless one rank would then have UNEVEN times the
    mean or more; parts otherwise differ by at most the longest sample. Every rank finds the same division without asking.
    """
    together = families(sorted(trajectories, key=lambda t: -len(t.token_ids)), device)
    shares = _dealt(together, world.size)
    loads = [sum(map(num_tokens, share)) for share in shares]
    if max(loads) * world.size > UNEVEN * sum(loads):
        shares = _dealt([[t] for family in together for t in family], world.size)
    return [t for family in shares[world.rank] for t in family]


def _dealt(some: Sequence[Family], size: int) -> list[list[Family]]:
    """Families by rank, the largest first."""
    shares: list[list[Family]] = [[] for _ in range(size)]
    loads = [0] * size
    for family in sorted(some, key=num_tokens, reverse=True):
        rank = loads.index(min(loads))
        loads[rank] += num_tokens(family)
        shares[rank].append(family)
    return shares


def _nothing(device: torch.device) -> MicroBatch:
    """A micro-batch of token 0 thrice. One computed token less, and compiled layers would be compiled once more for it."""
    tokens, trained = np.zeros(3, np.int64), np.array([False, True, True])
    one = Trajectory("nothing", "nothing", tokens, trained, np.zeros(2, np.float32), 0.0)
    return make_micro_batches([one], token_budget=3, device=device)[0]
