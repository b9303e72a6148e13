"""AdamW over float32 master weights, with a learning rate that is a pure function of the update's number."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..config import OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int, total: int) -> float:
    """The rate of update number `update` (from 0) of `total`: linear warm-up, then constant, or falling to 0."""
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / config.warmup_updates
    if config.schedule == "constant":
        return config.learning_rate
    done = (update - config.warmup_updates) / max(1, total - config.warmup_updates)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * max(0.0, left)


class Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) on a policy's trainable parameters.

    Parameters in bfloat16 get a float32 master copy; their gradients are added up in float32 over micro-batches, the
    step moves the master, and the parameter is its rounding. Float32 parameters are their own master.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, total_updates: int) -> None:
        if not parameters:
            raise ValueError("the model has no trainable parameters")
        self.config, self.total_updates, self.updates = config, total_updates, 0
        self.parameters = dict(parameters)
        self.masters: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            wide = p.dtype in (torch.float32, torch.float64)
            self.masters[name] = p if wide else p.detach().float()
            if not wide:
                p.register_post_accumulate_grad_hook(_add_into(self.masters[name]))
        self.adamw = torch.optim.AdamW(
            [
                {"params": [m for m in self.masters.values() if m.ndim >= 2], "weight_decay": config.weight_decay},
                {"params": [m for m in self.masters.values() if m.ndim < 2], "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )
        self.zero_grad()

    @property
    def learning_rate(self) -> float:
        """The rate of the next update."""
        return learning_rate(self.config, self.updates, self.total_updates)

    def zero_grad(self) -> None:
        """Zero, not None: a minibatch without a signal then still moves by its momentum, as one with zero gradients."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            else:
                master.grad.zero_()

    @torch.no_grad()
    def step(self) -> float:
        """One update with the gradients added up so far, clipped to max_grad_norm; then they are zeroed.

        Returns the gradient norm before clipping. If it is not finite nothing moves: neither weights, nor moments, nor
        the number of updates.
        """
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if bool(torch.isfinite(norm)):
            torch.nn.utils.clip_grads_with_norm_(self.masters.values(), self.config.max_grad_norm, norm)
            for group in self.adamw.param_groups:
                group["lr"] = self.learning_rate
            self.adamw.step()
            self.updates += 1
            self._round()
        self.zero_grad()
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """Everything that resuming needs besides the model's own weights, as flat names to tensors."""
        out = {"updates": torch.tensor(self.updates)}
        for name, master in self.masters.items():
            moments = self.adamw.state.get(master, {})
            out |= {f"{key}/{name}": value for key, value in moments.items()}
            if master is not self.parameters[name] or "lora_" in name:
                out[f"master/{name}"] = master.detach()
        return out

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up `state()`. Raises ValueError if it belongs to other parameters."""
        stray = {k.partition("/")[2] for k in state if "/" in k} - set(self.masters)
        if stray:
            raise ValueError(f"the optimizer's state has parameters that the model lacks, e.g. {min(stray)}")
        self.updates = int(state["updates"])
        for name, master in self.masters.items():
            if f"master/{name}" in state:
                master.copy_(state[f"master/{name}"])
            keys = [k for k in ("step", "exp_avg", "exp_avg_sq") if f"{k}/{name}" in state]
            if keys:
                self.adamw.state[master] = {k: state[f"{k}/{name}"].to(master.device).clone() for k in keys}
        self._round()

    def _round(self) -> None:
        for name, p in self.parameters.items():
            if self.masters[name] is not p:
                p.copy_(self.masters[name])


def _add_into(master: Tensor):
    def hook(p: Tensor) -> None:
        if p.grad is not None:
            assert master.grad is not None
            master.grad.add_(p.grad)
            p.grad = None

    return hook
