"""Variance of the gradient against response length, by token ratios (grpo) and sequence ratios (gspo), at a fixed policy.

    python experiments/gradient_variance.py
    python experiments/gradient_variance.py --draw

Run from the repository's folder. For each of three policies (seeds) and each length, groups of eight responses to one
prompt are sampled R times from the old policy. The gradient of each group's objective with respect to all parameters is
made by gspo's own log-probabilities, packing and objectives, for all arms from the same samples and advantages. What is
kept are products of gradients, of all groups for each arm and of all arms for each group, from which all numbers and
bootstraps follow. Writes
docs/evidence/gradient_variance.jsonl and gradient_variance.png. T tokens of a response, P parameters, K numbers that are
kept of a gradient, R groups.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import EVIDENCE, SEEDS, Plan, main, read, write
from gradient_variance_numbers import draw, measured_rows, print_table
from sums import imitated, right_share
from torch import Tensor

from gspo.advantages import group_advantages
from gspo.config import SamplingConfig
from gspo.objectives import OBJECTIVES, Clip, pack
from gspo.rollout.engine import Request, sample_seed
from gspo.rollout.transformers import TransformersEngine
from gspo.training.packing import MicroBatch, make_micro_batches
from gspo.training.policy import Policy, load_policy
from gspo.types import Completion, Prompt, Sample, Trajectory

GROUPS = {32: 24, 128: 24, 512: 12, 2048: 6}
"""Resampled groups by length: fewer of the long ones, which cost most."""
G = 8
"""Responses of a group."""
STEPS = {"near": (2, 1.5e-4), "far": (20, 5e-4)}
"""Steps on batches of their own between the old policy and the current one, and their learning rate: a mean |d| of about
0.04, as in the last minibatch of a batch, and six times that."""
OTHER_BATCHES = 1000
"""Added to the seed for those steps, so that their prompts and samples are not the measured ones."""
UNCLIPPED = Clip(1.0, math.inf)
TOKENS = 8192
"""Of a micro-batch. All arms of a policy go backward through what its forward pass kept."""


@dataclass(frozen=True)
class Ground:
    """What is measured, and where."""

    plan: Plan
    """Of the steps that move the policy. They have one minibatch each: on-policy all objectives are the same."""
    prompt: str
    """Of all responses."""
    steps: Mapping[str, tuple[int, float]]
    """As STEPS."""
    groups: Mapping[int, int]
    """As GROUPS."""
    width: int | None = None
    """Numbers that a gradient is sketched to, None if all of it is kept."""


@dataclass(frozen=True)
class Arm:
    """A way to weigh tokens."""

    policy: str
    """Whose gradient: `old` (no step in between), `near` or `far`."""
    noise: float
    """Standard deviation of normal noise added to each old log-probability, nats."""
    ratio: str
    """`none` (every ratio 1), `token` (grpo) or `sequence` (gspo)."""
    clipped: bool
    """By the objective's own default range, or not at all."""

    @property
    def name(self) -> str:
        """All of it."""
        return f"{self.policy}/{self.noise:g}/{self.ratio}/{'clipped' if self.clipped else 'free'}"


ARMS = [
    Arm("old", 0.0, "none", False),
    *(Arm(policy, 0.0, "none", False) for policy in STEPS),
    *(
        Arm(policy, noise, ratio, clipped)
        for policy, noise in (("near", 0.0), ("near", 0.05), ("near", 0.5), ("far", 0.0))
        for ratio in ("token", "sequence")
        for clipped in (False, True)
    ),
]
"""Noise of 0.05 has a mean absolute value of 0.04, as vLLM and transformers differ in bfloat16; 0.5 is ten times it."""


def coefficients(logp_T: Tensor, old_T: Tensor, micro: MicroBatch, arm: Arm) -> Tensor:
    """c where the sum of c_t grad log pi_t is the gradient of the objective of a group that these responses are of."""
    algorithm = OBJECTIVES["grpo" if arm.ratio == "token" else "gspo"]
    leaf_T = logp_T.detach().requires_grad_()
    advantage_S = torch.tensor([t.advantage for t in micro.trajectories], device=logp_T.device)
    below_T = logp_T if arm.ratio == "none" else old_T
    batch = pack(below_T, micro.sequence_T, advantage_S, global_sequences=G)
    loss = algorithm.function(leaf_T, batch, algorithm.clip if arm.clipped else UNCLIPPED, None).loss
    return -torch.autograd.grad(loss, leaf_T)[0]


class Sketch:
    """A linear map of P numbers to K that keeps each product of two vectors in the mean, with a standard deviation of about
    their lengths' product over the root of K: numbers in random order and with random signs, each K of them added to those
    before. A count sketch (Charikar, Chen and Farach-Colton, 2002) with places that are used alike. All of P where the
    width is None. Q: P rounded up to a multiple of K."""

    def __init__(self, parameters: list[Tensor], width: int | None) -> None:
        self.size = sum(p.numel() for p in parameters)
        self.width, self.order_Q, self.sign_Q = width or self.size, None, None
        if width is not None:
            device, room = parameters[0].device, math.ceil(self.size / width) * width
            numbers = torch.Generator(device).manual_seed(0)
            self.order_Q = torch.randperm(room, generator=numbers, device=device)
            self.sign_Q = torch.randint(2, (room,), generator=numbers, device=device) * 2.0 - 1

    def __call__(self, parts: tuple[Tensor, ...]) -> Tensor:
        """float32 [K] of the parts of a gradient."""
        vector_P = torch.cat([part.flatten() for part in parts])
        if self.order_Q is None:
            return vector_P
        padded_Q = torch.nn.functional.pad(vector_P, (0, len(self.order_Q) - self.size))
        return (padded_Q[self.order_Q] * self.sign_Q).view(-1, self.width).sum(0)


class Pull:
    """sum of c_t grad log pi_t of some responses, for many c by one forward pass; multiples of a c are computed once."""

    def __init__(self, logp_T: Tensor, parameters: list[Tensor], sketch: Sketch) -> None:
        self.logp_T, self.parameters, self.sketch = logp_T, parameters, sketch
        self.known: list[tuple[Tensor, Tensor]] = []

    def __call__(self, c_T: Tensor) -> Tensor:
        """float32 [K]."""
        size = float(c_T.abs().max())
        if size == 0:
            return torch.zeros(self.sketch.width, device=c_T.device)
        unit_T = c_T / size
        for other_T, pulled_K in self.known:
            if torch.allclose(unit_T, other_T, rtol=1e-6, atol=1e-7):
                return size * pulled_K
        parts = torch.autograd.grad(self.logp_T, self.parameters, unit_T, retain_graph=True)
        self.known.append((unit_T, self.sketch(parts)))
        return size * self.known[-1][1]


def sample(policy: Policy, prompt: str, length: int, count: int, seed: int) -> list[Completion]:
    """Responses of exactly this length: no token ends one."""
    policy.eos_ids = frozenset()
    ids = tuple(policy.tokenizer(prompt, add_special_tokens=False)["input_ids"])
    requests = [Request(f"{k}", ids, sample_seed(seed, length, "variance", k)) for k in range(count)]
    sampling = SamplingConfig(max_response_tokens=length)
    return TransformersEngine(policy, max_rows=128).generate(requests, sampling)


def trajectory(policy: Policy, prompt: str, completion: Completion, name: str, advantage: float) -> Trajectory:
    """A response after the prompt, to be scored."""
    ids = np.array(policy.tokenizer(prompt, add_special_tokens=False)["input_ids"])
    tokens = np.concatenate([ids, completion.token_ids])
    return Trajectory(name, "", tokens, np.arange(len(tokens)) >= len(ids), completion.logprobs, advantage)


def advantages(policy: Policy, prompt: str, completions: list[Completion]) -> np.ndarray:
    """The advantage of each response, [groups x G]: its reward is the share of right additions, normalised in its group."""
    of = Prompt(0, None, prompt, (), None)
    texts = [policy.tokenizer.decode(c.token_ids) for c in completions]
    samples = [Sample(str(k), of, c, text) for k, (c, text) in enumerate(zip(completions, texts, strict=True))]
    rewards = right_share(samples)
    return np.concatenate([group_advantages(rewards[g : g + G]) for g in range(0, len(samples), G)]).astype(float)


def group_gradients(
    policies: dict[str, Policy], group: list[Trajectory], noises: dict[str, np.ndarray], sketch: Sketch
) -> tuple[Tensor, list[dict]]:
    """Each arm's gradient of a group's objective, float32 [arms, K], and what the ratios of its responses were like. Noises
    [T] by id."""
    total, rows = torch.zeros(len(ARMS), sketch.width, device=policies["old"].device), []
    for name, policy in policies.items():
        for micro in make_micro_batches(group, token_budget=TOKENS, device=policy.device):
            pull = Pull(policy.score(micro)[0], list(policy.trainable.values()), sketch)
            old_T = torch.from_numpy(np.concatenate([t.engine_logprobs for t in micro.trajectories])).to(policy.device)
            noise_T = torch.from_numpy(np.concatenate([noises[t.id] for t in micro.trajectories])).to(policy.device)
            for k, arm in enumerate(ARMS):
                if arm.policy == name:
                    below_T = old_T + arm.noise * noise_T
                    c_T = coefficients(pull.logp_T, below_T, micro, arm)
                    total[k] += pull(c_T)
                    rows += response_rows(arm, micro, pull.logp_T.detach() - below_T, c_T)
            del pull  # with its graph, before the next forward pass makes another
    return total, rows


def response_rows(arm: Arm, micro: MicroBatch, d_T: Tensor, c_T: Tensor) -> list[dict]:
    """Of each response the sign of its advantage, the share of its tokens without a gradient, and its ratios."""
    ends = np.cumsum([t.num_trained for t in micro.trajectories])[:-1]
    d_by_response, c_by_response = (np.split(x.cpu().numpy(), ends) for x in (d_T, c_T))
    return [
        {
            "arm": arm.name, "sign": float(np.sign(t.advantage)), "lost": float((c == 0).mean()), "log_s": float(d.mean()),
            "abs_d": float(np.abs(d).mean()), "w": float(np.exp(d).mean()), "w2": float(np.exp(2 * d).mean()),
        }
        for t, d, c in zip(micro.trajectories, d_by_response, c_by_response, strict=True)
    ]  # fmt: skip


def gradients(
    policies: dict[str, Policy], ground: Ground, length: int, seed: int
) -> tuple[dict[str, np.ndarray], list[dict]]:
    """Products of the groups' gradients, `by_arm` [arms, R, R] and `by_group` [R, arms, arms], and a row for each response
    and arm. A response without a signal is left out of both, as in training."""
    old, groups = policies["old"], ground.groups[length]
    completions = sample(old, ground.prompt, length, groups * G, seed)
    sketch, rng, rows = Sketch(list(old.trainable.values()), ground.width), np.random.default_rng((seed, length)), []
    noises = {str(k): rng.normal(size=length).astype(np.float32) for k in range(len(completions))}
    total = torch.zeros(len(ARMS), groups, sketch.width, device=old.device)
    signals = advantages(old, ground.prompt, completions)
    for g in range(groups):
        group = [
            trajectory(old, ground.prompt, completions[k], str(k), float(signals[k]))
            for k in range(g * G, (g + 1) * G)
            if signals[k]
        ]
        total[:, g], of_group = group_gradients(policies, group, noises, sketch)
        rows += of_group
    wide = total.double()
    products = {"by_arm": wide @ wide.transpose(1, 2), "by_group": torch.einsum("arp,brp->rab", wide, wide)}
    return {name: x.cpu().numpy() for name, x in products.items()}, rows


def moved(ground: Ground, start: str, seed: int) -> dict[str, str]:
    """The models of the old policy and of those some steps on, which are run unless they are there."""
    found = {"old": start}
    for name, (steps, rate) in ground.steps.items():
        settings = {"training.steps": steps, "training.learning_rate": rate}
        folder = ground.plan.run(name, OTHER_BATCHES + seed, settings, model=start)
        found[name] = str(folder / "checkpoints" / f"step-{steps:06d}" / "model")
    return found


def measure(ground: Ground, start: str, seed: int, length: int) -> None:
    """Products of gradients, and ratios, of one policy at one length, unless they are there."""
    path = ground.plan.folder / f"gram-{seed}-{length}.npz"
    if path.exists():
        return
    config = ground.plan.config("old", seed, {"model.create": None, "model.path": start}).model
    models = {name: config.model_copy(update={"path": path}) for name, path in moved(ground, start, seed).items()}
    policies = {name: load_policy(model, temperature=1.0, seed=0) for name, model in models.items()}
    products, rows = gradients(policies, ground, length, seed)
    path.with_name(f"ratios-{seed}-{length}.json").write_text(json.dumps(rows), "utf-8")
    np.savez(path, **products)
    print(f"seed {seed}, length {length}: {ground.groups[length]} groups", flush=True)


def run(output: Path) -> None:
    """Every policy at every length."""
    plan = Plan("experiments/sums.toml", output / "gradient_variance", {"training.minibatches": 1})
    ground = Ground(plan, "7+5=", STEPS, GROUPS)
    for seed in SEEDS:
        start = str(imitated(seed, output / "sums" / f"policy-{seed}"))
        for length in GROUPS:
            measure(ground, start, seed, length)
    write("gradient_variance", measured_rows(plan.folder, SEEDS, list(GROUPS), [arm.name for arm in ARMS]))


def show() -> None:
    """The figure, and on standard output the tables."""
    rows = read("gradient_variance")
    draw(rows, EVIDENCE / "gradient_variance.png")
    print_table(rows)


if __name__ == "__main__":
    main(str(__doc__), run, show)
