"""The lines of readable rollouts (`samples.py`) as the compact episodes that the viewer's page holds.

Columns of numbers become runs or short integers: a page of thousands of episodes stays a file that a browser opens at
once. Lines of older runs have text and no columns; their prompt and completion count as one token each.

It refuses to know about pages. Invariants: what is made of a line is plain JSON without NaN; a line that is not what
`write_samples` writes is a ViewError with the file and the number of the line.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEEDED = (
    *("sample", "source", "task", "reward", "status", "seconds", "prompt", "completion"),
    *("prompt_tokens", "sampled_tokens", "version_min", "version_max", "advantage"),
)
LOGPROB_UNIT = 1e-4  # logprobs are whole multiples of it, with the sign turned


class ViewError(ValueError):
    """Something that can't be shown, and the way out."""


@dataclass(frozen=True)
class Shown:
    """One episode as the page holds it."""

    facts: dict[str, Any]  # what lists and filters need: one short value each
    body: bytes  # one line of JSON: what is read when the episode is opened
    advantage: float  # the largest one of a token, without the sign


def read_file(path: Path, kind: str, step: int) -> Iterator[Shown]:
    """The episodes of one file. kind: "train" or "eval". A last line that is still being written is left out.

    Raises ViewError at a broken line.
    """
    rows: list[dict[str, Any]] = []
    number = 0
    for row in _rows(path):
        if row["sample"] == 0 and rows:
            yield _episode(rows, kind, step, number)
            rows, number = [], number + 1
        rows.append(row)
    if rows:
        yield _episode(rows, kind, step, number)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Lines as objects, with their columns checked and made compact."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                # parse_constant: older lines say NaN, which is no JSON
                row = json.loads(line, parse_constant=lambda _: None)
                if missing := [name for name in NEEDED if name not in row]:
                    raise ValueError(f"no {missing[0]!r}")
                row["shown"] = _sample(row)
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                if not line.endswith(b"\n") and isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
                    return
                raise ViewError(
                    f"{path}, line {number} is broken ({type(error).__name__}: {error}): "
                    "take the line out, or choose other steps with --steps"
                ) from error
            yield row


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of one line; those of sampled tokens alone have an entry per sampled token."""
    if "pieces" not in row:
        return _sample_without_columns(row)
    pieces, mask = row["pieces"], row["mask"]
    for name in ("mask", "logprobs", "versions"):
        if len(row[name]) != len(pieces):
            raise ValueError(f"{name} has {len(row[name])} entries for {len(pieces)} pieces")
    advantages = row["advantages"]
    if isinstance(advantages, list):
        advantages = _pairs(list(itertools.compress(advantages, mask)))
    return {
        "agent": row["agent"],
        "reward": row["sample_reward"],
        "text": "".join(pieces),
        "lengths": [_utf16_units(piece) for piece in pieces],
        "mask": _runs(mask),
        "logprobs": [
            None if x is None else -round(x / LOGPROB_UNIT) for x in itertools.compress(row["logprobs"], mask)
        ],
        "versions": _pairs(list(itertools.compress(row["versions"], mask))),
        "advantages": advantages,
        "temperature": row["temperature"],
    }


def _sample_without_columns(row: dict[str, Any]) -> dict[str, Any]:
    texts = [row["prompt"], row["completion"]]
    versions = [row["version_min"], 1] if row["version_min"] == row["version_max"] else [None, 1]
    return {
        "agent": "",
        "reward": None,
        "text": "".join(texts),
        "lengths": [_utf16_units(text) for text in texts],
        "mask": [1, 1],
        "logprobs": [None],
        "versions": versions,
        "advantages": row["advantage"],
        "temperature": None,
        "whole": row["sampled_tokens"],  # tokens behind the completion's single piece
    }


def _episode(rows: list[dict[str, Any]], kind: str, step: int, number: int) -> Shown:
    first, samples = rows[0], [row["shown"] for row in rows]
    body = {
        "data": first.get("data"),
        "parts": first.get("reward_parts", {}),
        "error": first.get("reward_error", ""),
        "samples": samples,
    }
    advantages = [row["advantage"] for row in rows if row["advantage"] is not None]
    versions = [v for s in samples for v in s["versions"][::2] if v is not None and v >= 0]  # -1: a frozen teacher's
    weights = [w for s in samples for w in _values(s["advantages"]) if w is not None]
    facts = {
        "kind": kind,
        "step": step,
        "number": number,
        "source": str(first["source"]),
        "task": first["task"],
        "reward": first["reward"] if isinstance(first["reward"], int | float) else None,
        "status": str(first["status"]),
        "seconds": first["seconds"],
        "sampled": sum(row["sampled_tokens"] for row in rows),
        "given": sum(_given(row) for row in rows),
        "turns": sum(len(s["mask"]) // 2 for s in samples),
        "advantage": sum(advantages) / len(advantages) if advantages else None,
        "oldest": min(versions, default=None),
        "newest": max(versions, default=None),
    }
    return Shown(facts, embeddable(body), max(map(abs, weights), default=0.0))


def embeddable(value: Any) -> bytes:
    """One line of JSON that may stand inside a script element: no `<` ends it, lone surrogates are escapes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "backslashreplace")


def _runs(mask: Iterable[int]) -> list[int]:
    """Lengths of the runs of 0, 1, 0, 1, …; the first one may be 0."""
    runs, expected = [], False
    for value, run in itertools.groupby(map(bool, mask)):
        if value != expected:
            runs.append(0)
        runs.append(sum(1 for _ in run))
        expected = not value
    return runs


def _pairs(column: Sequence[Any]) -> list[Any]:
    """[value, how often, value, how often, …]."""
    return [x for value, run in itertools.groupby(column) for x in (value, sum(1 for _ in run))]


def _given(row: dict[str, Any]) -> int:
    return len(row["pieces"]) - row["sampled_tokens"] if "pieces" in row else row["prompt_tokens"]


def _values(advantages: Any) -> list[Any]:
    return advantages[::2] if isinstance(advantages, list) else [advantages]


def _utf16_units(text: str) -> int:
    """The length as the browser counts."""
    return len(text) if text.isascii() else len(text) + sum(c > "\uffff" for c in text)
