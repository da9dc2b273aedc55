"""Type hints of tools: as JSON schemas, and as a check of what a model wrote.

It refuses to know about functions and calls. Invariant: what `converted` returns is of the type that the hint names,
all the way down; nothing is guessed (a number in a string stays an error).
"""

from __future__ import annotations

import math
import types
import typing
from typing import Any, Literal, Union

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_NOUN = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


class WrongType(ValueError):
    """An argument that does not fit; the text says what would."""


def schema(hint: Any) -> dict[str, Any]:
    """JSON schema of a type hint. TypeError for one that JSON has no form of."""
    if hint is Any:
        return {}
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is Literal:
        if wrong := [choice for choice in arguments if not isinstance(choice, str | int | None)]:
            raise TypeError(f"a model can't write {wrong[0]!r}: let a Literal hold strings, integers, booleans or None")
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        kinds = [kind for kind in arguments if kind is not types.NoneType]
        return schema(kinds[0]) if len(kinds) == 1 else {"anyOf": [schema(kind) for kind in kinds]}
    if origin not in _PLAIN or (origin is dict and arguments and arguments[0] is not str):
        raise TypeError(f"a model can't write a {hint}: use str, int, float, bool, list, dict, Optional or Literal")
    made: dict[str, Any] = {"type": _PLAIN[origin]}
    if arguments and arguments[-1] is not Any:
        made["items" if origin is list else "additionalProperties"] = schema(arguments[-1])
    return made


def converted(value: Any, hint: Any, where: str) -> Any:
    """The value in the hint's type: an integer where a float is asked for becomes one, 3.0 becomes 3.

    WrongType, which names `where` the value stands, for any other.
    """
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is Literal:
        # True == 1, but they are not the same.
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
    elif origin in (Union, types.UnionType):
        for kind in arguments:
            try:
                return converted(value, kind, where)
            except WrongType:
                continue
    elif origin is types.NoneType:
        if value is None:
            return None
    elif origin is list and isinstance(value, list):
        item = arguments[0] if arguments else Any
        return [converted(part, item, f"{where}[{number}]") for number, part in enumerate(value)]
    elif origin is dict and isinstance(value, dict):
        item = arguments[1] if arguments else Any
        return {name: converted(part, item, f"{where}[{name!r}]") for name, part in value.items()}
    elif origin is float and type(value) in (int, float):
        return _as_float(value, where)
    elif origin is int and type(value) is float and value.is_integer():
        return int(value)
    elif origin is type(value) and origin in _PLAIN:
        return value
    raise WrongType(f"argument {where} must be {_named(hint)}, not {_shown(value)}")


def _as_float(value: float, where: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise WrongType(f"argument {where} is too large a number")
    return number


def _named(hint: Any) -> str:
    """What a type is called in a sentence."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(_named(kind) for kind in arguments)
    return "null" if origin is types.NoneType else _NOUN[origin]


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    text = repr(value)
    kinds: dict[type, str] = {str: "the string ", list: "the list ", dict: "the object "}
    return kinds.get(type(value), "") + (text if len(text) <= 60 else text[:60] + "…")
