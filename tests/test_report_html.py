"""Laws of the report: one page, no network, nothing a model wrote is obeyed, figures say what they lack."""

import base64
import hashlib
import json
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from browser import Page, chromium, driven, needs_chromium
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import NASTY, write_run

from gspo.reporting import html
from gspo.reporting.drawing import FILL_POINTS, SAMPLES, binned, smooth
from gspo.reporting.figures import COLD_START, REFERENCE, TRAINING
from gspo.reporting.html import embed, render, write_report
from gspo.reporting.names import METRICS
from gspo.reporting.pictures import spread
from gspo.reporting.records import RunRecords
from gspo.reporting.text import visible


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("run"))
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def page(run):
    return Page((run / "report.html").read_text(encoding="utf-8"))


def test_a_report_of_500_steps_is_small_and_quickly_written(run):
    start = time.perf_counter()
    path = write_report(run)
    assert path == run / "report.html"
    assert path.stat().st_size < 3_000_000
    assert time.perf_counter() - start < 15


def test_same_files_same_page(run):
    assert render(run) == render(run)
    assert not re.search(r"20\d\d-\d\d-\d\d", (run / "report.html").read_text(encoding="utf-8"))


def test_page_refers_to_nothing_outside_itself(run, page):
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "http:" not in text and "https:" not in text and "//" not in re.sub(r"(?m)^// .*$", "", text)
    assert "@import" not in text
    for tag, attrs in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "image", "foreignobject", "a:href")
        assert "src" not in attrs
        for name in ("href", "xlink:href"):
            assert attrs.get(name, "#").startswith("#")
    assert set(re.findall(r"url\((.)", text)) <= {"#"}


def test_policy_of_the_page_admits_only_its_own_script(page):
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    script = next(text for attrs, text in page.scripts if "type" not in attrs)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}'; ")
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    assert len(page.scripts) == 2


def test_what_a_model_wrote_stays_text(page):
    # Exactly the page's own scripts, no handler attributes, and every nasty text whole in the data.
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    shown = [s["response"] for step in page.data["steps"] for s in step["samples"]]
    for nasty in NASTY:
        assert any(visible(nasty) in text for text in shown)
    assert not any("<b>{a}" in text for attrs, text in page.scripts)
    assert "<b>{a}</b> </pre><script>document.title='owned'</script>" in "".join(page.words)


def test_page_holds_no_character_that_a_browser_obeys(run):
    text = (run / "report.html").read_text(encoding="utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]", text)


@given(st.recursive(st.text(st.characters(exclude_categories=("Cs",))), st.lists, max_leaves=5))
def test_embedded_json_cannot_leave_its_element(value):
    text = embed(value)
    assert json.loads(text) == value
    assert not set(text) & set("<>&\u2028\u2029")


def test_ids_are_unique_and_every_reference_has_its_target(page):
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    wanted = {attrs["href"][1:] for _, attrs in page.elements if "href" in attrs}
    styles = " ".join(v or "" for _, attrs in page.elements for v in attrs.values())
    wanted |= set(re.findall(r"url\(#([^)]+)\)", styles))
    assert wanted and wanted <= set(ids)


def test_colours_are_the_themes(run):
    svgs = "".join(re.findall(r"<svg.*?</svg>", (run / "report.html").read_text(encoding="utf-8"), re.S))
    assert not re.findall(r"#[0-9a-f]{6}", svgs)
    used = set(re.findall(r"var\((--[a-z0-9]+)\)", svgs))
    style = Path(html.__file__).with_name("report.css").read_text(encoding="utf-8")
    light, dark = style.split("@media (prefers-color-scheme: dark)")[:2]
    for block in (light, dark):
        assert used <= set(re.findall(r"(--[a-z0-9]+):", block))


def test_figures_are_drawn_from_keys_of_the_table_and_have_names_of_their_own():
    specs = [spec for _, specs in TRAINING for spec in specs] + [REFERENCE, COLD_START]
    needs = {need for spec in specs for panel in spec.panels for need in panel.needs}
    assert {need for need in needs if not need.startswith(SAMPLES)} <= set(METRICS)
    assert len({spec.name for spec in specs}) == len(specs)


def test_a_full_run_has_every_figure_and_leaves_none_out(page):
    figures = [attrs["id"] for tag, attrs in page.elements if tag == "figure"]
    specs = [spec for _, specs in TRAINING for spec in specs]
    assert sorted(figures) == sorted([spec.name for spec in specs] + ["cold-start", "strip"])
    assert "left-out" not in {attrs.get("id") for _, attrs in page.elements}
    assert sum(tag == "svg" for tag, _ in page.elements) == sum(len(s.panels) for s in [*specs, COLD_START])


@pytest.mark.parametrize(
    ("drop", "line"),
    [
        (("mismatch/",), "Engine against trainer, same weights is not drawn: the run has no mismatch/k3, mismatch/k1,"),
        (("ratio/token",), "Ratios of new to old policy is drawn without ratio/token_quantiles."),
        (("ratio/",), "Histograms of the ratios is not drawn: the run has no ratio/sequence_histogram"),
        (("system/model",), "Model FLOP utilisation is not drawn: the run has no system/model_flops_utilisation."),
        (("evaluation/",), "Reward and evaluation is drawn without evaluation/pass@&lt;k&gt;."),
    ],
)
def test_missing_metrics_leave_a_figure_out_and_are_named(tmp_path, drop, line):
    assert line in render(write_run(tmp_path, 12, drop=drop))


def test_a_key_that_only_later_rows_hold_is_drawn(tmp_path):
    records = RunRecords(tmp_path)
    records.append({"step": 1, "reward/mean": 0.1, "kl/reference": None})
    records.append({"step": 2, "reward/mean": 0.2, "kl/reference": 0.01, "clip/sequence": 0.0})
    text = render(tmp_path)
    assert 'id="reference"' in text and 'id="clipped"' in text


def test_a_run_that_died_at_once_still_has_a_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rew')
    text = render(tmp_path)
    for sentence in ("No step was recorded", "The configuration was not recorded", "Versions were not recorded"):
        assert sentence in text
    assert {key: Page(text).data[key] for key in ("recorded", "steps")} == {"recorded": 0, "steps": []}


def test_a_single_step_is_drawn(tmp_path):
    text = render(write_run(tmp_path, 1))
    assert len(re.findall(r"<svg [^>]*viewBox", text)) == sum(len(s.panels) for _, specs in TRAINING for s in specs) + 1


def test_without_a_clip_range_in_the_configuration_the_page_says_so(tmp_path):
    folder = write_run(tmp_path, 5)
    assert "The clip band is not drawn" not in render(folder)
    (folder / "config.json").write_text('{"objective": {"clip_low": null, "clip_high": null}}')
    assert "The clip band is not drawn" in render(folder)


def test_a_damaged_file_is_named(tmp_path):
    folder = write_run(tmp_path, 2)
    (folder / "versions.json").write_text("{")
    with pytest.raises(ValueError, match=r"versions\.json: is damaged"):
        render(folder)


def test_a_folder_that_is_no_run_is_named_and_gets_no_report(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_summary_holds_the_first_and_last_evaluation(tmp_path):
    records = RunRecords(tmp_path)
    for step, score in ((0, 0.25), (1, None), (2, 0.75)):
        held = (
            {"evaluation/pass@2": score, "evaluation/pass@2_low": 0.125, "evaluation/pass@2_high": 0.875} if score else {}
        )
        records.append({"step": step} | held | ({"reward/mean": step / 10} if step else {}))
    words = " ".join(Page(render(tmp_path)).words)
    assert re.search(r"pass@2, held out\s+0\.250\s+\[0\.125, 0\.875\]\s+0\.750\s+\[0\.125, 0\.875\]", words)
    assert re.search(r"training reward\s+0\.100\s+0\.200", words)


# ---- samples ----------------------------------------------------------------------------------------------


@given(st.integers(0, 3000), st.integers(2, 50))
def test_spread_keeps_first_and_last_and_is_even(num, limit):
    at = spread(num, limit)
    assert len(at) == min(num, limit)
    if num:
        assert at[0] == 0 and at[-1] == num - 1
        gaps = np.diff(at)
        assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1


def test_samples_are_spread_over_the_run_and_their_numbers_told(page):
    data = page.data
    assert (len(data["steps"]), data["recorded"]) == (40, 100)
    assert (data["steps"][0]["step"], data["steps"][-1]["step"]) == (1, 496)
    assert {(len(s["samples"]), s["recorded"]) for s in data["steps"]} == {(16, 64)}


def test_long_texts_are_cut_and_say_how_much_is_left_out(tmp_path):
    records = RunRecords(tmp_path)
    records.append({"step": 1})
    records.write_samples(1, [{"id": "a", "response": "x" * 12345, "answer": {"k": [1]}}])
    sample = Page(render(tmp_path)).data["steps"][0]["samples"][0]
    assert sample["response"] == "x" * 2000 + " … [10,345 more characters left out]"
    assert sample["answer"] == '{"k": [1]}'
    assert sample["reward"] is None


def test_page_stays_small_whatever_a_model_writes(tmp_path):
    records = RunRecords(tmp_path)
    for step in range(1, 41):
        records.append({"step": step})
        records.write_samples(step, [{"id": str(i), "prompt": "你" * 9000, "response": "<" * 9000} for i in range(16)])
    assert len(render(tmp_path).encode()) < 5_000_000


# ---- drawing ----------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300))
def test_running_mean_stays_within_its_values(values):
    out = smooth(np.array(values))
    slack = 1e-9 * max(1.0, max(map(abs, values))) * len(values)
    assert len(out) == len(values)
    assert min(values) - slack <= out.min() and out.max() <= max(values) + slack


@given(st.integers(1, 4000))
def test_binned_means_keep_the_total(num):
    values = np.arange(num, dtype=float)
    x, y = binned(np.arange(num), values)
    assert len(x) == len(y) <= FILL_POINTS
    size = -(-num // FILL_POINTS)
    counts = np.full(len(y), size)
    counts[-1] = num - size * (len(y) - 1)
    assert (y * counts).sum() == pytest.approx(values.sum())


# ---- in a browser -----------------------------------------------------------------------------------------


@needs_chromium
def test_in_a_browser_nothing_a_model_wrote_runs_and_the_table_is_filled(run, tmp_path):
    profile = shutil.copytree(run, tmp_path / "run")
    dom = chromium(profile / "report.html")
    assert "<title>synthetic</title>" in dom
    page = Page(dom)
    assert len(page.scripts) == 2
    assert not [tag for tag, _ in page.elements if tag in ("img", "iframe")]
    words = "".join(page.words)
    assert "first the tens, then the ones" in words
    assert "16 shown of 16 kept here, of 64 recorded at step 496" in words
    assert "page 1 of 2" in words


@needs_chromium
def test_in_a_browser_sorting_filtering_and_stepping_work(run, tmp_path):
    driver = """
    const set = (id, value) => { by(id).value = value; by(id).dispatchEvent(new Event("input")); };
    const rewards = () => [...document.querySelectorAll(".reward")].map((e) => e.textContent).join(" ");
    const log = [];
    set("order", "up"); log.push(rewards()); by("next").click(); log.push(rewards());
    set("order", "down"); log.push(rewards());
    by("earlier").click(); log.push(by("step").value);
    const wicked = (step) => step.samples.some((sample) => sample.response.includes("<" + "/script>"));
    by("step").selectedIndex = data.steps.findIndex(wicked);
    set("filter", "<" + "/SCRIPT>"); log.push(document.querySelectorAll("#rows tr").length, by("rows").textContent);
    set("filter", "no such text"); log.push(document.querySelectorAll("#rows tr").length);
    return log;
    """
    log = driven(run / "report.html", tmp_path / "driven.html", driver)
    low, rest, high, step, found, cell, none = log
    ordered = [float(x) for x in (low + " " + rest).split() if x != "none"]
    assert ordered == sorted(ordered) and len(ordered) >= 15
    assert [float(x) for x in high.split()] == sorted((float(x) for x in high.split()), reverse=True)
    assert int(step) == 1 + 5 * spread(100, 40)[-2]
    assert found >= 1 and "</script><script>" in cell
    assert none == 0
