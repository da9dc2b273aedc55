"""Put the letters of a word in order. No word is in order already, so a policy that only copies scores exactly 0."""

from __future__ import annotations

import numpy as np

from spmd_rl.envs.builtin.conversation import Style
from spmd_rl.envs.builtin.single_turn import SingleTurn
from spmd_rl.envs.builtin.splits import Content, Drawn
from spmd_rl.envs.builtin.words import Words
from spmd_rl.envs.protocol import Tokenizer


class Sort(SingleTurn):
    """`sort dbca` → `abcd`, in the order of the characters' codes. Words with the same answer stay on one side."""

    SOURCE = "sort"
    RULES = "Answer with the letters of the word after 'sort' in alphabetical order, and nothing else."

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int = 0,
        letters: str = "abcdefgh",
        length: int = 4,
        shortest: int = 0,
        repeats: bool = False,
        wrong: float = 0.0,
        heldout: float = 0.1,
        reward: str = "exact",
        chat: bool = True,
        rules: bool = False,
        max_tokens: int = 0,
    ) -> None:
        """Words of `shortest` (0: `length`) to `length` letters, with `repeats` or not. The rest: `single_turn.py`."""
        self.words = Words(self.SOURCE, letters, length, shortest, repeats)
        style = Style(tokenizer, chat, self.RULES if rules else "", max_tokens or length + 2)
        super().__init__(style, Drawn(self.SOURCE, seed, heldout, self.draw, self.answer), wrong, reward)

    def draw(self, rng: np.random.Generator) -> Content:
        """A word that is not in order."""
        while True:
            word = self.words.draw(rng)
            if word != "".join(sorted(word)):
                return {"word": word}

    def question(self, data: Content) -> str:
        """The word and what to do with it."""
        return f"sort {data['word']}"

    def answer(self, data: Content) -> str:
        """Its letters in order."""
        return "".join(sorted(data["word"]))

    def mistake(self, data: Content, rng: np.random.Generator) -> str:
        """The word as it is."""
        return str(data["word"])
