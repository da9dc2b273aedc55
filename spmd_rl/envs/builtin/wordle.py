"""Find a secret word; after each guess every letter is marked: in place (g), elsewhere in the word (y), or neither (-).

The words are a list of common English ones, your own, or, for a tiny model, all words of some different letters.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from spmd_rl.envs.builtin.arguments import check_letters, check_number
from spmd_rl.envs.builtin.conversation import Style
from spmd_rl.envs.builtin.guessing import Guessing
from spmd_rl.envs.builtin.splits import Content, Listed
from spmd_rl.envs.builtin.word_list import FIVE_LETTERS
from spmd_rl.envs.protocol import Tokenizer
from spmd_rl.rollouts.types import Task

MOST_WORDS = 5000
FEW = 8  # possible words, from which on the teacher looks for one that tells them apart, in the whole list


class Wordle(Guessing[str]):
    """`5 letters` → `crane`, `c r a n e` + newline + `- y - - g` → …; with `letters`: `3 of abcde` → `bad`, …

    Any word of the right letters may be guessed, on the list or not. As in the game, a letter of the guess is marked y
    only as often as the secret has it beside those marked g.
    """

    SOURCE = "wordle"
    RULES = (
        "Find the secret word. Answer with one word, and nothing else. You are told of every letter of your word "
        "whether it is in its place (g), elsewhere in the secret word (y), or neither (-)."
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int = 0,
        words: Sequence[str] = (),
        letters: str = "",
        length: int = 3,
        turns: int = 6,
        turn_cost: float = 0.0,
        wrong: float = 0.0,
        heldout: float = 0.1,
        reward: str = "exact",
        chat: bool = True,
        rules: bool = False,
        max_tokens: int = 0,
    ) -> None:
        """`words`: your own, of one length, of the letters a–z. `letters`: all words of `length` different ones of
        these. With neither the own list. The rest: `guessing.py`."""
        if letters and words:
            raise ValueError("wordle: give words or letters, not both")
        self.words = _combinations(letters, length) if letters else _checked(words or FIVE_LETTERS.split())
        size = len(self.words[0])
        self._what = f"{size} of {letters}" if letters else f"{size} letters"
        self._form = re.compile(f"[{letters or 'a-z'}]{{{size}}}")
        self._verdict = re.compile(rf"((?:[a-z] ){{{size - 1}}}[a-z])\n((?:[gy-] ){{{size - 1}}}[gy-])")
        style = Style(tokenizer, chat, self.RULES if rules else "", max_tokens or size + 2)
        tasks = Listed(self.SOURCE, seed, heldout, [{"secret": word} for word in self.words])
        super().__init__(style, tasks, turns, turn_cost, wrong, reward)

    def opening(self, data: Content) -> str:
        """How many letters, and which ones where not all may come."""
        return self._what

    def read(self, data: Content, answer: str) -> str | None:
        """A word of the right number of the right letters, capital or not."""
        word = answer.lower() if answer.isascii() else ""
        return word if self._form.fullmatch(word) else None

    def verdict(self, data: Content, guess: str) -> str:
        """The guess and its marks, letter by letter."""
        return f"{' '.join(guess)}\n{' '.join(marks(guess, data['secret']))}"

    def invalid(self, data: Content) -> str:
        """What a word must be."""
        return self._what

    def nearness(self, data: Content, guess: str) -> float:
        """Share of letters in place."""
        return marks(guess, data["secret"]).count("g") / len(guess)

    def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
        """Any word first (and with probability `wrong`), then a possible one; of a few, one that tells them apart.

        Secrets that are held out are guessed too: the teacher knows the list, as a player knows the language.
        """
        verdicts = [(g.replace(" ", ""), m.replace(" ", "")) for g, m in self._verdict.findall("\n".join(heard))]
        if not verdicts or rng.random() < self._wrong:
            return self.words[rng.integers(len(self.words))]
        possible = [word for word in self.words if all(marks(g, word) == m for g, m in verdicts)]
        if len(possible) > FEW:
            return possible[rng.integers(len(possible))]

        def told_apart(guess: str) -> int:
            return len({marks(guess, word) for word in possible})

        best = max(possible, key=told_apart)
        return best if told_apart(best) == len(possible) else max([best, *self.words], key=told_apart)


def marks(guess: str, secret: str) -> str:
    """A mark for each letter of the guess: g, y or -."""
    rest = [s for g, s in zip(guess, secret, strict=True) if g != s]
    found = ""
    for g, s in zip(guess, secret, strict=True):
        if g == s:
            found += "g"
        elif g in rest:
            rest.remove(g)
            found += "y"
        else:
            found += "-"
    return found


def _combinations(letters: str, length: int) -> list[str]:
    check_letters("wordle", letters)
    _check_word("letters", letters)
    check_number("wordle", "length", length, 2, len(letters), why="the number of letters")
    count = math.perm(len(letters), length)
    if count > MOST_WORDS:
        raise ValueError(f"wordle: {length} of {len(letters)} letters make {count} words, more than {MOST_WORDS}")
    return ["".join(word) for word in itertools.permutations(sorted(letters), length)]


def _checked(words: Sequence[str]) -> list[str]:
    if isinstance(words, str) or not 2 <= len(set(words)) <= MOST_WORDS:
        raise ValueError(f"wordle: words must be a list of 2 to {MOST_WORDS} different words")
    for word in words:
        _check_word("words", word)
        if len(word) != len(words[0]) or len(word) < 2:
            raise ValueError(f"wordle: words = {words[0]!r}, {word!r}, …: all must have the same length, 2 or more")
    return sorted(set(words))


def _check_word(name: str, text: str) -> None:
    if not isinstance(text, str) or not re.fullmatch("[a-z]+", text):
        raise ValueError(f"wordle: {name} = {text!r} may hold the letters a-z only")
