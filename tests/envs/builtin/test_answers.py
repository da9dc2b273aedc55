"""What of a model's text is its answer: strict, and never an exception."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.envs.builtin.answers import answer_in, nearness, whole_number

NEARLY_NUMBERS = [
    "-",
    "+7",
    "007",
    "-0",
    "00",
    "1_000",
    "1,000",
    "7.0",
    "7.",
    "1e3",
    "0x7",
    "--7",
    "²",
    "٣",
    "７",
    "\x0b7",
]
ANY_TEXT = st.text(st.characters())  # lone surrogates too


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("abcd", "abcd"),
        (" abcd\r\n\t", "abcd"),
        ("<think>\nx\n</think>\n\n7", "7"),
        ("<think>a</think>b</think> c ", "c"),
        ("<think>7", "<think>7"),
        ("a b", "a b"),
        ("\u00a07\u3000", "\u00a07\u3000"),
        ("", ""),
    ],
)
def test_what_is_the_answer(text: str, answer: str) -> None:
    assert answer_in(text) == answer


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), ("-12", -12), (" 7 ", 7), ("0", 0), ("9" * 18, 10**18 - 1), ("<think>8</think>3", 3)]
)
def test_a_number_as_it_is_printed(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize(
    "text", [*NEARLY_NUMBERS, "", "7 8", "seven", "9" * 19, "9" * 2**20, "7\0", "\ud800", "7\u00a0"]
)
def test_anything_else_is_none(text: str) -> None:
    assert whole_number(text) is None


@given(ANY_TEXT)
def test_any_text_is_read(text: str) -> None:
    number = whole_number(text)
    assert number is None or str(number) == answer_in(text)


@given(st.integers(-(10**18) + 1, 10**18 - 1))
def test_every_number_reads_as_itself(number: int) -> None:
    assert whole_number(str(number)) == number


@given(ANY_TEXT, ANY_TEXT)
def test_only_the_right_text_is_wholly_near(given_text: str, right: str) -> None:
    assert 0 <= nearness(given_text, right) <= 1
    assert (nearness(given_text, right) == 1) == (given_text == right)


def test_near_is_a_share_of_the_longer_text() -> None:
    assert nearness("abxd", "abcd") == 0.75
    assert nearness("abcdabcd", "abcd") == 0.5
    assert nearness("ab", "abcd") == 0.5
    assert nearness("bcd", "abcd") == 0
