"""Laws of a run's records, of what is sent to trackers, and of what the terminal shows."""

import io
import json
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from synthetic_run import NASTY, evaluation, step_row

from gspo.config import TrackingConfig
from gspo.reporting.names import HISTOGRAM, LENGTHS, METRICS, ONLY_WHEN, QUANTILES, table_key
from gspo.reporting.records import RunRecords, read_metrics, read_samples, sample_steps
from gspo.reporting.terminal import Terminal
from gspo.reporting.text import visible
from gspo.reporting.trackers import TrackerMissing, open_trackers, scalars

# ---- names ------------------------------------------------------------------------------------------------


def test_every_key_of_a_step_falls_under_one_of_the_table():
    rng = np.random.default_rng(0)
    logged = {table_key(key) for key in step_row(1, 10, rng) | evaluation(0.5, rng)}
    unconditional = tuple(start for start in ONLY_WHEN if start != "evaluation/")
    assert logged == {key for key in METRICS if not key.startswith(unconditional)}


@pytest.mark.parametrize(
    "key", ["reward/meen", "evaluation/pass@", "evaluation/pass@x", "reward/part/", "evaluation/pass@2_mid"]
)
def test_unknown_keys_fall_under_none(key):
    assert table_key(key) is None


def test_quantiles_and_bins_are_symmetric_and_ascending():
    assert [1 - q for q in reversed(QUANTILES)] == pytest.approx(QUANTILES)
    assert list(HISTOGRAM) == sorted(HISTOGRAM) == [-edge for edge in reversed(HISTOGRAM)]


# ---- records ----------------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were_written(tmp_path):
    row = {
        "step": 1,
        "time": 0.1 + 0.2,
        "reward/std": None,
        "ratio/sequence_quantiles": [1e-300, 1.0],
        "update/updates": 2**60,
    }
    RunRecords(tmp_path).append(row | {"clip/token": np.float32(0.25), "reward/abstained": np.int64(3)})
    assert read_metrics(tmp_path) == [row | {"clip/token": 0.25, "reward/abstained": 3}]


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), -float("inf"), np.float32("nan"), [1.0, float("nan")], np.array([np.inf])]
)
def test_what_is_not_finite_is_refused_by_name_and_leaves_no_trace(tmp_path, bad):
    records = RunRecords(tmp_path)
    records.append({"step": 1})
    with pytest.raises(ValueError, match="update/grad_norm"):
        records.append({"step": 2, "update/grad_norm": bad})
    with pytest.raises(ValueError, match=r"s1/a/0.*parts.exact.value"):
        records.write_samples(2, [{"id": "s1/a/0", "parts": {"exact": {"value": bad}}}])
    assert read_metrics(tmp_path) == [{"step": 1}]
    assert sample_steps(tmp_path) == []


def test_values_of_unknown_kind_are_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match="reward/mean is a object"):
        RunRecords(tmp_path).append({"step": 1, "reward/mean": object()})


def test_each_row_is_on_disk_when_append_returns(tmp_path):
    records = RunRecords(tmp_path)
    for step in range(3):
        records.append({"step": step})
        assert len(read_metrics(tmp_path)) == step + 1


def test_a_torn_last_line_is_left_out_wherever_it_is_torn(tmp_path):
    records = RunRecords(tmp_path)
    records.append({"step": 1, "reward/mean": 0.5})
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    for cut in range(1, len(whole) - 1):
        (tmp_path / "metrics.jsonl").write_bytes(whole + whole[:cut])
        assert read_metrics(tmp_path) == [{"step": 1, "reward/mean": 0.5}]


def test_nothing_is_appended_to_a_torn_line_until_it_is_mended(tmp_path):
    RunRecords(tmp_path).append({"step": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    records = RunRecords(tmp_path)
    with pytest.raises(ValueError, match="truncate_after"):
        records.append({"step": 3})
    records.truncate_after(2)
    records.append({"step": 2})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize("bad", ['{"step": 1, "x"', "[1]", '{"step": 1, "x": NaN}', '{"x": 1}', "\xff"])
def test_a_bad_line_in_the_middle_is_an_error_with_its_number(tmp_path, bad):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n' + bad.encode("latin-1") + b'\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_metrics(tmp_path)


def test_a_folder_without_records_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="folder of a run"):
        read_metrics(tmp_path)
    with pytest.raises(FileNotFoundError, match="step-000007"):
        read_samples(tmp_path, 7)


def test_going_back_leaves_exactly_what_was_there_then(tmp_path):
    then, later = RunRecords(tmp_path / "then"), RunRecords(tmp_path / "later")
    for step in range(1, 13):
        for records in (then, later) if step <= 7 else (later,):
            records.append({"step": step, "time": step / 3})
            records.write_samples(step, [{"id": f"s{step}"}])
    with (tmp_path / "later" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13')
    later.truncate_after(7)
    files = sorted(p.relative_to(tmp_path / "then") for p in (tmp_path / "then").rglob("*"))
    assert files == sorted(p.relative_to(tmp_path / "later") for p in (tmp_path / "later").rglob("*"))
    for file in (f for f in files if (tmp_path / "then" / f).is_file()):
        assert (tmp_path / "then" / file).read_bytes() == (tmp_path / "later" / file).read_bytes()


@given(st.lists(st.text(st.characters(exclude_categories=()), max_size=30), max_size=5))
def test_any_text_survives_the_samples_file(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("run")
    texts = [*texts, *NASTY]
    path = RunRecords(folder).write_samples(12, [{"id": str(i), "response": text} for i, text in enumerate(texts)])
    assert path.name == "step-000012.jsonl"
    assert [sample["response"] for sample in read_samples(folder, 12)] == texts
    assert len(path.read_text().splitlines()) == len(texts)


def test_samples_that_cannot_be_written_leave_the_old_ones(tmp_path):
    records = RunRecords(tmp_path)
    records.write_samples(1, [{"id": "old"}])
    with pytest.raises(TypeError, match="sample new"):
        records.write_samples(1, [{"id": "new", "answer": {1, 2}}])
    assert read_samples(tmp_path, 1) == [{"id": "old"}]


# ---- trackers ---------------------------------------------------------------------------------------------


def test_lists_become_named_scalars_and_histograms_and_lists_of_lists_stay_home():
    row = {"step": 1, "time": 2.0, "reward/mean": 1, "kl/reference": None, "ratio/token_histogram": [1, 2]}
    row |= {"ratio/token_quantiles": [float(i) for i in range(9)], "clip/token_by_minibatch": [0.0, 0.5]}
    row |= {"moe/flips_after_by_minibatch_and_layer": [[0.0, 0.5], None]}
    out = scalars(row)
    assert out["ratio/token_quantiles/q0.01"] == 1.0
    assert out["ratio/token_quantiles/q1"] == 8.0
    assert out["clip/token_by_minibatch/2"] == 0.5
    assert len(out) == 1 + 9 + 2


def test_lists_by_length_are_named_by_the_longest_response_of_the_bin():
    values = [None] * 4 + [0.5] + [None] * (len(LENGTHS) - 4)
    assert scalars({"step": 1, "mismatch/sequence_std_by_length": values}) == {"mismatch/sequence_std_by_length/16": 0.5}
    last = scalars({"step": 1, "mismatch/sequence_std_by_length": [None] * len(LENGTHS) + [0.25]})
    assert last == {"mismatch/sequence_std_by_length/longer": 0.25}


def test_no_tracker_imports_nothing(tmp_path):
    before = set(sys.modules)
    trackers = open_trackers(TrackingConfig(), tmp_path, "run", {})
    trackers.log({"step": 1, "reward/mean": 0.5})
    trackers.close()
    assert not {m for m in set(sys.modules) - before if m.split(".")[0] in ("wandb", "trackio", "tensorboard")}


def test_tensorboard_holds_what_was_logged(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = TrackingConfig(tensorboard=True)
    first = open_trackers(config, tmp_path, "run", {})
    for step in (1, 2, 3):
        first.log({"step": step, "reward/mean": step / 4, "clip/token_by_minibatch": [0.0, 0.25]})
    first.close()
    second = open_trackers(config, tmp_path, "run", {}, resumed_at=2)
    second.log({"step": 3, "reward/mean": 0.875})
    second.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.875)]
    assert events.Scalars("clip/token_by_minibatch/2")[0].value == 0.25


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_missing_package_names_its_extra_and_closes_the_others(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TrackerMissing, match=rf"pip install 'gspo\[{package}\]'"):
        open_trackers(TrackingConfig(tensorboard=True, **{package: "project"}), tmp_path, "run", {})


def test_a_broken_package_is_not_called_missing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "trackio.py").write_text("import no_such_module_of_trackio\n")
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_trackio"):
        open_trackers(TrackingConfig(trackio="project"), tmp_path, "run", {})


def fake_wandb(calls):
    module = types.ModuleType("wandb")
    run = types.SimpleNamespace(
        id="abc123",
        define_metric=lambda *a, **k: calls.append(("define", a, k)),
        log=lambda row: calls.append(("log", row)),
        finish=lambda: calls.append(("finish",)),
    )
    module.init = lambda **k: calls.append(("init", k)) or run
    return module


def test_wandb_goes_on_with_the_same_run_when_resumed(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(calls))
    for resumed_at in (None, 4):
        trackers = open_trackers(TrackingConfig(wandb="p"), tmp_path, "run", {"seed": 1}, resumed_at=resumed_at)
        trackers.log({"step": 5, "reward/mean": 0.5})
        trackers.close()
    inits = [c[1] for c in calls if c[0] == "init"]
    assert [(i["id"], i["resume"]) for i in inits] == [(None, None), ("abc123", "allow")]
    assert inits[0]["project"] == "p" and inits[0]["config"] == {"seed": 1}
    assert [c for c in calls if c[0] == "log"] == [("log", {"step": 5, "reward/mean": 0.5})] * 2
    assert calls[-1] == ("finish",)


def test_trackio_gets_scalars_at_their_step(tmp_path, monkeypatch):
    calls = []
    fake = types.ModuleType("trackio")
    fake.init = lambda **k: calls.append(k)
    fake.log = lambda row, step: calls.append((row, step))
    fake.finish = lambda: calls.append("finish")
    monkeypatch.setitem(sys.modules, "trackio", fake)
    trackers = open_trackers(TrackingConfig(trackio="p"), tmp_path, "run", {})
    trackers.log({"step": 5, "reward/mean": 0.5})
    trackers.close()
    assert calls[0]["resume"] == "never"
    assert calls[1:] == [({"reward/mean": 0.5}, 5), "finish"]


def test_one_tracker_that_fails_to_close_does_not_keep_others_open(tmp_path, monkeypatch):
    calls = []
    wandb, trackio = fake_wandb(calls), types.ModuleType("trackio")
    trackio.init = lambda **k: None

    def fail():
        raise RuntimeError("no connection")

    trackio.finish = fail
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    trackers = open_trackers(TrackingConfig(wandb="p", trackio="p"), tmp_path, "run", {})
    with pytest.raises(RuntimeError, match="no connection"):
        trackers.close()
    assert ("finish",) in calls


# ---- terminal ---------------------------------------------------------------------------------------------


def drive(terminal, fail=None):
    rng = np.random.default_rng(0)
    with terminal:
        terminal.step({"step": 0} | evaluation(0, rng))
        for step in (1, 2, 3):
            with terminal.generation(8) as advance:
                advance(3)
                advance(5)
            terminal.step(step_row(step, 4, rng) | (evaluation(0.5, rng) if step == 3 else {}))
        terminal.note("[bold]it[/bold] said [link=x] " + NASTY[3])
        if fail:
            raise fail


def test_without_a_terminal_only_start_evaluations_notes_and_end_are_said():
    out = io.StringIO()
    drive(Terminal("run", 4, title="gspo", console=Console(file=out)))
    lines = out.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "run",
        "step 0",
        "step 3",
        "[bold]it[/bold] said [link=x] " + visible(NASTY[3], ""),
        "run",
    ]
    assert lines[0] == "run: gspo, 4 steps"
    assert "pass@1 0." in lines[1] and "pass@4" in lines[1] and "[" in lines[1]
    assert lines[-1] == "run: ended after step 3 of 4"
    assert "\x1b" not in out.getvalue() and "\r" not in out.getvalue()


def test_a_pipe_that_knows_only_ascii_is_no_error():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    with Terminal("run", 1, console=Console(file=out)) as terminal:
        terminal.note("你好 ±")
    assert b"\\u4f60" in raw.getvalue()


def on_a_terminal(width=100):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=30, _environ={"TERM": "xterm"})
    return out, console


def test_on_a_terminal_the_table_holds_the_latest_steps_and_text_stays_text():
    out, console = on_a_terminal()
    terminal = Terminal("run", 4, rows=2, console=console)
    assert not terminal.quiet
    drive(terminal)
    text = out.getvalue()
    for word in ("step", "reward", "solved", "length", "entropy", "clipped", "|grad|", "tok/s", "sec", "3/4"):
        assert word in text
    assert "[bold]it[/bold] said [link=x]" in text
    assert "\x1b[31m" not in text.partition("[bold]it")[2].partition("\n")[0]
    last = text[text.rindex("steps ") :]
    rows = [line.split()[0] for line in last.splitlines() if line.split() and line.split()[0].isdigit()]
    assert rows == ["2", "3"]


def test_sampling_has_a_bar_of_its_own_while_it_lasts():
    out, console = on_a_terminal()
    with Terminal("run", 4, console=console) as terminal:
        with terminal.generation(8) as advance:
            advance(3)
            terminal.note("in between")
        during = out.getvalue()
        terminal.note("afterwards")
    assert "responses" in during and "3/8" in during
    assert "responses" not in out.getvalue().partition("afterwards")[2]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom"), SystemExit(1)])
def test_the_terminal_is_put_in_order_however_the_run_ends(error):
    out, console = on_a_terminal()
    with pytest.raises(type(error)):
        drive(Terminal("run", 4, console=console), fail=error)
    text = out.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again
    assert f"run: stopped by {type(error).__name__} after step 3 of 4" in text


def test_values_that_are_undefined_are_dashes():
    out, console = on_a_terminal()
    with Terminal("run", 4, console=console) as terminal:
        terminal.step({"step": 1, "reward/mean": None, "ratio/sequence_mean": 1.0})
    assert "-" in out.getvalue()


@given(st.text(st.characters(exclude_categories=())))
def test_visible_text_holds_nothing_that_is_obeyed(text):
    shown = visible(text, keep="")
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 for c in shown)
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029")
    shown.encode("utf-8")


def test_letters_of_every_script_stay():
    assert visible(NASTY[-1]) == NASTY[-1]
    assert visible("a\tb\nc") == "a\tb\nc"


def test_records_hold_one_json_object_a_line(tmp_path):
    records = RunRecords(tmp_path)
    records.append({"step": 1, "note": "a\nb\u2028c"})
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["note"] == "a\nb\u2028c"
