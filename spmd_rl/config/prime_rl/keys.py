"""What a row of the table says: a key of prime-rl, the values it takes, and what becomes of it here.

A row has one of four fates. *Converted* ones have a key of ours, or a rule that reads them beside others. *Later* ones
have no counterpart yet; *never* ones have none by design, and something is lost; *needless* ones speak of what does not
exist here (ports, routers, transports), and nothing is lost. `harmless` are values at which no key loses anything.

It refuses to know particular keys (`table_*.py`) and what files look like (`read.py`). Invariant: every leaf of a table
that `leaves` accepts belongs to exactly one row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spmd_rl.config.prime_rl.earlier import RENAMED
from spmd_rl.config.schema import did_you_mean

Fate = Literal["converted", "later", "never", "needless"]
SECTION = "[section]"  # an optional table: to be there is to be on
MISSING = object()  # no default: an absent key writes nothing

# What a value may be: types, None, literal strings, SECTION; `dict` takes a table of any keys.
Kind = type | str | None


@dataclass(frozen=True)
class Key:
    """One row. `path` is dotted, from the root of their `rl.toml`; `*` stands for a place in an array, a last
    `**` for any other name.

    Args:
        ours: the key of ours that it becomes, or that its rule writes; with fate "later" the planned one, if known.
        default: what the value is in prime-rl where nothing is said; written out, for ours may be another.
        read: from their value to ours.
        ruled: a rule reads it, beside others; then `ours` is for readers only.
        why: why there is no counterpart, or how the meaning differs.
        instead: the way out.
    """

    path: str
    kinds: tuple[Kind, ...]
    fate: Fate = "converted"
    ours: str = ""
    default: Any = MISSING
    read: Callable[[Any], Any] | None = None
    ruled: bool = False
    why: str = ""
    instead: str = ""
    harmless: tuple[Any, ...] = ()

    def loses(self, value: Any) -> bool:
        """Whether something is lost where this key has this value."""
        return not any(value == fine and type(value) is type(fine) for fine in self.harmless)


def same(path: str, kinds: Any, ours: str, default: Any = MISSING, read: Any = None, why: str = "") -> Key:
    """A key that becomes one of ours by itself."""
    return Key(path, _tuple(kinds), "converted", ours, default, read, why=why)


def ruled(path: str, kinds: Any, ours: str, why: str = "") -> Key:
    """A key that a rule reads."""
    return Key(path, _tuple(kinds), "converted", ours, ruled=True, why=why)


def later(path: str, kinds: Any, why: str, instead: str, harmless: Iterable[Any] = (), ours: str = "") -> Key:
    """A key whose counterpart is planned."""
    return Key(path, _tuple(kinds), "later", ours, why=why, instead=instead, harmless=tuple(harmless))


def never(path: str, kinds: Any, why: str, instead: str, harmless: Iterable[Any] = ()) -> Key:
    """A key without a counterpart, by design."""
    return Key(path, _tuple(kinds), "never", why=why, instead=instead, harmless=tuple(harmless))


def needless(path: str, kinds: Any, why: str) -> Key:
    """A key about something that does not exist here."""
    return Key(path, _tuple(kinds), "needless", why=why)


def under(prefix: str, rows: Iterable[Key]) -> tuple[Key, ...]:
    """The rows, moved below a table."""
    return tuple(_moved(row, f"{prefix}.{row.path}") for row in rows)


@dataclass
class Place:
    """What may stand at one place of the tables: a row, more places below it, or both."""

    row: Key | None = None
    below: dict[str, Place] = field(default_factory=dict)

    def at(self, name: str) -> Place | None:
        """The place under a name or a number."""
        return self.below.get(name) or self.below.get("*" if name.isdigit() else "**") or self.below.get("**")


def places(rows: Iterable[Key]) -> Place:
    """The rows as a tree. ValueError for a path with two rows."""
    root = Place()
    for row in rows:
        place = root
        for name in row.path.split("."):
            place = place.below.setdefault(name, Place())
        if place.row is not None:
            raise ValueError(f"two rows for {row.path}")
        place.row = row
    return root


def leaves(table: Mapping[str, Any], root: Place, shown: Callable[[str], str]) -> tuple[dict[str, Any], list[str]]:
    """Values by dotted path, tables of optional sections as {}; and what is wrong with names and types.

    `shown` says how the user wrote a path.
    """
    found: dict[str, Any] = {}
    problems: list[str] = []

    def walk(value: Any, place: Place, path: str) -> None:
        row = place.row
        if row is not None and isinstance(value, Mapping) and place.below and SECTION in row.kinds:
            found[path] = {}
        elif row is not None and not (isinstance(value, Mapping | list) and place.below):
            if not takes(row.kinds, value):
                problems.append(f"{shown(path)} = {_short(value)}: prime-rl takes {_takes(row.kinds)}")
            found[path] = value
            return
        elif (isinstance(value, list) and "*" not in place.below) or not isinstance(value, Mapping | list):
            expected = "an array of tables" if "*" in place.below else "a table"
            problems.append(f"{shown(path)} = {_short(value)}: prime-rl takes {expected}")
            return
        elif isinstance(value, Mapping) and "*" in place.below:
            problems.append(f"{shown(path)}: prime-rl takes an array of tables, as in [[{shown(path)}]]")
            return
        named = value.items() if isinstance(value, Mapping) else ((str(i), inner) for i, inner in enumerate(value))
        for name, inner in named:
            inner_path = f"{path}.{name}" if path else name
            below = place.at(name)
            if below is None:
                wanted = ".".join("*" if part.isdigit() else part for part in inner_path.split("."))
                known = [*_paths(root, ""), *(old for old, _ in RENAMED)]
                problems.append(f"{shown(inner_path)} is no key of prime-rl; {did_you_mean(wanted, known)}")
            else:
                walk(inner, below, inner_path)

    walk(table, root, "")
    return found, problems


def takes(kinds: tuple[Kind, ...], value: Any) -> bool:
    """Whether one of the kinds is that of the value; integers are floats, booleans are no numbers, `object` is all."""
    if object in kinds:
        return True
    if value is None or (isinstance(value, str) and value in kinds and value != SECTION):
        return value in kinds
    if isinstance(value, Mapping):
        return dict in kinds or (SECTION in kinds and not value)
    return type(value) in kinds or (type(value) is int and float in kinds)


def _paths(place: Place, prefix: str) -> list[str]:
    found = []
    for name, below in place.below.items():
        path = f"{prefix}{name}"
        found += [path, *_paths(below, f"{path}.")]
    return found


def _takes(kinds: tuple[Kind, ...]) -> str:
    words: list[str] = []
    for kind in kinds:
        if kind is None:
            words.append('"None"')
        elif kind == SECTION:
            words.append("a table")
        else:
            names = {dict: "a table", list: "a list", int: "an integer", float: "a number", bool: "true or false"}
            words.append(json.dumps(kind) if isinstance(kind, str) else names.get(kind, "a string"))
    return " or ".join(words)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _tuple(kinds: Any) -> tuple[Kind, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


def _moved(row: Key, path: str) -> Key:
    values = {name: getattr(row, name) for name in row.__dataclass_fields__} | {"path": path}
    return Key(**values)
