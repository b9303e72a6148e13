"""One whole GSPO step of ours and of TRL's GRPOTrainer on the CPU: same model, prompts, lengths, optimizer steps.

    pip install -e '.[bench]' && python benchmarks/cpu_against_trl.py

Both sides live in one process and take turns: a step of TRL's, a step of ours, and so on, at variable response lengths
(skewed: mean 40, longest 200) and at equal ones (40). Lengths are forced: an end-of-sequence token is sampled where it
is wanted and nowhere else. A rollout batch serves four optimizer steps; rewards are mixed in every group, so that
every sample has a gradient. TRL runs without vLLM, with SDPA attention, without gradient checkpointing, and with a
micro-batch as large as a minibatch. "generation" is everything up to the decoded text, "update" is everything else
that happens in a step, records included; a ratio above 1 says that ours is faster.

Not covered: several processes, accelerators, bf16.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from continuous_batching import generate_batch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList, TrainerCallback

from gspo import data
from gspo.config import CreateConfig
from gspo.recipe import build
from gspo.rollout import transformers as engine
from gspo.rollout.sampling import draw, uniform
from gspo.run import Run, open_run
from gspo.training.create import create
from gspo.training.update import update

MEAN, LONGEST = 40, 200
SETTINGS = ("variable", "equal")
FIRST_CHARACTER = 0x4E00


def prompts(num: int, vocabulary: int) -> list[dict[str, str]]:
    """Prompts of 10 to 60 random characters, one token each: a prompt source of ours and TRL's dataset."""
    rng = np.random.default_rng(0)
    lengths = np.linspace(10, 60, num).round().astype(int)
    characters = [rng.integers(FIRST_CHARACTER, FIRST_CHARACTER + vocabulary - 2, n) for n in lengths]
    return [{"prompt": "".join(map(chr, c))} for c in characters]


def alternating(samples: list[Any]) -> list[float]:
    """Reward 0, 1, 0, 1: mixed in every group."""
    return [float(i % 2) for i in range(len(samples))]


def response_lengths(setting: str, step: int, shape: tuple[int, int]) -> np.ndarray:
    """Length of each response [prompts, group]: all MEAN, or log-normal with that mean, the longest one LONGEST."""
    if setting == "equal":
        return np.full(shape, MEAN)
    drawn = np.random.default_rng([1, step]).lognormal(sigma=1.0, size=shape)
    scale = MEAN / drawn.mean()
    for _ in range(20):  # clipping lowers the mean: raise the scale until it is right again
        lengths = np.clip(drawn * scale, 2, LONGEST).round().astype(int)
        lengths[np.unravel_index(drawn.argmax(), shape)] = LONGEST
        scale *= MEAN / lengths.mean()
    return lengths


@dataclass
class Side:
    """What was measured of one side, by setting."""

    name: str
    generation_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    whole_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, setting: str, generation_s: float, whole_s: float, tokens: int) -> None:
        print(f"{self.name:5} {setting:9} generation {generation_s:6.2f} s, whole {whole_s:6.2f} s", file=sys.stderr)
        self.generation_s[setting].append(generation_s)
        self.whole_s[setting].append(whole_s)
        self.tokens[setting].append(tokens)

    def medians(self, setting: str) -> dict[str, float]:
        """Seconds of each stage; each setting's first step is warm-up."""
        generation, whole = self.generation_s[setting][1:], self.whole_s[setting][1:]
        update_s = [w - g for w, g in zip(whole, generation, strict=True)]
        stages = {"generation": generation, "update": update_s, "whole": whole}
        return {stage: statistics.median(seconds) for stage, seconds in stages.items()}


# ---- ours -------------------------------------------------------------------------------------------------


class ForcedDraws:
    """Stand-ins for the engine's `uniform` and `draw` that end each response at its wanted length.

    The log-probability is still the policy's own of the token that was put in.
    """

    def __init__(self, eos: int) -> None:
        self.eos, self.length_of_seed = eos, {}

    def uniform(self, seed_R: np.ndarray, index_R: np.ndarray) -> np.ndarray:
        wanted_R = np.array([self.length_of_seed[int(seed)] for seed in seed_R])
        self.due_R = torch.from_numpy(wanted_R == index_R + 1)
        return uniform(seed_R, index_R)

    def draw(self, logits_RV: torch.Tensor, sampling: Any, uniform_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token_R, logp_R = draw(logits_RV, sampling, uniform_R)
        at = (self.due_R | (token_R == self.eos)).nonzero()[:, 0]
        token_R[at] = torch.where(self.due_R[at], self.eos, self.eos + 1)
        logp_R[at] = logits_RV[at].float().log_softmax(-1).gather(1, token_R[at, None])[:, 0]
        return token_R, logp_R


class Ours:
    """Steps of the training loop, as gspo/loop.py has them."""

    def __init__(self, run: Run, shape: tuple[int, int]) -> None:
        self.run, self.shape, self.side = run, shape, Side("ours")
        self.forced = ForcedDraws(run.policy.tokenizer.eos_token_id)
        engine.uniform, engine.draw = self.forced.uniform, self.forced.draw  # type: ignore[assignment]
        self.generate = run.engine.generate
        run.engine.generate = self._generate  # type: ignore[method-assign]

    def _generate(self, requests, *args):
        """Look up each request's wanted length: by row and place in the group, in the source's order."""
        places = [(int(r.id.split("-r")[1].split("/")[0]), int(r.id.rsplit("/", 1)[1])) for r in requests]
        self.forced.length_of_seed = {r.seed: self.lengths[at] for r, at in zip(requests, places, strict=True)}
        return self.generate(requests, *args)

    def step(self, setting: str) -> None:
        run, config = self.run, self.run.config
        self.lengths = response_lengths(setting, run.step, self.shape)
        run.clock.take()
        taken, cursor = data.take(run.training, run.cursor, config.rollout.prompts_per_step, config.seed)
        with run.clock("collect"):
            groups, waiting = run.collect(taken)
        scored = run.score(groups)
        advantages, minibatches = run.pack(scored)
        updated = update(run.policy, run.optimizer, minibatches, config, run.skips)
        run.engine.load(run.policy)
        run.advance(cursor, waiting)
        start = time.perf_counter()
        row = run.measure(scored, advantages, minibatches, updated)
        run.record(row)
        records_s = time.perf_counter() - start  # the clock stops inside `measure`; its cost belongs to the step
        assert not row["update/samples_without_signal"], "a sample without a gradient makes the comparison unfair"
        whole = row["time/step_s"] + records_s
        self.side.add(setting, row["time/collect_s"], whole, row["update/trained_tokens"])


def recipe(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Our side's recipe."""
    source = {"source": "python", "function": f"{__file__}:prompts", "format": "text", "answer_column": ""}
    return {
        "name": "bench",
        "output": str(folder),
        "model": {"path": str(folder / "model")},
        "data": source | {"parameters": {"num": args.prompts, "vocabulary": args.vocabulary}},
        "rewards": [{"type": "function", "function": f"{__file__}:alternating"}],
        "rollout": {
            "prompts_per_step": args.prompts,
            "group_size": args.group,
            "max_prompt_tokens": 64,
            "max_response_tokens": LONGEST,
            "old_logprobs": args.old_logprobs,
        },
        "training": {"steps": args.steps * 4, "minibatches": args.minibatches, "micro_batch_tokens": args.micro_tokens},
        "checkpoint": {"every": 10**6},
    }


# ---- TRL --------------------------------------------------------------------------------------------------


class ForcedEnds(LogitsProcessor):
    """Make the end of sequence certain where it is wanted and impossible before."""

    def __init__(self, length_R: torch.Tensor, eos: int, prompt: int) -> None:
        self.length_R, self.eos, self.prompt = length_R, eos, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.eos] = -torch.inf
        due_R = self.length_R == input_ids.shape[1] - self.prompt + 1
        scores[due_R] = -torch.inf
        scores[due_R, self.eos] = 0
        return scores


class Theirs(TrainerCallback):
    """TRL's trainer; whenever it has finished a rollout batch, the other side has its turn."""

    def __init__(self, args: argparse.Namespace, folder: Path, ours: Ours) -> None:
        self.args, self.ours, self.side = args, ours, Side("TRL")
        self.settings = [SETTINGS[i % 2] for i in range(args.steps * 2 + 2)]
        self.trainer = trainer(args, folder, len(self.settings))
        self.trainer.add_callback(self)
        self.model = self.trainer.model
        self.eos = self.trainer.processing_class.eos_token_id
        self.model.generate = functools.partial(self._forced, self.model.generate)
        self.model.generate_batch = self._forced_batch
        self._generate, self.trainer._generate = self.trainer._generate, self._timed_generate
        self._loss, self.trainer.compute_loss = self.trainer.compute_loss, self._counted_loss

    def run(self) -> None:
        self.start, self.tokens = time.perf_counter(), 0
        self.trainer.train()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.args.minibatches:
            return
        setting = self.settings[state.global_step // self.args.minibatches - 1]
        self.side.add(setting, self.generation_s, time.perf_counter() - self.start, self.tokens)
        self.ours.step(setting)
        self.start, self.tokens = time.perf_counter(), 0

    def _timed_generate(self, *args: Any) -> Any:
        step = self.trainer.state.global_step // self.args.minibatches
        self.lengths = response_lengths(self.settings[step], step, self.ours.shape).flatten()
        start = time.perf_counter()
        out = self._generate(*args)
        self.generation_s = time.perf_counter() - start
        return out

    def _counted_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.tokens += int(inputs["completion_mask"].sum())
        return self._loss(model, inputs, *args, **kwargs)

    def _forced(self, generate: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        ends = ForcedEnds(torch.from_numpy(self.lengths), self.eos, input_ids.shape[1])
        return generate(input_ids=input_ids, logits_processor=LogitsProcessorList([ends]), **kwargs)

    def _forced_batch(self, prompt_ids: list[list[int]], **kwargs: Any) -> dict[str, Any]:
        out = generate_batch(self.model, prompt_ids, self.lengths, **kwargs)
        for result in out.values():
            result.generated_tokens[-1] = self.eos
        return out


def trainer(args: argparse.Namespace, folder: Path, steps: int) -> Any:
    """TRL's GRPOTrainer at GSPO's paper-faithful setting."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    minibatch = args.prompts * args.group // args.minibatches
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=steps * args.minibatches,
        per_device_train_batch_size=minibatch // args.trl_accumulation,
        gradient_accumulation_steps=args.trl_accumulation,
        steps_per_generation=args.minibatches * args.trl_accumulation,
        num_generations=args.group,
        max_completion_length=LONGEST,
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=3e-4,
        epsilon_high=4e-4,
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        use_transformers_continuous_batching=args.trl_continuous_batching,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        logging_steps=args.minibatches,
        disable_tqdm=True,
        save_strategy="no",
        report_to=[],
    )
    rows = Dataset.from_list(prompts(args.prompts, args.vocabulary) * steps)
    reward = lambda completions, **kwargs: alternating(completions)  # noqa: E731
    return GRPOTrainer(model=str(folder / "model"), args=config, reward_funcs=reward, train_dataset=rows)


# ---- generation alone -------------------------------------------------------------------------------------


def compare_engines(args: argparse.Namespace, ours: Ours, folder: Path) -> None:
    """Print tokens a second of generation alone on the same requests: our engine, `generate_batch`, `generate`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    taken, _ = data.take(ours.run.training, data.Cursor(), args.prompts, 0)
    ours.lengths = response_lengths("variable", 0, ours.shape)
    rows = sorted(taken, key=lambda p: p.row)
    ids = [list(p.token_ids) for p in rows for _ in range(args.group)]
    lengths = ours.lengths.flatten()
    eos, pad = ours.forced.eos, ours.run.policy.tokenizer.pad_token_id
    config = GenerationConfig(do_sample=True, max_new_tokens=LONGEST, eos_token_id=eos, pad_token_id=pad)
    width = max(map(len, ids))
    padded = torch.tensor([[pad] * (width - len(i)) + i for i in ids])
    ends = LogitsProcessorList([ForcedEnds(torch.from_numpy(lengths), eos, width)])
    mask = (padded != pad).long()
    calls = {
        "gspo's engine": lambda: ours.run.collect(rows),
        "transformers generate": lambda: model.generate(
            padded, attention_mask=mask, generation_config=config, logits_processor=ends
        ),
        # last: it leaves the model with its own, paged attention
        "transformers generate_batch": lambda: generate_batch(model, ids, lengths, generation_config=config),
    }
    print(f"\ngeneration alone at variable lengths, {lengths.sum()} tokens:")
    for name, call in calls.items():
        seconds = statistics.median(_seconds(call) for _ in range(3))
        print(f"  {name:28} {seconds:6.2f} s {lengths.sum() / seconds:8.0f} tokens/s")


@torch.no_grad()
def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ---- the comparison ---------------------------------------------------------------------------------------


def table(theirs: Side, ours: Side) -> None:
    """Print seconds of both sides and their ratio."""
    print(f"\n{'lengths':10} {'stage':12} {'TRL s':>8} {'ours s':>8} {'TRL/ours':>9}   tokens a step")
    for setting in SETTINGS:
        assert theirs.tokens[setting] == ours.tokens[setting], "the two sides trained on different numbers of tokens"
        a, b = theirs.medians(setting), ours.medians(setting)
        mean = statistics.mean(ours.tokens[setting])
        for stage in a:
            print(f"{setting:10} {stage:12} {a[stage]:8.2f} {b[stage]:8.2f} {a[stage] / b[stage]:9.2f}   {mean:.0f}")


@contextmanager
def silence():
    """Keep both sides' own lines out of the table."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def parse() -> argparse.Namespace:
    """The command line; `--steps` are measured steps of each side and setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = {"steps": 5, "threads": 2, "prompts": 16, "group": 8, "minibatches": 4, "vocabulary": 8000}
    defaults |= {"hidden": 256, "intermediate": 1024, "layers": 4, "heads": 4, "kv_heads": 2}
    defaults |= {"micro_tokens": 8192, "trl_accumulation": 1}
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--old-logprobs", default="auto", choices=["auto", "engine", "trainer"])
    parser.add_argument("--trl-continuous-batching", action="store_true")
    parser.add_argument("--compare-engines", action="store_true", help="also time generation alone, three ways")
    return parser.parse_args()


def save_model(args: argparse.Namespace, folder: Path) -> None:
    """The model that both sides load."""
    torch.manual_seed(0)
    alphabet = "".join(chr(FIRST_CHARACTER + i) for i in range(args.vocabulary - 2))
    config = CreateConfig(
        alphabet=alphabet,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
    )
    for part in create(config):
        part.save_pretrained(folder)


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(args, folder / "model")
        with silence(), open_run(build(recipe(args, folder)), None, resume=False) as run:
            ours = Ours(run, (args.prompts, args.group))
            theirs = Theirs(args, folder, ours)
            with run.signals.interruptible():
                theirs.run()
            assert run.optimizer.updates == theirs.trainer.state.global_step
        packages = ("gspo", "trl", "transformers", "torch")
        print(", ".join(f"{p} {version(p)}" for p in packages), f"{args.threads} threads", sep=", ")
        print(", ".join(f"{k} {v}" for k, v in vars(args).items()))
        table(theirs.side, ours.side)
        if args.compare_engines:
            compare_engines(args, ours, folder / "model")


if __name__ == "__main__":
    main()
