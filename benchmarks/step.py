"""The whole step, ours against TRL's, both with vLLM in their process on one GPU: seconds, of which generation, and memory.

    pip install -e '.[vllm,bench,liger]' && python benchmarks/step.py 0.6B

Models, lengths, prompts and the way in which the sides take turns are those of benchmarks/update.py. Lengths are forced:
the engine of each side is told how many tokens each response has, and no token ends one. An interval goes from one request
for a rollout to the next: generation, rewards, update, weights to the engine, records. Ours is gspo/loop.py as it is.

Two trainers and two engines must fit on the GPU for turns to be taken; else they run one after the other, and the table
says so. Lower --memory-fraction and --micro to make them fit.

Not covered: several GPUs, real rewards.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import update
from sides import OursSettings, Side, Task, Theirs, TheirSettings

OLD = ("auto", "engine", "trainer")


@dataclass(frozen=True, slots=True)
class OurStepSettings(OursSettings):
    """Settings of our side's loop."""

    memory_fraction: float
    """Share of the GPU's memory that vLLM takes."""


@dataclass(frozen=True, slots=True)
class TheirStepSettings(TheirSettings):
    """Settings of TRL's side with generation."""

    memory_fraction: float
    """Share of the GPU's memory that vLLM takes."""


def problems(num: int, length: int) -> list[dict[str, str]]:
    """Prompts of so many digits, which is as many tokens for the tokenizer of the made models."""
    return [{"prompt": f"{i:0{length}d}"[-length:]} for i in range(num)]


def alternating(samples: list[Any]) -> list[float]:
    """Reward 0, 1, 0, 1: mixed in every group."""
    return [float(i % 2) for i in range(len(samples))]


def wanted(task: Task, lengths: str) -> list[int]:
    """Tokens of each response, by its place in the batch."""
    from workload import response_lengths

    return response_lengths(lengths, task.responses, task.shrink)


def longest(task: Task) -> int:
    """The most response tokens that may be asked for."""
    return 2048 // task.shrink


class OurStep(Side):
    """Our loop; where it collects, it waits for its turn."""

    def __init__(self, task: Task, settings: OurStepSettings, connection: Connection) -> None:
        import gspo.loop
        import gspo.training.policy

        super().__init__(task, connection)
        gspo.training.policy.eos_ids = lambda *args: frozenset()  # no token ends a response
        self.settings, self.running = settings, False
        self.folder = tempfile.mkdtemp()

    def serve(self) -> None:
        """Train until told to stop."""
        from gspo.loop import train
        from gspo.recipe import build
        from gspo.run import Run

        self.configs = {old: build(self._recipe(old)) for old in OLD}
        self.collect = Run.collect
        Run.collect = lambda run, prompts: self._turn(run, prompts)  # type: ignore[method-assign]
        Run.save = lambda run: None  # type: ignore[method-assign]
        train(self.configs["auto"])

    def _turn(self, run: Any, prompts: Any) -> Any:
        if self.running:
            measured = self.interval.end()
            self.answer(measured, flops=0.0, checksum=self.tokens, collect_s=self.collect_s)
        asked = self.next_update()
        run.config = self.configs[asked["old_logprobs"]]
        self.lengths, self.running = wanted(self.task, asked["lengths"]), True
        self.interval.begin(asked["profile"])
        with patch.object(run.engine, "generate", self._forced(run.engine.generate)):
            groups, waiting = self.collect(run, prompts)
        self.interval.settle()
        self.collect_s = self.interval.so_far()
        found = [s.num_tokens for group in groups for s in group]
        assert found == self.lengths, "our engine did not sample the lengths that were asked for"
        self.tokens = sum(len(s.prompt.token_ids) + s.num_tokens for group in groups for s in group)
        return groups, waiting

    def _forced(self, sample: Any) -> Any:
        """An engine's `generate` with a limit of its own for each response; what reaches it counts as ended."""

        def generate(requests: Any, *args: Any) -> Any:
            asked = [replace(r, limit=n) for r, n in zip(requests, self.lengths, strict=True)]
            return [replace(c, finish_reason="stop") for c in sample(asked, *args)]

        return generate

    def _recipe(self, old_logprobs: str) -> dict[str, Any]:
        task, settings = self.task, self.settings
        model = {"path": task.model, "device": task.device, "dtype": task.dtype}
        source = {"source": "python", "function": f"{__file__}:problems", "format": "text", "answer_column": ""}
        return {
            "name": "bench",
            "output": self.folder,
            "model": model
            | {"head_dtype": settings.head, "kernels": settings.kernels, "checkpointing": settings.checkpointing},
            "data": source | {"parameters": {"num": 64 * task.responses // task.group, "length": task.prompt}},
            "rewards": [{"type": "function", "function": f"{__file__}:alternating"}],
            "rollout": {
                "engine": "vllm",
                "old_logprobs": old_logprobs,
                "vllm": {"memory_fraction": settings.memory_fraction},
                "prompts_per_step": task.responses // task.group,
                "group_size": task.group,
                "max_rows": task.responses,
                "max_prompt_tokens": 4 * task.prompt,
                "max_response_tokens": longest(task),
            },
            "training": {
                "steps": 10**5,
                "minibatches": task.minibatches,
                "micro_batch_tokens": settings.micro_tokens,
                "moments": settings.moments,
            },
            "checkpoint": {"every": 10**6},
        }


class TheirStep(Theirs):
    """TRL's trainer with vLLM in its process."""

    def __init__(self, task: Task, settings: TheirStepSettings, connection: Connection) -> None:
        super().__init__(task, settings, connection)
        llm = self.trainer.vllm_generation.llm
        self.engine = llm.generate
        llm.generate = self._forced

    def _options(self) -> dict[str, Any]:
        task = self.task
        return super()._options() | {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": self.settings.memory_fraction,
            "vllm_max_model_length": longest(task) + 4 * task.prompt,
            "max_completion_length": longest(task),
            "generation_kwargs": {"ignore_eos": True},
            "learning_rate": 1e-6,  # this and the next two: what our recipe has
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        }

    def _prompts(self, num: int) -> list[dict[str, str]]:
        return problems(num, self.task.prompt)

    def _turn(self, prompts: list[str]) -> tuple[Any, ...]:
        if self.running:
            measured = self.interval.end()
            assert sum(map(int, self.tokens)) == sum(self.lengths), "TRL did not train on all the tokens of its responses"
            self.answer(measured, flops=0.0, checksum=self.checksum, collect_s=self.collect_s)
        asked = self.next_update()
        self.lengths, self.tokens, self.running = wanted(self.task, asked["lengths"]), [], True
        self.interval.begin(asked["profile"])
        out = self.generate(prompts)
        self.interval.settle()
        self.collect_s = self.interval.so_far()
        assert [len(ids) for ids in out[1]] == self.lengths, "TRL did not sample the lengths that were asked for"
        self.checksum = sum(len(ids) for ids in (*out[0], *out[1]))
        return out

    def _forced(self, prompts: list[Any], sampling_params: Any, **kwargs: Any) -> Any:
        """Each response with its own limit."""
        each = [sampling_params.clone() for _ in prompts]
        for params, length in zip(each, self.lengths, strict=True):
            params.max_tokens = length
        return self.engine(prompts, sampling_params=each, **kwargs)


class StepBench(update.Bench):
    """The comparison of benchmarks/update.py with whole steps."""

    OURS, THEIRS = OurStep, TheirStep

    def theirs(self, micro: int) -> Any:
        """TRL's process. Raises Failed."""
        return self.child(TheirStep, TheirStepSettings(**self.trls(micro), memory_fraction=self.args.memory_fraction))

    def ours(self, kernels: str) -> Any:
        """Our process. Raises Failed."""
        return self.child(OurStep, OurStepSettings(**self.own(kernels), memory_fraction=self.args.memory_fraction))


def options(parser: argparse.ArgumentParser) -> None:
    """What this command adds to those of benchmarks/update.py."""
    parser.add_argument("--memory-fraction", type=float, default=0.2, help="share of the GPU for each side's vLLM")


if __name__ == "__main__":
    sys.exit(update.main(command=update.Command(StepBench, OLD, ("auto",), __doc__, options)))
