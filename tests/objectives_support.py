"""Random padded batches for the objectives, and the three ways to compute them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st
from reference import Answer, Row, objective
from torch import Tensor

from gspo.functional import policy_loss
from gspo.objectives import KL, OBJECTIVES, Clip, Objective, pack

NAMES = ("gspo", "gspo_token", "grpo", "dapo")


@dataclass(frozen=True)
class Case:
    """A padded batch. B sequences, L padded length; advantage is [B] or [B, L]."""

    new: Tensor
    old: Tensor
    mask: Tensor
    advantage: Tensor
    reference: Tensor

    def to(self, dtype: torch.dtype) -> Case:
        """The same batch with its numbers rounded to a precision."""
        parts = {k: getattr(self, k).to(dtype) for k in ("new", "old", "advantage", "reference")}
        return replace(self, **parts)

    @property
    def by_token(self) -> Tensor:
        """Advantages spread over tokens [B, L]."""
        return self.advantage if self.advantage.ndim == 2 else self.advantage[:, None].expand_as(self.new)

    def rows(self) -> list[Row]:
        """For the reference."""
        parts = (self.new, self.old, self.mask, self.by_token, self.reference)
        return [
            Row(n.tolist(), o.tolist(), m.tolist(), a.tolist(), r.tolist()) for n, o, m, a, r in zip(*parts, strict=True)
        ]

    def take(self, rows: list[int]) -> Case:
        """Some of the sequences."""
        return Case(*(getattr(self, k)[rows] for k in ("new", "old", "mask", "advantage", "reference")))


def padded(name: str, case: Case, kl: KL | None = None, **options: object) -> tuple[Objective, Tensor]:
    """The result and the gradient [B, L] of the padded entry."""
    new = case.new.clone().requires_grad_()
    reference = case.reference if kl else None
    out = policy_loss(
        new, case.old, case.mask, case.advantage, objective=name, kl=kl, reference_logp_BL=reference, **options
    )
    (gradient,) = torch.autograd.grad(out.loss, new)
    return out, gradient


def packed(name: str, case: Case, kl: KL | None = None, clip: Clip | None = None) -> tuple[Objective, Tensor]:
    """The result and the gradient [B, L], only the tokens that count being packed."""
    on, new = case.mask, case.new.clone().requires_grad_()
    batch = pack(
        case.old[on],
        torch.arange(len(on))[:, None].expand_as(on)[on],
        case.advantage if case.advantage.ndim == 1 else case.advantage[on],
        by_token=case.advantage.ndim == 2,
        reference_logp_T=case.reference[on],
    )
    out = OBJECTIVES[name].function(new[on], batch, clip or OBJECTIVES[name].clip, kl)
    (gradient,) = torch.autograd.grad(out.loss, new)
    return out, gradient


def expected(name: str, case: Case, kl: KL | None = None, clip: Clip | None = None) -> Answer:
    """The reference's answer."""
    clip = clip or OBJECTIVES[name].clip
    return objective(name, case.rows(), *clip, kl=(kl.coefficient, kl.estimator) if kl else None)


def near_a_bound(name: str, case: Case, width: float = 1e-5) -> bool:
    """Whether a ratio is so close to a clip bound that rounding decides, or a sum overflows."""
    low, high = OBJECTIVES[name].clip
    ratios = np.array([r for row in expected(name, case).ratios for r in row])
    return bool((np.abs(ratios - (1 + high)) < width).any() or (np.abs(ratios - (1 - low)) < width).any())


def random_case(seed: int, lengths: list[int], mask: list[list[bool]], scale: float, by_token: bool) -> Case:
    """A float64 batch whose log-ratios have the given size; advantages 0 included."""
    random = np.random.default_rng(seed)
    shape = (len(lengths), max(lengths))
    old = random.uniform(-6, -0.1, shape)
    new = old + scale * random.normal(size=shape)
    choices = [-2.0, -1.0, -0.3, 0.0, 0.5, 1.0, 2.0]
    advantage = random.choice(choices, size=shape if by_token else shape[0])
    reference = new + 0.3 * random.normal(size=shape)
    parts = (torch.from_numpy(x) for x in (new, old))
    return Case(*parts, torch.tensor(mask), torch.from_numpy(advantage), torch.from_numpy(reference))


@st.composite
def cases(draw: st.DrawFn, by_token: bool | None = None, most: int = 5) -> Case:
    """Random lengths, masks with holes, advantages, and log-ratios from inside every band to far outside."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=most))
    mask = []
    for length in lengths:
        row = draw(st.lists(st.booleans(), min_size=length, max_size=length).filter(any))
        mask.append(row + [False] * (max(lengths) - length))
    scale = draw(st.sampled_from([1e-4, 1e-3, 0.1, 1.0, 3.0]))
    spread = draw(st.booleans()) if by_token is None else by_token
    return random_case(draw(st.integers(0, 2**32 - 1)), lengths, mask, scale, spread)
