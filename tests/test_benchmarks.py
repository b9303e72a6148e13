"""The benchmarks' own criteria: they pass what is linear, and find what is not."""

import copy
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import attention
import cost
import errors
import growth
import numpy as np
import pytest
import sides
import torch
import update
import vllm_cycles
import workload
from conftest import BENCHMARKS
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gspo.training.attention import NAME, Layout, Segment, packed_attention
from gspo.training.optimizer import Optimizer

SIZES = [1.0, 2.0, 4.0, 8.0, 16.0]
SCALE = replace(cost.SMALL, pack=(512, 2048, 16384))


def rows(curve: str, *, repeats: int = 2) -> list[dict[str, float]]:
    return cost.measure(curve, SCALE, cost.Models(workload.SHAPES["tiny"], "cpu", "torch"), repeats=repeats, retries=3)


def whole_pack_attention(module, query, key, value, *args, **kwargs):
    """The right result, at the price of attention over the whole pack."""
    out, _ = packed_attention(module, query, key, value, *args, **kwargs)
    whole, _ = sdpa_attention_forward(module, query, key, value, None, is_causal=True)
    return out + 0 * whole, None


ALL_LOGITS = """
def all_logits(hidden_TH, weight_VH, target_T, *, temperature, float32_head=False):
    logits_TV = (hidden_TH @ weight_VH.T / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy_T = -torch.linalg.vecdot(logits_TV.exp(), logits_TV)
    return logits_TV.gather(1, target_T[:, None])[:, 0], entropy_T
policy.linear_logprobs = all_logits
"""
MEMORY = """
import sys, torch
from gspo.training import policy
sys.path.insert(0, sys.argv[1])
import cost
{fault}
args = cost.parse(["--small", "--curves", "vocabulary", "--device", "cpu", "--repeats", "1"])
rows = cost.measure_here(args, cost.SMALL)
sys.exit(0 if cost.report("vocabulary", rows["vocabulary"], cost.SMALL, "cpu") else 1)
"""


# ---- what they are asked ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("update", "0.7B", "0.7B: neither one of 0.6B, 1.7B, 4B, tiny nor a folder"),
        ("update", "tiny --minibatches 0", "--minibatches: 0: must be a whole number of 1 or more"),
        ("update", "tiny --device cpu --responses 20", "--responses 20 is not a multiple of --group 8"),
        ("update", "tiny --device cpu --responses 128 --trl-micro 5", "not a multiple of 4 minibatches x 5"),
        ("update", "tiny --device cpu --kernels liger", "--kernels liger needs a GPU"),
        ("cost", "--repeats 0", "--repeats: 0: must be"),
        pytest.param("cost", "--device cuda", "torch sees no GPU", marks=pytest.mark.skipif("torch.cuda.is_available()")),
    ],
)
def test_a_command_line_that_cannot_be_measured_ends_in_a_sentence(script, words, said, capsys):
    with pytest.raises(SystemExit):
        {"update": update, "cost": cost}[script].parse(words.split())
    assert said in capsys.readouterr().err


def test_a_micro_batch_of_the_peer_asks_nothing_where_it_does_not_run():
    words = "tiny --device cpu --against none --responses 40 --minibatches 5 --trl-micro 3"
    assert update.parse(words.split()).responses == 40


# ---- that they run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("head.py --device cpu --dtype float32 --tokens 64 --width 32 --vocabulary 500 --repeats 1", 2),
        ("attention.py tiny --device cpu --dtype float32 --shrink 64 --repeats 1 --warm 1", 5),
        ("shared_prompts.py tiny --dtype float32 --prompts 16 32 --response 8 --tokens 512 --micro 64", 2),
        ("ranks.py tiny --device cpu --dtype float32 --ranks 1 2 --shrink 16 --responses 16 --repeats 1 --micro 1024", 2),
    ],
    ids=lambda value: str(value).split()[0],
)
def test_a_command_of_the_documents_prints_its_table(words, rows):
    script, *options = words.split()
    command = [sys.executable, str(Path(BENCHMARKS) / script), *options]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert found.returncode == 0, found.stdout + found.stderr
    measured = [line for line in found.stdout.splitlines() if re.match(r"\| \S.*\d\.\d", line)]
    assert len(measured) >= rows, found.stdout


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_what_packed_attention_sees():
    """Its mask by the plain product of torch, which has no backward pass on a CPU."""
    shape = [Segment(40), Segment(24), Segment(9, 0), Segment(17, 0), Segment(30, 1)]
    layout, g = Layout.of(shape), torch.Generator().manual_seed(0)
    row = [torch.randn(120, heads, 16, generator=g) for heads in (4, 2, 2)]
    ways = attention.ways(layout, 16, "cpu", flex_attention)
    torch.testing.assert_close(ways["flex"](*row), ways["buckets"](*row))


@pytest.mark.parametrize(
    ("name", "values", "found"),
    [
        ("children", [3, 3, 3, 3, 3, 3, 3, 3], []),
        ("children", [3, 3, 3, 3, 3, 3, 3, 4], ["children"]),
        ("GPU MiB in use", [900, 950, 950, 950, 950, 950, 950, 950], []),
        ("GPU MiB in use", [900, 950, 950, 950, 950, 950, 950, 951], ["GPU MiB in use"]),
        ("resident MiB", [2000, 2100, 2150, 2160, 2165, 2166, 2165, 2167], []),
        ("resident MiB", [2000, 2002, 2004, 2006, 2008, 2010, 2012, 2014.5], ["resident MiB"]),
    ],
)
def test_what_grows_from_cycle_to_cycle_is_told_from_what_fills(name, values, found):
    assert vllm_cycles.grew([{name: value} for value in values]) == found


# ---- criteria ---------------------------------------------------------------------------------------------


def test_a_line_passes_and_a_square_does_not_whatever_the_start_and_the_noise():
    rng = np.random.default_rng(0)
    for start in (0.0, 1.0, 10.0):
        for _ in range(50):
            noise = 1 + 0.03 * rng.random(5)
            x = np.array(SIZES)
            assert growth.grows_linearly(SIZES, ((start + 2 * x) * noise).tolist(), bound=cost.SECONDS_BOUND).ok
            assert not growth.grows_linearly(SIZES, ((start + 2 * x + x**2) * noise).tolist(), bound=cost.SECONDS_BOUND).ok


def test_the_slope_and_the_exponent_of_an_exact_law_are_found():
    assert growth.line(SIZES, [3 + 2 * x for x in SIZES]) == pytest.approx((3, 2))
    assert growth.exponent(SIZES, [5 * x**1.5 for x in SIZES]) == pytest.approx(1.5)
    assert growth.marginal_ratio(SIZES, [x**2 for x in SIZES]) == pytest.approx(4)


def test_what_grows_only_above_the_middle_is_not_linear():
    assert growth.marginal_ratio(SIZES, [1, 1, 1, 5, 20]) == float("inf")


def test_the_update_is_linear_and_whole_pack_attention_is_found(monkeypatch):
    assert cost.seconds_verdict("pack", rows("pack")).ok
    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, whole_pack_attention)
    faulty = rows("pack", repeats=1)
    assert not cost.seconds_verdict("pack", faulty).ok, faulty


@pytest.mark.parametrize("fault", ["", ALL_LOGITS], ids=["as it is", "all logits"])
def test_memory_that_grows_with_the_vocabulary_is_found(fault):
    words = [sys.executable, "-c", MEMORY.format(fault=fault), BENCHMARKS]
    returns = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # as the script does: what is freed goes back at once
    done = subprocess.run(words, capture_output=True, text=True, env=returns)
    memory = re.findall(r"- memory: (as it should be|\*\*NOT)", done.stdout)
    assert memory == ["**NOT" if fault else "as it should be"], done.stdout + done.stderr
    assert not fault or done.returncode == 1  # without one, seconds of a single repeat on a busy machine may fail it


# ---- the work ---------------------------------------------------------------------------------------------


def test_the_two_kinds_of_lengths_are_as_described():
    equal, skewed = (workload.response_lengths(name, 128) for name in workload.LENGTHS)
    assert set(equal) == {1024}
    assert min(skewed) == 64 and max(skewed) == 2048 and 430 < np.mean(skewed) < 470
    assert np.median(skewed) < 0.75 * np.mean(skewed)
    assert skewed == workload.response_lengths("W2", 128)


def test_both_sides_are_given_the_same_tokens_and_a_group_has_one_prompt():
    task = sides.Task("", "cpu", "float32", responses=16, group=4, prompt=8, shrink=16, minibatches=4, threads=1)
    first, second = task.samples("W2", 100), task.samples("W2", 100)
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(first, second, strict=True))
    prompts = {(t.group, t.token_ids[:8].tobytes()) for t in first}
    assert len(prompts) == 4 == len({tokens for _, tokens in prompts})


@pytest.mark.parametrize("point", cost.points("length", cost.SMALL)[-2:], ids=lambda p: f"{p.x}")
def test_an_update_of_the_cost_curves_leaves_out_no_backward_pass(point, monkeypatch):
    updates, passes, backward = cost.Updates(workload.SHAPES["tiny"], "cpu", "torch"), [], Optimizer.backward
    monkeypatch.setattr(Optimizer, "backward", lambda *args: passes.append(backward(*args)))
    for _ in range(2):
        updates.once(point)
    assert len(passes) == 2 * len(point.lengths), "each of these responses fills a micro-batch"


def test_flops_are_those_of_the_packed_batch():
    scale = replace(SCALE, pack=(512,))
    (row,) = cost.measure("pack", scale, models := cost.Models(workload.SHAPES["tiny"], "cpu", "torch"), repeats=1)
    (point,) = cost.points("pack", scale)
    counter = models.of(point).counter
    n, r = point.prompt + point.lengths[0] - 1, point.lengths[0]
    one = 3 * (n * counter.body + n * (n + 1) / 2 * counter.attention + r * counter.head)
    assert row["flops"] == pytest.approx(one * len(point.lengths))
    assert counter.head == 2 * 2000 * 64 and counter.attention == 4 * 2 * 2 * 32


def test_ratio_and_utilisation_stand_in_the_table():
    side = {"peak_gib": 2.0, "held_gib": 1.0, "flops": 4e12}
    measured = {
        "TRL": [side | {"seconds": s} for s in (4.0, 4.4, 3.6)],
        "engine": [side | {"seconds": s} for s in (2.0, 2.0, 1.8)],
    }
    theirs, ours = update.table_rows(measured, {"TRL": "TRL", "engine": "ours"}, "W1", 1000, rate=1e13)
    assert "**2.00** (2.00 to 2.20)" in ours and "| 0.200 |" in ours and "| 500 |" in ours
    assert "| 0.100 |" in theirs and "**" not in theirs


@pytest.mark.parametrize(
    ("dtype", "off", "plain", "good"),
    [
        (torch.bfloat16, [0.010] * 9, [0.01] * 9, True),
        (torch.bfloat16, [0.012] * 9, [0.01] * 9, False),
        (torch.bfloat16, [0.025, *[0.005] * 8], [0.01] * 9, False),  # in the mean it is nearer
        (torch.bfloat16, [0.015, *[0.005] * 8], [0.01] * 9, True),
        (torch.float32, [2e-5, *[1e-9] * 8], [1e-3] * 9, False),
        (torch.float32, [9e-6] * 9, [1e-9] * 9, True),
    ],
)
def test_a_fast_path_is_too_far_off_by_what_errors_says(dtype, off, plain, good, capsys):
    exact = torch.ones(4, dtype=torch.float64)
    assert errors.report("a path", dtype, *([exact + e for e in es] for es in (off, plain)), [exact] * 9) is good
    assert ("TOO FAR" in capsys.readouterr().out) is not good


def test_log_probabilities_and_entropies_are_as_exact_as_the_plain_ones(monkeypatch, capsys):
    for name, size in {"TOKENS": 300, "WIDTH": 64, "VOCABULARY": 503}.items():
        monkeypatch.setattr(errors, name, size)
    monkeypatch.setitem(errors.logprobs.CHUNK_ELEMENTS, "cpu", 0)  # what the script sets is put back
    assert all(errors.head_rows("cpu"))
    assert capsys.readouterr().out.count("fast") == 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_adapter_on_the_output_matrix_is_as_exact_as_pefts_own(dtype):
    """Its product is made from the merged matrix, which is rounded once more than peft's two products."""
    peft = pytest.importorskip("peft")
    from gspo.training.policy import _merged

    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(64, 503, bias=False)})
    wanted = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["head"])
    layer = peft.inject_adapter_in_model(wanted, model)["head"]
    layer.lora_B["default"].weight.data.normal_(std=0.01)
    hidden, target = torch.randn(300, 64), torch.randint(503, (300,))

    def gradients(precision, logp_of):
        """Of log-probabilities with this layer in a precision: them, and the gradients of hidden states and adapter."""
        mine = copy.deepcopy(layer.to(dtype)).to(precision)
        h = hidden.to(dtype).to(precision).clone().requires_grad_()
        logp = logp_of(mine, h)
        logp.backward(torch.linspace(-1, 1, len(logp), dtype=logp.dtype))
        return [logp.detach(), h.grad, mine.lora_A["default"].weight.grad, mine.lora_B["default"].weight.grad]

    def plain(mine, h):
        logits = mine(h)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits.log_softmax(-1).gather(1, target[:, None])[:, 0]

    fast = gradients(dtype, lambda mine, h: errors.linear_logprobs(h, _merged(mine), target, temperature=1.0)[0])
    pefts, exact = gradients(dtype, plain), gradients(torch.float64, plain)
    assert errors.report("an adapter on the output matrix", dtype, fast, pefts, exact)
