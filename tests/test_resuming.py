"""Resuming equals never having stopped, bit for bit, wherever and however a run was stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import tiny_config, tiny_model, tiny_policy
from killing import STEPS, config
from safetensors.torch import load_file

from gspo.config import TrainingConfig
from gspo.loop import train
from gspo.recipe import RecipeError
from gspo.signals import Interrupted, Signals
from gspo.training import checkpoint
from gspo.training.optimizer import Optimizer
from gspo.training.policy import load_policy
from gspo.training.pretrained import ModelError

TESTS = Path(__file__).parent


def state(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step:06d}"
    weights = load_file(folder / "model" / "model.safetensors")
    both = weights | {f"optimizer/{k}": v for k, v in load_file(folder / "optimizer.safetensors").items()}
    return {k: v.clone() for k, v in both.items()}  # load_file maps the file, which tests then damage


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a), [k for k in a if not torch.equal(a[k], b[k])]


def timeless(run: Path) -> list[dict]:
    """Metrics without what depends on the clock or the machine."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = (
        "reward",
        "rollout/response",
        "policy",
        "ratio",
        "clip",
        "update",
        "mismatch",
        "evaluation",
        "step",
        "objective",
    )
    return [{k: v for k, v in row.items() if k.startswith(kept)} for row in rows]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_six_steps_equal_three_plus_three(tmp_path, dtype):
    changes = {"model__dtype": dtype, "training__schedule": "linear", "training__minibatches": 4, "data__size": 10}
    whole = train(tiny_config(tmp_path, name="whole", training__steps=6, **changes))
    first = tiny_config(tmp_path, name="parts", training__steps=6, checkpoint__every=3, checkpoint__keep=5, **changes)
    # Stopping at three with a schedule that ends at six: take the checkpoint of step three and forget what came later.
    parts = train(first)
    shutil.rmtree(parts / "checkpoints" / "step-000006")
    (parts / "report.html").unlink()
    train(first, resume=True)
    assert_same(state(whole, 6), state(parts, 6))
    assert timeless(whole) == timeless(parts)
    assert [r["step"] for r in timeless(parts)] == [1, 2, 3, 4, 5, 6]
    cursors = [json.loads((r / "checkpoints/step-000006/state.json").read_text())["cursor"] for r in (whole, parts)]
    assert cursors[0] == cursors[1] == {"epoch": 2, "index": 4}
    for step in range(1, 7):
        samples = [(r / f"samples/step-{step:06d}.jsonl").read_text() for r in (whole, parts)]
        assert samples[0] == samples[1]


@pytest.mark.parametrize("dtype", ["float32", "float16"])  # in float16 the first updates overflow
def test_lora_resumes_exactly(tmp_path, dtype):
    pytest.importorskip("peft")
    changes = {"model__dtype": dtype, "model__lora": {"rank": 2, "alpha": 4}, "training__steps": 4}
    whole = train(tiny_config(tmp_path, name="whole", **changes))
    settings = tiny_config(tmp_path, name="parts", checkpoint__every=2, checkpoint__keep=5, **changes)
    parts = train(settings)
    shutil.rmtree(parts / "checkpoints" / "step-000004")
    train(settings, resume=True)
    assert_same(state(whole, 4), state(parts, 4))


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over_with_a_message(tmp_path, capsys, damage):
    settings = tiny_config(tmp_path)
    run = train(settings)
    wanted = state(run, 3)
    newest = run / "checkpoints" / "step-000003"
    weights = newest / "model" / "model.safetensors"
    if damage == "truncated":
        os.truncate(weights, weights.stat().st_size // 2)
    elif damage == "changed":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    else:
        (weights if damage == "missing" else newest / checkpoint.MANIFEST).unlink()
    train(settings, resume=True)
    assert "passing over step-000003" in capsys.readouterr().out
    assert_same(state(run, 3), wanted)


def test_half_written_checkpoints_do_not_count(tmp_path):
    policy = tiny_policy()
    optimizer = Optimizer(policy.trainable, TrainingConfig(steps=1), 1)
    (tmp_path / ".step-000009.tmp" / "model").mkdir(parents=True)
    assert checkpoint.newest(tmp_path) is None
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, policy, optimizer, {}, step=step, keep=2)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.state["step"] == 3
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-000002", "step-000003"]


def test_a_checkpoint_holds_no_pickle(tmp_path):
    run = train(tiny_config(tmp_path))
    files = [p for p in (run / "checkpoints").rglob("*") if p.is_file()]
    assert {p.suffix for p in files} <= {".safetensors", ".json", ".jinja"}


def test_pickled_weights_are_never_loaded(tmp_path):
    policy = tiny_policy()
    policy.save(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(policy.model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ModelError):
        load_policy(tiny_model(), temperature=1.0, seed=0, path=tmp_path / "model")


def test_a_run_is_not_overwritten_and_not_continued_with_other_settings(tmp_path):
    settings = tiny_config(tmp_path)
    train(settings)
    with pytest.raises(RecipeError, match="--resume"):
        train(settings)
    with pytest.raises(RecipeError, match="learning_rate"):
        train(tiny_config(tmp_path, training__learning_rate=5e-3), resume=True)
    longer = train(tiny_config(tmp_path, training__steps=4), resume=True)
    assert [r["step"] for r in timeless(longer)] == [1, 2, 3, 4]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The end of the run of killing.py that nothing stops."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the runs that are held against it
    try:
        return state(train(config(tmp_path_factory.mktemp("undisturbed"), "reference")), STEPS)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves_and_the_run_goes_on(tmp_path, undisturbed, number):
    code = (
        "import sys, torch; torch.set_num_threads(1); sys.path.insert(0, sys.argv[1])\n"
        "from killing import config\nfrom pathlib import Path\nimport gspo.cli, gspo.recipe, gspo.loop\n"
        "gspo.recipe.load = lambda *a: config(Path(sys.argv[2]), 'run')\n"
        "sys.exit(gspo.cli.main(['train', 'recipe.toml', *sys.argv[3:]]))"
    )
    words = [sys.executable, "-c", code, str(TESTS), str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > 4) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number, output
    assert "go on with --resume" in output
    done = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert 0 < done < STEPS and (tmp_path / "run" / "checkpoints" / f"step-{done:06d}").exists()
    again = subprocess.run([*words, "--resume"], capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stdout + again.stderr
    assert_same(state(tmp_path / "run", STEPS), undisturbed)


def test_a_terminal_that_closes_ends_a_run_and_under_nohup_does_not():
    old = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with Signals() as signals, pytest.raises(Interrupted, match="SIGHUP"), signals.interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Signals() as signals, signals.interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.caught is None
    finally:
        signal.signal(signal.SIGHUP, old)


def test_twenty_kills_at_random_moments_change_nothing(tmp_path):
    result = subprocess.run(
        [sys.executable, str(TESTS / "killing.py"), str(tmp_path), "0"],
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 20
    wanted, rows = state(tmp_path / "reference", STEPS), timeless(tmp_path / "reference")
    for name in {line["kill"] for line in lines}:
        assert_same(state(tmp_path / name, STEPS), wanted)
        assert timeless(tmp_path / name) == rows


def test_pruning_never_deletes_the_checkpoint_just_written(tmp_path):
    policy = tiny_policy()
    optimizer = Optimizer(policy.trainable, TrainingConfig(steps=1), 1)
    damaged = checkpoint.save(tmp_path, policy, optimizer, {}, step=40, keep=1)
    (damaged / checkpoint.MANIFEST).write_text("{}")
    assert checkpoint.newest(tmp_path) is None
    checkpoint.save(tmp_path, policy, optimizer, {}, step=25, keep=1)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.state["step"] == 25


def test_the_number_of_steps_is_free_only_under_a_constant_learning_rate(tmp_path):
    train(tiny_config(tmp_path, training__schedule="linear"))
    with pytest.raises(RecipeError, match=r"training\.steps"):
        train(tiny_config(tmp_path, training__schedule="linear", training__steps=4), resume=True)


def test_weights_from_a_file_begin_where_those_in_memory_do(tmp_path):
    policy = tiny_policy()
    policy.save(tmp_path)
    loaded = load_policy(tiny_model(), temperature=1.0, seed=0, path=tmp_path)
    assert {p.data_ptr() % 64 for p in (*policy.model.parameters(), *loaded.model.parameters())} == {0}
