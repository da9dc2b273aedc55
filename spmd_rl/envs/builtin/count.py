"""Count how often a letter is in a word."""

from __future__ import annotations

import numpy as np

from spmd_rl.envs.builtin.arguments import check_letters, check_number
from spmd_rl.envs.builtin.conversation import Style
from spmd_rl.envs.builtin.single_turn import SingleTurn
from spmd_rl.envs.builtin.splits import Content, Drawn
from spmd_rl.envs.protocol import Tokenizer


class Count(SingleTurn):
    """`count a in abca` → `2`.

    Every count from 0 to the length comes as often as any other, so no constant answer is right more often. Answers of
    one digit have nothing for the dense reward to see but whether they are right.
    """

    SOURCE = "count"
    RULES = "Answer with how many times the letter is in the word, as a number, and nothing else."

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int = 0,
        letters: str = "abcd",
        length: int = 4,
        wrong: float = 0.0,
        heldout: float = 0.1,
        reward: str = "exact",
        chat: bool = True,
        rules: bool = False,
        max_tokens: int = 0,
    ) -> None:
        """Words of `length` of the `letters`. The rest: `single_turn.py`."""
        check_letters(self.SOURCE, letters)
        check_number(self.SOURCE, "length", length, 1, 1000)
        self._letters, self._length = letters, length
        style = Style(tokenizer, chat, self.RULES if rules else "", max_tokens or len(str(length)) + 2)
        super().__init__(style, Drawn(self.SOURCE, seed, heldout, self.draw), wrong, reward)

    def draw(self, rng: np.random.Generator) -> Content:
        """A letter, how often it comes, where, and other letters elsewhere."""
        letter = self._letters[rng.integers(len(self._letters))]
        others = [other for other in self._letters if other != letter]
        word = [others[i] for i in rng.integers(len(others), size=self._length)]
        for place in rng.permutation(self._length)[: rng.integers(self._length + 1)]:
            word[place] = letter
        return {"letter": letter, "word": "".join(word)}

    def question(self, data: Content) -> str:
        """The letter and the word."""
        return f"count {data['letter']} in {data['word']}"

    def answer(self, data: Content) -> str:
        """How often."""
        return str(data["word"].count(data["letter"]))

    def mistake(self, data: Content, rng: np.random.Generator) -> str:
        """Another count that is possible."""
        return str((data["word"].count(data["letter"]) + int(rng.integers(1, self._length + 1))) % (self._length + 1))
