"""Guess and wordle: what is said about a guess, what a game is worth, and how good their teachers are."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.envs.builtin.guess import Guess
from spmd_rl.envs.builtin.wordle import Wordle, marks
from spmd_rl.rollouts.types import Episode, Task
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer

SECRET = {Guess: {"low": 1, "high": 7, "secret": 5}, Wordle: {"secret": "crane"}}


def made(cls: Any, **knobs: Any) -> Any:
    return cls(byte_tokenizer(), 0, **knobs)


def play(env: Any, said: list[str | Said]) -> tuple[Episode, ScriptedPolicy]:
    policy = ScriptedPolicy(byte_tokenizer(), said)
    return asyncio.run(env.rollout(Task("", 0, SECRET[type(env)]), policy)), policy


def teach(env: Any, data: dict[str, Any], rng: np.random.Generator, most: int = 20) -> int:
    """Turns that the teacher needs."""
    task, heard = Task("", 0, data), ["the prompt"]
    for turn in range(1, most):
        guess = env.read(data, env.solve(task, heard, rng))
        if env.nearness(data, guess) == 1:
            return turn
        heard.append(f"before {env.verdict(data, guess)} behind")
    return most


def test_a_whole_game_of_guess_in_the_short_form() -> None:
    episode, policy = play(made(Guess, chat=False, turns=4), ["4", "x", "6", "5"])
    assert policy.prompts[-1] == (
        "<|im_start|>1-7\n4<|im_end|><|im_start|>higher than 4\nx<|im_end|><|im_start|>1-7\n6<|im_end|>"
        "<|im_start|>lower than 6\n"
    )
    assert (episode.reward.value, episode.status) == (1.0, "ok")
    assert episode.reward.parts == {"hit": 1, "turns": 4, "invalid": 1}


def test_a_game_of_wordle_in_the_chat_template() -> None:
    episode, policy = play(made(Wordle), ["React", "cran", "crane"])
    asked = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert policy.prompts[-1] == (
        "<|im_start|>user\n5 letters<|im_end|>\n<|im_start|>assistant\nReact"
        + asked.format("r e a c t\ny y g y -")
        + "cran"
        + asked.format("5 letters")
    )
    assert episode.reward.parts == {"hit": 1, "turns": 3, "invalid": 1}


@pytest.mark.parametrize("cls", [Guess, Wordle])
def test_a_game_is_over_after_the_last_turn(cls: Any) -> None:
    episode, policy = play(made(cls, turns=2), ["1", "2", "never said"])
    assert (len(policy.asked), episode.reward.value, episode.status) == (2, 0.0, "ok")
    assert episode.reward.parts["turns"] == 2


def test_what_turns_cost() -> None:
    env = made(Guess, turns=3, turn_cost=0.25)
    assert [play(env, said)[0].reward.value for said in (["5"], ["1", "5"], ["1", "2", "5"])] == [1, 0.75, 0.5]


def test_dense_rewards_climb_to_a_hit() -> None:
    env = made(Guess, turns=2, reward="dense")
    games = [["x", "x"], ["1", "x"], ["1", "3"], ["4", "1"], ["4", "5"]]
    worth = [play(env, said)[0].reward.value for said in games]
    assert worth == sorted(set(worth))
    assert (worth[0], worth[-1]) == (0, 1) and worth[-2] == pytest.approx(0.2 * 6 / 7)
    env = made(Wordle, turns=1, reward="dense")
    worth = [play(env, [said])[0].reward.value for said in ("xxxxx", "xxane", "brane", "crane")]
    assert worth == pytest.approx([0, 0.12, 0.16, 1])


@pytest.mark.parametrize("said", ["0", "8", "five", "5.0", "４", "4 or 5", "", "5555"])
def test_what_is_no_guess_costs_a_turn(said: str) -> None:
    episode, _ = play(made(Guess, max_tokens=30), [said, "5"])
    assert episode.reward.parts == {"hit": 1, "turns": 2, "invalid": 1}


@pytest.mark.parametrize("said", ["cran", "cranes", "cr4ne", "crané", "brea\u212a", "c r a n e", ""])
def test_what_is_no_word_costs_a_turn(said: str) -> None:
    episode, _ = play(made(Wordle, max_tokens=30), [said, " CRANE "])
    assert episode.reward.parts == {"hit": 1, "turns": 2, "invalid": 1}


def test_letters_that_are_not_among_those_make_no_word() -> None:
    env = made(Wordle, letters="abcd", length=3)
    assert env.opening({}) == "3 of abcd"
    assert [env.read({}, word) for word in ("abc", "aab", "abe", "ABD")] == ["abc", "aab", None, "abd"]


def test_a_reply_without_an_end_ends_the_game() -> None:
    episode, policy = play(made(Guess), ["4", Said("5", "length"), "5"])
    assert (len(policy.asked), episode.status, episode.reward.value) == (2, "truncated", 0.0)


@pytest.mark.parametrize(
    ("guess", "secret", "said"),
    [
        ("crane", "crane", "ggggg"),
        ("nacre", "crane", "yyyyg"),
        ("geese", "these", "--ggg"),
        ("eerie", "where", "y-y-g"),
        ("allow", "label", "yyy--"),
        ("label", "allow", "yy--y"),
        ("speed", "abide", "--y-y"),
        ("aab", "baa", "ygy"),
    ],
)
def test_marks_as_in_the_game(guess: str, secret: str, said: str) -> None:
    assert marks(guess, secret) == said


WORD = st.text("abc", min_size=5, max_size=5)


@given(WORD, WORD)
def test_marks_count_every_letter_once(guess: str, secret: str) -> None:
    found = marks(guess, secret)
    assert all((mark == "g") == (g == s) for mark, g, s in zip(found, guess, secret, strict=True))
    marked = Counter(g for mark, g in zip(found, guess, strict=True) if mark != "-")
    assert marked == Counter(guess) & Counter(secret)


@given(st.integers(2, 200), st.integers(1, 50), st.data())
def test_the_teacher_of_guess_halves_what_is_left(numbers: int, low: int, data: Any) -> None:
    env = made(Guess, numbers=numbers, ranges=1)
    secret = data.draw(st.integers(low, low + numbers - 1))
    content = {"low": low, "high": low + numbers - 1, "secret": secret}
    assert teach(env, content, np.random.default_rng(0)) <= numbers.bit_length()


def test_the_teacher_of_wordle_finds_every_word() -> None:
    env = made(Wordle)
    turns = [teach(env, {"secret": word}, np.random.default_rng(n)) for n, word in enumerate(env.words)]
    assert max(turns) <= 5  # any possible word, without a look at what it tells apart, takes up to 7
    assert np.mean(turns) < 3.5


@pytest.mark.parametrize("cls", [Guess, Wordle])
def test_a_teacher_that_does_not_listen_needs_more_turns(cls: Any) -> None:
    def mean(wrong: float) -> float:
        env, rng = made(cls, wrong=wrong), np.random.default_rng(0)
        return float(np.mean([teach(env, env.task(i, "train").data, rng) for i in range(150)]))

    assert mean(0.0) + 1 < mean(0.8)


def test_ranges_are_as_they_were_ordered_and_held_out_as_a_whole() -> None:
    env = made(Guess, numbers=9, ranges=4)
    tasks = {split: [env.task(i, split).data for i in range(200)] for split in ("train", "heldout")}
    ranges = {split: {(t["low"], t["high"]) for t in found} for split, found in tasks.items()}
    assert ranges["train"] | ranges["heldout"] == {(1, 9), (2, 10), (3, 11), (4, 12)}
    assert not ranges["train"] & ranges["heldout"] and ranges["heldout"]
    for found in tasks.values():
        assert all(
            {t["secret"] for t in found if t["low"] == low} == set(range(low, low + 9))
            for low in {t["low"] for t in found}
        )


def test_own_words() -> None:
    env = made(Wordle, words=["red", "bed", "bad", "red"])
    assert env.words == ["bad", "bed", "red"] and env.opening({}) == "3 letters"
    assert len(made(Wordle).words) > 300
    assert made(Wordle, letters="cab", length=2).words == ["ab", "ac", "ba", "bc", "ca", "cb"]


@pytest.mark.parametrize(
    ("cls", "knobs", "says"),
    [
        (Guess, {"numbers": 1}, r"guess: numbers = 1 must lie in 2\.\.100000"),
        (Guess, {"numbers": 1000, "ranges": 101}, r"guess: ranges = 101 must lie in 1\.\.100: at most 100000 tasks"),
        (Guess, {"turns": 0}, r"guess: turns = 0 must lie in 1\.\.1000"),
        (Guess, {"turns": 5, "turn_cost": 0.3}, r"guess: turn_cost = 0\.3 must lie in 0\.\.0\.2: the last hit must"),
        (Guess, {"reward": "none"}, "guess: reward = 'none'"),
        (Wordle, {"words": ["red"]}, "wordle: words must be a list of 2 to 5000"),
        (Wordle, {"words": "red"}, "wordle: words must be a list"),
        (Wordle, {"words": ["red", "blue"]}, "'red', 'blue', …: all must have the same length"),
        (Wordle, {"words": ["red", "Bed"]}, "words = 'Bed' may hold the letters a-z only"),
        (Wordle, {"words": ["red", 3]}, "words = 3 may hold the letters a-z only"),
        (Wordle, {"words": ["red", "bed"], "letters": "abc"}, "words or letters, not both"),
        (Wordle, {"letters": "abC"}, "letters = 'abC' may hold"),
        (Wordle, {"letters": "abc", "length": 4}, r"length = 4 must lie in 2\.\.3"),
        (Wordle, {"letters": "abcdefghij", "length": 5}, "make 30240 words, more than 5000"),
    ],
)
def test_bad_knobs_are_named(cls: Any, knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        made(cls, **knobs)
