"""Copy a short word: what a tiny model learns from nothing, with the dense reward."""

from __future__ import annotations

import numpy as np

from spmd_rl.envs.builtin.conversation import Style
from spmd_rl.envs.builtin.single_turn import SingleTurn
from spmd_rl.envs.builtin.splits import Content, Drawn
from spmd_rl.envs.builtin.words import Words
from spmd_rl.envs.protocol import Tokenizer


class Copy(SingleTurn):
    """`copy dbca` → `dbca`."""

    SOURCE = "copy"
    RULES = "Answer with the word after 'copy', and nothing else."

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
        super().__init__(style, Drawn(self.SOURCE, seed, heldout, self.draw), wrong, reward)

    def draw(self, rng: np.random.Generator) -> Content:
        """Any word."""
        return {"word": self.words.draw(rng)}

    def question(self, data: Content) -> str:
        """The word and what to do with it."""
        return f"copy {data['word']}"

    def answer(self, data: Content) -> str:
        """The word."""
        return str(data["word"])

    def mistake(self, data: Content, rng: np.random.Generator) -> str:
        """The word with one letter changed."""
        word, place = data["word"], int(rng.integers(len(data["word"])))
        others = [letter for letter in self.words.letters if letter != word[place]]
        return str(word[:place] + others[rng.integers(len(others))] + word[place + 1 :])
