"""Laws of prompts: sources, faults, and overlap."""

import json
import re

import pytest

from gspo.config import DatasetSource, JsonlSource, ParquetSource, PythonSource, ReasoningGymSource
from gspo.data import (
    DataError,
    Fault,
    load_rows,
    overlap,
    prepare,
    require_batch,
    separate,
    settle,
)
from gspo.types import Prompt


def refused(call, *words):
    """The message of the DataError that the call raises; it holds all the words."""
    with pytest.raises(DataError) as caught:
        call()
    for word in words:
        assert str(word) in str(caught.value), str(caught.value)
    return str(caught.value)


# ---- sources ----------------------------------------------------------------------------------------------

ROWS = [{"prompt": f"What is {i}+1?", "answer": str(i + 1), "level": i} for i in range(5)]


def jsonl(tmp_path, content, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return JsonlSource(path=str(path), **settings)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_every_file_source_gives_the_same_rows(tmp_path):
    import datasets
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data.select([0]), test=data).save_to_disk(tmp_path / "two")
    function = tmp_path / "mine.py"
    function.write_text(
        "def rows(first):\n"
        "    for i in range(first, 5):\n"
        "        yield {'prompt': f'What is {i}+1?', 'answer': str(i + 1), 'level': i}\n"
    )
    sources = [
        jsonl(tmp_path, lines(ROWS)),
        ParquetSource(path=str(tmp_path / "rows.parquet")),
        DatasetSource(path=str(tmp_path / "one")),
        DatasetSource(path=str(tmp_path / "two"), split="test"),
        PythonSource(function=f"{function}:rows", parameters={"first": 0}),
    ]
    for source in sources:
        assert load_rows(source) == ROWS, source
        assert load_rows(source.model_copy(update={"limit": 2})) == ROWS[:2], source
        assert load_rows(source.model_copy(update={"limit": 9})) == ROWS, source


def test_a_folder_of_data_files_is_a_dataset(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text(lines(ROWS))
    assert load_rows(DatasetSource(path=str(folder))) == ROWS
    refused(lambda: load_rows(DatasetSource(path=str(folder), split="tran")), "tran", "train", folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": 1}\n{"a": \n', ["line 2", "not JSON"]),
        ('{"a": 1}\n\n{"a": 2}\n', ["line 2", "empty"]),
        ('{"a": 1}\n[1]\n', ["line 2", "list"]),
        ('{"a": NaN}\n', ["line 1", "NaN"]),
        (b'{"a": 1}\n{"a": "\xff"}\n', ["line 2", "utf-8"]),
        ("[" * 100_000 + "\n", ["line 1", "not JSON"]),
        ("\n\n", ["no rows"]),
    ],
)
def test_a_broken_line_is_named_with_its_file(tmp_path, content, words):
    source = jsonl(tmp_path, content)
    refused(lambda: load_rows(source), "rows.jsonl", *words)


def test_line_separators_of_unicode_do_not_split_a_row(tmp_path):
    rows = [{"prompt": "a\u2028b\u0085c"}, {"prompt": "d"}]
    text = "\ufeff" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n"
    assert load_rows(jsonl(tmp_path, text)) == rows


def test_a_missing_source_is_one_sentence_with_its_name(tmp_path):
    missing = str(tmp_path / "gone")
    for source in (JsonlSource(path=missing), ParquetSource(path=missing), DatasetSource(path=missing)):
        assert "\n" not in refused(lambda s=source: load_rows(s), missing, "there is no such")


def test_what_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "x.parquet").write_text("hello")
    refused(lambda: load_rows(ParquetSource(path=str(tmp_path / "x.parquet"))), "x.parquet", "cannot be read")


def test_settings_that_mean_nothing_for_a_saved_dataset_are_refused(tmp_path):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    source = DatasetSource(path=str(tmp_path / "one"))
    refused(lambda: load_rows(source.model_copy(update={"split": "test"})), "no split 'test'", "train")
    refused(lambda: load_rows(source.model_copy(update={"name": "main"})), "leave name out")
    refused(lambda: load_rows(source.model_copy(update={"revision": "v1"})), "revision", "leave it out")


def gym(**settings):
    return ReasoningGymSource(**{"task": "chain_sum", "size": 4, "seed": 3} | settings)


def test_a_reasoning_gym_row_holds_all_that_its_scorer_needs():
    rows = load_rows(gym(parameters={"min_terms": 2, "max_terms": 2}))
    assert len(rows) == 4
    assert {"question", "answer", "num_terms", "difficulty"} <= rows[0].keys()
    assert rows[0]["num_terms"] == 2
    assert rows[0]["_entry"]["question"] == rows[0]["question"]
    assert rows[0]["_task"] == "chain_sum"
    assert rows[0]["_parameters"] == {"min_terms": 2, "max_terms": 2, "seed": 3, "size": 4}


def test_metadata_never_replace_question_or_answer():
    (row,) = load_rows(gym(task="needle_haystack", size=1, parameters={"min_num_statements": 5, "max_num_statements": 5}))
    assert row["question"] == row["_entry"]["question"]
    assert row["metadata_question"] == row["_entry"]["metadata"]["question"] != row["question"]


def test_reasoning_gym_rows_depend_on_the_seed_alone():
    assert load_rows(gym()) == load_rows(gym())
    assert load_rows(gym(limit=2)) == load_rows(gym())[:2]
    assert load_rows(gym(seed=4))[0]["question"] != load_rows(gym())[0]["question"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task": "chain_sun"}, ["chain_sun", "nearest", "chain_sum"]),
        ({"parameters": {"min_term": 2}}, ["min_term", "nearest", "min_terms"]),
        ({"parameters": {"seed": 2}}, ["seed", "beside parameters"]),
        ({"parameters": {"min_terms": -1}}, ["chain_sum", "min_terms must be positive"]),
        ({"parameters": {"min_terms": "a"}}, ["chain_sum", "do not work"]),
    ],
)
def test_a_wrong_reasoning_gym_setting_names_itself_and_the_nearest(settings, words):
    assert "\n" not in refused(lambda: load_rows(gym(**settings)), *words)


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("mine.py", {}, ["write path/to/file.py:name"]),
        ("gone.py:rows", {}, ["no file gone.py"]),
        ("mine.py:row", {}, ["no function row", "it has rows"]),
        ("mine.py:rows", {"n": 1, "m": 2}, ["does not take", "m"]),
        ("mine.py:rows", {}, ["does not take", "'n'"]),
        ("mine.py:number", {}, ["returned a int"]),
        ("mine.py:wrong", {}, ["row 1", "str"]),
        ("mine.py:nothing", {}, ["no rows"]),
        ("broken.py:rows", {}, ["broken.py", "ZeroDivisionError"]),
    ],
)
def test_a_wrong_function_is_one_sentence(tmp_path, monkeypatch, name, parameters, words):
    (tmp_path / "mine.py").write_text(
        "def rows(n): return [{}] * n\ndef number(): return 3\ndef wrong(): return [{}, 'x']\ndef nothing(): return []\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    assert "\n" not in refused(lambda: load_rows(PythonSource(function=name, parameters=parameters)), *words)


# ---- rows into prompts ------------------------------------------------------------------------------------


def encode(prompt):
    """One token a character; a chat becomes `role:content;` strings."""
    text = prompt if isinstance(prompt, str) else "".join(f"{m['role']}:{m['content']};" for m in prompt)
    if "☠" in text:
        raise ValueError("no token for '☠'")
    return [ord(c) for c in text]


def prepared(rows, limit=100, checks=(), **settings):
    source = JsonlSource(path="rows.jsonl", **settings)
    return prepare(rows, source, encode=encode, max_prompt_tokens=limit, gold_checks=checks)


def only_fault(row, **settings):
    """The fault of a row that stands behind a good one; the good one is not touched."""
    good = {"prompt": "good", "answer": "1", "a": 1, "b": 2}
    prompts, faults = prepared([good, row], **settings)
    assert [p.row for p in prompts] == [0]
    (fault,) = faults
    assert fault.row == 1
    return fault.what


def test_a_string_becomes_a_chat_and_text_stays_text():
    row = {"prompt": "2+2?", "answer": 4, "more": "x"}
    (chat,), faults = prepared([row])
    assert not faults
    assert chat.messages == ({"role": "user", "content": "2+2?"},)
    assert chat.token_ids == tuple(encode(chat.messages)) == tuple(map(ord, "user:2+2?;"))
    assert (chat.row, chat.text, chat.answer, chat.columns) == (0, "2+2?", 4, row)
    (text,), _ = prepared([row], format="text")
    assert text.messages is None
    assert text.token_ids == tuple(map(ord, "2+2?"))


def test_a_chat_is_kept_and_the_system_message_stands_before_it():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    (prompt,), _ = prepared([{"prompt": chat, "answer": "1"}], system="Be brief.")
    assert prompt.messages == ({"role": "system", "content": "Be brief."}, *chat)
    assert prompt.text == "Be brief.\n\na\n\nb\n\nc"


def test_a_template_is_filled_from_columns_and_from_nothing_else():
    (prompt,), _ = prepared([{"a": 7, "b": 3.14159, "answer": "1"}], template="{a}*{b:.2f} {{x}} {a!r}", format="text")
    assert prompt.text == "7*3.14 {x} 7"
    _, faults = prepared([{"a": 7, "answer": "1"}], template="{a.real} {a[0]}")
    assert "column a.real is missing" in faults[0].what


@pytest.mark.parametrize(("template", "words"), [("{a", "cannot be read"), ("{}", "without a column name")])
def test_a_broken_template_is_the_recipes_fault(template, words):
    refused(lambda: prepared([{"a": 1}], template=template), "data.template", words)


def test_a_system_message_without_a_chat_is_refused():
    refused(lambda: prepared([], format="text", system="x"), "data.system", 'format = "chat"')


USER = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({"answer": "1", "x": 1}, {}, ["column prompt is missing", "answer, x"]),
        ({"prompt": "p"}, {}, ["column answer is missing"]),
        ({"answer": "1", "a": 1}, {"template": "{a}*{b}"}, ["column b is missing"]),
        ({"answer": "1", "a": 1, "b": None}, {"template": "{a}*{b}"}, ["column b is null"]),
        ({"answer": "1", "a": 1, "b": "x"}, {"template": "{a}*{b:d}"}, ["column b", "'d'"]),
        ({"prompt": "", "answer": "1"}, {}, ["prompt is empty"]),
        ({"prompt": " \n", "answer": "1"}, {}, ["prompt is empty"]),
        ({"prompt": [], "answer": "1"}, {}, ["prompt is empty"]),
        ({"prompt": [{**USER, "content": " "}], "answer": "1"}, {}, ["prompt is empty"]),
        ({"prompt": 3, "answer": "1"}, {}, ["int", "neither a string nor a list"]),
        ({"prompt": ["hi"], "answer": "1"}, {}, ["message 0", "str"]),
        ({"prompt": [USER, {"role": "user"}], "answer": "1"}, {}, ["message 1", "content"]),
        ({"prompt": [{**USER, "role": ""}], "answer": "1"}, {}, ["message 0", "role"]),
        ({"prompt": [{**USER, "tools": [1]}], "answer": "1"}, {}, ["message 0", "tools"]),
        ({"prompt": [USER, {**USER, "role": "assistant"}], "answer": "1"}, {}, ["assistant's own"]),
        ({"prompt": [{**USER, "role": "system"}, USER], "answer": "1"}, {"system": "s"}, ["system message of its own"]),
        ({"prompt": [USER], "answer": "1"}, {"format": "text"}, ['"text"', "list"]),
        ({"prompt": "☠", "answer": "1"}, {}, ["cannot be tokenised", "☠"]),
        ({"prompt": "p", "answer": None}, {}, ["gold answer is null", "answer_column"]),
        ({"prompt": "p", "answer": "  "}, {}, ["gold answer", "empty"]),
        ({"prompt": "p", "answer": []}, {}, ["gold answer", "empty"]),
        ({"prompt": "p" * 95, "answer": "1"}, {}, ["101 tokens", "max_prompt_tokens = 100"]),
    ],
)
def test_each_fault_of_a_row_is_found_and_named(row, settings, words):
    what = only_fault(row, **settings)
    for word in words:
        assert word in what


def test_a_prompt_of_exactly_the_limit_is_no_fault():
    prompts, faults = prepared([{"prompt": "p" * 94, "answer": "1"}])
    assert not faults
    assert len(prompts[0].token_ids) == 100


def test_null_keys_of_a_message_are_not_held_against_it():
    prompts, faults = prepared([{"prompt": [{**USER, "name": None}], "answer": "1"}])
    assert not faults
    assert prompts[0].messages == (USER,)


def test_gold_answers_are_shown_to_every_reward_even_where_there_is_none():
    def even(answer, columns):
        return None if answer is not None and answer % 2 == 0 else f"{answer} is odd at level {columns['level']}"

    def small(answer, columns):
        return None if answer is not None and answer < 5 else f"{answer} is large"

    rows = [{"prompt": "p", "answer": a, "level": 9} for a in (2, 3, 7)]
    prompts, faults = prepared(rows, checks=[even, small])
    assert [p.answer for p in prompts] == [2]
    assert [f.what for f in faults] == ["3 is odd at level 9", "7 is odd at level 9; 7 is large"]
    prompts, faults = prepared(rows, checks=[even], answer_column="")
    assert not prompts
    assert faults[0].what == "None is odd at level 9"


def test_without_an_answer_column_there_is_no_answer():
    prompts, faults = prepared([{"prompt": "p", "answer": "1"}, {"prompt": "q"}], answer_column="")
    assert not faults
    assert [p.answer for p in prompts] == [None, None]


# ---- faults, sizes, overlap -------------------------------------------------------------------------------


def prompt(row, *token_ids):
    return Prompt(row, None, str(row), token_ids or (row,), None)


def test_refusing_lists_every_fault_up_to_twenty_and_counts_them_all():
    source = JsonlSource(path="rows.jsonl")
    faults = [Fault(row, f"fault {row}") for row in range(3, 33)]
    message = refused(
        lambda: settle([prompt(0)], faults, source, "evaluation.data"),
        *("evaluation.data", "30 of 31 rows", "row 3 (line 4): fault 3", "row 22", "and 10 more", 'faults = "drop"'),
    )
    assert "row 23" not in message
    assert "line" not in refused(lambda: settle([prompt(0)], faults[:1], gym(), "data"), "1 of 2 rows is", "row 3: fault 3")


def test_dropping_counts_what_it_drops():
    source = JsonlSource(path="rows.jsonl", faults="drop")
    assert settle([prompt(0), prompt(2)], [Fault(1, "x")], source) == ([prompt(0), prompt(2)], 1)
    assert settle([prompt(0)], [], JsonlSource(path="x")) == ([prompt(0)], 0)
    refused(lambda: settle([], [Fault(0, "bad")], source), "1 of 1", "no row is left", "bad")


def test_a_training_set_smaller_than_a_batch_is_refused_with_both_numbers():
    require_batch([prompt(0), prompt(1)], 2)
    refused(lambda: require_batch([prompt(0), prompt(1)], 3), "2 prompts", "prompts_per_step = 3")


def test_overlap_is_of_tokens():
    training, evaluation = [prompt(0, 1, 2), prompt(1, 3), prompt(2, 1, 2)], [prompt(7, 1, 2), prompt(8, 1)]
    assert overlap(training, evaluation) == [training[0], training[2]]
    assert separate(training, evaluation, "allow") == (training, 0)
    assert separate(training, evaluation, "drop") == ([training[1]], 2)
    refused(lambda: separate(training, evaluation, "refuse"), "2 of 3", "rows 0, 2", '"drop"', '"allow"')
    refused(lambda: separate(training[:1], evaluation, "drop"), "all 1", "nothing is left")
    for policy in ("refuse", "drop"):
        assert separate(training, [prompt(9, 9)], policy) == (training, 0)


def test_messages_stay_on_one_line_a_fault():
    source = JsonlSource(path="rows.jsonl")
    message = refused(lambda: settle([prompt(0)], [Fault(1, "a"), Fault(2, "b")], source))
    assert len(message.splitlines()) == 3
    assert re.search(r"2 of 3 rows are faulty", message)
