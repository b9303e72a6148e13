"""A killed evaluation goes on with what is missing, settings never mix, and two evaluations are compared by problem."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from conftest import tiny_policy
from test_suites import NEEDED

from gspo import cli
from gspo.evaluation import suite_command
from gspo.evaluation.comparison import compare, read_results
from gspo.evaluation.evaluate import EvaluationError
from gspo.evaluation.samples_file import SamplesFile, fingerprint
from gspo.evaluation.suite import load_suite
from gspo.evaluation.suite_command import Options, evaluate_suites, weights_hash
from gspo.evaluation.suite_run import Task
from gspo.evaluation.suite_scores import problems_of, rating_of, scores_of, table
from gspo.rollout.transformers import TransformersEngine
from gspo.types import Prompt

SUITE = NEEDED.replace("[[rewards]]", 'format = "text"\nrating_column = "rating"\n[[rewards]]').replace(
    "[sampling]", "[sampling]\nsamples = 3\npass_at = [1, 3]"
)


@pytest.fixture
def place(tmp_path):
    """A folder with a model, a suite of ten sums, and their file."""
    tiny_policy().save(tmp_path / "model")
    (tmp_path / "sums.toml").write_text(SUITE)
    rows = [{"question": f"{n}+1=", "answer": str(n + 1), "rating": 1000 + 100 * n} for n in range(10)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def options(place, output="out", **changes):
    known = {"dtype": "float32", "device": "cpu", "rows": 4, "data": place, **changes}
    return Options(str(place / "model"), [str(place / "sums.toml")], output=place / output, **known)


def lines(place, output="out"):
    return (place / output / "sums" / "samples.jsonl").read_text().splitlines()


def drawn(place, output="out"):
    rows = map(json.loads, lines(place, output))
    return {(r["problem"], r["index"]): (r["text"], r["score"], r["seed"]) for r in rows}


def count_requests(monkeypatch, fail_after=None):
    asked = []
    whole = TransformersEngine.generate

    def generate(self, requests, *rest):
        if fail_after is not None and len(asked) >= fail_after:
            raise KeyboardInterrupt
        asked.extend(r.id for r in requests)
        return whole(self, requests, *rest)

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    return asked


def test_a_killed_run_goes_on_with_what_is_missing_and_ends_as_if_never_killed(place, monkeypatch):
    evaluate_suites(options(place, "whole"))
    with monkeypatch.context() as killed:
        count_requests(killed, fail_after=16)
        with pytest.raises(KeyboardInterrupt):
            evaluate_suites(options(place))
    assert len(lines(place)) == 16 and not (place / "out" / "sums" / "results.json").exists()
    path = place / "out" / "sums" / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-20])  # killed while writing: the last line is torn
    with monkeypatch.context() as counted:
        asked = count_requests(counted)
        evaluate_suites(options(place))
    assert len(asked) == 30 - 15
    assert drawn(place) == drawn(place, "whole") and len(drawn(place)) == 30
    results = [json.loads((place / o / "sums" / "results.json").read_text()) for o in ("out", "whole")]
    assert results[0] == results[1]


def test_a_finished_evaluation_is_read_and_not_sampled_again(place, monkeypatch):
    first = evaluate_suites(options(place))
    asked = count_requests(monkeypatch)
    assert evaluate_suites(options(place)) == first and not asked
    more = evaluate_suites(options(place, changes={"pass_at": [1, 2, 3]}))  # asks more of the same samples
    assert "pass@2" in more and not asked


@pytest.mark.parametrize("changes", [{"changes": {"temperature": 0.5}}, {"limit": 5}, {"seed": 1}, {"dtype": "bfloat16"}])
def test_samples_of_other_settings_or_data_are_never_mixed(place, monkeypatch, changes):
    evaluate_suites(options(place))
    before = lines(place)
    monkeypatch.setattr(suite_command, "open_engine", None)  # an engine may take minutes to start: refused before
    with pytest.raises(EvaluationError, match="made with other settings or data"):
        evaluate_suites(options(place, **changes))
    assert lines(place) == before


def test_samples_of_another_model_are_never_mixed(place):
    evaluate_suites(options(place))
    policy = tiny_policy()
    before = weights_hash(policy)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight += 1e-4
    assert weights_hash(policy) != before == weights_hash(tiny_policy())
    policy.save(place / "model")
    with pytest.raises(EvaluationError, match=r"model\.weights differ"):
        evaluate_suites(options(place))


def test_two_processes_do_not_write_the_same_file(tmp_path):
    with (
        SamplesFile(tmp_path, {"a": 1}),
        pytest.raises(EvaluationError, match="another process"),
        SamplesFile(tmp_path, {}),
    ):
        pass
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1})


def test_samples_of_another_chat_template_column_or_reward_function_are_not_gone_on_with(place):
    """None of the three shows in the suite's own settings."""
    prompt = Prompt(0, None, "1+1=", (3, 4), "2", id="r0")
    task = Task(load_suite(str(place / "sums.toml")), [prompt], [], place, "m", {}, 0)
    templated = replace(task, prompts=[replace(prompt, token_ids=(3, 4, 5))])
    assert templated.settings["data"] == task.settings["data"]  # the same problems: models are compared on them
    assert templated.settings["prompts"] != task.settings["prompts"]
    source = place / "mine.py"
    source.write_text("def zero(samples):\n    return [0.0 for _ in samples]\n")
    table = f'type = "function"\nfunction = "{source}:zero"'
    (place / "sums.toml").write_text(SUITE.replace('type = "last_number"', table))
    evaluate_suites(options(place))
    settings = json.loads((place / "out" / "sums" / "settings.json").read_text())
    assert list(settings["files"]) == [f"{source}:zero"]

    def refused_and_back(path, text):
        before = path.read_text()
        path.write_text(text)
        with pytest.raises(EvaluationError, match="made with other settings or data"):
            evaluate_suites(options(place))
        path.write_text(before)

    refused_and_back(source, source.read_text() + "# judged otherwise\n")
    rows = (place / "sums.jsonl").read_text()
    refused_and_back(place / "sums.jsonl", rows.replace('"rating": 1000', '"rating": 999'))
    evaluate_suites(options(place))  # as it was


def test_results_hold_settings_versions_scores_by_problem_intervals_and_a_rating(place):
    text = evaluate_suites(options(place))
    results = read_results(place / "out")["sums"]
    assert {"torch", "transformers", "gspo"} <= results["versions"].keys()
    assert results["settings"]["sampling"]["samples"] == 3 and len(results["problems"]) == 10
    shares = [p["solved"] / 3 for p in results["problems"]]
    score = results["scores"]["pass@1"]
    assert score["mean"] == pytest.approx(sum(shares) / 10)
    assert score["low"] <= score["mean"] <= score["high"] and score["bootstrap_low"] <= score["mean"]
    assert results["elo"]["problems"] == 10 and ("Elo" in text)
    row = json.loads(lines(place)[0])
    assert {"text", "score", "parts", "tokens", "finish_reason", "seed"} <= row.keys()
    assert row["parts"]["last_number"]["why"]


def test_what_does_not_fit_is_refused_before_anything_is_sampled(place, monkeypatch):
    asked = count_requests(monkeypatch)
    with pytest.raises(EvaluationError, match=r"need 604 positions, and the model has 512: use --max-response-tokens 508"):
        evaluate_suites(options(place, changes={"max_response_tokens": 600}))
    with pytest.raises(EvaluationError, match="named twice"):
        twice = options(place)
        evaluate_suites(Options(twice.model, [*twice.suites, *twice.suites], data=place))
    with pytest.raises(EvaluationError, match=r"no chat template.*--format text"):
        evaluate_suites(options(place, changes={"format": "chat"}))
    (place / "sums.jsonl").write_text('{"question": "x+1=", "answer": "2", "rating": 1200}\n')
    with pytest.raises(EvaluationError, match="row 0: the prompt cannot be tokenised: the tokenizer has no token for 'x'"):
        evaluate_suites(options(place))
    assert not asked and not (place / "out").exists()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('rating_column = "rating"', 'rating_column = "points"', "no row has it; they have question, answer, rating"),
        ('rating_column = "rating"', 'rating_column = "question"', "row 0: the rating '0.1=' in 'question' is no number"),
        ("[[rewards]]", "[[rewards]]\nname = 'a'\ntype = 'exact'\n[[rewards]]\nname = 'a'", "two rewards are called a"),
        ("[[rewards]]", "[[rewards]]\ntype = 'environment'\n[[rewards]]", "a suite has no environment"),
        ("pass_at = [1, 3]", "pass_at = []", "sampling.pass_at"),
    ],
)
def test_suites_that_could_not_be_scored_are_refused_before_anything_is_sampled(place, monkeypatch, before, after, said):
    asked, path = count_requests(monkeypatch), place / "sums.toml"
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(EvaluationError, match=said.replace("0.1", ".*")):
        evaluate_suites(options(place))
    assert not asked


@pytest.mark.parametrize("rule", ["return row['answer']", "raise IndexError('none')"])
def test_a_rule_for_gold_answers_that_fails_is_a_fault_of_its_row(place, rule):
    (place / "rules.py").write_text(f"def gold(row, column):\n    {rule}\n")
    path = place / "sums.toml"
    path.write_text(f"gold = '{place / 'rules.py'}:gold'\n" + path.read_text())
    with pytest.raises(EvaluationError, match="row 0: "):
        evaluate_suites(options(place))


@pytest.mark.parametrize(
    "damage", ["{}", '{"suite": 5}', '{"suite": "s", "settings": null, "problems": []}', "[" * 100_000]
)
def test_results_that_are_none_are_refused_by_file(place, damage):
    (place / "out").mkdir()
    (place / "out" / "results.json").write_text(damage)
    with pytest.raises(EvaluationError, match=r"results\.json: is no results of a suite"):
        read_results(place / "out")


def test_abstentions_count_nowhere_and_are_counted():
    def row(problem, index, score):
        return {
            "problem": f"r{problem}",
            "row": problem,
            "index": index,
            "score": score,
            "tokens": 4,
            "finish_reason": "stop",
        }

    suite = load_suite("gsm8k", changes={"samples": 2, "temperature": 1.0})
    problems = problems_of([row(1, 0, None), row(0, 1, 0.0), row(0, 0, 1.0), row(1, 1, 1.0)], 1.0)
    scores = scores_of(suite, problems)
    assert [p["scores"] for p in problems] == [[1.0, 0.0], [None, 1.0]]
    assert scores["pass@1"]["mean"] == pytest.approx((0.5 + 1.0) / 2) and scores["abstained"] == 1
    with pytest.raises(EvaluationError, match="undefined"):
        scores_of(suite, problems_of([row(0, 0, None)], 1.0))
    assert rating_of(suite, problems, {}) is None


def results_of(folder, solved, **settings):
    folder.mkdir(parents=True)
    problems = [{"id": f"r{i}", "scores": [1.0] * s + [0.0] * (4 - s), "solved": s} for i, s in enumerate(solved)]
    values = {"suite": "sums", "problems": problems, "settings": {"data": "d", "temperature": 1.0} | settings}
    (folder / "results.json").write_text(json.dumps(values))
    return folder


def test_two_evaluations_are_compared_problem_by_problem(tmp_path):
    first = results_of(tmp_path / "a" / "sums", [4, 3, 4, 4, 2, 3] * 5)
    second = results_of(tmp_path / "b" / "sums", [3, 1, 2, 4, 1, 2] * 5, temperature=0.5)
    text = compare(tmp_path / "a", second, output=tmp_path / "out.json")
    assert "+0.2917" in text and "these settings differ: temperature" in text and "sign-flip" in text
    found = json.loads((tmp_path / "out.json").read_text())["suites"]["sums"]
    assert found["p_value"] < 0.001 and found["num_worse"] == 0 and found["difference"]["low"] > 0
    assert json.loads(json.dumps(found))["problems"] == 30
    same = compare(first, first)
    assert "1.0000" in same and "which is not certainty" in same


def test_evaluations_that_do_not_measure_the_same_are_not_compared(tmp_path):
    first = results_of(tmp_path / "a", [1, 2])
    with pytest.raises(EvaluationError, match=r"data differ"):
        compare(first, results_of(tmp_path / "b", [1, 2], data="other"))
    with pytest.raises(EvaluationError, match=r"holds no results\.json"):
        compare(first, tmp_path / "nothing")


# ---- the command line -------------------------------------------------------------------------------------


def test_the_command_takes_suites_and_keeps_recipes(place, monkeypatch, capsys):
    words = [
        "--data",
        str(place),
        "--output",
        str(place / "out"),
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--samples",
        "4",
    ]
    assert cli.main(["eval", str(place / "model"), "--suite", str(place / "sums.toml"), *words]) == 0
    shown = capsys.readouterr().out
    assert "sums: sums" in shown and "samples = 4, pass_at = [1, 3]" in shown
    assert "95% (bootstrap)" in shown and "pass@3" in shown and "U+000A" not in shown
    assert cli.main(["compare-evals", str(place / "out"), str(place / "out")]) == 0
    seen = {}
    monkeypatch.setattr("gspo.evaluation.command.evaluate_model", lambda config, model: seen.update(c=config) or "done")
    assert cli.main(["eval", "recipes/quickstart.toml", "--seed", "3", "--output", "elsewhere"]) == 0
    assert (seen["c"].seed, seen["c"].output) == (3, "elsewhere")


def test_words_of_the_wrong_kind_are_refused(place, capsys):
    model = str(place / "model")
    assert cli.main(["eval", model, "--suite", "gsmk8"]) == 1
    assert "nearest known one is gsm8k" in capsys.readouterr().err
    for words in (["--limit", "0"], ["--training.steps", "3"], ["--from", model]):
        with pytest.raises(SystemExit):
            cli.main(["eval", model, "--suite", "gsm8k", *words])
    suite = ["--suite", str(place / "sums.toml"), "--data", str(place)]
    assert cli.main(["eval", model, *suite, "--output", str(place / "sums.jsonl")]) == 1
    assert "is a file; results are a folder" in capsys.readouterr().err
    assert cli.main(["eval", "recipes/quickstart.toml", "--samples", "3"]) == 1
    assert "evaluation.samples" in capsys.readouterr().err


def test_the_table_says_what_a_rating_without_bound_is():
    score = {"mean": 0.0, "low": 0.0, "high": 0.1, "bootstrap_low": 0.0, "bootstrap_high": 0.0}
    scores = {"pass@1": score, "response_tokens": {"mean": 3}, "truncated": {"mean": 0.5}, "abstained": 2}
    rating = {"rating": None, "low": None, "high": 900.0, "problems": 4, "why": "no attempt succeeded"}
    settings = {"sampling": {"samples": 8}, "rating_column": "r"}
    text = table([{"suite": "s", "problems": [1], "settings": settings, "scores": scores, "elo": rating}])
    assert "no attempt succeeded" in text and "abstained on 2 samples" in text
    assert "none of the problems has a rating" in table(
        [{"suite": "s", "problems": [1], "settings": settings, "scores": scores, "elo": None}]
    )
