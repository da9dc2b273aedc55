"""Rows of a dataset: JSON Lines, Parquet, or a dataset on the Hub, all as a `Table` of plain dicts.

A table is read lazily and never changed; row i is the same in every process. It refuses to know what columns mean.
Invariant: a row holds plain JSON values (numbers, strings, booleans, None, lists, dicts), and every error names the
file, and the line where there is one.
"""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

CONVERTED = "refs/convert/parquet"  # the Hub's own conversion of every public dataset: one format to read


class DataError(ValueError):
    """The data can't be used as they are; the message says what to change."""


class Table(Protocol):
    """Rows by number."""

    name: str
    columns: tuple[str, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


def open_table(name: str, split: str = "train") -> Table:
    """A `*.jsonl` file, `*.parquet` file(s) (a folder or a glob pattern), or a Hub dataset (`owner/name[:config]`).

    `split` is the Hub dataset's; files are one split. Raises DataError for what is missing, empty or not readable.
    """
    if not name:
        raise DataError("no dataset is named: give a *.jsonl file, *.parquet files, or a Hub dataset id")
    if name.endswith((".jsonl", ".json")):
        return JsonLines(name)
    if name.endswith(".parquet") or Path(name).is_dir():
        return Parquet(name, _parquet_files(name))
    if "/" in name and not Path(name).exists():
        return Parquet(name, _from_hub(name, split))
    raise DataError(f"dataset {name!r} is neither *.jsonl, *.parquet, a folder of these, nor a Hub id (owner/name)")


class JsonLines:
    """One JSON object per line; lines are found once and parsed when they are asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self._bytes = np.memmap(name, dtype=np.uint8, mode="r")
        except FileNotFoundError:
            raise DataError(f"dataset {name!r} does not exist (looked in {Path(name).absolute().parent})") from None
        except (ValueError, OSError) as error:  # an empty file can't be mapped
            raise DataError(f"dataset {name!r} can't be read: {error}") from None
        ends = np.append(np.flatnonzero(self._bytes == ord("\n")), len(self._bytes))
        starts = np.append(0, ends[:-1] + 1)
        self._lines = [
            (line + 1, int(start), int(end))
            for line, (start, end) in enumerate(zip(starts, ends, strict=True))
            if self._bytes[start:end].tobytes().strip()
        ]
        if not self._lines:
            raise DataError(f"dataset {name!r} is empty: it has no line with an object")
        self.columns = tuple(self[0])

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        line, start, end = self._lines[index]
        try:
            row = json.loads(self._bytes[start:end].tobytes())
        except ValueError as error:
            raise DataError(f"{self.name}, line {line}: not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{self.name}, line {line}: a {type(row).__name__}, where every line must be an object")
        return row


class Parquet:
    """Some Parquet files as one table, memory-mapped."""

    def __init__(self, name: str, files: list[str]) -> None:
        import pyarrow
        import pyarrow.parquet

        self.name = name
        try:
            tables = [pyarrow.parquet.read_table(file, memory_map=True) for file in files]
            self._table = pyarrow.concat_tables(tables)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"dataset {name!r} can't be read as Parquet: {error}") from None
        if not len(self._table):
            raise DataError(f"dataset {name!r} is empty: its {len(files)} file(s) hold no row")
        self.columns = tuple(self._table.column_names)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row: dict[str, Any] = self._table.slice(index % len(self), 1).to_pylist()[0]
        return row


def _parquet_files(name: str) -> list[str]:
    pattern = f"{glob.escape(name)}/**/*.parquet" if Path(name).is_dir() else name
    files = sorted(glob.glob(pattern, recursive=True))
    if not files:
        raise DataError(f"dataset {name!r}: no Parquet file there (looked for {Path(pattern).absolute()})")
    return files


def _from_hub(name: str, split: str) -> list[str]:
    """Files of one split of the Hub's Parquet conversion, downloaded or out of the local cache."""
    from huggingface_hub import snapshot_download

    repository, _, config = name.partition(":")
    pattern = f"{config or '*'}/{split}/*.parquet"
    try:
        folder = snapshot_download(repository, repo_type="dataset", revision=CONVERTED, allow_patterns=[pattern])
    except Exception as error:  # the Hub's client raises a dozen kinds: offline, no such dataset, no access
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"dataset {name!r} is no file here, and the Hub gives none: {reason}. Name a file that exists, or a public "
            "dataset (owner/name, owner/name:config)"
        ) from error
    files = sorted(map(str, Path(folder).glob(pattern)))
    configs = {Path(file).parent.parent.name for file in files}
    if not files:
        raise DataError(f"dataset {name!r} has no split {split!r} in the Hub's Parquet conversion")
    if len(configs) > 1:
        raise DataError(f"dataset {name!r} has several configs: name one of {name}:{{{', '.join(sorted(configs))}}}")
    return files
