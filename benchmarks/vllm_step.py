"""vLLM in our process against vLLM alone, and a whole step of ours against TRL's, on one GPU.

    pip install -e '.[vllm,bench]' liger-kernel && python benchmarks/vllm_step.py MODEL

16 prompts of about 120 tokens x 8 responses of exactly 1,024 tokens, four optimizer steps a rollout batch, bfloat16. Each
part runs in a process of its own, one after the other: vLLM alone with its own defaults, without log-probabilities, with
them, and with them flat; our engine with its loads and its probe; TRL's GRPOTrainer with vLLM in its process and the
settings that were its fastest (Liger, no checkpointing, micro-batches of 16); our loop with the engine's and with `auto`
old log-probabilities. Medians, the first two of each left out as warm-up; rewards are random in both.

Not covered: unequal lengths, several GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

PROMPTS, GROUP, MINIBATCHES = 16, 8, 4
TEXT = "A train leaves at nine and travels {} km at {} km per hour. How long is it on its way? Think step by step. "
PARTS = ("alone", "engine", "trl", "loop-engine", "loop-auto")


def problems(num: int = 512) -> list[dict[str, str]]:
    """A prompt source of ours and TRL's dataset."""
    return [{"prompt": TEXT.format(100 + i, 10 + i % 50) * 4, "answer": ""} for i in range(num)]


def parity(samples: list[Any]) -> list[float]:
    """A reward that is as good as random."""
    return [float(s.completion.token_ids.sum() % 2) for s in samples]


def seconds(work: Any, repeats: int = 5) -> dict[str, Any]:
    """Median, and all, of the repeats but the first two."""
    import torch

    took = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return {"median": round(statistics.median(took[2:]), 4), "all": [round(s, 4) for s in took[2:]]}


def alone(model: str, tokens: int) -> dict[str, Any]:
    """vLLM with its own defaults: a process for its engine, its own sampler."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", max_model_len=tokens + 512, gpu_memory_utilization=0.4, max_num_seqs=PROMPTS * GROUP)
    prompts = [p["prompt"] for p in problems(PROMPTS)]
    out = {}
    for name, more in {"none": {}, "logprobs": {"logprobs": 0}, "flat": {"logprobs": 0, "flat_logprobs": True}}.items():
        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, n=GROUP, detokenize=False, **more)
        out[f"generation_{name}_s"] = seconds(lambda p=params: llm.generate(prompts, p, use_tqdm=False))
    return out


def engine(model: str, tokens: int) -> dict[str, Any]:
    """Our engine alone."""
    from gspo.config import ModelConfig, SamplingConfig, VllmConfig
    from gspo.rollout.engine import Request
    from gspo.rollout.probe import Probe
    from gspo.rollout.vllm import VllmEngine
    from gspo.training.policy import load_policy
    from gspo.types import Prompt

    policy = load_policy(ModelConfig(path=model, dtype="bfloat16"), temperature=1.0, seed=0)
    policy.eos_ids = frozenset()  # all responses of one length
    prompts = [tuple(policy.tokenizer(p["prompt"]).input_ids) for p in problems(PROMPTS)]
    asked = [Request(f"{i}/{k}", p, 100 * i + k) for i, p in enumerate(prompts) for k in range(GROUP)]
    sampling = SamplingConfig(max_response_tokens=tokens)
    with closing(VllmEngine(policy, VllmConfig(), max_rows=len(asked), max_tokens=tokens + 512)) as vllm:
        vllm.load(policy)
        probe = Probe(policy, [Prompt(0, None, "", p, None) for p in prompts], sampling, tolerance=0.25)
        return {
            "generation_s": seconds(lambda: vllm.generate(asked, sampling)),
            "load_s": seconds(lambda: vllm.load(policy)),
            "probe_s": seconds(lambda: probe(vllm)),
            "probe": probe(vllm),
        }


def loop(model: str, tokens: int, old_logprobs: str, steps: int = 5) -> dict[str, float]:
    """Our training loop, its own records."""
    import gspo.training.policy
    from gspo.loop import train
    from gspo.recipe import build
    from gspo.run import Run

    gspo.training.policy.eos_ids = lambda *args: frozenset()  # all responses of one length
    Run.save = lambda self: None  # type: ignore[method-assign]
    source = {"source": "python", "function": f"{__file__}:problems", "format": "text", "answer_column": ""}
    rollout = {"engine": "vllm", "old_logprobs": old_logprobs, "vllm": {"memory_fraction": 0.3}}
    sizes = {"prompts_per_step": PROMPTS, "group_size": GROUP, "max_rows": PROMPTS * GROUP}
    with tempfile.TemporaryDirectory() as folder:
        train(
            build(
                {
                    "name": "bench",
                    "output": folder,
                    "model": {"path": model, "dtype": "bfloat16"},
                    "data": source,
                    "rewards": [{"type": "function", "function": f"{__file__}:parity"}],
                    "rollout": rollout | sizes | {"max_prompt_tokens": 256, "max_response_tokens": tokens},
                    "training": {"steps": steps, "minibatches": MINIBATCHES, "micro_batch_tokens": 16 * (tokens + 128)},
                }
            )
        )
        rows = [json.loads(line) for line in Path(folder, "bench", "metrics.jsonl").read_text().splitlines()][2:]
    keys = (
        "time/step_s",
        "time/collect_s",
        "time/update_s",
        "time/sync_s",
        "system/peak_memory_gib",
        "mismatch/recomputed",
    )
    return {key.split("/")[1]: statistics.median(row[key] for row in rows) for key in keys}


def trl(model: str, tokens: int, steps: int = 5) -> dict[str, float]:
    """TRL's trainer with the settings that were its fastest."""
    import torch
    import transformers
    from datasets import Dataset

    if not hasattr(transformers.PreTrainedModel, "warnings_issued"):  # TRL sets an entry of what transformers 5 took out
        transformers.PreTrainedModel.warnings_issued = {}
    from trl import GRPOConfig, GRPOTrainer

    batch, micro = PROMPTS * GROUP, 16
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=micro, steps_per_generation=batch // micro,
        gradient_accumulation_steps=batch // micro // MINIBATCHES, num_generations=GROUP, max_completion_length=tokens,
        importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4, beta=0.0, bf16=True,
        gradient_checkpointing=False, max_steps=steps * MINIBATCHES, save_strategy="no", report_to=[], use_vllm=True,
        vllm_mode="colocate", vllm_gpu_memory_utilization=0.3, vllm_max_model_length=tokens + 512, use_liger_kernel=True,
        generation_kwargs={"ignore_eos": True}, model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "sdpa"},
    )  # fmt: skip
    reward = lambda completions, completion_ids, **kw: [float(sum(ids) % 2) for ids in completion_ids]  # noqa: E731
    trainer = GRPOTrainer(model=model, args=config, reward_funcs=reward, train_dataset=Dataset.from_list(problems()))
    starts, generation = [], []
    generate = trainer._generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        starts.append(time.perf_counter())
        out = generate(*args, **kwargs)
        torch.cuda.synchronize()
        generation.append(time.perf_counter() - starts[-1])
        return out

    trainer._generate = timed
    trainer.train()
    torch.cuda.synchronize()
    whole = [b - a for a, b in zip(starts, [*starts[1:], time.perf_counter()], strict=True)]
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {
        "step_s": statistics.median(whole[2:]),
        "collect_s": statistics.median(generation[2:]),
        "peak_memory_gib": peak,
    }


def measure(part: str, model: str, tokens: int) -> dict[str, Any]:
    """One part, in this process."""
    if part.startswith("loop-"):
        return loop(model, tokens, part.removeprefix("loop-"))
    return {"alone": alone, "engine": engine, "trl": trl}[part](model, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a language model; weights may be random")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each response")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--here", action="store_true", help="the one part in this process (used by the script itself)")
    args = parser.parse_args()
    if args.here:
        import torch
        import vllm

        where = f"{torch.cuda.get_device_name()}, vLLM {vllm.__version__}, torch {torch.__version__}"
        print("RESULT " + json.dumps({**measure(args.parts[0], args.model, args.tokens), "on": where}), flush=True)
        return
    for part in args.parts:
        words = [sys.executable, __file__, args.model, "--tokens", str(args.tokens), "--parts", part, "--here"]
        done = subprocess.run(words, capture_output=True, text=True)
        found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        print(part, found[0].removeprefix("RESULT ") if found else f"failed: {done.stderr[-2000:]}", flush=True)


if __name__ == "__main__":
    main()
