"""Laws of the order in which prompts are used."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.data import Cursor, DataError, take
from gspo.types import Prompt


def prompt(row):
    return Prompt(row, None, str(row), (row,), None)


sizes = st.integers(1, 12)
seeds = st.integers(0, 2**40)


def stream(prompts, cuts, seed, cursor=Cursor()):  # noqa: B008  (frozen)
    out = []
    for n in cuts:
        batch, cursor = take(prompts, cursor, n, seed)
        assert len(batch) == n
        cursor = Cursor.of(json.loads(json.dumps(cursor.state())))
        out += batch
    return out, cursor


@given(data=st.data(), size=sizes, seed=seeds)
def test_any_split_into_batches_gives_the_same_stream(data, size, seed):
    prompts = [prompt(row) for row in range(size)]
    cuts = data.draw(st.lists(st.integers(1, size), min_size=1, max_size=30))
    whole, end = stream(prompts, [1] * sum(cuts), seed)
    assert stream(prompts, cuts, seed) == (whole, end)


@given(data=st.data(), size=sizes, seed=seeds)
def test_resuming_anywhere_equals_never_stopping(data, size, seed):
    prompts = [prompt(row) for row in range(size)]
    first = data.draw(st.lists(st.integers(1, size), max_size=20))
    second = data.draw(st.lists(st.integers(1, size), max_size=20))
    before, middle = stream(prompts, first, seed)
    after, end = stream(prompts, second, seed, middle)
    assert stream(prompts, first + second, seed) == (before + after, end)


@given(size=sizes, seed=seeds, n=st.integers(1, 12), epochs=st.integers(1, 4))
def test_no_prompt_is_lost_or_repeated_within_an_epoch(size, seed, n, epochs):
    prompts = [replace(prompt(row), row=row * 10) for row in range(size)]
    n = min(n, size)
    batches = -(-epochs * size // n)
    ids = [p.id for p in stream(prompts, [n] * batches, seed)[0]][: epochs * size]
    for epoch in range(epochs):
        assert sorted(ids[epoch * size : (epoch + 1) * size]) == sorted(f"e{epoch}-r{p.row}" for p in prompts)
    assert len(set(ids)) == len(ids)


@given(seed=seeds)
def test_an_epochs_order_depends_on_seed_and_epoch_alone(seed):
    prompts = [prompt(row) for row in range(50)]
    first, cursor = take(prompts, Cursor(), 50, seed)
    second, _ = take(prompts, cursor, 50, seed)
    other, _ = take(prompts, Cursor(), 50, seed + 1)
    orders = [[p.row for p in part] for part in (first, second, other)]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    assert cursor == Cursor(1, 0)
    assert take(prompts, Cursor(1, 0), 50, seed)[0] == second


def test_taking_nothing_leaves_the_cursor_where_it_is():
    assert take([prompt(row) for row in range(3)], Cursor(2, 1), 0, 0) == ([], Cursor(2, 1))


def test_a_cursor_that_does_not_fit_is_refused_with_both_numbers():
    prompts = [prompt(row) for row in range(3)]
    with pytest.raises(DataError, match="4 prompts at once from 3"):
        take(prompts, Cursor(), 4, 0)
    with pytest.raises(DataError, match="-1 prompts"):
        take(prompts, Cursor(), -1, 0)
    with pytest.raises(DataError, match="prompt 3 of an epoch, but there are 3 prompts: the data have changed"):
        take(prompts, Cursor(0, 3), 1, 0)
    for state in ({"epoch": 1}, {"epoch": 1, "index": -1}, {"epoch": 1.0, "index": 0}, {"epoch": 0, "index": 0, "x": 0}):
        with pytest.raises(DataError, match="no cursor"):
            Cursor.of(state)
