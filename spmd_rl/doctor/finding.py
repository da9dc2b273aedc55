"""What a check is, and what it says: a finding is a status, a value and a way out.

It refuses to know what is checked. Invariants: a finding that is not ok says what to do; a check that raises becomes a
finding and stops no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Status = Literal["ok", "warn", "FAIL"]
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """What one look saw. `to_do` may be empty only where all is well; there it is a hint."""

    status: Status
    value: str
    to_do: str = ""

    def __post_init__(self) -> None:
        if self.status != "ok" and not self.to_do:
            raise ValueError(f"{self.status} {self.value!r} does not say what to do")


def ok(value: str, hint: str = "") -> Finding:
    """All is well."""
    return Finding("ok", value, hint)


def warn(value: str, to_do: str) -> Finding:
    """It will work, but worse than it could, or not always."""
    return Finding("warn", value, to_do)


def fail(value: str, to_do: str) -> Finding:
    """A run will not start, or will break."""
    return Finding("FAIL", value, to_do)


@dataclass(frozen=True)
class Check(Generic[T]):
    """One entry of a list of checks: where it stands in the report, and the function that looks."""

    group: str
    what: str
    look: Callable[[T], Finding]


@dataclass(frozen=True)
class Line:
    """One line of a report; `hosts` names where it was found, nothing where there is one host only."""

    group: str
    what: str
    finding: Finding
    hosts: tuple[str, ...] = ()


def run_checks(checks: Iterable[Check[T]], place: T) -> list[Line]:
    """One line per check, in their order."""
    return [Line(check.group, check.what, _look(check, place)) for check in checks]


def _look(check: Check[T], place: T) -> Finding:
    try:
        return check.look(place)
    except Exception as error:
        return fail(
            f"could not be checked: {type(error).__name__}: {error}",
            "look at the other lines first: they may say why; else report this line as a bug of the doctor",
        )
