"""Work out a short sum, difference or product."""

from __future__ import annotations

import math
import re

import numpy as np

from spmd_rl.envs.builtin.arguments import check_number, check_operators
from spmd_rl.envs.builtin.conversation import Style
from spmd_rl.envs.builtin.single_turn import SingleTurn
from spmd_rl.envs.builtin.splits import Content, Drawn
from spmd_rl.envs.protocol import Tokenizer

OPERATORS = "+-*"


class Arithmetic(SingleTurn):
    """`12+7=` → `19`. Tasks that only differ in the order of their numbers (`3+5`, `5+3`) stay on one side."""

    SOURCE = "arithmetic"
    RULES = "Work out what stands before '='. Answer with the number, and nothing else."

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int = 0,
        largest: int = 9,
        terms: int = 2,
        operators: str = "+",
        wrong: float = 0.0,
        heldout: float = 0.1,
        reward: str = "exact",
        chat: bool = True,
        rules: bool = False,
        max_tokens: int = 0,
    ) -> None:
        """`terms` numbers of 0 to `largest`, with any of the `operators` between two; products come before sums.

        The rest: `single_turn.py`."""
        check_number(self.SOURCE, "largest", largest, 1, 10**6)
        check_number(self.SOURCE, "terms", terms, 2, 10)
        check_operators(self.SOURCE, operators, OPERATORS)
        self._largest, self._terms, self._operators = largest, terms, sorted(set(operators))
        biggest = largest**terms if "*" in operators else largest * terms
        style = Style(tokenizer, chat, self.RULES if rules else "", max_tokens or len(str(-biggest)) + 2)
        super().__init__(style, Drawn(self.SOURCE, seed, heldout, self.draw, _key), wrong, reward)

    def draw(self, rng: np.random.Generator) -> Content:
        """Numbers and operators, all as likely as each other."""
        numbers = [str(n) for n in rng.integers(0, self._largest + 1, self._terms)]
        signs = [self._operators[i] for i in rng.integers(len(self._operators), size=self._terms - 1)]
        return {"sum": numbers[0] + "".join(sign + number for sign, number in zip(signs, numbers[1:], strict=True))}

    def question(self, data: Content) -> str:
        """The sum, and what asks for its value."""
        return f"{data['sum']}="

    def answer(self, data: Content) -> str:
        """Its value, as Python prints it."""
        return str(value_of(data["sum"]))

    def mistake(self, data: Content, rng: np.random.Generator) -> str:
        """A number that is off by one, two or three."""
        off = int(rng.integers(1, 4))
        return str(value_of(data["sum"]) + (off if rng.random() < 0.5 else -off))


def value_of(text: str) -> int:
    """What a sum of products comes to."""
    parts = re.findall(r"([+-]?)([0-9*]+)", text)
    return sum((-1 if sign == "-" else 1) * math.prod(map(int, product.split("*"))) for sign, product in parts)


def _key(content: Content) -> str:
    """The same for all orders of the same numbers under the same operators."""
    numbers = re.findall("[0-9]+", content["sum"])
    return "".join(sorted(re.findall(r"[+*-]", content["sum"]))) + " " + " ".join(sorted(numbers))
