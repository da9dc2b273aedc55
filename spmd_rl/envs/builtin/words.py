"""Random words over given letters, for tasks that are about letters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spmd_rl.envs.builtin.arguments import check_letters, check_number

LONGEST = 1000


@dataclass(frozen=True)
class Words:
    """Words of `shortest` to `length` letters, every length as often as any other.

    Without `repeats` the letters of a word are all different: a tiny model then always finds the next letter by the
    last one.
    """

    source: str
    letters: str
    length: int
    shortest: int  # 0: as `length`
    repeats: bool

    def __post_init__(self) -> None:
        check_letters(self.source, self.letters)
        if self.repeats:
            check_number(self.source, "length", self.length, 2, LONGEST)
        else:
            why = "the number of letters; or set repeats = true"
            check_number(self.source, "length", self.length, 2, len(self.letters), why=why)
        if self.shortest != 0:
            check_number(self.source, "shortest", self.shortest, 2, self.length)

    def draw(self, rng: np.random.Generator) -> str:
        """One word."""
        length = int(rng.integers(self.shortest or self.length, self.length + 1))
        places = rng.choice(len(self.letters), length, replace=self.repeats)
        return "".join(self.letters[place] for place in places)
