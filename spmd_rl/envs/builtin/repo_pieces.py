"""What small repositories are made of: functions with places where a bug fits, and functions that call others.

A place is written `‹right|wrong|wrong›` in a function's source. It refuses to know about files and tests. Invariants: a
function as it is right never fails on the arguments drawn for it, and returns what JSON has; no wrong one runs without
end; what a caller returns shows what it was returned.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

PLACE = re.compile("‹(.*?)›", re.DOTALL)
LETTERS = "abxy"  # names of parameters: with few of them a tiny model soon learns to copy

Draw = Callable[[Random], list[Any]]


@dataclass(frozen=True)
class Piece:
    """One function."""

    name: str
    parameters: str  # as in its first line
    source: str  # with its places
    arguments: Draw  # draws those of one call
    calls: str = ""  # the function that a caller calls


def places(source: str) -> list[list[str]]:
    """The alternatives of each place, the right one first."""
    return [place.split("|") for place in PLACE.findall(source)]


def written(source: str, place: int = -1, text: str = "") -> str:
    """The source as it is right, but for `text` in one place."""
    right = iter(range(len(PLACE.findall(source))))
    return PLACE.sub(lambda found: text if next(right) == place else found[1].split("|")[0], source)


# Name of a one-line function → what it returns, the right form and wrong ones between bars.
OF_TWO = {
    "add": "{0} + {1}|{0} - {1}|{0} * {1}",
    "sub": "{0} - {1}|{0} + {1}|{1} - {0}",
    "mul": "{0} * {1}|{0} + {1}|{0} - {1}",
    "larger": "max({0}, {1})|min({0}, {1})|{0} + {1}",
    "smaller": "min({0}, {1})|max({0}, {1})|{0} - {1}",
}
OF_ONE_AND_A_NUMBER = {
    "plus": "{0} + {n}|{0} - {n}|{0} * {n}",
    "minus": "{0} - {n}|{0} + {n}|{0} * {n}",
    "times": "{0} * {n}|{0} + {n}|{0} - {n}",
}
OF_ONE = {
    "double": "{0} * 2|{0} + 2|{0} * 3",
    "triple": "{0} * 3|{0} + 3|{0} * 2",
    "half": "{0} // 2|{0} * 2|{0} - 2",
    "square": "{0} * {0}|{0} + {0}|{0} * 2",
    "negative": "-{0}|{0}|0",
    "after": "{0} + 1|{0} - 1|{0} + 2",
    "before": "{0} - 1|{0} + 1|{0} - 2",
}


def short_piece(chance: Random) -> Piece:
    """A function of one line that its name says everything about."""
    family = chance.choice([OF_TWO, OF_TWO, OF_ONE_AND_A_NUMBER, OF_ONE])
    name = chance.choice(list(family))
    parameters = chance.sample(LETTERS, 2 if family is OF_TWO else 1)
    number = chance.randint(2, 9)
    forms = family[name].format(*parameters, n=number)
    if family is OF_ONE_AND_A_NUMBER:
        name = f"{name}{number}"
    taken = ", ".join(parameters)
    arguments = _two_numbers if family is OF_TWO else _number
    return Piece(name, taken, f"def {name}({taken}):\n    return ‹{forms}›\n", arguments)


def _number(chance: Random) -> list[Any]:
    return [chance.randint(3, 20)]


def _two_numbers(chance: Random) -> list[Any]:
    return chance.sample(range(1, 10), 2)


def caller(inner: Piece, chance: Random) -> Piece:
    """A function that returns what another one returns, in another form. It has no places."""
    name, parameters, arguments = inner.name, inner.parameters, inner.arguments
    call = f"{name}({parameters})"

    def rows(chance: Random) -> list[Any]:
        return [[inner.arguments(chance) for _ in range(chance.randint(1, 3))]]

    forms = {
        f"{name}_report": f'return {{"of": [{parameters}], "is": {call}}}',
        f"checked_{name}": f"if None in [{parameters}]:\n        return None\n    return {call}",
        f"{name}_as_text": f'return "{name}: " + str({call})',
        f"{name}_of_each": f"return [{name}(*row) for row in rows]",
    }
    chosen = chance.choice(list(forms)[: 3 if parameters == "rows" else 4])
    if chosen == f"{name}_of_each":
        parameters, arguments = "rows", rows
    return Piece(chosen, parameters, f"def {chosen}({parameters}):\n    {forms[chosen]}\n", arguments, name)
