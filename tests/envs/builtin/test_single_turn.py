"""Copy, sort, arithmetic and count: what is asked, what is right, and what an answer is worth."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.envs.builtin.arithmetic import Arithmetic, value_of
from spmd_rl.envs.builtin.copy import Copy
from spmd_rl.envs.builtin.count import Count
from spmd_rl.envs.builtin.sort import Sort
from spmd_rl.rollouts.types import Task
from tests.envs.fakes import ScriptedPolicy, byte_tokenizer


def made(cls: Any, **knobs: Any) -> Any:
    return cls(byte_tokenizer(), 0, **knobs)


def data(env: Any, count: int = 300) -> list[dict[str, Any]]:
    return [env.task(index, "train").data for index in range(count)]


@pytest.mark.parametrize(
    ("cls", "content", "asked", "right"),
    [
        (Copy, {"word": "dbca"}, "copy dbca", "dbca"),
        (Sort, {"word": "dbca"}, "sort dbca", "abcd"),
        (Arithmetic, {"sum": "12+7"}, "12+7=", "19"),
        (Arithmetic, {"sum": "3-2*4"}, "3-2*4=", "-5"),
        (Count, {"letter": "a", "word": "abca"}, "count a in abca", "2"),
        (Count, {"letter": "d", "word": "abca"}, "count d in abca", "0"),
    ],
)
def test_what_is_asked_and_what_is_right(cls: Any, content: dict[str, Any], asked: str, right: str) -> None:
    decode = byte_tokenizer().decode
    task = Task("", 0, content)
    chat = decode(made(cls).prompt(task).tolist())
    assert chat == f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    assert decode(made(cls, chat=False).prompt(task).tolist()) == f"<|im_start|>{asked}\n"
    ruled = decode(made(cls, rules=True).prompt(task).tolist())
    assert ruled == f"<|im_start|>system\n{cls.RULES}<|im_end|>\n{chat}"
    assert made(cls).answer(content) == right


@pytest.mark.parametrize(
    ("said", "exact", "dense"),
    [
        ("abcd", 1.0, 1.0),
        (" abcd\n", 1.0, 1.0),
        ("abc", 0.0, 0.6),
        ("abcdabcd", 0.0, 0.4),
        ("abdc", 0.0, 0.4),
        ("", 0.0, 0.0),
        ("ABCD", 0.0, 0.0),
    ],
)
def test_what_an_answer_is_worth(said: str, exact: float, dense: float) -> None:
    task = Task("copy", 0, {"word": "abcd"})
    for reward, worth in (("exact", exact), ("dense", dense)):
        env = made(Copy, reward=reward, max_tokens=20)
        episode = asyncio.run(env.rollout(task, ScriptedPolicy(byte_tokenizer(), [said])))
        assert episode.reward.value == pytest.approx(worth)
        assert reward == "exact" or episode.reward.parts["exact"] == exact
    assert made(Copy).reward(task, "abcd", False).value == 0
    assert made(Copy, reward="dense").reward(task, "abcd", False).value == pytest.approx(0.8)


@pytest.mark.parametrize("cls", [Copy, Sort, Arithmetic, Count])
def test_a_mistake_is_never_right(cls: Any) -> None:
    rng = np.random.default_rng(0)
    for env in (made(cls), made(cls, **{"largest": 1} if cls is Arithmetic else {"letters": "ab", "length": 2})):
        for index in range(300):
            content = env.task(index, "train").data
            assert env.mistake(content, rng) != env.answer(content)
            assert len(env.mistake(content, rng)) <= len(env.answer(content)) + 1


@pytest.mark.parametrize("cls", [Copy, Sort])
def test_words_are_as_they_were_ordered(cls: Any) -> None:
    words = [c["word"] for c in data(made(cls, letters="abcdef", length=5, shortest=3))]
    assert all(len(set(word)) == len(word) and set(word) <= set("abcdef") for word in words)
    assert {len(word) for word in words} == {3, 4, 5}
    repeats = [c["word"] for c in data(made(cls, letters="ab", length=6, repeats=True))]
    assert {len(word) for word in repeats} == {6}


def test_sort_has_something_to_do_and_holds_answers_out() -> None:
    env = made(Sort, letters="abcdef", length=3)
    words = {s: {env.task(i, s).data["word"] for i in range(300)} for s in ("train", "heldout")}
    assert not any(word == "".join(sorted(word)) for side in words.values() for word in side)
    answers = {s: {"".join(sorted(word)) for word in side} for s, side in words.items()}
    assert not answers["train"] & answers["heldout"]


@given(st.recursive(st.integers(0, 99).map(str), lambda e: st.tuples(e, st.sampled_from("+-*"), e).map("".join)))
def test_sums_come_to_what_python_says(text: str) -> None:
    plain = re.sub(r"\d+", lambda number: str(int(number[0])), text)
    assert value_of(text) == eval(plain)


def test_sums_are_as_they_were_ordered() -> None:
    sums = [c["sum"] for c in data(made(Arithmetic, largest=20, terms=3, operators="-*+"))]
    assert all(len(re.findall(r"\d+", text)) == 3 for text in sums)
    assert {int(n) for text in sums for n in re.findall(r"\d+", text)} == set(range(21))
    assert {sign for text in sums for sign in re.findall(r"[^\d]", text)} == set("+-*")
    assert not any("-" in c["sum"] or "*" in c["sum"] for c in data(made(Arithmetic)))


def test_the_order_of_the_numbers_moves_no_sum_to_the_other_side() -> None:
    env = made(Arithmetic, heldout=0.4)
    pairs = [{tuple(sorted(env.task(i, s).data["sum"].split("+"))) for i in range(500)} for s in ("train", "heldout")]
    assert not pairs[0] & pairs[1]


def test_every_count_comes_as_often() -> None:
    counts = Counter(c["word"].count(c["letter"]) for c in data(made(Count, length=4, letters="abcdefgh"), 2000))
    assert sorted(counts) == [0, 1, 2, 3, 4]
    # The words of one letter alone are few: some of them are held out.
    assert min(counts[n] for n in (0, 1, 2, 3)) > 300


@pytest.mark.parametrize(
    ("cls", "knobs", "says"),
    [
        (Copy, {"length": 9}, r"copy: length = 9 must lie in 2\.\.8: the number of letters; or set repeats = true"),
        (Copy, {"length": 1}, r"copy: length = 1 must lie in 2\.\.8"),
        (Copy, {"length": "4"}, "copy: length = '4' must be a whole number"),
        (Sort, {"length": 2.0}, r"sort: length = 2\.0 must be a whole number"),
        (Sort, {"shortest": 5}, r"sort: shortest = 5 must lie in 2\.\.4"),
        (Copy, {"letters": "a"}, "copy: letters = 'a' must be two or more different"),
        (Copy, {"letters": "aab"}, "copy: letters = 'aab' must be two or more different"),
        (Copy, {"letters": "a b"}, "copy: letters = 'a b' must be visible"),
        (Copy, {"letters": "aé"}, "copy: letters = 'aé' must be visible"),
        (Count, {"letters": "a<"}, "count: letters = 'a<' must be visible"),
        (Count, {"length": 0}, r"count: length = 0 must lie in 1\.\.1000"),
        (Arithmetic, {"operators": "+/"}, r"arithmetic: operators = '\+/' must be one or more of '\+-\*'"),
        (Arithmetic, {"operators": ""}, "arithmetic: operators = ''"),
        (Arithmetic, {"terms": 1}, r"arithmetic: terms = 1 must lie in 2\.\.10"),
        (Arithmetic, {"largest": 0}, r"arithmetic: largest = 0 must lie in 1\.\.1000000"),
        (Copy, {"reward": "sparse"}, "copy: reward = 'sparse' must be one of exact, dense"),
    ],
)
def test_bad_knobs_are_named(cls: Any, knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        made(cls, **knobs)
