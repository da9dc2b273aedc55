"""What a game observes as text, and what a model writes as an action.

It refuses to know about turns and rewards. Invariants: every observation has a text; what is no action is a
ValueError that says what is allowed, whatever was written.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from spmd_rl.envs.builtin.answers import whole_number

_NOT_SEEN = ("reward", "done", "metadata")  # of an OpenEnv observation
_COLOUR, _PLAIN = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m"), re.compile(r"\x1b\[0?m")


class Actions:
    """The actions of one kind of game; `allowed` says what they are, an empty text when any text is one."""

    def __init__(self, source: str, space: Any, parse: Callable[[str], Any] | None) -> None:
        """TypeError for a space (None: the game has none) whose actions are neither whole numbers nor texts."""
        self._parse, self._numbers, self.allowed = parse, range(0), ""
        kind = type(space).__name__
        if parse is not None or space is None or kind == "Text":
            return
        if kind != "Discrete":
            raise TypeError(
                f"{source}: its actions are a {kind}; a reply can be a whole number (Discrete) or a text. Set `action` "
                "to the import path of a function (text) → action"
            )
        first = int(getattr(space, "start", 0))
        self._numbers = range(first, first + int(space.n))
        self.allowed = f"Answer with a whole number from {self._numbers[0]} to {self._numbers[-1]}."

    def read(self, answer: str) -> Any:
        """The action. ValueError for what is none."""
        if self._parse is not None:
            try:
                return self._parse(answer)
            except Exception as error:  # a parser is the user's, and what it is given the model's
                raise ValueError(str(error) or type(error).__name__) from error
        if not self._numbers:
            return answer
        action = whole_number(answer)
        if action not in self._numbers:
            raise ValueError(self.allowed)
        return action


def as_text(observation: Any) -> str:
    """A text as it is, else JSON, else its repr. Of an object with one field that is seen, that one."""
    if isinstance(observation, str):
        # Colours mark a place, such as where the player stands.
        return _PLAIN.sub("]", _COLOUR.sub("[", observation))
    fields = _fields(observation)
    if fields is not None:
        seen = {name: value for name, value in fields.items() if name not in _NOT_SEEN}
        return as_text(next(iter(seen.values())) if len(seen) == 1 else seen)
    try:
        return json.dumps(observation, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return repr(observation)


def _fields(observation: Any) -> dict[str, Any] | None:
    """Of a dataclass or a pydantic model."""
    if dataclasses.is_dataclass(observation) and not isinstance(observation, type):
        return {field.name: getattr(observation, field.name) for field in dataclasses.fields(observation)}
    dump = getattr(observation, "model_dump", None)
    return dump() if callable(dump) else None


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays and numbers of numpy
        return value.tolist()
    fields = _fields(value)
    return repr(value) if fields is None else fields
