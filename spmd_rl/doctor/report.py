"""The report: lines for people, a table for machines, and the exit code.

It refuses to judge. Invariant: the exit code is 1 exactly when a line says FAIL; every host's warnings and failures are
in both forms.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from spmd_rl.doctor.finding import Line

MAX_HOSTS = 4  # named in one line


@dataclass
class Report:
    """What was found, in the order of its groups."""

    lines: list[Line] = field(default_factory=list)
    tables: dict[str, str] = field(default_factory=dict)  # title → text, for people
    figures: dict[str, Any] = field(default_factory=dict)  # for machines: JSON values

    @property
    def exit_code(self) -> int:
        """0 when nothing failed."""
        return int(any(line.finding.status == "FAIL" for line in self.lines))

    def render(self) -> str:
        """For people: groups of lines, tables, and the sum of it."""
        parts = []
        for group in dict.fromkeys(line.group for line in self.lines):
            mine = [line for line in merged(self.lines) if line.group == group]
            width = max(len(line.what) for line in mine)
            parts.append("\n".join([group, *(_row(line, width) for line in mine)]))
        parts += [f"{title}\n{text}" for title, text in self.tables.items()]
        return "\n\n".join([*parts, self.summary()])

    def summary(self) -> str:
        """One line."""
        count = {status: [line for line in self.lines if line.finding.status == status] for status in ("warn", "FAIL")}
        what = ", ".join(dict.fromkeys(line.what for line in count["FAIL"]))
        warnings = f"{len(count['warn'])} warning{'s' * (len(count['warn']) != 1)}"
        return f"not fit: {what} ({warnings})" if count["FAIL"] else f"fit ({warnings})"

    def write(self, path: str | Path) -> None:
        """As JSON. OSError when that can't be done."""
        table = {"fit": not self.exit_code, "lines": [_flat(line) for line in self.lines], **self.figures}
        Path(path).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def merged(lines: Iterable[Line]) -> list[Line]:
    """What is alike on several hosts becomes one line; where all is well, so does what differs only in its value."""
    lines = list(lines)
    everywhere = {host for line in lines for host in line.hosts}
    places: dict[tuple[str, str], dict[tuple[str, ...], list[Line]]] = {}
    for line in lines:
        finding = line.finding
        alike = ("ok",) if finding.status == "ok" else (finding.status, finding.value, finding.to_do)
        places.setdefault((line.group, line.what), {}).setdefault(alike, []).append(line)
    return [_one(same, everywhere) for alternatives in places.values() for same in alternatives.values()]


def _one(same: Sequence[Line], everywhere: set[str]) -> Line:
    hosts = tuple(dict.fromkeys(host for line in same for host in line.hosts))
    finding = same[0].finding
    if len({line.finding.value for line in same}) > 1:
        where = f" on {hosts[0]}, otherwise elsewhere" if hosts else f", and {len(same) - 1} more"
        finding = replace(finding, value=finding.value + where)
    return Line(same[0].group, same[0].what, finding, () if set(hosts) == everywhere else hosts)


def _row(line: Line, width: int) -> str:
    finding = line.finding
    where = f"[{_named(line.hosts)}] " if line.hosts else ""
    to_do = f"  → {finding.to_do}" if finding.to_do else ""
    return f"  {finding.status:<4}  {line.what:<{width}}  {where}{finding.value}{to_do}"


def _named(hosts: Sequence[str]) -> str:
    more = len(hosts) - MAX_HOSTS
    return ", ".join(hosts[:MAX_HOSTS]) + (f" and {more} more" if more > 0 else "")


def _flat(line: Line) -> dict[str, Any]:
    return {"group": line.group, "what": line.what, "hosts": list(line.hosts), **asdict(line.finding)}
