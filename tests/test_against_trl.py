"""The same numbers as TRL's GRPOTrainer in the setting that is faithful to the paper, by its own loss code."""

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from objectives_support import Case, random_case
from torch import Tensor

from gspo.functional import policy_loss

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own


@pytest.fixture(scope="module")
def trainer_class() -> type:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("trl", reason="TRL comes with the extra `bench` alone")
        from trl.trainer.grpo_trainer import GRPOTrainer
    return GRPOTrainer


def trl_loss(
    trainer_class: type, case: Case, *, loss_type: str, level: str, clip: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """TRL's loss and its gradient [B, L]: a trainer without a model, whose log-probabilities are given."""
    new = case.new.clone().requires_grad_()
    trainer = trainer_class.__new__(trainer_class)
    trainer.__dict__ |= {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "beta": 0.0,
        "epsilon_low": clip[0],
        "epsilon_high": clip[1],
        "args": SimpleNamespace(delta=None, steps_per_generation=1),
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "aux_loss_enabled": False,
        "use_vllm": False,
        "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *a, **k: (new, torch.zeros_like(new), None),
    }
    ids, prompt = torch.zeros_like(case.mask, dtype=torch.long), torch.zeros(len(case.mask), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt + 1,
        "completion_ids": ids,
        "completion_mask": case.mask.long(),
        "advantages": case.advantage,
        "old_per_token_logps": case.old,
        "num_items_in_batch": case.mask.sum(),
    }
    loss = trainer._compute_loss(None, inputs)
    return loss.detach(), torch.autograd.grad(loss, new)[0]


@pytest.mark.parametrize("scale", [1e-4, 1e-3, 0.3])
@pytest.mark.parametrize(
    ("name", "loss_type", "level", "clip"),
    [
        ("gspo", "grpo", "sequence", (3e-4, 4e-4)),
        ("grpo", "grpo", "token", (0.2, 0.27)),
        ("dapo", "dapo", "token", (0.2, 0.28)),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_are_those_of_trl(trainer_class, name, loss_type, level, clip, scale, seed):
    lengths = [12, 3, 7, 1, 9, 12]
    mask = [[t < length for t in range(12)] for length in lengths]
    case = random_case(seed, lengths, mask, scale, False).to(torch.float32)
    want, gradient = trl_loss(trainer_class, case, loss_type=loss_type, level=level, clip=clip)
    new = case.new.clone().requires_grad_()
    ours = policy_loss(new, case.old, case.mask, case.advantage, objective=name, clip=clip)
    ours.loss.backward()
    assert ours.loss.item() == pytest.approx(want.item(), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(new.grad, gradient, rtol=1e-5, atol=1e-6)
    assert ours.clipped_T.any() or scale < 0.3  # the comparison covers both branches
