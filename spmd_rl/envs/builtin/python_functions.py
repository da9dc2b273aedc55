"""Small functions, in words and as Python expressions: from `x plus 3` to loops and conditions.

A step makes one value of another: its words and its expression have a hole for the one it takes. Level 1 is one step,
or `times … plus …`; level 2 is two steps, one on the other; level 3 is a step with a condition or a loop in it, most
often with another one behind.

It refuses to know who is asked. Invariants: words and expression say the same; no function fails on, or returns the
same for, everything it is tried on, and none of a higher level does what one of level 1 does, or nothing; functions
that do the same on what they are tried on have the same `behaviour`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from random import Random
from typing import Any, Literal

import numpy as np

Kind = Literal["int", "text", "ints"]
Arguments = list[Any]

NAMES: dict[Kind, str] = {"int": "x", "text": "s", "ints": "v"}
LETTERS = "abcdeilnorst"
LONGEST_VALUE = 400  # characters
MOST_DRAWS = 1000
NAMED = 0.3  # share of letters and numbers in arguments that are those the function names: others tell little of it


@dataclass(frozen=True)
class Step:
    """From a value of one kind to one of another; {} in words and expression is the one it takes."""

    takes: Kind
    makes: Kind
    words: str
    expression: str


@dataclass(frozen=True)
class Function:
    """What a task asks for."""

    words: str
    kinds: tuple[Kind, ...]  # of its parameters
    names: tuple[str, ...]  # of its parameters
    expression: str


def _steps(takes: Kind, makes: Kind, n: Iterable[Any], *pairs: tuple[str, str]) -> list[Step]:
    """A step of each (words, expression) with each n in the place of #."""
    return [Step(takes, makes, *(text.replace("#", str(k)) for text in pair)) for pair in pairs for k in n]


ONE, SMALL, LARGE = (0,), range(2, 6), range(2, 10)
SIMPLE = [
    *_steps("int", "int", range(1, 10), ("{} plus #", "{}+#"), ("{} minus #", "{}-#")),
    *_steps("int", "int", LARGE, ("{} times #", "{}*#"), ("the rest of {} by #", "{}%#")),
    *_steps("int", "int", range(10), ("the larger of {} and #", "max({},#)"), ("the smaller of {} and #", "min({},#)")),
    *_steps("int", "int", ONE, ("{} squared", "{}**2"), ("{} without its sign", "abs({})"), ("minus {}", "-{}")),
    *_steps("text", "int", ONE, ("the length of {}", "len({})")),
    *_steps("text", "int", LETTERS, ("how often {} has #", "{}.count('#')")),
    *_steps("text", "text", ONE, ("{} reversed", "{}[::-1]"), ("{} in capitals", "{}.upper()")),
    *_steps("text", "text", ONE, ("the first letter of {}", "{}[0]"), ("the last letter of {}", "{}[-1]")),
    *_steps("text", "text", SMALL, ("{} # times", "{}*#")),
    *_steps("text", "text", LETTERS, ("{} and then #", "{}+'#'"), ("{} without any #", "{}.replace('#','')")),
    *_steps("ints", "int", ONE, ("the sum of {}", "sum({})"), ("the length of {}", "len({})")),
    *_steps("ints", "int", ONE, ("the largest of {}", "max({})"), ("the smallest of {}", "min({})")),
    *_steps("ints", "int", ONE, ("the first of {}", "{}[0]"), ("the last of {}", "{}[-1]")),
    *_steps("ints", "int", range(10), ("how often {} has #", "{}.count(#)")),
    *_steps("ints", "ints", ONE, ("{} reversed", "{}[::-1]"), ("{} sorted", "sorted({})")),
    *_steps("ints", "ints", range(10), ("{} and then #", "{}+[#]")),
]
LINEAR = [
    *_steps("int", "int", LARGE, *((f"{{}} times # plus {b}", f"{{}}*#+{b}") for b in range(1, 10))),
    *_steps("int", "int", LARGE, *((f"{{}} times # minus {b}", f"{{}}*#-{b}") for b in range(1, 10))),
]
BRANCHING = [
    *_steps("ints", "int", range(-5, 6), ("the sum of what in {} is above #", "sum([n for n in {} if n>#])")),
    *_steps("ints", "int", range(-5, 6), ("how many in {} are below #", "sum([n<# for n in {}])")),
    *_steps("ints", "int", SMALL, ("how many in {} # divides", "sum([n%#==0 for n in {}])")),
    *_steps("ints", "ints", range(-5, 6), ("what in {} is above #", "[n for n in {} if n>#]")),
    *_steps("ints", "ints", SMALL, ("what in {} # divides", "[n for n in {} if n%#==0]")),
    *_steps("ints", "ints", LARGE, ("every number of {} plus #", "[n+# for n in {}]")),
    *_steps("ints", "ints", LARGE, ("every number of {} times #", "[n*# for n in {}]")),
    *_steps("ints", "ints", range(-3, 4), ("every number of {}, # if it is less", "[max(n,#) for n in {}]")),
    *_steps("text", "text", SMALL, ("every letter of {} # times", "''.join([c*# for c in {}])")),
    *_steps("text", "text", SMALL, ("the first of every # letters of {}", "{}[::#]")),
    *_steps("text", "text", ONE, ("{} with dashes between", "'-'.join({})")),
    *_steps("text", "text", ONE, ("{} in alphabetical order", "''.join(sorted({}))")),
    *_steps("text", "int", ONE, ("how many letters of {} are vowels", "sum([c in 'aeiou' for c in {}])")),
    *_steps("text", "int", ONE, ("how many different letters {} has", "len(set({}))")),
    *_steps("int", "int", ONE, ("the sum of the digits of {}", "sum([int(d) for d in str(abs({}))])")),
    *_steps("int", "int", LARGE, ("{} times # if {} is positive, else {}", "({}*# if {}>0 else {})")),
    *_steps("int", "int", LARGE, ("half of {} if {} is even, else {} plus #", "({}//2 if {}%2==0 else {}+#)")),
    *_steps("int", "int", ONE, ("the sum of the squares from 1 to {}", "sum([n*n for n in range(1,{}+1)])")),
    *_steps("int", "ints", SMALL, ("the numbers from 1 to {} that # divides", "[n for n in range(1,{}+1) if n%#==0]")),
]
PAIRS = [
    ("x plus y", "x+y"),
    ("x minus y", "x-y"),
    ("y minus x", "y-x"),
    ("x times y", "x*y"),
    ("the larger of x and y", "max(x,y)"),
    ("the smaller of x and y", "min(x,y)"),
]


def draw_function(level: int, rng: np.random.Generator) -> Function:
    """A function of a level, 1 to 3; on level 1 all are as likely."""
    if level == 1:
        return _one_of(level_1(), rng)
    for _ in range(MOST_DRAWS):
        first = _one_of(SIMPLE if level == 2 else BRANCHING, rng)
        behind = [step for step in SIMPLE if step.takes == first.makes]
        alone = level == 3 and rng.random() < 0.3
        function = _applied(first) if alone else _applied(first, _one_of(behind, rng))
        outputs = outputs_of(function, tried(function.kinds))
        if outputs and any(v != outputs[0] for v in outputs) and behaviour(function) not in _simple():
            return function
    raise RuntimeError(f"no function of level {level} came in {MOST_DRAWS} draws")


@cache
def level_1() -> list[Function]:
    """All functions of the first level."""
    pairs = [Function(words, ("int", "int"), ("x", "y"), expression) for words, expression in PAIRS]
    return [*(_applied(step) for step in SIMPLE + LINEAR), *pairs]


@cache
def _simple() -> set[str]:
    """What functions of level 1 do, and what those do that return what they take."""
    identities = [Function("", (kind,), (name,), name) for kind, name in NAMES.items()]
    return {behaviour(function) for function in level_1() + identities}


def _applied(*steps: Step) -> Function:
    """One step after the other, on a parameter."""
    words = expression = name = NAMES[steps[0].takes]
    for place, step in enumerate(steps):
        words = step.words.replace("{}", f"({words})" if place else words)
        expression = step.expression.replace("{}", f"({expression})")
    return Function(words, (steps[0].takes,), (name,), compact(expression))


def compact(expression: str) -> str:
    """The expression with no more brackets than it needs, and no spaces around its operators."""
    text = ast.unparse(ast.parse(expression, mode="eval"))
    return re.sub(r"(?<=,) | ?([-+*/%<>=]+) ?", r"\1", text)


@cache
def tried(kinds: tuple[Kind, ...]) -> list[Arguments]:
    """The arguments that functions of these parameters are told apart by: the same everywhere and always."""
    if kinds == ("int",):
        return [[n] for n in range(-12, 25)]
    chance = Random(0)
    return [[_value(kind, "", chance) for kind in kinds] for _ in range(24)]


def draw_arguments(function: Function, count: int, rng: np.random.Generator) -> list[Arguments]:
    """So many different ones; numbers and letters that the function names, or are next to those, are likely in them."""
    chance = Random(int(rng.integers(2**62)))
    found: list[Arguments] = []
    while len(found) < count:
        arguments = [_value(kind, function.expression, chance) for kind in function.kinds]
        if arguments not in found:
            found.append(arguments)
    return found


def outputs_of(function: Function, arguments: Sequence[Arguments]) -> list[Any] | None:
    """What the function returns for each; None when it fails for one, or returns something long."""
    values = outputs(function.expression, function.names, arguments)
    return None if values is None or any(len(repr(v)) > LONGEST_VALUE for v in values) else values


def outputs(expression: str, names: Sequence[str], arguments: Sequence[Arguments]) -> list[Any] | None:
    """What an expression of this file comes to for each; None when it fails for one. Never for one of a model's."""
    call = eval(f"lambda {','.join(names)}: {expression}")
    try:
        return [call(*each) for each in arguments]
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None


@lru_cache(maxsize=1024)
def behaviour(function: Function) -> str:
    """The same text for functions that do the same."""
    return json.dumps([function.kinds, outputs_of(function, tried(function.kinds))])


SLIPS = {
    "+": "-",
    "-": "+",
    "*": "+",
    "**": "*",
    "%": "//",
    "//": "%",
    "<": "<=",
    ">": ">=",
    "==": "!=",
    "max": "min",
    "min": "max",
    "upper": "lower",
}


def mistakes(function: Function, arguments: Sequence[Arguments]) -> list[str]:
    """Expressions that are nearly right: each returns something else for one of the arguments, and fails for none.

    There is one where the function does not return the same for all of them.
    """
    text, right = function.expression, outputs_of(function, arguments)
    slips = []
    for part in re.finditer(r"[0-9]+|[a-z]+|[-+*/%<>=]+|'[a-z]'", text):
        for other in _other(part[0]):
            slips.append(text[: part.start()] + other + text[part.end() :])
    slips.append(compact(f"({text})+1" if isinstance(right[0], int) else f"({text})[1:]"))
    return [slip for slip in slips if outputs(slip, function.names, arguments) not in (None, right)]


def _other(part: str) -> list[str]:
    if part.isdecimal():
        return [str(int(part) + 1), str(int(part) - 1)] if part != "0" else ["1"]
    if part.startswith("'"):
        return [f"'{LETTERS[LETTERS.find(part[1]) - 1]}'"]
    return [SLIPS[part]] if part in SLIPS else []


def _value(kind: Kind, expression: str, chance: Random) -> Any:
    """Anything of a kind; what the expression names is likely in it."""
    letters = re.findall("'([a-z])'", expression)
    numbers = [int(n) + off for n in re.findall("-?[0-9]+", expression) for off in (-1, 0, 1)]

    def pick(named: Sequence[Any], low: int, high: int) -> Any:
        return chance.choice(named) if named and chance.random() < NAMED else chance.randint(low, high)

    if kind == "int":
        return pick(numbers, -12, 24)
    if kind == "ints":
        return [pick(numbers, -9, 9) for _ in range(chance.randint(1, 6))]
    places = [pick([LETTERS.find(c) for c in letters], 0, len(LETTERS) - 1) for _ in range(chance.randint(2, 8))]
    return "".join(LETTERS[place] for place in places)


def _one_of(choices: Sequence[Any], rng: np.random.Generator) -> Any:
    return choices[rng.integers(len(choices))]
