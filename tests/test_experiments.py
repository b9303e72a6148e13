"""The experiments: every recipe loads, every arm resolves, the harness runs what is missing and nothing twice."""

import importlib
import json
import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gspo.recipe import load
from gspo.training.policy import load_policy

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"
ON_THE_HARNESS = (
    "clipped_shares", "clip_range", "collapse", "routing_replay", "engine_replay", "deep_mixture", "language_mixture",
    "language_model", "old_likelihoods", "language_likelihoods", "turns",
)  # fmt: skip


@pytest.fixture(scope="module")
def script():
    """Imports an experiment by its name, as `python experiments/NAME.py` would."""
    sys.path.insert(0, str(EXPERIMENTS))
    yield importlib.import_module
    sys.path.remove(str(EXPERIMENTS))


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Reports of runs are drawn in tests of their own; here they would take most of the time."""
    monkeypatch.setattr("gspo.reporting.html.draw_figures", lambda *args, **more: [])


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.toml")), ids=lambda p: p.name)
def test_every_recipe_of_an_experiment_loads(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    load(path)


def test_every_arm_resolves_and_differs_from_the_others_only_where_it_says(script, tmp_path):
    common, collapse = script("common"), script("collapse")
    plan = common.sorting(8, tmp_path)
    given = [
        method.settings(rate, scale) for method in common.METHODS.values() for rate in common.RATES for scale in (1, 64)
    ]
    given += [collapse.settings(1e-3 * rate, clip, 100) for rate, clip in collapse.OTHER.values()]
    whole = [plan.config("arm", 0, settings).model_dump() for settings in given]
    allowed = {"objective", "training"}
    for one in whole[1:]:
        assert {key for key in one if one[key] != whole[0][key]} <= allowed
        assert all(one["training"][key] == whole[0]["training"][key] for key in ("minibatches", "warmup_updates", "groups"))


def test_processes_side_by_side_answer_in_order_and_take_gpus_in_turn(script, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    found = script("common").side_by_side(os.getenv, [("CUDA_VISIBLE_DEVICES",), ("NO_SUCH_NAME", "none")] * 2)
    assert {found[0], found[2]} <= {"3", "5"} and found[1::2] == ["none", "none"]


def test_a_search_seed_is_never_reported(script):
    common = script("common")
    assert common.SEARCH_SEED not in common.SEEDS and len(common.SEEDS) >= 3


@pytest.mark.parametrize("power", [-0.3, -1.0, -2.0])
def test_the_calibration_nears_its_target_where_the_share_falls_as_a_power_of_the_range(script, power):
    common = script("common")
    trials = []
    scale = 1.0
    for _ in range(8):
        trials.append((scale, min(0.5, 0.3 * scale**power)))
        scale = common.next_scale(trials)
    nearest = min(abs(math.log(share / common.TARGET)) for _, share in trials)
    assert nearest < 0.1


def test_the_range_at_the_target_is_exact_on_a_power_and_absent_where_no_trial_is_beyond(script):
    clip_range = script("clip_range")
    trials = [{"scale": scale, "share": 0.3 * scale**-0.5} for scale in (1.0, 2.0, 16.0)]
    assert clip_range.range_at_target(trials) == pytest.approx(4 * script("common").METHODS["gspo"].high)
    assert clip_range.range_at_target(trials[:2]) is None and clip_range.range_at_target(trials[2:]) is None


def curve(*rewards):
    return [{"step": 0}] + [{"step": i + 1, "reward/mean": r} for i, r in enumerate(rewards)]


def test_a_collapse_is_a_fall_under_half_of_the_best_that_lasts(script):
    collapse = script("collapse")
    steady, dip, fall = [0.8] * 60, [0.8] * 30 + [0.1] * 12 + [0.8] * 20, [0.8] * 30 + [0.0] * 30
    assert collapse.collapsed_at(curve(*steady)) is None
    assert collapse.collapsed_at(curve(*dip)) is None
    fallen = collapse.collapsed_at(curve(*fall))
    assert 30 < fallen <= 40
    steps = collapse.checkpoints(curve(*fall), fallen, collapse.EVERY)
    assert 0 < steps["well before"] < steps["last before"] <= 32 < steps["half fallen"] < steps["after"] == 60
    assert not [step for step in steps.values() if step % collapse.EVERY]


def test_a_run_that_is_whole_is_not_run_again_and_its_rows_carry_their_labels(script, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    common = script("common")
    cold = {"steps": 1, "batch_size": 4, "warmup_updates": 1, "evaluate_every": 0, "stop_at": None}
    small = {f"cold_start.{key}": value for key, value in cold.items()} | {
        "evaluation": None,
        "data.parameters": {"digits": 3, "size": 200},
    }
    plan = common.sorting(3, tmp_path)
    plan = common.Plan(plan.recipe, plan.folder, {k: v for k, v in plan.settings.items() if "evaluation" not in k} | small)
    tiny = {"training.steps": 2, "training.warmup_updates": 4, "rollout.prompts_per_step": 4}
    settings = {**common.METHODS["gspo"].settings(1e-4, 1), **tiny}
    folder = plan.run("smoke", 0, settings)
    before = (folder / "metrics.jsonl").stat().st_mtime_ns
    assert plan.run("smoke", 0, settings) == folder and (folder / "metrics.jsonl").stat().st_mtime_ns == before
    rows = common.labelled(folder, what="run", arm="smoke")
    assert [row["step"] for row in rows] == [1, 2] and {row["arm"] for row in rows} == {"smoke"}
    assert not [row for row in rows if any("histogram" in key for key in row)]


FEW = {"gspo": (1.0, 4.0), "grpo": (1.0, 0.25)}
LABELS = ("what", "arm", "seed", "rate", "scale", "minibatches")
TWO = {"gspo": ("gspo", "none"), "grpo with replay": ("grpo", "trainer")}
MIXTURE = {f"model.create.{k}": v for k, v in (("num_experts", 4), ("experts_per_token", 2), ("moe_intermediate_size", 8))}
SMALL = {
    "collapse": {"RATES": (1e-3,), "SEEDS": (0,), "STEPS": 20, "AGAIN": 5, "DIGITS": 3},
    "hidden_change": {"RATES": (1e-3,), "SEEDS": (0,), "STEPS": 2, "EARLY": (1, 1), "LATE": (2, 2)},
    "gradient_variance": {"SEEDS": (0,), "GROUPS": {8: 8, 16: 8}, "STEPS": {"near": (1, 1e-4), "far": (1, 1e-3)}},
    "routing_replay": {
        "RATES": {4: (1e-3,)}, "SEEDS": (0,), "SEARCH_STEPS": 2, "STEPS": {4: 3}, "DIGITS": 3,
        "BOUNDARY": ((3e-4, 4),), "DRAWN": ((3e-4, 4),), "FACTORS": FEW, "DECODER": MIXTURE, "ARMS": TWO,
        "side_by_side": lambda work, jobs, at_once: [work(*job) for job in jobs],
    },
    "engine_replay": {
        "SEEDS": (0,), "STEPS": 2, "SEARCH_STEPS": 1, "DIGITS": 3, "FACTORS": FEW, "DECODER": MIXTURE,
        "ARMS": {"gspo": ("gspo", "none"), "grpo, R3": ("grpo", "engine")},
    },
    "deep_mixture": {
        "RATES": {4: (1e-3,), 8: (1e-3,)}, "SEEDS": (0,), "STEPS": 3, "DIGITS": 3, "FACTORS": FEW,
        "BOUNDARY": ((3e-3, 4),), "DECODER": MIXTURE, "side_by_side": lambda work, jobs: [work(*job) for job in jobs],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def fewer(plan):
    """A plan with problems enough for a few steps, not the 20,000 of the recipe, which each run would read."""
    sizes = {"data.parameters": 400, "evaluation.data.parameters": 128}
    smaller = {key: plan.settings[key] | {"size": size} for key, size in sizes.items()}
    return replace(plan, settings=plan.settings | smaller | {"training.warmup_updates": 1})


@pytest.fixture
def little_learning(script, tmp_path, monkeypatch):
    """Experiments start from a model that has learned little, and write elsewhere than the committed evidence."""
    common = script("common")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(common, "EVIDENCE", tmp_path)

    def start(plan, seed):
        config, folder = plan.config("start", seed, {}), plan.folder / f"start-{seed}"
        if not folder.exists():
            load_policy(config.model, temperature=1.0, seed=seed).save(folder)
        return str(folder)

    monkeypatch.setattr(common.Plan, "start", start)
    for name in ("SHORT", "LONG"):
        monkeypatch.setattr(script("sums"), name, 64)  # what imitates additions learns a few, in seconds


@pytest.mark.parametrize("name", SMALL)
def test_an_experiment_runs_from_an_empty_folder_to_its_rows(script, name, little_learning, runs, tmp_path, monkeypatch):
    experiment = script(name)
    for key in ("SEEDS", "ARMS", "side_by_side"):
        monkeypatch.setattr(script("replay_arms"), key, SMALL["routing_replay"][key])
    for key, value in SMALL[name].items():
        monkeypatch.setattr(experiment, key, value)
    monkeypatch.setattr(experiment, "sorting", lambda *args: fewer(script("common").sorting(*args)), raising=False)
    monkeypatch.setattr(experiment, "EVIDENCE", tmp_path, raising=False)
    experiment.run(runs)
    rows = script("common").read(name)
    assert rows
    if name in ("routing_replay", "engine_replay", "deep_mixture"):
        arms = getattr(experiment, "ARMS", TWO)
        for what, seeds in {"run": {0}, "range search": {100}}.items():
            found = {(row["arm"], row["seed"]) for row in rows if row["what"] == what}
            assert found == {(arm, seed) for arm in arms for seed in seeds}
        chosen = {(row["arm"], row["scale"]) for row in rows if row["what"] == "range chosen"}
        assert {scale for _, scale in chosen} <= {1.0, 4.0, 0.25} and len(chosen) == len(dict(chosen))
        places = [tuple(row.get(key) for key in (*LABELS, "step")) for row in rows]
        assert len(places) == len(set(places))


@pytest.fixture
def llama(tmp_path):
    """The folder of a decoder of Llama's kind that writes digits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = load_policy(load(EXPERIMENTS / "sorting.toml").model, temperature=1.0, seed=0).tokenizer
    shape = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, **ids)).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_a_mixture_without_noise_computes_what_its_model_does_and_with_noise_does_not(script, llama, tmp_path):
    from transformers import AutoModelForCausalLM

    ids, found = torch.tensor([[3, 4, 5, 6, 7]]), {}
    for noise in (0.0, 0.3):
        folder = script("upcycle").upcycle(str(llama), tmp_path / f"mixture{noise}", noise=noise)
        found[noise] = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    exact = AutoModelForCausalLM.from_pretrained(llama)(ids).logits
    torch.testing.assert_close(found[0.0], exact, rtol=1e-4, atol=1e-6)
    assert (found[0.3] - exact).abs().max() > 1e-3


def test_a_model_of_another_kind_is_not_made_a_mixture(script, tmp_path):
    load_policy(load(EXPERIMENTS / "sorting.toml").model, temperature=1.0, seed=0).save(tmp_path / "qwen")
    with pytest.raises(SystemExit, match=r"not a model of Llama's kind: model.layers.0.self_attn.._norm.weight"):
        script("upcycle").upcycle(str(tmp_path / "qwen"), tmp_path / "mixture")


def test_the_comparison_of_language_models_runs_to_its_rows(script, llama, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    language = script("language_mixture")
    monkeypatch.setattr(script("common"), "EVIDENCE", tmp_path)
    for key in ("SEEDS", "side_by_side"):
        monkeypatch.setattr(script("replay_arms"), key, SMALL["routing_replay"][key])
    monkeypatch.setattr(language, "FACTORS", FEW)
    three = fewer(script("common").sorting(3, tmp_path)).settings
    small = {"RECIPE": "experiments/sorting.toml", "SETTINGS": three, "RATES": (1e-3,)}
    for key, value in {**small, "STEPS": 3}.items():
        monkeypatch.setattr(language, key, value)
    language.run(tmp_path, str(llama))
    rows = script("common").read("language_mixture")
    arms = script("replay_arms").ARMS
    for what in ("run", "range search", "range chosen"):
        assert {row["arm"] for row in rows if row["what"] == what} == set(arms)
    told = {(row["what"], row["step"]) for row in rows if "evaluation/pass@1" in row}
    assert told == {(what, step) for what in ("search", "range search", "run", "range chosen") for step in (0, 3)}


@pytest.fixture
def small_language(script, llama, tmp_path, monkeypatch):
    """What makes an experiment on a language model one of seconds: a small model and task, a reward that always differs."""
    monkeypatch.chdir(ROOT)
    for name in ("common", "collapse", "language_model"):
        monkeypatch.setattr(script(name), "EVIDENCE", tmp_path)
    (tmp_path / "length.py").write_text("def length(samples):\n    return [len(s.text) / 10 for s in samples]\n")
    rewards = [{"type": "function", "function": f"{tmp_path / 'length.py'}:length"}]
    more = {"rewards": rewards, "training.warmup_updates": 2, "rollout.prompts_per_step": 8}
    return {
        "RECIPE": "experiments/sorting.toml",
        "SETTINGS": fewer(script("common").sorting(3, tmp_path)).settings | more,
        "SEEDS": (0, 1),
        "side_by_side": lambda work, jobs, **more: [work(*job) for job in jobs],
    }


def test_the_questions_of_a_dense_language_model_run_to_their_rows_and_tables(
    script, small_language, llama, tmp_path, monkeypatch, capsys
):
    language, common = script("language_model"), script("common")
    more = {"SEARCH_STEPS": 3, "STEPS": 4, "ALONE_STEPS": 4, "RATES": (1e-4, 3e-4), "SCALES": {1e-4: (1, 4)}}
    for key, value in {**small_language, **more}.items():
        monkeypatch.setattr(language, key, value)

    def share(plan, rate, scale, seed):
        return [{"what": "range", "rate": rate, "seed": seed, "scale": scale, "share": 0.3 / scale, "reward/mean": 0.5}]

    monkeypatch.setattr(language, "share", share)
    language.run(tmp_path, str(llama))
    rows = common.read("language_model")
    assert {row["what"] for row in rows} == {"search", "range search", "range", "run", "hidden", "seconds"}
    assert {row["arm"] for row in rows if row["what"] == "run"} == {"gspo", "grpo", "gspo, calibrated"}
    tried = common.by_run([r for r in rows if r["what"] == "range search" and r["arm"] == "gspo"], "seed", "scale")
    over = {key: common.mean(some, "clip/sequence") > common.TARGET for key, some in tried.items()}
    (scale,) = {row["scale"] for row in rows if row.get("arm") == "gspo, calibrated"}
    wide = min(x for (seed, x), clips in over.items() if not clips and seed == common.SEARCH_SEED)
    assert max(x for (_, x), clips in over.items() if clips) < scale < wide  # of a seed that no run has
    language.draw()
    assert "what hides" in capsys.readouterr().out and (tmp_path / "language_model.png").exists()


def test_a_language_model_collapses_and_starts_again(script, small_language, llama, tmp_path, monkeypatch, capsys):
    language = script("language_collapse")
    more = {"RATES": (1e-3, 1e-2), "STEPS": 6, "AGAIN": 2, "EVERY": 2}
    for key, value in {**small_language, **more, "SEEDS": (0,), "collapsed_at": lambda rows: 5}.items():
        monkeypatch.setattr(language, key, value)
    language.run(tmp_path, str(llama))
    rows = script("common").read("language_collapse")
    starts = {(row["since"], row["change"], row["seed"]) for row in rows if row["what"] == "again"}
    collapse = script("collapse")
    assert starts == {(when, change, seed) for when in collapse.WHEN for change in collapse.OTHER for seed in (0,)}
    assert {row["rate"] for row in rows if row["what"] == "provoked"} == {1e-3}
    assert all(row["rate"] == pytest.approx(1e-3 * 5 / 6, rel=1e-4) for row in rows if row["what"] == "again")
    folder = tmp_path / "language_collapse" / "provoke-lr0.001-seed0"
    provoked = json.loads((folder / "config.json").read_text())["training"]
    assert provoked["warmup_updates"] == 6 * provoked["minibatches"]  # the rate rises to the end
    language.draw()
    assert "less the same settings" in capsys.readouterr().out and (tmp_path / "language_collapse.png").exists()


def test_a_language_model_learns_from_either_sides_likelihoods_in_either_precision(
    script, small_language, llama, tmp_path, monkeypatch, capsys
):
    language, common = script("language_likelihoods"), script("common")
    monkeypatch.setattr(script("old_likelihoods"), "EVIDENCE", tmp_path)
    for key, value in {"ENGINE": "transformers", "SEEDS": (0, 1), "FACTORS": FEW}.items():
        monkeypatch.setattr(script("old_likelihoods"), key, value)
    settings = {key: value for key, value in small_language.items() if key != "SEEDS"} | {
        "SEEDS": (0, 1), "PRECISIONS": ("float32",), "STEPS": 2, "SEARCH_STEPS": 1, "MEMORY": {},
        "OWN_RATES": (1e-4,),
        "beside": script("old_likelihoods").trial,
    }  # fmt: skip
    for key, value in settings.items():
        monkeypatch.setattr(language, key, value)
    language.run(tmp_path, str(llama))
    rows = common.read("language_likelihoods")
    runs = [{(row["arm"], row["seed"]) for row in rows if row["what"] == what} for what in ("run", "own run")]
    assert runs == [{(arm, seed) for arm in language.ARMS for seed in (0, 1)}] * 2
    searched = {(row["arm"], row["scale"]) for row in rows if row["what"] == "own search"}
    assert searched == {(arm, x) for arm in language.ARMS for x in (1.0, 4.0 if "gspo" in arm else 0.25)}
    language.draw()
    assert "own rate and range" in capsys.readouterr().out and (tmp_path / "language_likelihoods.png").exists()


def test_the_variance_of_a_language_models_gradient_is_measured_in_sketches(
    script, small_language, llama, tmp_path, monkeypatch, capsys
):
    language, common = script("language_variance"), script("common")
    load_policy(load(EXPERIMENTS / "sums.toml").model, temperature=1.0, seed=0).save(tmp_path / "sums")
    settings = language.SETTINGS | {"rollout.max_response_tokens": 16, "rewards": small_language["SETTINGS"]["rewards"]}
    steps = {"near": (1, 1e-4), "far": (1, 1e-3)}
    for key, value in {
        "SEEDS": (0, 1), "GROUPS": {8: 8, 12: 8}, "STEPS": steps, "WIDTH": 512,
        "SETTINGS": settings, "side_by_side": small_language["side_by_side"], "EVIDENCE": tmp_path,
    }.items():  # fmt: skip
        monkeypatch.setattr(language, key, value)
    alternating = lambda policy, prompt, some: np.resize([1.0, -1.0], len(some))  # noqa: E731
    monkeypatch.setattr(script("gradient_variance"), "advantages", alternating)
    monkeypatch.setattr(script("gradient_variance"), "G", 2)
    language.run(tmp_path, str(tmp_path / "sums"))
    assert {row["arm"] for row in common.read("language_variance")} == {arm.name for arm in language.ARMS}
    language.show()
    assert "slope_trace" in capsys.readouterr().out and (tmp_path / "language_variance.png").exists()


WITH_ROWS = sorted(
    path.stem for path in EXPERIMENTS.glob("*.py") if (ROOT / "docs" / "evidence" / f"{path.stem}.jsonl").exists()
)


@pytest.mark.parametrize("name", WITH_ROWS)
def test_every_committed_row_can_be_drawn(script, name, tmp_path, monkeypatch, capsys):
    experiment = script(name)
    shutil.copy(ROOT / "docs" / "evidence" / f"{name}.jsonl", tmp_path)
    for module in list(sys.modules.values()):
        if str(getattr(module, "__file__", "")).startswith(str(EXPERIMENTS)) and hasattr(module, "EVIDENCE"):
            monkeypatch.setattr(module, "EVIDENCE", tmp_path)
    (getattr(experiment, "show", None) or experiment.draw)()
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000 and len(capsys.readouterr().out) > 100


def committed():
    return [path for name in ON_THE_HARNESS if (path := ROOT / "docs" / "evidence" / f"{name}.jsonl").exists()]


@pytest.mark.parametrize("path", committed(), ids=lambda p: p.stem)
def test_all_arms_of_the_committed_rows_had_the_same_seeds_and_steps(script, path):
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    places = {}
    for row in rows:
        if (what := row.get("what", "run")) in ("run", "again", "pushed", "pushed range chosen", "range chosen", "own run"):
            pushed = row["rate"] if what.startswith("pushed") else None
            arms = places.setdefault((what, row.get("digits"), row.get("minibatches"), pushed), {})
            arm = tuple(row.get(key) for key in ("arm", "method", "since", "change", "precision", "rate", "scale"))
            steps = arms.setdefault(arm, {})
            steps[row["seed"]] = max(steps.get(row["seed"], 0), row["step"])
    for arms in places.values():
        assert all(steps == next(iter(arms.values())) for steps in arms.values())
        assert script("common").SEARCH_SEED not in next(iter(arms.values()))
    assert places
