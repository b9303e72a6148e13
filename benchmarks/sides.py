"""The two sides of a comparison of updates: each lives in a process of its own and makes one update whenever it is told to.

Both get the same forced token ids. What is inside an interval stands in docs/speed.md and in `Ours.update` and
`Theirs._turn`; nothing else is timed.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
import zlib
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """What both sides train on, and how."""

    model: str
    """Folder of a language model."""
    device: str
    """cuda or cpu."""
    dtype: str
    """Precision of products, and of the weights that they use."""
    responses: int
    """Responses a rollout batch."""
    group: int
    """Responses a prompt."""
    prompt: int
    """Tokens of each prompt."""
    shrink: int
    """Response lengths are divided by it."""
    minibatches: int
    """Optimizer steps a rollout batch."""
    threads: int
    """CPU threads of each side."""

    def samples(self, lengths: str, vocabulary: int) -> list[Any]:
        """The forced rollouts, the same for both sides."""
        from workload import response_lengths, trajectories

        wanted = response_lengths(lengths, self.responses, self.shrink)
        return trajectories(vocabulary, wanted, prompt=self.prompt, group=self.group)


def checksum(samples: list[Any]) -> int:
    """Of all token ids and their lengths: both sides tell it, and it has to be the same."""
    found = 0
    for t in samples:
        found = zlib.crc32(t.token_ids.tobytes(), zlib.crc32(str(t.num_trained).encode(), found))
    return found


@dataclass(frozen=True, slots=True)
class OursSettings:
    """Settings of our side alone."""

    kernels: str
    head: str
    micro_tokens: int
    checkpointing: str
    moments: str


@dataclass(frozen=True, slots=True)
class TheirSettings:
    """Settings of TRL's side alone."""

    weights: str
    """Precision of its weights and of AdamW's moments; TRL keeps no master copy."""
    micro: int
    """Sequences a micro-batch."""
    liger: bool
    """Liger's kernels for norms, rotations and SwiGLU."""
    attention: str
    """attn_implementation of transformers."""


class Stop(Exception):
    """The parent wants no more."""


class Side:
    """What both sides answer besides updates."""

    def __init__(self, task: Task, connection: Connection) -> None:
        import torch
        from workload import Interval

        torch.set_num_threads(task.threads)
        self.task, self.connection = task, connection
        self.interval = Interval(torch.device(task.device))
        self.base = self.interval.memory_gib()  # on a CPU the libraries', which are imported by now

    def next_update(self) -> dict[str, Any]:
        """Answer until an update is asked for: its lengths, old_logprobs, and a file for a profile or ""."""
        while True:
            asked = self.connection.recv()
            if asked["do"] == "update":
                return asked
            if asked["do"] == "stop":
                raise Stop
            self.connection.send(self._memory(release=asked["do"] == "release"))

    def _memory(self, *, release: bool) -> dict[str, float]:
        """What the process takes of the GPU, GiB; with `release`, after giving back all that it does not hold."""
        import torch

        if self.task.device != "cuda":
            return {"reserved_gib": 0.0, "total_gib": float("inf")}
        if release:
            torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved() if release else torch.cuda.max_memory_reserved()
        total = torch.cuda.get_device_properties(0).total_memory
        return {"reserved_gib": reserved / 2**30, "total_gib": total / 2**30}

    def answer(self, measured: dict[str, float], **more: float) -> None:
        """Tell what an update took; memory without what the libraries alone had."""
        for key in ("peak_gib", "held_gib"):
            measured[key] -= self.base
        self.connection.send(measured | more)


# ---- ours -------------------------------------------------------------------------------------------------


class Ours(Side):
    """Our update, on our own policy and optimizer."""

    def __init__(self, task: Task, settings: OursSettings, connection: Connection) -> None:
        from workload import recipe

        from gspo.config import ModelConfig
        from gspo.training.flops import FlopCounter
        from gspo.training.optimizer import Optimizer
        from gspo.training.policy import load_policy
        from gspo.training.update import Skips

        super().__init__(task, connection)
        self.settings, self.skips = settings, Skips()
        chosen = ModelConfig(
            path=task.model,
            device=task.device,  # type: ignore[arg-type]
            dtype=task.dtype,  # type: ignore[arg-type]
            head_dtype=settings.head,  # type: ignore[arg-type]
            kernels=settings.kernels,  # type: ignore[arg-type]
            checkpointing=settings.checkpointing,  # type: ignore[arg-type]
        )
        self.policy = load_policy(chosen, temperature=1.0, seed=0)
        self.configs = {
            old: recipe(
                chosen,
                old_logprobs=old,
                minibatches=task.minibatches,
                micro_tokens=settings.micro_tokens,
                moments=settings.moments,
            )
            for old in ("engine", "trainer")
        }
        self.optimizer = Optimizer(self.policy.trainable, self.configs["engine"].training, 10**6)
        self.counter = FlopCounter(self.policy)
        self.samples: dict[str, list[Any]] = {}

    def serve(self) -> None:
        """Update whenever told to."""
        while True:
            asked = self.next_update()
            samples = self._samples(asked["lengths"])
            self.update(samples, asked)

    def update(self, samples: list[Any], asked: dict[str, Any]) -> None:
        """Inside the interval: dealing and packing, all passes and optimizer steps, and the metrics of the update."""
        from gspo.training.diagnosis import mismatch_metrics, ratio_metrics
        from gspo.training.update import pack_minibatches, update

        config = self.configs[asked["old_logprobs"]]
        self.interval.begin(asked["profile"])
        parts = pack_minibatches(samples, config, seed=0, device=self.policy.device)
        updated = update(self.policy, self.optimizer, parts, config, self.skips)
        _ = ratio_metrics(updated.ratios) | mismatch_metrics(updated.ratios, recomputed=updated.recomputed)
        measured = self.interval.end()
        micro = [m for part in parts for m in part.micro_batches]
        flops = 3 * sum(self.counter.forward(m) for m in micro)
        self.answer(measured, flops=flops, checksum=checksum(samples))

    def _samples(self, lengths: str) -> list[Any]:
        """The rollouts with the log-probabilities that an engine with the first weights would have had."""
        from workload import as_sampled

        if lengths not in self.samples:
            made = self.task.samples(lengths, len(self.policy.head))
            self.samples[lengths] = as_sampled(self.policy, made, token_budget=self.settings.micro_tokens)
        return self.samples[lengths]


# ---- TRL --------------------------------------------------------------------------------------------------


class Theirs(Side):
    """TRL's GRPOTrainer, whose generation is replaced by waiting for the next update."""

    def __init__(self, task: Task, settings: TheirSettings, connection: Connection) -> None:
        import transformers

        if not hasattr(transformers.PreTrainedModel, "warnings_issued"):  # TRL sets an entry of what is gone since then
            transformers.PreTrainedModel.warnings_issued = {}
        import trl.trainer.grpo_trainer  # noqa: F401

        super().__init__(task, connection)
        self.settings, self.running = settings, False
        self.trainer = self._trainer()
        self.generate, self.trainer._generate = self.trainer._generate, self._turn
        self._loss, self.trainer.compute_loss = self.trainer.compute_loss, self._counted
        self.vocabulary = self.trainer.model.get_output_embeddings().weight.shape[0]

    def serve(self) -> None:
        """Train until told to stop."""
        self.trainer.train()

    def _turn(self, prompts: list[str]) -> tuple[Any, ...]:
        """An interval ends where the trainer wants the next rollout, and begins where it gets one.

        Inside: padding, the pass for old log-probabilities, rewards and advantages, all passes and optimizer steps, the
        trainer's own metrics and log.
        """
        if self.running:
            measured = self.interval.end()
            assert sum(map(int, self.tokens)) == sum(self.lengths), "TRL did not train on all the tokens that it was given"
            self.answer(measured, flops=self.flops, checksum=self.checksum)
        asked = self.next_update()
        samples = self.task.samples(asked["lengths"], self.vocabulary)
        assert len(samples) == len(prompts)
        ids = [t.token_ids.tolist() for t in samples]
        asked_ids, answers = [i[: self.task.prompt] for i in ids], [i[self.task.prompt :] for i in ids]
        self.lengths, self.tokens, self.running = [len(a) for a in answers], [], True
        self.flops, self.checksum = self._flops(self.lengths), checksum(samples)
        self.interval.begin(asked["profile"])
        return asked_ids, answers, None, ["" for _ in answers], None, {}, None, None

    def _counted(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.tokens.append(inputs["completion_mask"].sum())  # read after the interval: reading waits for the GPU
        return self._loss(model, inputs, *args, **kwargs)

    def _flops(self, lengths: list[int]) -> float:
        """Forward and backward of what it was given, by our counter."""
        from types import SimpleNamespace

        from workload import flops_of_samples

        from gspo.training.flops import FlopCounter

        model = self.trainer.model
        head = model.get_output_embeddings().weight
        counter = FlopCounter(SimpleNamespace(model=model, backbone=model.get_decoder(), head=head, routing=None))  # type: ignore[arg-type]
        return flops_of_samples(counter, [(self.task.prompt, n) for n in lengths])

    def _options(self) -> dict[str, Any]:
        """Its settings, with its own loss at GSPO's paper-faithful one."""
        from workload import CLIP, STANDING_STILL

        task, on_gpu = self.task, self.task.device == "cuda"
        steps = task.responses // self.settings.micro
        return {
            "output_dir": tempfile.mkdtemp(),
            "num_generations": task.group,
            "max_completion_length": 2048,
            "per_device_train_batch_size": self.settings.micro,
            "steps_per_generation": steps,
            "gradient_accumulation_steps": steps // task.minibatches,
            "importance_sampling_level": "sequence",
            "loss_type": "grpo",
            "epsilon": CLIP,
            "epsilon_high": CLIP,
            "beta": 0.0,
            "learning_rate": STANDING_STILL,
            "lr_scheduler_type": "constant",
            "max_steps": 1000 * task.minibatches,
            "gradient_checkpointing": False,
            "bf16": on_gpu and task.dtype == "bfloat16",
            "use_cpu": not on_gpu,
            "use_liger_kernel": self.settings.liger,
            "model_init_kwargs": {"dtype": self.settings.weights, "attn_implementation": self.settings.attention},
            "logging_steps": task.minibatches,
            "disable_tqdm": True,
            "save_strategy": "no",
            "report_to": [],
        }

    def _trainer(self) -> Any:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        reward = lambda completions, **kwargs: [float(i % 2) for i in range(len(completions))]  # noqa: E731
        rows = Dataset.from_list(self._prompts(1000 * self.task.responses // self.task.group))
        config = GRPOConfig(**self._options())
        return GRPOTrainer(model=self.task.model, args=config, reward_funcs=reward, train_dataset=rows)

    def _prompts(self, num: int) -> list[dict[str, str]]:
        return [{"prompt": str(i)} for i in range(num)]


# ---- processes --------------------------------------------------------------------------------------------


def live(side: type[Side], task: Task, settings: Any, connection: Connection, log: str) -> None:
    """The life of a child process; what its libraries print goes to `log`."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            server = side(task, settings, connection)  # type: ignore[call-arg]
            connection.send({})
            server.serve()  # type: ignore[attr-defined]
    except Stop:
        connection.send({})
    except BaseException as error:
        traceback.print_exc()
        what = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        connection.send({"failed": what})


class Failed(Exception):
    """A side could not do what it was told; the message is its error."""


class Child:
    """A side in its own process."""

    def __init__(self, side: type[Side], task: Task, settings: Any, log: Path) -> None:
        self.key, self.log = (side, task, settings), log
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (side, task, settings, theirs, str(log))
        self.process = context.Process(target=live, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def ready(self) -> Child:
        """Wait until it has loaded. Raises Failed."""
        self._answer()
        return self

    def update(self, lengths: str, *, old_logprobs: str = "engine", profile: str = "") -> dict[str, float]:
        """What one update took: seconds, peak_gib, held_gib, flops. Raises Failed."""
        self.connection.send({"do": "update", "lengths": lengths, "old_logprobs": old_logprobs, "profile": profile})
        return self._answer()

    def memory(self, *, release: bool = False) -> dict[str, float]:
        """GiB of the GPU that the process takes (reserved_gib) and that there are (total_gib)."""
        self.connection.send({"do": "release" if release else "memory"})
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self.process.is_alive():
            try:
                self.connection.send({"do": "stop"})
                self.process.join(30)
            except OSError:
                pass
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _answer(self) -> dict[str, Any]:
        try:
            answer = self.connection.recv()
        except EOFError:
            self.process.join()
            answer = {"failed": f"the process ended with code {self.process.exitcode}"}
        if "failed" in answer:
            print(f"{self.key[0].__name__}: {answer['failed']}; its log is {self.log}", file=sys.stderr)
            raise Failed(answer["failed"])
        return answer
