"""How far vLLM's log-probabilities are from the trainer's on the same weights, by the precision of either, as GSPO sees it.

    pip install -e '.[vllm]' && python benchmarks/mismatch.py MODEL --tokens 1024

Each engine samples eight stories to each of eight prompts at temperature 1; each trainer scores the same tokens. No weight
moves between the two, so s should be 1. A table a pair: mean and largest |d| of a token, mean and deviation of s - 1, and
the share of sequences outside the paper's clip range before any update, also by response length.

Not covered: other temperatures, larger models, other tasks. All of them matter: measure your own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise

import numpy as np

from gspo.chat import encode
from gspo.config import ModelConfig, SamplingConfig, VllmConfig
from gspo.rollout.engine import Request
from gspo.rollout.vllm import VllmEngine
from gspo.training.policy import Policy, load_policy
from gspo.training.scoring import score_ends
from gspo.types import Completion

PAIRS = ("fox and a crow", "king and a baker", "robot and a child", "river and a stone", "cat and the moon",
         "sailor and a whale", "teacher and a storm", "farmer and a dragon")  # fmt: skip
PRECISIONS = ("bfloat16", "bfloat16, float32 head", "float16", "float16, float32 head", "float32")
LENGTHS = (1, 64, 128, 256, 512, 10**9)


def settings(name: str) -> dict[str, str]:
    """`dtype` and `head_dtype` of a name in PRECISIONS."""
    dtype, _, head = name.partition(", ")
    return {"dtype": dtype, "head_dtype": "float32" if head else "same"}


def load(path: str, name: str) -> Policy:
    """The trainer in one precision."""
    return load_policy(ModelConfig(path=path, kernels="torch", **settings(name)), temperature=1.0, seed=0)  # type: ignore[arg-type]


def requests(policy: Policy, stories: int) -> list[Request]:
    """So many of each prompt."""
    texts = [[{"role": "user", "content": f"Tell me a short story about a {pair}."}] for pair in PAIRS]
    prompts = [tuple(encode(policy.tokenizer, text)) for text in texts]
    return [Request(f"{i}/{k}", p, 100 * i + k) for i, p in enumerate(prompts) for k in range(stories)]


def gaps(policy: Policy, asked: Sequence[Request], sampled: Sequence[Completion]) -> list[np.ndarray]:
    """log p(trainer) - log p(engine) of each response's tokens."""
    out = []
    for request, completion in zip(asked, sampled, strict=True):
        tokens = [*request.prompt, *completion.token_ids]
        logp = score_ends(policy, [tokens], [len(completion.token_ids)], temperature=1.0)[0]
        out.append(logp.astype(np.float64) - completion.logprobs)
    return out


def row(engine: str, trainer: str, d: list[np.ndarray]) -> str:
    """A line of the table."""
    s = np.exp([x.mean() for x in d])
    lengths = np.array([len(x) for x in d])
    outside = (s < 1 - 3e-4) | (s > 1 + 4e-4)
    every = np.abs(np.concatenate(d))
    by_length = [
        f"{low}-{high - 1 if high < 10**9 else ''}: {(s[at] - 1).std(ddof=1):.1e} ({at.sum()})"
        for low, high in pairwise(LENGTHS)
        if (at := (lengths >= low) & (lengths < high)).sum() > 3
    ]
    sizes = f"{every.mean():.1e} | {every.max():.1e} | {(s - 1).mean():+.1e} | {(s - 1).std(ddof=1):.1e}"
    return f"| {engine} | {trainer} | {sizes} | {outside.mean():.2f} | {', '.join(by_length)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a language model with a chat template")
    parser.add_argument("--tokens", type=int, default=192, help="longest response")
    parser.add_argument("--stories", type=int, default=8, help="of each of the eight prompts")
    parser.add_argument("--engines", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--trainers", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    args = parser.parse_args()
    print("| engine | trainer | token mean abs d | largest | s-1 mean | s-1 sd | outside | s-1 sd by response tokens |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for engine_name in args.engines:
        policy = load(args.model, "float32")
        asked = requests(policy, args.stories)
        config = VllmConfig(**settings(engine_name))  # type: ignore[arg-type]
        longest = max(len(r.prompt) for r in asked) + args.tokens
        with closing(VllmEngine(policy, config, max_rows=64, max_tokens=longest)) as engine:
            engine.load(policy)
            sampled = engine.generate(asked, SamplingConfig(max_response_tokens=args.tokens))
        for trainer_name in args.trainers:
            trainer = policy if trainer_name == "float32" else load(args.model, trainer_name)
            print(row(engine_name, trainer_name, gaps(trainer, asked, sampled)), flush=True)


if __name__ == "__main__":
    main()
