"""Checks of keyword arguments: the error names the environment, the argument, its value, and what it may be.

It refuses to know what the arguments are for.
"""

from __future__ import annotations

from collections.abc import Collection


def check_number(source: str, name: str, value: float, low: float, high: float, *, why: str = "") -> None:
    """ValueError unless low ≤ value ≤ high; a whole number where `low` is one (an int and not a float)."""
    whole = isinstance(low, int)
    kinds = int if whole else int | float
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ValueError(f"{source}: {name} = {value!r} must be a {'whole ' if whole else ''}number")
    if not low <= value <= high:
        raise ValueError(f"{source}: {name} = {value} must lie in {low:.12g}..{high:.12g}{why and f': {why}'}")


def check_share(source: str, name: str, value: float) -> None:
    """ValueError unless it lies in 0..1."""
    check_number(source, name, value, 0.0, 1.0)


def check_choice(source: str, name: str, value: str, choices: Collection[str]) -> None:
    """ValueError unless it is one of them."""
    if value not in choices:
        raise ValueError(f"{source}: {name} = {value!r} must be one of {', '.join(choices)}")


def check_letters(source: str, letters: str) -> None:
    """ValueError unless they are two or more, all different, ASCII, and visible."""
    if not isinstance(letters, str) or len(letters) < 2 or len(set(letters)) < len(letters):
        raise ValueError(f"{source}: letters = {letters!r} must be two or more different characters")
    if not (letters.isascii() and letters.isprintable()) or " " in letters or "<" in letters:
        raise ValueError(f"{source}: letters = {letters!r} must be visible ASCII characters, and none of them '<'")


def check_operators(source: str, operators: str, known: str) -> None:
    """ValueError unless they are one or more of the known ones."""
    if not isinstance(operators, str) or not operators or set(operators) - set(known):
        raise ValueError(f"{source}: operators = {operators!r} must be one or more of {known!r}, as a string")
