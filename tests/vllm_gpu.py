"""vLLM on a GPU, by hand: what the tests hold the CPU build to, and what it cannot do.

Models of each kind, whose weights move twice: engine and trainer must agree after each load, in float32 as closely as their
kernels do. A load must hold no second copy of the model, an engine asleep next to no memory, a run that ended none. A
mixture's experts must be those that the trainer chooses for the same tokens, one row short of them, and replaying them must
train. Prints each number, and exits with 1 if one is not right. A start of the engine takes half a minute.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch

from gspo.training.policy import Policy

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
SHAPE = {"num_heads": 2, "num_kv_heads": 1, "num_layers": 4}
EXPERTS = {"num_experts": 16, "experts_per_token": 4, "moe_intermediate_size": 64}
KINDS = ("tied", "untied", "lora", "experts")
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.02}
"""Mean |log p(engine) - log p(trainer)| a token, nats, of these small models."""
FLIPS = 0.01
"""Of the engine's choices in float32: where two experts are equally good to rounding, either may be taken."""

failures: list[str] = []


def told(name: str, value: float, most: float, unit: str = "") -> None:
    """Print a number, and remember it if it is too large."""
    right = value <= most
    print(f"{name:58} {value:10.3g} {unit:5} at most {most:g}{'' if right else '   WRONG'}", flush=True)
    if not right:
        failures.append(name)


def policy_of(kind: str, dtype: str) -> Policy:
    """A small model on the GPU, whose routers, if it has any, are not indifferent."""
    from test_vllm import policy_of

    policy = policy_of(kind, dtype, device="cuda", **SHAPE, **(EXPERTS if kind == "experts" else {}))
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                p.normal_(std=0.3)
    return policy


def kinds() -> None:
    """Two updates of each kind of model in each precision."""
    from test_vllm import move, prober, start

    for dtype, tolerance in TOLERANCE.items():
        for kind in KINDS:
            policy = policy_of(kind, dtype)
            probe = prober(policy)
            probe.tolerance = 1.0
            worst = 0.0
            with start(policy, memory_fraction=0.1) as engine:
                for _ in range(2):
                    move(policy)
                    engine.load(policy)
                    worst = max(worst, probe(engine))
            told(f"{kind}, {dtype}: engine from trainer after an update", worst, tolerance, "nats")


def load_peak() -> None:
    """What a load allocates, of a model of 672 MiB in bfloat16, and its seconds."""
    import time

    from conftest import tiny_model
    from test_vllm import start

    from gspo.training.policy import load_policy

    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8}
    config = tiny_model("bfloat16", **shape).model_copy(update={"device": "cuda", "kernels": "torch"})
    policy = load_policy(config, temperature=1.0, seed=0)
    size = sum(p.numel() * p.element_size() for p in policy.model.parameters())
    with start(policy, memory_fraction=0.2) as engine:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        engine.load(policy)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        told("a load's peak, of the model's bytes", (torch.cuda.max_memory_allocated() - before) / size, 0.25)
    told(f"loading {size / 2**20:.0f} MiB", seconds, 0.25, "s")


def routed_experts() -> None:
    """Samples with the experts of every token; both engines draw the same tokens in float32."""
    from test_vllm import assert_same, requests

    from gspo.config import SamplingConfig, VllmConfig
    from gspo.rollout.transformers import TransformersEngine
    from gspo.rollout.vllm import VllmEngine

    policy, config = policy_of("experts", "float32"), SamplingConfig(max_response_tokens=24)
    engine = VllmEngine(policy, VllmConfig(memory_fraction=0.1), max_rows=8, max_tokens=256, routed_experts=True)
    try:
        engine.load(policy)
        ours = engine.generate(requests(), config)
        theirs = TransformersEngine(policy, max_rows=64, routed_experts=True).generate(requests(), config)
        assert_same(ours, theirs, 5e-3)
        experts = [[np.asarray(c.routed_experts, int) for c in some] for some in (ours, theirs)]
        for request, completion, rows in zip(requests(), ours, experts[0], strict=True):
            assert len(rows) == len(request.prompt) + len(completion.token_ids) - 1, (request.id, rows.shape)
        a, b = map(np.concatenate, experts)
        kept = (a[..., :, None] == b[..., None, :]).any(-1)
        told(f"experts of {len(a)} tokens: choices the trainer does not make", float(1 - kept.mean()), FLIPS)
    finally:
        engine.close()


def replayed() -> None:
    """Three steps with the engine's choices replayed, of a mixture that learns to sort."""
    from gspo.loop import train
    from gspo.recipe import load
    from gspo.reporting.records import read_metrics

    create = {"num_layers": 4, "hidden_size": 128, "num_heads": 2, "num_kv_heads": 1} | EXPERTS
    settings = {f"model.create.{key}": value for key, value in create.items()} | {
        "data.parameters": '{"digits": 2}', "evaluation.data.parameters": '{"digits": 2, "size": 64}',
        "evaluation.overlap": "allow", "rollout.engine": "vllm", "rollout.vllm.memory_fraction": 0.1,
        "rollout.routed_experts": "true", "training.replay": "engine", "training.steps": 3, "training.warmup_updates": 0,
        "model.device": "cuda", "model.kernels": "torch",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        words = [str(w) for key, value in (settings | {"output": folder}).items() for w in (f"--{key}", value)]
        os.chdir(ROOT)
        train(load("experiments/sorting.toml", words))
        rows = read_metrics(next(Path(folder).iterdir()))
    for row in rows[1:]:
        flips, own = row["moe/flips_by_minibatch"], row["moe/engine_flips"]
        if own is None:  # no group had a signal, and nothing was trained
            continue
        told(f"step {row['step']}, the engine's choices replayed: flips", max(f for f in flips if f is not None), 0)
        told("of the engine's choices, those that routers do not make of themselves", own, FLIPS)
        print(f"  loss {row['objective/loss']:.6f}, {row['moe/replay_bytes']:,} bytes, {row['moe/replay_s'] * 1e3:.2f} ms")


def sleeping() -> None:
    """What a sleeping engine gives back of a GPU's memory, and the seconds to sleep and to wake with new weights."""
    import time

    from test_vllm import assert_same, move, requests, start

    from gspo.config import SamplingConfig
    from gspo.rollout.transformers import TransformersEngine

    policy, config, fraction = policy_of("tied", "float32"), SamplingConfig(max_response_tokens=24), 0.3
    with start(policy, memory_fraction=fraction, sleep=True) as engine:
        engine.generate(requests(), config)
        awake, began = used_gib(), time.perf_counter()
        engine.rest()
        asleep, slept = used_gib(), time.perf_counter()
        move(policy)
        engine.load(policy)
        print(f"to sleep {slept - began:.3f} s, to wake with new weights {time.perf_counter() - slept:.3f} s")
        told(f"in use asleep, GiB ({awake:.1f} awake)", asleep, awake / 10, "GiB")
        assert_same(
            engine.generate(requests(), config), TransformersEngine(policy, max_rows=64).generate(requests(), config), 5e-3
        )
        engine.rest()  # and is closed so


def used_gib() -> float:
    """Of the GPU's memory, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def ends() -> None:
    """A run that ends by SIGINT, SIGTERM or a failing reward, each in a process of its own: what it leaves of memory in use
    on the GPU and of its processes."""
    import subprocess
    import time

    torch.cuda.synchronize()
    before = used_gib()
    for end in ("INT", "TERM", "RAISE"):
        with tempfile.TemporaryDirectory() as folder:
            fail = ["--fail"] if end == "RAISE" else []
            words = [sys.executable, str(ROOT / "tests" / "vllm_run.py"), folder, "--device", "cuda", *fail]
            wanted = 4 if end == "RAISE" else 3
            output = Path(folder, "output.txt")
            with output.open("wb") as file:
                run = subprocess.Popen(words, start_new_session=True, stdout=file, stderr=file)
            metrics, deadline = Path(folder, "tiny", "metrics.jsonl"), time.time() + 150
            try:
                while run.poll() is None and time.time() < deadline:
                    if end != "RAISE" and metrics.exists() and metrics.read_text().count("\n") >= 2:
                        os.kill(run.pid, getattr(signal, f"SIG{end}"))
                        break
                    time.sleep(0.1)
                if (code := run.wait(60)) != wanted:
                    print(output.read_text()[-2000:])
                told(f"{end}: its exit code, less the wanted", abs(code - wanted), 0)
            finally:
                if run.poll() is None:
                    run.kill()
                    run.wait()
            left = subprocess.run(["pgrep", "-s", str(run.pid)], capture_output=True, text=True).stdout.split()
            told(f"{end}: processes that stayed", len(left), 0)
            told(f"{end}: GPU memory that stayed", used_gib() - before, 0.01, "GiB")


def main() -> int:
    """0 if every number is right."""
    parts = {part.__name__: part for part in (routed_experts, replayed, load_peak, sleeping, ends, kinds)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(parts)}; all without one")
    chosen = parser.parse_args().parts or list(parts)
    if wrong := set(chosen) - set(parts):
        parser.error(f"no such part: {', '.join(wrong)}")
    warnings.simplefilter("ignore")
    import vllm  # pyright: ignore[reportMissingImports]

    print(f"vLLM {vllm.__version__}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for part in [parts[name] for name in chosen]:
        try:
            part()
        except Exception as error:  # the other parts are still told
            failures.append(part.__name__)
            print(f"{part.__name__}: {type(error).__name__}: {error}", flush=True)
    print(f"not right: {', '.join(failures)}" if failures else "all right")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
