"""Several processes are one run: same gradients, same samples, same checkpoints, and all end when one does."""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_config, tiny_policy
from ranks import CASES, DTYPES, ENDS, LENGTHS, recipe
from safetensors.torch import load_file

from gspo.distributed import World, packed
from gspo.training import sharding
from gspo.training.policy import require_one_rank
from gspo.training.pretrained import ModelError
from gspo.training.sharding import share_by_tokens
from gspo.types import Trajectory

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> Path:
    """What the jobs of ranks.py left."""
    folder = tmp_path_factory.mktemp("ranks")
    words = [sys.executable, "-W", "error::UserWarning", str(TESTS / "ranks.py"), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def ended(jobs: Path, name: str) -> dict:
    return json.loads((jobs / f"{name}.json").read_text())


def succeeded(jobs: Path, name: str) -> dict:
    job = ended(jobs, name)
    assert set(job["statuses"]) == {0}, job["said"]
    return job


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "tiny" / "metrics.jsonl").read_text().splitlines()]


def samples(run: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run / "tiny" / f"samples/step-{step:06d}.jsonl").read_text().splitlines()]


# ---- the same mathematics ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_several_ranks_is_that_of_one(jobs, case, size):
    for world in (1, size):
        succeeded(jobs, f"laws-{world}")
    one, many = (load_file(jobs / f"ranks-{n}" / f"{case}.safetensors") for n in (1, size))
    assert one.keys() == many.keys() == tiny_policy().trainable.keys()
    for name, gradient in one.items():
        assert (many[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    moved = any(gradient.any() for gradient in one.values())
    assert moved is (CASES[case][1] > 0)


@pytest.mark.parametrize(
    ("bytes_of_layers", "of_a_group"), [([8] * 5, [2, 2, 1]), ([16, 4, 4, 8, 20], [1, 3, 1]), ([4], [1])]
)
def test_layers_are_gathered_in_groups_of_a_size(monkeypatch, bytes_of_layers, of_a_group):
    monkeypatch.setattr(sharding, "GROUP_BYTES", 16)
    layers = torch.nn.ModuleList(torch.nn.Linear(1, n // 4, bias=False) for n in bytes_of_layers)
    groups = sharding._groups(layers)
    assert [len(group) for group in groups] == of_a_group and [x for group in groups for x in group] == list(layers)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_looking_ahead_leaves_out_passes_on_all_ranks_alike_and_makes_the_same_updates(jobs, size):
    succeeded(jobs, f"laws-{size}")
    plain, ahead = json.loads((jobs / f"ranks-{size}" / "said.json").read_text())["ahead"]
    assert (plain["looked_ahead"], ahead["looked_ahead"]) == (0, 3)
    assert ahead["losses"] == pytest.approx(plain["losses"], rel=1e-4, abs=1e-6)
    assert len(set(ahead["passes"])) == 1  # one process leaves some out without looking ahead
    assert ahead["passes"][0] < (1 if size == 1 else 0.8) * plain["passes"][0]
    one, some, fewer = (
        load_file(jobs / f"ranks-{n}" / f"ahead-{share}.safetensors") for n, share in ((1, 2), (size, 2), (size, 0))
    )
    for name, weight in one.items():
        torch.testing.assert_close(some[name], weight, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(fewer[name], weight, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_overflow_on_one_rank_lowers_the_loss_scale_of_all(jobs, size):
    succeeded(jobs, f"laws-{size}")
    assert json.loads((jobs / f"ranks-{size}" / "said.json").read_text())["overflow"] == [[0.5, True]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_loss_mismatch_and_diagnosis_are_those_of_the_whole_batch(jobs, size):
    one, many = (json.loads((jobs / f"ranks-{n}" / "said.json").read_text()) for n in (1, size))
    for case in CASES:
        assert many[case]["loss"] == pytest.approx(one[case]["loss"], rel=1e-5, abs=1e-8)
        assert many[case]["mismatch"] == (one[case]["mismatch"] and pytest.approx(one[case]["mismatch"], rel=1e-2))
        assert many[case]["samples"] == one[case]["samples"]
        assert len(many[case]["samples"]) == CASES[case][1]
    for objective in ("gspo", "grpo"):  # the cases are what their names say
        assert len(set(many[f"{objective}, unequal passes"]["micro_batches"])) == (2 if size == 2 else 1)
        assert sorted(many[f"{objective}, a rank without samples"]["micro_batches"])[0] == 0


def test_a_minibatch_is_shared_by_tokens_and_every_rank_knows_how():
    rng = np.random.default_rng(0)
    batch = [_trajectory(f"s{i}", int(n)) for i, n in enumerate(rng.integers(2, 400, 50))]
    shares = [share_by_tokens(batch, World(rank, 4)) for rank in range(4)]
    assert sorted(t.id for share in shares for t in share) == sorted(t.id for t in batch)
    tokens = [sum(len(t.token_ids) for t in share) for share in shares]
    assert max(tokens) - min(tokens) < 0.02 * sum(tokens)  # by rows it would be a tenth
    assert len({len(share) for share in shares}) > 1


@pytest.mark.parametrize(("groups", "together"), [(8, True), (4, True), (3, False)])
def test_samples_that_share_a_prompt_stay_together_unless_ranks_would_wait(groups, together):
    batch = [_trajectory(f"{g}/{k}", 30 + k, group=f"{g}", prompt=20) for g in range(groups) for k in range(4)]
    shares = [share_by_tokens(batch, World(rank, 2)) for rank in range(2)]
    assert sorted(t.id for share in shares for t in share) == sorted(t.id for t in batch)
    assert ({t.group for t in shares[0]}.isdisjoint(t.group for t in shares[1])) == together


def _trajectory(name: str, length: int, group: str = "", prompt: int = 1) -> Trajectory:
    trained, logp = np.arange(length) >= prompt, np.zeros(length - prompt, np.float32)
    return Trajectory(name, group or name, np.zeros(length, np.int64), trained, logp, 1.0)


# ---- the same run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_draw_the_samples_of_one(jobs, size):
    for world in (1, size):
        succeeded(jobs, f"run-{world}")
    drawn = ("id", "prompt", "response", "reward", "advantage", "seed", "num_tokens", "weight_version")
    one, many = ([{k: s[k] for k in drawn} for s in samples(jobs / f"run-{n}", 1)] for n in (1, size))
    assert one == many and len(many) == 16


def test_which_samples_are_suspended_does_not_depend_on_the_number_of_ranks(jobs):
    waiting = []
    for size in (1, 2):
        succeeded(jobs, f"partial-{size}")
        saved = jobs / f"partial-{size}/tiny/checkpoints/step-000003/state.json"
        waiting.append(json.loads(saved.read_text(), parse_float=lambda text: None))  # but for rounding
    assert waiting[0]["waiting"] == waiting[1]["waiting"] and len(waiting[0]["waiting"]) > 1
    for step in (1, 2, 3):
        one, two = ([(s["id"], s["response"]) for s in samples(jobs / f"partial-{n}", step)] for n in (1, 2))
        assert one == two


@pytest.mark.parametrize("size", [2, 3])
def test_records_hold_all_ranks_and_are_written_once(jobs, size):
    one, many = rows(jobs / "run-1"), rows(jobs / f"run-{size}")
    assert [row["step"] for row in many] == [0, 1, 2, 3]
    for a, b in zip(one[:2], many[:2], strict=True):  # before and at step 1; later steps may draw other samples
        assert a.keys() == b.keys()
        for key in a:
            if not key.startswith(("time", "system/", "rollout/tokens_per_s", "mismatch/", "update/micro_batches")):
                assert b[key] == pytest.approx(a[key], rel=1e-3, abs=1e-6), key
    assert (jobs / f"run-{size}" / "tiny" / "report.html").exists()
    first, *others = succeeded(jobs, f"run-{size}")["said"]
    assert "ended after step 3 of 3" in first and "report.html" in first
    assert not any("tiny" in said for said in others)


@pytest.mark.parametrize("route", ["1-to-2", "2-to-1", "2-to-3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_goes_on_with_any_number_of_ranks(jobs, route, dtype):
    was = route[0]
    succeeded(jobs, f"ranks-{route}")
    written = jobs / f"ranks-{was}" / dtype / "step-000008"
    again = jobs / f"ranks-{route}" / dtype / "again" / "step-000008"
    for file in ("optimizer.safetensors", "model/model.safetensors"):
        old, new = load_file(written / file), load_file(again / file)
        assert old.keys() == new.keys()
        assert all(torch.equal(old[k], new[k]) for k in old), file
    assert (jobs / f"ranks-{route}" / dtype / "step-000016").exists()


def test_float32_training_does_not_depend_on_the_number_of_ranks(jobs):
    one, two, three = (load_file(jobs / f"ranks-{n}/float32/step-000008/model/model.safetensors") for n in (1, 2, 3))
    for name, weight in one.items():
        assert (two[name] - weight).norm() <= 1e-5 * weight.norm(), name
        assert (three[name] - weight).norm() <= 1e-5 * weight.norm(), name


# ---- the end ----------------------------------------------------------------------------------------------

SENTENCES = {
    "reward": (r"rank 0 stops, because rank 1 failed: reward troubled failed on .*the verifier is down", "rank 1: reward"),
    "update": (r"rank 0 stops, because rank 1 failed: the weights are broken", "rank 1: the weights are broken"),
    "SIGKILL": (r"rank 0 stops, because another rank ended without a word", ""),
    "quit": (r"rank 0 stops, because rank 1 failed: stopped at once", "rank 1: stopped at once"),
    "SIGTERM": (r"rank 0: stopped by SIGTERM", "rank 1: stopped by SIGTERM"),
    "sampling": (r"rank 0: stopped by SIGTERM", "rank 1: stopped by SIGTERM"),
    "first": (r"rank 0: the weights are broken", "rank 1 stops, because "),
}
STATUSES = {"SIGKILL": [1, -9], "quit": [1, 130], "SIGTERM": [143, 143], "sampling": [143, 143]}


@pytest.mark.parametrize("trouble", ENDS)
def test_one_ranks_end_is_every_ranks_end_with_its_reason(jobs, trouble):
    job = ended(jobs, f"end-{trouble}")
    assert job["statuses"] == STATUSES.get(trouble, [1, 1]), job["said"]
    assert max(job["seconds"]) < 30  # the other rank of `quit` would have slept for a minute
    for said, wanted in zip(job["said"], SENTENCES[trouble], strict=True):
        assert re.search(f"^gspo: .*{wanted}" if wanted else "", said, re.MULTILINE), said
        assert "Traceback" not in said
    assert ("saved at step 1" in job["said"][0]) is (trouble in ("reward", "SIGTERM", "sampling"))


@pytest.mark.parametrize("trouble", ["reward", "SIGTERM", "update"])
def test_what_was_done_together_is_saved_and_goes_on(jobs, trouble):
    saved = "saved at step 1" in ended(jobs, f"end-{trouble}")["said"][0]
    assert saved is (trouble != "update")  # weights may have moved on some ranks: the last checkpoint stands
    again = succeeded(jobs, f"end-{trouble}-resumed")["said"][0]
    assert ("going on after step 1" in again) is saved
    assert [row["step"] for row in rows(jobs / f"end-{trouble}")] == [1, 2, 3]


def test_what_several_ranks_cannot_do_is_refused_by_name(jobs):
    for name, wanted in (("lora", "[model.lora] is for one"), ("eval", "gspo eval runs in one process")):
        job = ended(jobs, f"refused-{name}")
        assert set(job["statuses"]) <= {1, 2} and all(wanted in said for said in job["said"]), job["said"]
    assert not (jobs / "refused" / "tiny" / "metrics.jsonl").exists()


def test_moments_in_eight_bits_are_refused_among_several_ranks(tmp_path):
    config = tiny_config(tmp_path)
    eight = config.model_copy(update={"training": config.training.model_copy(update={"moments": "8bit"})})
    require_one_rank(config, World(0, 2))
    require_one_rank(eight, World(0, 1))
    with pytest.raises(ModelError, match=r'training.moments = "8bit" is for one process, and these are 2'):
        require_one_rank(eight, World(0, 2))


def test_a_cold_start_of_several_ranks_is_that_of_one(jobs):
    for size in (1, 2):
        succeeded(jobs, f"cold-{size}")
    one, two = ([json.loads(x) for x in _cold(jobs, n).joinpath("metrics.jsonl").read_text().splitlines()] for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        for key in a.keys() - {"time", "time/step_s"}:
            assert b[key] == pytest.approx(a[key], rel=1e-4), key
    weights = [load_file(_cold(jobs, n) / "checkpoints/step-000003/model/model.safetensors") for n in (1, 2)]
    for name, weight in weights[0].items():
        assert (weights[1][name] - weight).norm() <= 1e-4 * weight.norm(), name


def _cold(jobs: Path, size: int) -> Path:
    return jobs / f"cold-{size}" / "tiny" / "cold_start"


# ---- several hosts ----------------------------------------------------------------------------------------


def test_a_host_that_dies_ends_the_run_everywhere_and_it_goes_on(tmp_path):
    path = recipe(tmp_path, checkpoint__every=1)
    dead, living = sorted(_agents(path, TROUBLE="host", TROUBLED_RANK="1"))
    assert dead[0] == -9 and living[0] == 1, living[1]
    assert "gspo: rank 0 stops, because another rank ended without a word, or its host is gone" in living[1]
    assert [row["step"] for row in rows(tmp_path)] == [1]
    again = _agents(path, "--resume")
    assert [status for status, _ in again] == [0, 0], "\n".join(text for _, text in again)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


def _agents(path: Path, *words: str, **environment: str) -> list[tuple[int, str]]:
    """A run by two launch agents of torchrun, as two hosts have one each: exit status and output of both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "run", "-m", "gspo.cli", "train", str(path), *words,
    ]  # fmt: skip
    agents = [
        subprocess.Popen(
            torchrun, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | environment
        )
        for _ in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [(agent.returncode, output) for agent, output in zip(agents, outputs, strict=True)]


def test_the_batch_of_these_tests_is_uneven():
    assert len(LENGTHS) % 2 == 1 and len(set(LENGTHS)) == len(LENGTHS)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).T, torch.tensor(3), torch.tensor([True, False]), torch.zeros(0, 2),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.tensor([1 / 3], dtype=torch.float64),
        torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True),
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)  # fmt: skip
def test_what_ranks_tell_each_other_arrives_as_it_was(tensor):
    sent = [("id", {"T": tensor, "none": None}), float("nan")]
    (name, table), number = pickle.loads(packed(sent))
    assert name == "id" and table["none"] is None and np.isnan(number)
    found = table["T"]
    assert (type(found), found.dtype, found.requires_grad) == (type(tensor), tensor.dtype, tensor.requires_grad)
    assert torch.equal(found, tensor)
    assert not found.detach().zero_().any()  # it may be written to
