"""What several benchmarks share: model shapes with random weights, made-up rollouts, seconds and peak memory.

Not covered: real weights and real text. Speed does not depend on them, except through response lengths, which are given.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gspo.config import Config, ModelConfig
from gspo.training.flops import FlopCounter, peak_flops
from gspo.training.policy import Policy
from gspo.training.scoring import score_trajectories
from gspo.types import Trajectory

QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "num_hidden_layers": 28}
SMALL = {"vocab_size": 2_000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SHAPES: dict[str, dict[str, int]] = {
    "0.6B": QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "1.7B": QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16},
    "4B": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_hidden_layers": 36},
    "tiny": SMALL | {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
}
"""Qwen3's published shapes, and one for trying the benchmarks on a CPU."""

LENGTHS = ("W1", "W2")
DATA_SHEET = 989e12
"""FLOP/s of dense bfloat16 products on the data sheet of an H100 and an H200 (SXM)."""


def positive(text: str) -> int:
    """A whole number of 1 or more, from the command line."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of 1 or more")
    return int(text)


def parsed(parser: argparse.ArgumentParser, words: list[str] | None = None) -> argparse.Namespace:
    """The command line, which ends with a sentence for a model, a GPU or a package that is not there."""
    args = parser.parse_args(words)
    given = vars(args)
    if "model" in given and args.model not in SHAPES and not Path(args.model).is_dir():
        parser.error(f"{args.model}: neither one of {', '.join(SHAPES)} nor a folder of a language model")
    if given.get("device") == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here: use --device cpu")
    if given.get("device") == "cpu" and "liger" in given.get("kernels", ()):
        parser.error("--kernels liger needs a GPU")
    if given.get("moments") == "8bit" and importlib.util.find_spec("torchao") is None:
        parser.error("--moments 8bit needs the package torchao: pip install 'gspo[torchao]'")
    return args


def make_model(folder: Path, shape: dict[str, int], dtype: str, device: str) -> Path:
    """Write a Qwen3 with random weights and a small tokenizer in Hugging Face format; returns the folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from gspo.chat import character_tokenizer

    torch.manual_seed(0)
    tokenizer = character_tokenizer("0123456789 ")
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(**shape, **ends, tie_word_embeddings=True, max_position_embeddings=40_960)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def response_lengths(name: str, num: int, shrink: int = 1) -> list[int]:
    """Tokens of each response. W1: all 1,024. W2: log-normal, cut to 64 and 2,048, mean about 450. All over `shrink`."""
    if name == "W1":
        return [1024 // shrink] * num
    drawn = np.random.default_rng(0).lognormal(5.65, 1.0, num).clip(64, 2048)
    return [max(1, int(n) // shrink) for n in drawn]


def trajectories(vocabulary: int, lengths: Sequence[int], *, prompt: int, group: int) -> list[Trajectory]:
    """Random tokens, one prompt a group, advantages of both signs; the log-probabilities are zeros."""
    rng = np.random.default_rng(1)
    out = []
    for i, n in enumerate(lengths):
        if i % group == 0:
            asked = rng.integers(0, vocabulary, prompt)
        tokens = np.concatenate([asked, rng.integers(0, vocabulary, n)])
        trained = np.arange(prompt + n) >= prompt
        name = f"{i // group}"
        out.append(Trajectory(f"{name}/{i}", name, tokens, trained, np.zeros(n, np.float32), (-1.0) ** i))
    return out


def as_sampled(policy: Policy, samples: Sequence[Trajectory], *, token_budget: int) -> list[Trajectory]:
    """The same with the log-probabilities that an engine with these weights would have had.

    Of others than these most ratios are far from 1, and what is clipped is left out of an update.
    """
    old = score_trajectories(policy, samples, token_budget=token_budget)
    return [replace(t, engine_logprobs=old[t.id]) for t in samples]


STANDING_STILL = 1e-12
"""A learning rate at which the optimizer does all its work, and no weight of ordinary size moves."""
CLIP = 0.5
"""A clip range that no ratio leaves meanwhile, so that no side leaves out work for what is clipped."""


def recipe(
    model: ModelConfig, *, old_logprobs: str, minibatches: int, micro_tokens: int, moments: str = "float32"
) -> Config:
    """The settings that an update reads."""
    return Config.model_validate(
        {
            "name": "bench",
            "model": model.model_dump(),
            "data": {"source": "reasoning_gym", "task": "chain_sum", "size": 8, "template": "{expression}"},
            "rewards": [{"type": "exact"}],
            "rollout": {"old_logprobs": old_logprobs, "max_prompt_tokens": 1, "max_response_tokens": micro_tokens - 1},
            "objective": {"clip_low": CLIP, "clip_high": CLIP},
            "training": {
                "steps": 8,
                "minibatches": minibatches,
                "micro_batch_tokens": micro_tokens,
                "learning_rate": STANDING_STILL,
                "moments": moments,
            },
        }
    )


def flops_of_samples(counter: FlopCounter, sizes: Sequence[tuple[int, int]]) -> float:
    """Forward and backward of samples of (prompt, response) tokens, each computed on its own and without padding."""
    total = 0.0
    for prompt, response in sizes:
        n = prompt + response - 1  # nothing is predicted from the last token
        total += n * counter.body + n * (n + 1) / 2 * counter.attention + response * counter.head
    return 3 * total


def best_rate(device: torch.device, dtype: str) -> tuple[float, str]:
    """FLOP/s that utilisation is measured against, and where the number is from."""
    if device.type == "cuda" and dtype != "float32":
        return DATA_SHEET, "the data sheet's 989 TFLOP/s"
    rate = peak_flops(device, getattr(torch, dtype)) if device.type == "cuda" else _cpu_rate(getattr(torch, dtype))
    return rate, f"{rate / 1e12:.3g} TFLOP/s, the best of a large matrix product here"


def _cpu_rate(dtype: torch.dtype) -> float:
    """FLOP a CPU second of one thread, as updates are timed there: the best of ten."""
    size, best, threads = 1024, float("inf"), torch.get_num_threads()
    torch.set_num_threads(1)
    a, b = (torch.ones(size, size, dtype=dtype) for _ in range(2))
    for _ in range(10):
        start = time.process_time()
        torch.mm(a, b)
        best = min(best, time.process_time() - start)
    torch.set_num_threads(threads)
    return 2 * size**3 / best


class Interval:
    """Seconds and peak memory between `begin` and `end`, on a GPU or on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.trace: Any = None

    def begin(self, profile: str = "") -> None:
        """Start measuring; with `profile`, also which kernels run, at some cost in time."""
        if profile:
            from torch.profiler import ProfilerActivity
            from torch.profiler import profile as Profiler

            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.on_gpu
            self.trace, self.path = Profiler(activities=kinds), Path(profile)
            self.trace.start()
        self.settle()
        self._reset_peak()
        self.held = self.memory_gib()
        self.start, self.cpu_start = time.perf_counter(), time.process_time()

    def end(self) -> dict[str, float]:
        """seconds, cpu_seconds (of all threads), peak_gib and held_gib (at the start)."""
        self.settle()
        seconds, cpu_seconds = time.perf_counter() - self.start, time.process_time() - self.cpu_start
        if self.trace is not None:
            self.trace.stop()
            self._write_trace()
        memory = {"peak_gib": self.peak_gib(), "held_gib": self.held}
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, **memory}

    def so_far(self) -> float:
        """Seconds since `begin`."""
        return time.perf_counter() - self.start

    def settle(self) -> None:
        """Wait for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def memory_gib(self) -> float:
        """Held now: tensors on a GPU, resident memory of the process on a CPU."""
        return torch.cuda.memory_allocated() / 2**30 if self.on_gpu else _resident("VmRSS:")

    def peak_gib(self) -> float:
        """The most that was held since `begin`."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.on_gpu else _resident("VmHWM:")

    def _reset_peak(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts anew

    def _write_trace(self) -> None:
        by = "self_cuda_time_total" if self.on_gpu else "self_cpu_time_total"
        table = self.trace.key_averages().table(sort_by=by, row_limit=45, max_name_column_width=90)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(table)
        self.trace = None


def _resident(key: str) -> float:
    return int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) / 2**20
