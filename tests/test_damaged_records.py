"""Records that were damaged are refused by file, line or sample, by every command that reads them; nothing is guessed."""

import json

import pytest
from synthetic_run import write_run

from gspo import cli
from gspo.reporting.records import RecordsError, read_config, read_metrics, read_samples, sample_steps

STEP = "time/step_s"


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", 6, samples_every=2)


def change_row(folder, number, **changes):
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[number] |= changes
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    "changes",
    [
        {STEP: "1.0"},
        {STEP: True},
        {STEP: [1.0, "2"]},
        {STEP: {}},
        {"step": 1e30},
        {"step": True},
        {"step": -1},
        {"step": 1},
    ],
    ids=str,
)
def test_a_row_that_is_no_row_is_refused_by_its_line(run, changes, capsys):
    change_row(run, -1, **changes)
    last = len((run / "metrics.jsonl").read_text().splitlines())
    with pytest.raises(RecordsError, match=f"line {last}: "):
        read_metrics(run)
    for command in ("report", "compare"):
        assert cli.main([command, str(run)]) == 1
        assert f"line {last}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [{"training": None}, {"objective": "gspo"}, {"training": {"steps": "many"}}, {"objective": {"clip_low": "a"}},
     {"evaluation": "yes"}],
    ids=str,
)  # fmt: skip
def test_settings_that_pages_need_are_refused_by_name(run, changes, capsys):
    path = run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (table,) = changes
    with pytest.raises(RecordsError, match=f"config.json: is damaged: {table}"):
        read_config(run)
    assert cli.main(["report", str(run)]) == 1 and cli.main(["compare", str(run)]) == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "broken",
    [
        [],
        {"texts": [1]},
        {"texts": ["a"]},
        {"log_ratio": "x"},
        {"left_out": "x"},
        {"engine_gap": ["x"]},
        {"minibatch": None},
    ],
    ids=str,
)
def test_damaged_records_of_tokens_are_refused_by_sample(run, broken, capsys):
    step = next(s for s in sample_steps(run) if any(line.get("tokens") for line in read_samples(run, s)))
    lines = read_samples(run, step)
    line = next(line for line in lines if line.get("tokens"))
    line["tokens"] = [1] if broken == [] else line["tokens"] | broken
    path = run / "samples" / f"step-{step:06d}.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert cli.main(["report", str(run)]) == 1
    said = capsys.readouterr().err
    assert f"samples of step {step}, sample {line['id']}" in said


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parts": [1]}, "parts is no table"),
        ({"parts": {"exact": 1}}, "parts is no table"),
        ({"num_tokens": "x"}, "num_tokens is no number"),
        ({"reward": [1]}, "reward is no number"),
        ({"advantage": "x"}, "advantage is no number or list of numbers"),
    ],
    ids=str,
)
def test_a_damaged_sample_is_refused_by_its_line(run, changes, told, capsys):
    path = next((run / "samples").glob("step-*.jsonl"))
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | changes), *others]) + "\n")
    assert cli.main(["report", str(run)]) == 1
    said = capsys.readouterr().err
    assert f"{path}, line 1: {told}" in said and "Traceback" not in said


def test_a_histogram_of_other_bins_is_refused_by_its_line(run):
    change_row(run, 2, **{"ratio/sequence_histogram": [1, 2, 3]})
    with pytest.raises(RecordsError, match="line 3: ratio/sequence_histogram has not the 31 bins of a histogram"):
        read_metrics(run)


def test_a_page_is_never_written_over_a_folder(run, tmp_path, capsys):
    (tmp_path / "page.html").mkdir()
    assert cli.main(["compare", str(run), "--output", str(tmp_path / "page.html")]) == 1
    assert "is a folder" in capsys.readouterr().err and not list(tmp_path.glob("*.part"))
