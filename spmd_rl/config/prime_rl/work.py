"""A conversion on its way: what the user's files say, what was written of our config, and what there is to tell.

It refuses to know particular keys. Invariant: a key of ours has one value; two keys of theirs that ask for different
ones are a problem that names both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from spmd_rl.config.prime_rl.read import Theirs

# differs: converted, with a meaning that is not quite the same. by hand: nothing that could be converted says it.
Kind = Literal["later", "never", "differs", "by hand", "needless"]
LOSSES: tuple[Kind, ...] = ("later", "never", "by hand")


@dataclass(frozen=True)
class Note:
    """One thing to tell: about a key as the user wrote it (or one of ours, for what is to be set by hand)."""

    kind: Kind
    key: str
    why: str
    instead: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.why}" + (f"; instead: {self.instead}" if self.instead else "")


@dataclass
class Work:
    """See the module."""

    theirs: Theirs
    written: dict[str, Any] = field(default_factory=dict)
    because: dict[str, tuple[str, ...]] = field(default_factory=dict)  # our key → the keys of theirs that were given
    sources: list[dict[str, Any]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def given(self, path: str) -> bool:
        """Whether the files have this key, a table of this name included."""
        return path in self.theirs.values or any(key.startswith(f"{path}.") for key in self.theirs.values)

    def on(self, path: str) -> bool:
        """Whether an optional table is there and not "None"."""
        return self.given(path) and self.theirs.values.get(path, {}) is not None

    def get(self, path: str, default: Any = None) -> Any:
        """The value of a key; the default where it is not given or is "None"."""
        value = self.theirs.values.get(path)
        return default if value is None else value

    def one(self, *paths: str, default: Any = None) -> Any:
        """The value of keys that all mean one thing. A problem when they disagree."""
        found = {path: self.theirs.values[path] for path in paths if self.theirs.values.get(path) is not None}
        (first, value), *others = [*found.items()] or [("", default)]
        for path, other in others:
            if other != value:
                self.problems.append(
                    f"{self.shown(first)} = {value!r} and {self.shown(path)} = {other!r}: one program has one value"
                )
        return value

    def put(self, ours: str, value: Any, *because: str) -> None:
        """Write a key of ours, for these keys of theirs."""
        given = tuple(path for path in because if self.given(path))
        if ours in self.written and self.written[ours] != value:
            both = " and ".join(self.shown(path) for path in dict.fromkeys((*self.because[ours], *given)))
            self.problems.append(f"{ours} would be {self.written[ours]!r} and {value!r}: {both} disagree")
        self.written[ours] = value
        self.because[ours] = given

    def note(self, kind: Kind, path: str, why: str, instead: str = "") -> None:
        """Tell something about a key of theirs."""
        self.notes.append(Note(kind, self.shown(path), why, instead))

    def by_hand(self, ours: str, why: str) -> None:
        """Something that the user has to set."""
        self.notes.append(Note("by hand", ours, why))

    def shown(self, path: str) -> str:
        """A path as the user wrote it."""
        return self.theirs.shown(path)

    def under(self, path: str) -> Iterator[tuple[str, Any]]:
        """The given keys below a table: the rest of the path, and the value."""
        for key, value in self.theirs.values.items():
            if key.startswith(f"{path}."):
                yield key[len(path) + 1 :], value

    def numbers(self, path: str) -> list[int]:
        """The places of an array of tables."""
        return sorted({int(rest.split(".")[0]) for rest, _ in self.under(path) if rest.split(".")[0].isdigit()})
