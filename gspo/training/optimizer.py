"""AdamW over float32 master weights, with a learning rate that is a pure function of the update's number."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..config import OptimizerConfig
from ..types import Metrics
from .sharding import added_up, dealt, largest, like, part

INITIAL_SCALE = 2.0**16
"""Loss scale that float16 starts with, torch's own: a gradient's entry overflows from a size of 1 up, and the whole is
clipped to about that anyway; entries down to 1e-9 keep all their bits. A start too high costs an update left out for each
halving."""

CLIP_EPSILON = 1e-6
"""Added to a norm that gradients are divided by, as torch.nn.utils.clip_grad_norm_ does."""

LOWEST_SCALE = 1.0
"""Overflows do not lower the loss scale below: a gradient that float16 cannot hold as it is, is no matter of scale."""

SCALER_STATE = {"loss_scale": "scale", "steps_without_overflow": "_growth_tracker"}
"""Names in `Optimizer.state` of what GradScaler remembers, and its own."""


def learning_rate(config: OptimizerConfig, update: int, total: int) -> float:
    """The rate of update number `update` (from 0) of `total`: linear warm-up, then constant, or falling to 0."""
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / config.warmup_updates
    if config.schedule == "constant":
        return config.learning_rate
    done = (update - config.warmup_updates) / max(1, total - config.warmup_updates)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * max(0.0, left)


EIGHT_BIT_PARTS = ("codes", "scale")
"""What an 8-bit moment is made of: a code a value, a scale a block of 256."""


def _adamw(masters: Sequence[Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over these tensors; only matrices decay."""
    groups = [
        {"params": [m for m in masters if m.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
    ]
    betas, epsilon = (config.beta1, config.beta2), config.epsilon
    if config.moments == "float32":
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=epsilon, fused=True)
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it tells which of its kernels do not load, of which none is used
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
    return AdamW8bit([g for g in groups if g["params"]], lr=config.learning_rate, betas=betas, eps=epsilon)


class Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) on a policy's trainable parameters.

    Parameters in bfloat16 get a float32 master copy; their gradients are added up in float32 over micro-batches, the
    step moves the master, and the parameter is its rounding. Float32 parameters are their own master. Float16 is as
    bfloat16, and its loss is scaled (Micikevicius et al., arXiv:1710.03740, 3.2) by torch's GradScaler, so that small
    gradients are not rounded to zero; an overflow leaves the step out and halves the scale.

    Sharded parameters are float32 whatever the precision of the passes, and their own masters; each rank then moves its
    part of them, by a norm that is that of the whole. The parts are worked on as the plain tensors that they are: as
    DTensors a step would cost the host's processor several times as much, with the GPU waiting.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        total_updates: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """dtype: of forward and backward passes, where it is not that of the parameters."""
        if not parameters:
            raise ValueError("the model has no trainable parameters")
        self.config, self.total_updates, self.updates = config, total_updates, 0
        self.parameters = dict(parameters)
        self.masters: dict[str, Tensor] = {}
        self.parts: dict[str, Tensor] = {}
        """What of each master lies here: all of it, but for sharded ones. They share their memory."""
        for name, p in self.parameters.items():
            wide = p.dtype in (torch.float32, torch.float64)
            self.masters[name] = p if wide else p.detach().float()
            if not wide:
                p.register_post_accumulate_grad_hook(_add_into(self.masters[name]))
            self.masters[name].grad = torch.zeros_like(self.masters[name])
            self.parts[name] = part(self.masters[name])
        self.adamw = _adamw(list(self.parts.values()), config)
        some = next(iter(self.parameters.values()))
        self.dtype = dtype or some.dtype
        half = any(torch.float16 in (p.dtype, dtype) for p in self.parameters.values())
        self.scaler = torch.amp.GradScaler(some.device.type, init_scale=INITIAL_SCALE, enabled=half)
        self.scaler.scale(torch.zeros((), device=some.device))  # it makes its state here; a step may come without a loss
        self.lowered = False
        """Whether the last step was left out for an overflow that lowered the loss scale; float16 only."""
        self._norm = math.nan
        self._told: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        """Of the last step, on their way to the host: its norm and whether it lowered the loss scale; and their arrival."""

    @property
    def learning_rate(self) -> float:
        """The rate of the next update; of the last one until that has been settled."""
        return learning_rate(self.config, self.updates, self.total_updates)

    @property
    def gradients(self) -> list[Tensor]:
        """What of each master's gradient lies here."""
        return [x.grad for x in self.parts.values() if x.grad is not None]

    def zero_grad(self) -> None:
        """Zero, not None: a minibatch without a signal then still moves by its momentum, as one with zero gradients."""
        torch._foreach_zero_(self.gradients)

    def backward(self, out: Tensor, grad: Tensor | None = None) -> None:
        """Add the gradients of a loss to those so far, times the loss scale where parameters are float16.

        Of `out` itself, a scalar, or of a loss whose gradient with respect to `out` is `grad`, of its shape.
        """
        out.backward(self.scaler.scale(torch.ones_like(out) if grad is None else grad))

    @torch.no_grad()
    def step(self) -> None:
        """One update with the gradients added up so far, clipped to max_grad_norm; then they are zeroed.

        If the gradient's norm is not finite nothing moves: neither weights, nor moments, nor the number of updates. Whether
        it is stays on the GPU, so that the host goes on with the next forward pass while this minibatch's backward pass
        runs; `settle` tells. With moments of 8 bits the host waits.
        """
        self.settle()
        some = next(iter(self.masters.values()))
        self.scaler.unscale_(self.adamw)
        if self.scaler.is_enabled():
            for overflowed in self.scaler._found_inf_per_device(self.adamw).values():
                largest(overflowed, some)
        norm = added_up(torch.nn.utils.get_total_norm(self.gradients), some)
        finite = torch.isfinite(norm)
        if self.config.moments == "float32":
            self.adamw.found_inf = (~finite).float()  # type: ignore[attr-defined]  # its kernel then moves nothing
            self._move(norm)
        elif bool(finite):  # torchao's knows no such thing
            self._move(norm)
        self._round()
        self.zero_grad()
        self._told = torch.stack([norm, self._move_scale(norm)]).to("cpu", non_blocking=True)
        if norm.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(norm.device))

    def settle(self) -> float:
        """Wait for the last step, count it if it was taken, and say in `lowered` whether the loss scale could give way.

        Returns its gradient norm, without loss scale, before clipping; NaN before the first step.
        """
        if self._told is not None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._norm, lowered = self._told.tolist()
            self.lowered, self._told, self._arrived = bool(lowered), None, None
            self.updates += math.isfinite(self._norm)
        return self._norm

    def metrics(self) -> Metrics:
        """The loss scale of the next update, where there is one."""
        return {"update/loss_scale": self.scaler.get_scale()} if self.scaler.is_enabled() else {}

    def state(self) -> dict[str, Tensor]:
        """Everything that resuming needs besides the model's own weights, as flat names to tensors, sharded as they are."""
        self.settle()
        out = {"updates": torch.tensor(self.updates)}
        if self.scaler.is_enabled():
            scaler = self.scaler.state_dict()
            out |= {k: torch.tensor(scaler[name]) for k, name in SCALER_STATE.items()}
        for name, master in self.masters.items():
            for key, value in self.adamw.state.get(self.parts[name], {}).items():
                eight = {piece: getattr(value, piece) for piece in EIGHT_BIT_PARTS if hasattr(value, piece)}
                whole = value if key == "step" else dealt(value, master)
                out |= {f"{key}_{piece}/{name}": x for piece, x in eight.items()} or {f"{key}/{name}": whole}
            rounded = self.dtype not in (torch.float32, torch.float64)
            if master is not self.parameters[name] or rounded or "lora_" in name:
                out[f"master/{name}"] = master.detach()
        return out

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up `state()`, its tensors whole. Raises ValueError if it belongs to other parameters."""
        self.settle()
        stray = {k.partition("/")[2] for k in state if "/" in k} - set(self.masters)
        if stray:
            raise ValueError(f"the optimizer's state has parameters that the model lacks, e.g. {min(stray)}")
        self.updates = int(state["updates"])
        if self.scaler.is_enabled():
            scaler = {name: state[k].item() for k, name in SCALER_STATE.items()}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **scaler})
        for name, master in self.masters.items():
            if f"master/{name}" in state:
                master.copy_(like(state[f"master/{name}"], master))
            if f"step/{name}" in state:
                moments = {k: part(self._moment(state, k, name)) for k in ("step", "exp_avg", "exp_avg_sq")}
                self.adamw.state[self.parts[name]] = moments
        self._round()

    def _moment(self, state: Mapping[str, Tensor], key: str, name: str) -> Tensor:
        """One tensor of AdamW's own state, as `state` gave it away."""
        master = self.masters[name]
        if key == "step":
            return state[f"step/{name}"].to(master.device).clone()
        eight = {piece: state.get(f"{key}_{piece}/{name}") for piece in EIGHT_BIT_PARTS}
        buffer: Any = torch.zeros_like(master)
        if self.config.moments == "8bit":
            buffer = self.adamw._new_buffer(master, key == "exp_avg")  # type: ignore[attr-defined]
        if hasattr(buffer, "codes") != (eight["codes"] is not None):
            raise ValueError("the optimizer's state has moments of another precision than the recipe's `moments`")
        for piece, x in eight.items():
            (buffer if x is None else getattr(buffer, piece)).copy_(
                like(state[f"{key}/{name}"], buffer) if x is None else x
            )
        return buffer

    def _move(self, norm: Tensor) -> None:
        """AdamW's step with the gradients clipped, at the rate of this update."""
        too_long, most = norm > self.config.max_grad_norm, self.config.max_grad_norm
        torch._foreach_mul_(self.gradients, torch.where(too_long, most / (norm + CLIP_EPSILON), 1.0))
        for group in self.adamw.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.learning_rate)
            else:
                group["lr"] = self.learning_rate
        with warnings.catch_warnings():
            if self.config.moments == "8bit":  # torchao compiles its step, and torch warns of that
                warnings.simplefilter("ignore")
            self.adamw.step()

    def _move_scale(self, norm: Tensor) -> Tensor:
        """Halve the loss scale after an overflow, double it after 2,000 steps without one; 1 if it is lower now, else 0."""
        if not self.scaler.is_enabled():
            return torch.zeros_like(norm)
        scale = self.scaler._scale
        assert scale is not None
        before = scale.clone()
        self.scaler.update()
        scale.clamp_(min=LOWEST_SCALE)
        return (scale < before).to(norm)

    def _round(self) -> None:
        rounded = [name for name, p in self.parameters.items() if self.masters[name] is not p]
        if rounded:
            torch._foreach_copy_([self.parameters[name] for name in rounded], [self.masters[name] for name in rounded])


def _add_into(master: Tensor):
    def hook(p: Tensor) -> None:
        if p.grad is not None:
            assert master.grad is not None
            master.grad.add_(p.grad)
            p.grad = None

    return hook
