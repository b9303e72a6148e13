"""Laws of the method's own pictures: what is recorded of tokens, what is drawn from it, and what a browser shows."""

import json
import math
import re
from itertools import pairwise

import numpy as np
import pytest
from browser import Page, chromium, driven, needs_chromium
from conftest import sampled, tiny_config, tiny_policy
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import write_run

from gspo.chat import token_texts
from gspo.objectives import OBJECTIVES
from gspo.reporting.html import render, write_report
from gspo.reporting.names import HISTOGRAM
from gspo.reporting.pictures import place
from gspo.reporting.records import RunRecords, read_samples
from gspo.reporting.strips import GRPO_CLIP, GSPO_CLIP, clips, strips
from gspo.reporting.tokens import MAX_TOKENS, Trace, ends, token_record
from gspo.training.optimizer import Optimizer
from gspo.training.traces import traces
from gspo.training.update import Skips, pack_minibatches, update

# ---- what is recorded -------------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=30))
def test_pieces_of_bytes_make_the_text(text):
    ids = list(text.encode())
    pieces = token_texts(lambda some: bytes(some).decode("utf-8", "replace"), ids)
    assert len(pieces) == len(ids)
    if "\ufffd" not in text:
        assert "".join(pieces) == text


@given(st.lists(st.sampled_from(["a", "bc", "d,"]), max_size=12))
def test_pieces_keep_the_spaces_that_a_tokenizer_writes_between_words(words):
    assert "".join(token_texts(" ".join, words)) == " ".join(words)


@pytest.mark.parametrize("old", ["engine", "trainer", "auto"])
def test_traces_hold_the_log_probabilities_of_the_update(tmp_path, old):
    policy = tiny_policy()
    trajectories = sampled(policy, [3, 5, 4, 6, 7, 3, 5, 4])
    engine = {t.id: t.engine_logprobs for t in trajectories}
    config = tiny_config(tmp_path, training__minibatches=2, rollout__old_logprobs=old)
    parts = pack_minibatches(trajectories, config, seed=0, device=policy.device)
    updated = update(policy, Optimizer(policy.trainable, config.training, 2), parts, config, Skips())
    found = traces(updated.ratios, engine)
    log_s = {name: float(x) for part in updated.ratios for r in part for name, x in zip(r.ids, r.log_ratio_S, strict=True)}
    largest = next(t for t in found.values() if "largest |log s| of the step" in t.chosen)
    assert 2 <= len(found) <= 4 and {t.minibatch for t in found.values()} == {1, 2}
    assert abs(largest.log_ratio.mean()) == pytest.approx(max(map(abs, log_s.values())), rel=1e-4)
    for name, trace in found.items():
        assert trace.log_ratio.mean() == pytest.approx(log_s[name], abs=1e-7)
        np.testing.assert_array_equal(trace.engine_logprobs, engine[name])
        assert (trace.engine_gap is not None) is (trace.minibatch == 1 or old == "trainer")
        if trace.minibatch == 1:  # before any step, so the trainer's are the old ones, and the engine's but for rounding
            np.testing.assert_allclose(trace.trainer_logprobs, engine[name], atol=1e-5)
        else:
            np.testing.assert_allclose(trace.trainer_logprobs - trace.log_ratio, engine[name], atol=1e-5)
            assert np.abs(trace.log_ratio).max() > 1e-4


def trace_of(num):
    d = np.arange(num, dtype=np.float32) / 1e4
    return Trace(2, ("by hand",), d, d - 1, np.full_like(d, -1), None, np.ones_like(d))


@given(st.integers(0, 40), st.integers(1, 20))
def test_ends_are_the_first_and_last_halves(num, limit):
    kept = ends(num, limit)
    assert len(kept) == min(num, limit) and kept == sorted(set(kept))
    if num > limit:
        assert kept[0] == 0 and (limit == 1 or kept[-1] == num - 1)
        assert sum(b - a > 1 for a, b in pairwise(kept)) <= 1


def test_of_a_long_response_both_ends_are_recorded_and_the_rest_is_told():
    record = token_record(trace_of(32768), range(32768), ["x"] * 32768)
    assert len(record["ids"]) == len(record["log_ratio"]) == len(record["texts"]) == MAX_TOKENS
    assert record["left_out"] == 32768 - MAX_TOKENS
    assert record["left_out_largest"] == pytest.approx((32768 - MAX_TOKENS / 2 - 1) / 1e4, rel=1e-3)
    assert len(json.dumps(record)) < 40_000
    line = {"id": "a", "ratio": 1.0, "tokens": record}
    ((step,), (whole,)) = (strips([(1, [line])], limit) for limit in (64, MAX_TOKENS))
    cut, most = step["responses"][0], whole["responses"][0]
    assert cut["length"] == most["length"] == 32768 and cut["leftOut"] == 32768 - 64
    assert cut["ids"] == [*range(32), *range(32768 - 32, 32768)]
    assert cut["leftOutLargest"] >= most["leftOutLargest"]


def test_the_page_of_long_responses_stays_small_and_says_what_is_missing(tmp_path):
    records, record = RunRecords(tmp_path), token_record(trace_of(9000), range(9000), ["<\u4f60>"] * 9000)
    for step in range(1, 13):
        records.append({"step": step})
        lines = [{"id": f"{i}", "ratio": 1.0, "num_tokens": 9000, "tokens": record} for i in range(4)]
        records.write_samples(step, lines)
    text = render(tmp_path)
    assert len(text.encode()) < 1_500_000
    data = Page(text).data["strips"]["steps"]
    assert len(data) == 12 and len(data[0]["responses"][0]["d"]) < MAX_TOKENS
    assert all(len(r["d"]) + r["leftOut"] == 9000 for s in data for r in s["responses"])


# ---- what is drawn ----------------------------------------------------------------------------------------


def test_edges_of_bins_lie_one_apart_and_places_keep_the_order():
    assert [place(edge) for edge in HISTOGRAM] == pytest.approx(range(len(HISTOGRAM)))
    values = np.concatenate([-np.logspace(1, -9, 60), np.logspace(-9, 1, 60)])
    assert (np.diff([place(v) for v in values]) > 0).all()


def test_the_other_objective_is_drawn_with_its_own_clip_range():
    for name, mine in (("gspo", GSPO_CLIP), ("grpo", GRPO_CLIP)):
        assert mine == (OBJECTIVES[name].clip.low, OBJECTIVES[name].clip.high)
    assert clips("gspo_token", (1e-3, 2e-3)) == {"gspo": (1e-3, 2e-3), "grpo": GRPO_CLIP}
    assert clips("dapo", (0.2, 0.28)) == {"gspo": GSPO_CLIP, "grpo": (0.2, 0.28)}


def axis_labels(text, figure):
    svg = re.search(rf'id="{figure}".*?</svg>', text, re.S)
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg[0])


def test_a_share_of_zero_has_a_lane_of_its_own(tmp_path):
    records = RunRecords(tmp_path / "zero")
    others = RunRecords(tmp_path / "none")
    for step in range(1, 30):
        records.append({"step": step, "clip/sequence": 0.1 * (step % 3)})
        others.append({"step": step, "clip/sequence": 0.1 * (step % 3 + 1)})
    assert "0" in axis_labels(render(tmp_path / "zero"), "clipped")[5:]
    assert "0" not in axis_labels(render(tmp_path / "none"), "clipped")[5:]


def test_flips_are_drawn_of_experts_and_not_missed_in_a_dense_model(tmp_path):
    few = ("ratio/", "mismatch/", "time/", "system/", "update/", "clip/", "rollout/", "policy/", "evaluation/")
    experts, dense = (render(write_run(tmp_path / str(n), 12, layers=n, drop=few)) for n in (3, 0))
    assert 'id="flips"' in experts and 'id="load"' in experts and re.search(r"up to [\d.]+%", experts)
    assert 'id="flips"' not in dense and 'id="load"' not in dense and "moe/" not in dense and "moe/" not in experts


def test_a_run_without_recorded_tokens_has_no_strip_and_says_what_is_missing(tmp_path):
    folder = write_run(tmp_path, 4)
    for path in (folder / "samples").iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "tokens"}) + "\n" for line in lines))
    text = render(folder)
    assert 'id="strip"' not in text
    assert "Engine against trainer, token by token is not drawn: the run has no samples: tokens/engine_gap" in text


# ---- in a browser -----------------------------------------------------------------------------------------

HOVER = """
const seen = [];
const step = data.strips.steps.length - 1;
by("strip-step").value = step; by("strip-step").dispatchEvent(new Event("input"));
data.strips.steps[step].responses.forEach((_, which) => {
  by("strip-response").selectedIndex = which; by("strip-response").dispatchEvent(new Event("input"));
  const tokens = [...document.querySelectorAll(".token")];
  const shown = tokens.map((token) => {
    token.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
    const numbers = [...document.querySelectorAll("#strip-detail dd")];
    return Object.fromEntries(numbers.map((e) => [e.dataset.of, e.textContent]));
  });
  const gap = document.querySelectorAll(".gap").length, bars = document.querySelectorAll("#weights .slot").length;
  seen.push({ s: by("strip-s").textContent, shown, gap, bars, up: tokens.map((t) => t.className.includes("up")) });
});
return seen;
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("pictures"), 25, layers=4)
    write_report(folder)
    return folder


def number(text):
    return 0.0 if text == "0, clipped" else float(text.replace("\u2212", "-"))


def weight(ratio, advantage, clip, length):
    """Zero where min(ratio A, clip(ratio) A) takes the clipped branch, else ratio A / |y|."""
    inside = min(max(ratio, 1 - clip[0]), 1 + clip[1])
    return ratio * advantage / length if ratio * advantage <= inside * advantage else 0.0


@needs_chromium
def test_hovering_over_a_token_shows_the_recorded_numbers(run, tmp_path):
    seen = driven(run / "report.html", tmp_path / "driven.html", HOVER)
    lines = sorted((s for s in read_samples(run, 21) if "tokens" in s), key=lambda s: s["tokens"]["minibatch"] == 1)
    assert len(seen) == len(lines) == 4
    assert sum(line["tokens"]["left_out"] > 0 for line in lines) == 1
    for found, line in zip(seen, lines, strict=True):
        table = line["tokens"]
        num, length = len(table["ids"]), len(table["ids"]) + table["left_out"]
        assert float(found["s"]) == pytest.approx(line["ratio"], abs=5e-7)
        assert len(found["shown"]) == found["bars"] == num
        assert found["gap"] == (table["left_out"] > 0)
        for i, shown in enumerate(found["shown"]):
            d, w = table["log_ratio"][i], math.exp(table["log_ratio"][i])
            assert number(shown["d"]) == pytest.approx(d, rel=1e-3)
            assert number(shown["ratio"]) == pytest.approx(w, rel=1e-3)
            assert number(shown["trainer"]) == pytest.approx(table["trainer_logprobs"][i], rel=1e-3)
            assert number(shown["engine"]) == pytest.approx(table["engine_logprobs"][i], rel=1e-3)
            assert number(shown["grpo"]) == pytest.approx(weight(w, 0.7, GRPO_CLIP, length), rel=1e-3)
            assert number(shown["gspo"]) == pytest.approx(weight(line["ratio"], 0.7, GSPO_CLIP, length), rel=1e-3)
            assert ("gap" in shown) is (table["engine_gap"] is not None)
            assert found["up"][i] is (d > 0)


@needs_chromium
def test_keys_move_along_the_strip_and_the_slider_through_the_steps(run, tmp_path):
    driver = """
    const press = (key) => new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true });
    const key = (name) => document.activeElement.dispatchEvent(press(name));
    const place = () => document.querySelector('[data-of="place"]').textContent.split(" ")[0];
    document.querySelector('.token[tabindex="0"]').focus();
    const log = [];
    for (const name of ["Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End"]) { key(name); log.push(place()); }
    log.push(document.querySelectorAll('.token[tabindex="0"]').length);
    by("strip-step").value = 0; by("strip-step").dispatchEvent(new Event("input"));
    return [...log, by("strip-at").textContent, by("strip-response").options.length];
    """
    first, *moves, last, stops, step, responses = driven(run / "report.html", tmp_path / "driven.html", driver)
    assert (first, moves) == ("1", ["2", "3", "2"]) and int(last) > 3
    assert (stops, step, responses) == (1, "1", 4)


LAYOUT = """
const colour = (selector) => getComputedStyle(document.querySelector(selector)).backgroundColor;
const right = (e) => e.getBoundingClientRect().right;
const scrolls = (e) => e.closest(".tokens, pre, svg");
const wide = [...document.querySelectorAll("main *")].filter((e) => right(e) > innerWidth + 1 && !scrolls(e));
const flat = [...document.querySelectorAll("figure")].filter((f) => f.getBoundingClientRect().height < 100);
const colours = [colour("body"), getComputedStyle(document.body).color];
const scroll = document.documentElement.scrollWidth;
return [innerWidth, scroll, ...colours, flat.map((f) => f.id), wide.map((e) => e.className || e.tagName)];
"""


@needs_chromium
@pytest.mark.parametrize(("theme", "dark"), [("1", False), ("0", True)])
@pytest.mark.parametrize("width", [375, 1280])
def test_every_picture_is_there_on_phone_and_laptop_in_light_and_dark(run, tmp_path, width, theme, dark):
    theme, at = f"--blink-settings=preferredColorScheme={theme}", tmp_path / "driven.html"
    inner, scroll, ground, letters, flat, wide = driven(run / "report.html", at, LAYOUT, theme, width=width)
    assert inner == width and scroll <= inner and not wide
    assert flat == []
    luminance = [sum(int(x) for x in re.findall(r"\d+", colour)[:3]) for colour in (ground, letters)]
    assert (luminance[0] < luminance[1]) is dark and abs(luminance[0] - luminance[1]) > 400
    assert {"histograms", "ratio-length", "clipped", "flips", "strip", "engine-trainer"} <= {
        attrs["id"] for tag, attrs in Page((run / "report.html").read_text()).elements if tag == "figure"
    }


@needs_chromium
def test_the_page_itself_writes_nothing_to_the_console(run):
    assert chromium(run / "report.html").count('class="slot') > 3
