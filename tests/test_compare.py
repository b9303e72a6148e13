"""Laws of comparing runs: what an arm is, what its numbers are over, and that what cannot be compared is refused."""

import json
import re
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import CONFIG, write_run

from gspo import cli
from gspo.reporting.arms import arms_of, read_run
from gspo.reporting.compare import CHARTS, compare, footnotes, headings, render, row, write_page
from gspo.reporting.curves import FEWEST_FOR_T, MOST_ARMS, curve
from gspo.reporting.names import METRICS, table_key
from gspo.reporting.records import RecordsError, RunRecords
from gspo.reporting.seeds import seed_interval, t_quantile
from gspo.reporting.text import visible

WICKED = "<script>x</script>\u202e\x1b[31m"
HELD_OUT = {"temperature": 1.0, "samples": 2, "data": {"source": "jsonl", "path": "held-out.jsonl"}}


def write(folder: Path, rewards, /, *, seed=0, evaluations=None, seconds=1.0, ranks=1, **settings) -> Path:
    """A run whose rewards, evaluations by step and seconds a step are given; settings by dotted name with __ for dots."""
    records = RunRecords(folder)
    evaluations = evaluations or {}
    for step, reward in enumerate([None, *rewards]):
        score = evaluations.get(step)
        held = {} if score is None else {"evaluation/reward": score, "evaluation/pass@1": score / 2}
        held |= {
            f"{key}_{end}": value + d for key, value in dict(held).items() for end, d in (("low", -0.1), ("high", 0.1))
        }
        trained = {"reward/mean": reward, "rollout/responses": 8, "time/step_s": seconds + (9 if held else 0)}
        trained |= {"time/evaluate_s": 9.0 if held else 0.0, "system/ranks": ranks, "clip/sequence": 0.01 * step}
        if held or step:
            records.append({"step": step} | held | (trained if step else {}))
    config = json.loads(json.dumps(CONFIG)) | {"seed": seed, "name": folder.name, "output": str(folder.parent)}
    config["evaluation"] = HELD_OUT if evaluations else None
    for key, value in settings.items():
        table, _, last = key.rpartition("__")
        (config.setdefault(table, {}) if table else config)[last] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def seeds(tmp_path, arm, values, **settings):
    """A run a seed, with a constant training reward each."""
    return [write(tmp_path / f"{arm}-{i}", [v] * 10, seed=i, **settings) for i, v in enumerate(values)]


def command(*words):
    return cli.main(["compare", *map(str, words)])


# ---- intervals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227)]
)
def test_quantiles_are_those_of_the_printed_tables(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, rel=1e-5)


def test_an_interval_over_seeds_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    ends = [seed_interval(rng.normal(3, 2, 3).tolist())[1:] for _ in range(4000)]
    assert np.mean([low <= 3 <= high for low, high in ends]) == pytest.approx(0.95, abs=0.012)


def test_one_value_has_no_interval_over_seeds():
    with pytest.raises(ValueError, match="at least two"):
        seed_interval([0.5])


# ---- arms -------------------------------------------------------------------------------------------------


def test_runs_that_differ_in_seed_name_and_what_moves_no_weight_are_one_arm(tmp_path):
    a = write(tmp_path / "a", [0.1], seed=1, checkpoint__every=5)
    b = write(tmp_path / "b", [0.2], seed=0, tracking__wandb="x")
    (arm,) = arms_of([read_run(a), read_run(b)])
    assert [run.seed for run in arm.runs] == [0, 1] and arm.label == "gspo" and not arm.differing


def test_arms_are_named_by_the_fewest_settings_and_tell_all_that_differ(tmp_path):
    ours = {"objective__name": "gspo", "objective__clip_low": 3e-4, "training__learning_rate": 1e-4}
    theirs = {"objective__name": "grpo", "objective__clip_low": 0.2}
    folders = [write(tmp_path / "a", [0.1], **ours), write(tmp_path / "b", [0.1], **(ours | theirs))]
    first, second = arms_of([read_run(f) for f in folders])
    assert (first.label, second.label) == ("objective.name = gspo", "objective.name = grpo")
    assert second.differing == {"objective.name": "grpo", "objective.clip_low": "0.2"}
    faster = write(tmp_path / "c", [0.1], **(ours | {"training__learning_rate": 1e-3}))
    labels = [arm.label for arm in arms_of([read_run(f) for f in [*folders, faster]])]
    moved = write(tmp_path / "d", [0.1], **(ours | {"model__path": "/elsewhere", "training__epsilon": 1e-6}))
    assert arms_of([read_run(f) for f in [folders[0], moved]])[1].label == "epsilon = 1e-06"
    assert labels == [
        "objective.name = gspo, learning_rate = 0.0001",
        "objective.name = grpo, learning_rate = 0.0001",
        "objective.name = gspo, learning_rate = 0.001",
    ]


def test_a_seed_that_comes_twice_makes_no_narrower_interval(tmp_path):
    folders = [write(tmp_path / name, [0.5], seed=0) for name in ("before", "after")]
    comparison = compare(folders)
    assert [r.arm.label for r in comparison.results] == ["run = before", "run = after"]
    assert all(r.scores["training reward"].interval is None for r in comparison.results)


def test_a_run_named_twice_is_refused(tmp_path):
    folder = write(tmp_path / "a", [0.5])
    with pytest.raises(RecordsError, match="named twice"):
        compare([folder, folder.parent / "." / "a"])


# ---- numbers ----------------------------------------------------------------------------------------------


def test_the_training_score_is_the_last_tenth_of_the_steps_and_its_interval_over_seeds(tmp_path):
    folders = [write(tmp_path / f"s{i}", [0.0] * 18 + [v, v + 0.1], seed=i) for i, v in enumerate((0.3, 0.5, 0.4))]
    (result,) = compare(folders).results
    score = result.scores["training reward"]
    assert score.mean == pytest.approx(0.45) and score.over == "seeds" and score.num == 3
    half = 4.30265 * statistics.stdev([0.35, 0.55, 0.45]) / 3**0.5
    assert score.interval == pytest.approx((0.45 - half, 0.45 + half), rel=1e-4)


def test_one_seed_keeps_the_interval_that_it_recorded_and_says_so(tmp_path):
    comparison = compare([write(tmp_path / "a", [0.1, 0.2], evaluations={0: 0.2, 2: 0.6})])
    (result,) = comparison.results
    assert result.scores["held-out reward"].interval == pytest.approx((0.5, 0.7))
    assert result.scores["held-out pass@1"].mean == pytest.approx(0.3)
    assert ("0.600", "[0.500, 0.700]*") in row(comparison, result)
    assert any(note.startswith("* one run") for note in footnotes(comparison))


def test_scores_of_runs_of_unequal_length_are_read_where_all_have_been(tmp_path):
    short = write(tmp_path / "short", [0.1] * 10, evaluations={0: 0.0, 10: 0.4}, objective__name="grpo")
    long = write(tmp_path / "long", [0.2] * 10 + [0.9] * 10, evaluations={0: 0.0, 10: 0.5, 20: 0.8})
    comparison = compare([short, long])
    assert [r.scores["held-out reward"].mean for r in comparison.results] == [0.4, 0.5]
    assert comparison.results[1].scores["training reward"].mean == pytest.approx(0.2)
    assert f"Scores are read at step 10, which all runs reached; longer are {long} (20)." in footnotes(comparison)
    (chart,) = (curves for chart, curves in comparison.charts if chart.key == "reward/mean")
    assert [c.x[-1] for c in chart] == [10, 20]


def test_seconds_leave_out_evaluations_and_gpu_seconds_count_processes(tmp_path):
    one = write(tmp_path / "one", [0.5] * 6, evaluations={0: 0.1, 3: 0.2, 6: 0.3}, seconds=2.0)
    four = write(tmp_path / "four", [0.5] * 6, evaluations={0: 0.1, 3: 0.2, 6: 0.3}, seconds=1.0, ranks=4, model__dtype="x")
    by_seconds, by_gpu = compare([one, four], "seconds"), compare([one, four], "gpu-seconds")
    assert by_seconds.limit == 6.0 and by_gpu.limit == 12.0
    assert [r.steps for r in by_seconds.results] == [(3, 3), (6, 6)]
    assert [r.steps for r in by_gpu.results] == [(6, 6), (3, 3)]
    assert [r.scores["held-out reward"].mean for r in by_gpu.results] == [0.3, 0.2]
    assert headings(by_gpu)[-2:] == headings(by_seconds)[-2:] == ["seconds", "GPU-seconds"]
    assert by_gpu.results[1].totals == {"samples": 24, "seconds": 3.0, "gpu-seconds": 12.0}


def test_bands_are_the_range_of_few_seeds_and_students_interval_of_more(tmp_path):
    few = arms_of([read_run(f) for f in seeds(tmp_path, "few", (0.1, 0.2, 0.6))])[0]
    c = curve(few, "steps", "reward/mean", smoothed=True)
    assert c.num_seeds == 3 and c.mean == pytest.approx(np.full(10, 0.3))
    assert c.low == pytest.approx(np.full(10, 0.1)) and c.high == pytest.approx(np.full(10, 0.6))
    values = np.linspace(0, 1, FEWEST_FOR_T).tolist()
    many = arms_of([read_run(f) for f in seeds(tmp_path, "many", values)])[0]
    c = curve(many, "steps", "reward/mean", smoothed=True)
    assert (c.low[3], c.high[3]) == pytest.approx(seed_interval(values)[1:])


def test_a_curve_goes_no_further_than_all_its_seeds(tmp_path):
    folders = [write(tmp_path / "a", [0.5] * 4, seed=0), write(tmp_path / "b", [0.7] * 9, seed=1)]
    (arm,) = arms_of([read_run(f) for f in folders])
    assert curve(arm, "steps", "reward/mean", smoothed=False).x.tolist() == [1, 2, 3, 4]


def test_charts_are_of_keys_of_the_table():
    keys = {chart.key.replace("{k}", "1") for chart in CHARTS}
    assert {table_key(key) for key in keys} <= set(METRICS)


# ---- what cannot be compared ------------------------------------------------------------------------------


def test_what_is_no_run_is_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    begun = tmp_path / "begun"
    write(begun, [], evaluations={0: 0.5})
    for folder, said in (
        (tmp_path / "no", "there is no such folder"),
        (tmp_path / "empty", "holds no config.json, so it is no folder of a run"),
        (begun, "no training step is recorded yet"),
    ):
        assert command(folder, "--output", tmp_path / "x.html") == 1
        assert f"gspo: {folder}: " in (err := capsys.readouterr().err) and said in err and "Traceback" not in err
    assert not (tmp_path / "x.html").exists()


def test_damaged_files_are_named_and_a_torn_end_is_told(tmp_path):
    folder = write(tmp_path / "a", [0.5, 0.6])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    comparison = compare([folder])
    assert comparison.results[0].steps == (2, 2)
    assert any("is torn and left out" in note and str(folder) in note for note in footnotes(comparison))
    (folder / "config.json").write_text("[")
    with pytest.raises(RecordsError, match=r"config\.json: is damaged"):
        compare([folder])


def test_other_held_out_problems_are_refused_and_other_rewards_told(tmp_path):
    first = write(tmp_path / "a", [0.5], evaluations={1: 0.5})
    other = HELD_OUT | {"data": {"source": "jsonl", "path": "other.jsonl"}}
    second = write(tmp_path / "b", [0.5], evaluations={1: 0.5}, evaluation=other)
    with pytest.raises(RecordsError, match=r"not of the same problems \(evaluation\.data\.path differ\)"):
        compare([first, second])
    third = write(tmp_path / "c", [0.5], evaluations={1: 0.5}, rewards=[{"type": "exact"}])
    assert any("scored or prompted differently (rewards)" in note for note in footnotes(compare([first, third])))


def test_without_evaluations_the_prompts_must_be_the_same(tmp_path):
    first, second = write(tmp_path / "a", [0.5]), write(tmp_path / "b", [0.5], data__template="{b}")
    with pytest.raises(RecordsError, match=r"data\.template differ"):
        compare([first, second])


def test_a_run_without_evaluation_has_no_held_out_score_and_that_is_said(tmp_path):
    comparison = compare([write(tmp_path / "a", [0.5], evaluations={1: 0.5}), write(tmp_path / "b", [0.5])])
    assert [r.scores["held-out reward"] is None for r in comparison.results] == [False, True]
    assert any(note.startswith("Without an evaluation") and str(tmp_path / "b") in note for note in footnotes(comparison))
    alone = compare([tmp_path / "b"])
    assert headings(alone) == ["arm", "seeds", "steps", "training reward", "samples", "seconds"]
    assert "Held-out reward" in alone.missing


def test_gpu_seconds_of_records_without_processes_are_refused(tmp_path):
    folder = write_run(tmp_path / "old", 3, drop=("system/ranks",))
    with pytest.raises(RecordsError, match=r"step 1 holds no system/ranks \(it was made before processes were counted\)"):
        compare([folder], "gpu-seconds")
    assert compare([folder], "seconds").results[0].totals["gpu-seconds"] is None


def test_more_arms_than_can_be_told_apart_are_refused(tmp_path):
    folders = [write(tmp_path / f"{i}", [0.5], training__learning_rate=i) for i in range(MOST_ARMS + 1)]
    with pytest.raises(RecordsError, match=f"at most {MOST_ARMS} can be told apart"):
        compare(folders)


def test_nothing_but_a_page_is_written_over(tmp_path, capsys):
    folder = write(tmp_path / "a", [0.5])
    before = (folder / "metrics.jsonl").read_bytes()
    assert command(folder, "--output", folder / "metrics.jsonl") == 1
    assert command(folder, "--output", tmp_path / "no" / "x.html") == 1
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert "ends in .html" in (err := capsys.readouterr().err) and "is not there; make it first" in err


# ---- the page ---------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("runs")
    for i, (name, clip) in enumerate([("gspo", 3e-4), ("gspo", 3e-4), (WICKED, 0.2)]):
        folder = write_run(tmp_path / f"r{i}", 30, seed=i)
        changed = CONFIG | {"seed": i, "objective": {"name": name, "clip_low": clip}}
        (folder / "config.json").write_text(json.dumps(changed))
    return write_page(compare([tmp_path / f"r{i}" for i in range(3)], "samples"), tmp_path / "c.html")


def test_the_page_needs_nothing_but_itself_and_runs_nothing(page):
    text = page.read_text(encoding="utf-8")
    assert "http:" not in text and "https:" not in text and "@import" not in text
    tags = Tags(text)
    assert not {tag for tag, _ in tags.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not [name for _, attrs in tags.tags for name in attrs if name.startswith("on") or name == "src"]
    policy = next(attrs["content"] for _, attrs in tags.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'") and "script" not in policy
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]", text)
    assert visible(WICKED) in "".join(tags.words)


def test_the_page_has_every_chart_with_its_band_and_every_arm(page):
    tags = Tags(page.read_text(encoding="utf-8"))
    assert [attrs["id"] for tag, attrs in tags.tags if tag == "figure"] == [c.name for c in CHARTS if c.name != "held-out"]
    ids = [attrs["id"] for _, attrs in tags.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    words = " ".join(tags.words)
    assert words.count("Along samples; band: from the smallest to the largest seed.") == 7
    assert "held-out pass@4" in words and "seed 1, 30 steps:" in words


def test_same_runs_same_page(page):
    folders = [page.parent / f"r{i}" for i in range(3)]
    assert render(compare(folders, "samples")) == page.read_text(encoding="utf-8")


def test_the_command_prints_the_table_and_loads_no_torch(tmp_path):
    ours, theirs = (seeds(tmp_path, n, (0.2, 0.4, 0.3), objective__name=n, evaluations={10: 0.5}) for n in ("gspo", "grpo"))
    code = "import sys; from gspo.cli import main; assert not main(sys.argv[1:]); assert 'torch' not in sys.modules"
    words = ["compare", *map(str, ours + theirs), "--output", str(tmp_path / "c.html")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert re.search(
        r"objective\.name = grpo +3 +10 +10 +0\.250 \[0\.250, 0\.250\] +0\.500 .*0\.300 \[0\.052, 0\.548\]", done.stdout
    )
    assert done.stdout.endswith(f"page: {tmp_path / 'c.html'}\n")


def test_runs_of_one_step_of_nothing_clipped_and_of_as_many_arms_as_there_are_colours_are_drawn(tmp_path):
    folders = [write(tmp_path / f"{i}", [0.5], training__learning_rate=i) for i in range(MOST_ARMS)]
    for folder in folders:
        text = (folder / "metrics.jsonl").read_text()
        (folder / "metrics.jsonl").write_text(text.replace('"clip/sequence": 0.01', '"clip/sequence": 0.0'))
    page = Tags(render(compare(folders)))
    assert {attrs["id"] for tag, attrs in page.tags if tag == "figure"} == {"reward", "clipped", "seconds"}
    assert len({attrs["class"] for tag, attrs in page.tags if tag == "i"}) == MOST_ARMS
    assert "What is 0 lies on the lower edge." in " ".join(page.words)
