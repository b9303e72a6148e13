"""Tools: found, described, called, and every fault of a call told to the model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.config import ToolEnvironment
from gspo.environments import EpisodeError, open_environment, tool_schemas
from gspo.environments.calls import find_calls
from gspo.environments.tools import calculator, search

FILE = f"{Path(__file__).parent / 'tools_for_tests.py'}"


@pytest.fixture(scope="module")
def environment():
    config = ToolEnvironment(
        tools=["calculator", f"{FILE}:misbehave"], timeout_s=1.0, max_output_characters=100, max_calls=6, workers=1
    )
    with closing(open_environment(config)) as opened:
        yield opened


def called(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def said(environment, text):
    return environment.start({}).step([{"role": "user", "content": "?"}, {"role": "assistant", "content": text}])


# ---- calls ------------------------------------------------------------------------------------------------


def test_an_answer_without_a_call_ends_the_episode(environment):
    assert said(environment, "It is 4.").done
    assert said(environment, f"<think>{called('calculator', expression='1')}</think>It is 4.").done


def test_calls_are_answered_in_their_order(environment):
    reply = said(environment, called("calculator", expression="6*7") + "\n" + called("misbehave", how="x", times=3))
    assert [m["content"] for m in reply.messages] == ["42", "xxx"] and not reply.done
    assert [m["role"] for m in reply.messages] == ["tool", "tool"]
    assert [(c.name, c.failed) for c in reply.calls] == [("calculator", False), ("misbehave", False)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (called("calculatr", expression="1"), "there is no tool 'calculatr': there is calculator, misbehave"),
        ('<tool_call>{"name": "calculator", </tool_call>', "not JSON"),
        ("<tool_call>[1]</tool_call>", 'not an object with a "name"'),
        ('<tool_call>{"name": "calculator"', "no </tool_call>"),
        ('<tool_call>{"name": "calculator", "arguments": 3}</tool_call>', '"arguments" are not an object'),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "the call is not JSON"),
        (called("calculator"), "missing"),
        (called("calculator", expression="1", sign="-"), "sign"),
        (called("misbehave", how="x", times="many"), "wrong arguments: times"),
        (called("calculator", expression="1/0"), "division by zero"),
        (called("misbehave", how="raise"), "no such thing"),
        (called("misbehave", how="leave"), "tried to end its process"),
        (called("misbehave", how="exit"), "the tool crashed"),
        (called("misbehave", how="hang"), "longer than 1 seconds"),
    ],
)
def test_what_goes_wrong_in_a_call_is_told_to_the_model(environment, text, told):
    reply = said(environment, text)
    assert not reply.done and reply.calls[0].failed
    assert reply.messages[0]["content"].startswith("Error: ") and told in reply.messages[0]["content"]
    assert said(environment, called("calculator", expression="6*7")).messages[0]["content"] == "42", "the next call works"


def test_a_hanging_call_costs_its_limit_and_leaves_nothing_running(environment):
    said(environment, called("calculator", expression="1"))
    start = time.monotonic()
    assert said(environment, called("misbehave", how="child")).calls[0].failed
    assert time.monotonic() - start < 5
    assert "sleep 61." not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_what_a_tool_prints_is_not_taken_for_its_output(environment):
    assert said(environment, called("misbehave", how="print")).messages[0]["content"] == "print"


def test_a_long_output_is_cut_and_says_so(environment):
    (message,) = said(environment, called("misbehave", how="x", times=1000)).messages
    assert message["content"] == "x" * 100 + "\n[cut here: these are the first 100 of 1000 characters]"
    assert said(environment, called("misbehave", how="half")).messages[0]["content"] == "a?b"


def test_calls_beyond_the_limit_are_told_so(environment):
    episode = environment.start({})
    reply = episode.step([{"role": "assistant", "content": called("calculator", expression="1") * 8}])
    assert [c.failed for c in reply.calls] == [False] * 6 + [True] * 2
    assert "limit of 6 tool calls" in reply.messages[-1]["content"]
    assert (
        not environment.start({})
        .step([{"role": "assistant", "content": called("calculator", expression="1")}])
        .calls[0]
        .failed
    )


def test_to_a_user_role_all_outputs_go_in_one_message():
    with closing(open_environment(ToolEnvironment(tools=["calculator"], role="user", workers=1))) as environment:
        reply = said(environment, called("calculator", expression="1") + called("calculator", expression="2"))
    assert reply.messages == ({"role": "user", "content": "1\n\n2"},)


def test_the_bare_json_format():
    call = {"name": "f", "parameters": {"x": 1}}
    assert [c.arguments for c in find_calls(json.dumps(call), "json")] == [{"x": 1}]
    assert [c.arguments for c in find_calls(json.dumps([call, call]), "json")] == [{"x": 1}] * 2
    assert find_calls('{"name": "f", ', "json")[0].fault and not find_calls('{"answer": 3}', "json")
    assert not find_calls("[1, 2]", "json") and not find_calls("It is {x}.", "json")


@given(st.text(alphabet='<tool_call>/{}[]":,name 1\\', max_size=60), st.sampled_from(["hermes", "json"]))
def test_no_text_breaks_the_reading_of_calls(text, call_format):
    assert all(call.fault or call.name for call in find_calls(text, call_format))


# ---- schemas ----------------------------------------------------------------------------------------------


def test_a_schema_has_what_the_model_gives_and_not_what_the_recipe_gives(tmp_path):
    config = ToolEnvironment(tools=["search"], parameters={"search": {"folder": str(tmp_path)}})
    (schema,) = tool_schemas(config)
    arguments = schema["function"]["parameters"]
    assert set(arguments["properties"]) == {"query", "num_results"} and arguments["required"] == ["query"]
    assert tool_schemas(config.model_copy(update={"tell": "nothing"})) == ()


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"tools": ["calculater"]}, "no tool 'calculater'"),
        ({"tools": [f"{FILE}:nothing"]}, "no function nothing"),
        ({"tools": [f"{FILE}:untyped"]}, "untyped"),
        ({"tools": ["search"], "parameters": {"search": {"foldr": "x"}}}, "no argument foldr"),
        ({"tools": ["search"]}, r"no folder is given, and the model is not to choose one: set parameters = \{ search"),
        ({"tools": ["search"], "parameters": {"search": {"folder": "/nowhere"}}}, "there is no folder /nowhere in /"),
        ({"tools": [f"{FILE}:later"]}, "is async or a generator"),
        ({"tools": [f"{FILE}:piecewise"]}, "is async or a generator"),
        ({"tools": [f"{FILE}:many"]}, "argument texts cannot be given by its name"),
        ({"tools": [f"{FILE}:placed"]}, "argument text cannot be given by its name"),
        ({"tools": [f"{FILE}:Kind"]}, "is a class: name a function"),
        ({"tools": [f"{FILE}:misnamed"]}, "name 'Nowhere' is not defined"),
    ],
)
def test_a_tool_that_cannot_be_described_is_refused_at_the_start(setting, told):
    with pytest.raises(EpisodeError, match=told):
        open_environment(ToolEnvironment(**setting))


def test_a_given_argument_is_the_recipes_alone(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat\n\na dog ran")
    config = ToolEnvironment(tools=["search"], parameters={"search": {"folder": str(tmp_path)}}, workers=1)
    with closing(open_environment(config)) as environment:
        assert said(environment, called("search", query="dog")).messages[0]["content"] == "[a.txt]\na dog ran"
        assert (
            "unexpected argument folder"
            in said(environment, called("search", query="x", folder="/")).messages[0]["content"]
        )


# ---- the tools that come along ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2+3*4", "14"), ("-(7 // 2) ** 2", "-9"), ("10 / 4", "2.5"), ("sqrt(16) + abs(-2)", "6.0"), ("2**100", str(2**100)),
     ("round(2.567, 1)", "2.6"), ("max(1, 2, 3) % 2", "1"), ("factorial(5)", "120"), ("pi", str(math.pi))],
)  # fmt: skip
def test_the_calculator_computes(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["__import__('os').system('true')", "().__class__", "open('x')", "[1]*9", "'a'*9", "x", "1 if 1 else 2", "lambda: 1",
     "9**9**9", "2**5000", "(2**2000)**3", "10**4000*10**4000", "factorial(10**6)", "1e308*10", "(-1)**0.5",
     "comb(10**6, 5)",
     "round(5, -1000000000)", "abs(x=1)", "1;2", "", "(" * 400, "1+" * 600, "True", "max([1])", "2.0**5000"],
)  # fmt: skip
def test_the_calculator_refuses_all_else_at_once(expression):
    start = time.perf_counter()
    with pytest.raises((ValueError, ArithmeticError, TypeError)):
        calculator(expression)
    assert time.perf_counter() - start < 0.5


NUMBERS = st.integers(-99, 99).map(str)
TERMS = st.recursive(NUMBERS, lambda x: st.builds("({}){}({})".format, x, st.sampled_from("+-*%"), x), max_leaves=8)


@settings(max_examples=200)
@given(TERMS)
def test_the_calculator_agrees_with_python(expression):
    try:
        expected = str(eval(expression))  # of our own making
    except ZeroDivisionError:
        return
    assert calculator(expression) == expected


def test_search_finds_rare_words_first_and_stays_in_its_folder(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("the zebra is secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "a.md").write_text("the the the house\n\nthe zebra")
    (folder / "large.txt").write_text("zebra " * 300_000)
    found = search("the zebra", str(folder))
    assert found.startswith("[a.md]\nthe zebra\n\n[a.md]\nthe the") and "secret" not in found
    assert found.endswith("(not searched, too large: large.txt)")
    assert search("yak", str(folder)).startswith("no passage")


PARENT = """
import sys, threading
from gspo.config import ToolEnvironment
from gspo.environments.pool import Pool
pool = Pool(ToolEnvironment(tools=[sys.argv[1]], timeout_s=2.0, workers=1))
pool.call("misbehave", {"how": "x"})
print(pool._all[0]._process.pid, flush=True)
pool.call("misbehave", {"how": "hang"})
"""


def ended_after(process, within_s=20.0):
    """Seconds until it is gone, or dead and not yet buried; None if it goes on."""
    start = time.monotonic()
    while time.monotonic() < start + within_s:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return time.monotonic() - start
        time.sleep(0.05)
    return None


def test_a_tool_that_hangs_ends_though_the_trainer_was_killed():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, f"{FILE}:misbehave"],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with parent:
        process = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.5)
        parent.kill()
        parent.wait(5)
    assert ended_after(process) is not None
