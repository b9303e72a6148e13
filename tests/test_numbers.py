"""Laws of reading numbers."""

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.rewards.numbers import last_number, parse_number, to_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        (" -3.5\n", Fraction(-7, 2)),
        ("+7", 7),
        ("\u22128", -8),
        (".5", Fraction(1, 2)),
        ("1,234", 1234),
        ("-1,234,567.25", Fraction(-123456725, 100)),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        ("2/3", Fraction(2, 3)),
        ("-4/6", Fraction(-2, 3)),
        ("007", 7),
        ("0.1", Fraction(1, 10)),
    ],
)
def test_numbers_are_read_exactly(text, number):
    assert parse_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        *("", "-", "five", "$5", "5%", "5.", "1,23", "1,2345", ",123", "1.234,5", "1_000", "1 000", "1 1/2", "1.5/2"),
        *("½", "0x10", "inf", "nan", "1/0", "--1", "1e", "e5", "٣", "1e1001", "1e-999999999", "9" * 1001, "3 apples"),
        "1/-2",
    ],
)
def test_what_is_no_number_is_not_read(text):
    assert parse_number(text) is None


@given(st.integers(), st.sampled_from(["{}", "{:,}", " {} ", "{}.0", "{}e0", "{}/1"]))
def test_integers_come_back_in_every_spelling(n, form):
    assert parse_number(form.format(n)) == n


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**30), max_value=10**30))
def test_decimals_come_back_exactly(d):
    assert parse_number(str(d)) == Fraction(d) == to_number(d)


@given(st.integers(), st.integers(min_value=1))
def test_fractions_come_back_exactly(n, d):
    assert parse_number(f"{n}/{d}") == Fraction(n, d)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_counts_as_the_decimal_that_is_printed(x):
    assert to_number(x) == Fraction(repr(x))


@given(st.text(max_size=60))
def test_parsing_any_text_ends_and_the_last_number_is_in_it(text):
    parse_number(text)
    found = last_number(text)
    assert found is None or found in text
    assert (found is None) == (not any(c in "0123456789" for c in text))


@given(st.text(alphabet="ab .,()=-", max_size=20), st.integers())
def test_the_last_number_is_found_behind_any_words(words, n):
    assert parse_number(last_number(f"{words} {n}. So.")) == n


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The answer is 5.", "5"),
        ("x = -3", "-3"),
        ("5-3", "3"),
        ("(2)-3", "3"),
        ("1, 2", "2"),
        ("it costs $1,234.50!", "1,234.50"),
        ("about 3/4 of 5/6", "5/6"),
        ("1.5/2", "2"),
        ("1.2.3", "3"),
        ("#### 72", "72"),
        ("50%", "50"),
        ("-1e3", "-1e3"),
        ("\u22124", "\u22124"),
        ("none", None),
        ("٣", None),
    ],
)
def test_the_last_number_of_a_text(text, found):
    assert last_number(text) == found


def test_reading_numbers_takes_linear_time():
    start = time.perf_counter()
    for text in ("1" * 100_000, "1," * 50_000, "1/" * 50_000, "-" * 100_000, ".1" * 50_000, "1,111" * 20_000):
        last_number(text)
        parse_number(text)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("gold", [True, None, "x", float("nan"), float("inf"), Decimal("nan"), Decimal("1e9999999"), [1]])
def test_what_is_no_number_is_no_gold_number(gold):
    assert to_number(gold) is None
