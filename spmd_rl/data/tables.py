"""Rows of a dataset: JSON Lines, Parquet, or a dataset on the Hub, all as a `Table` of plain dicts.

A table is read lazily and never changed; row i is the same in every process. It refuses to know what columns mean.
Invariant: a row holds plain JSON values (numbers, strings, booleans, None, lists, dicts), and every error names the
file, and the line where there is one.
"""

from __future__ import annotations

import base64
import glob
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

BLOCK = 2**24  # bytes of a file that are searched for line ends at a time
WHITE = np.frombuffer(b" \t\r\n", np.uint8)
CONVERTED = "refs/convert/parquet"  # the Hub's own conversion of every public dataset: one format to read


class DataError(ValueError):
    """The data can't be used as they are; the message says what to change."""


class Table(Protocol):
    """Rows by number."""

    name: str
    columns: tuple[str, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str:
        """The place of a row, for error messages."""
        ...


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


def open_beside(other: str, name: str, split: str = "train") -> Table:
    """What a run evaluates on beside `name`: a dataset, or, where `name` is on the Hub, another split of it.

    Raises DataError, also for the same rows again, and for a split of files, which have none.
    """
    local = _is_path(name) or Path(name).exists()
    if Path(other).resolve() == Path(name).resolve() or (not local and other == split):
        raise DataError(f"{other!r} would be trained on and evaluated on: name other rows, or none, to keep a share")
    if _is_path(other) or "/" in other or (local and Path(other).exists()):
        return open_table(other)
    if local:
        raise DataError(
            f"{other!r} is no dataset, and files have no splits: beside {name!r} name a *.jsonl file, *.parquet files "
            "or a Hub dataset id, or none, to keep a share of the rows"
        )
    return open_table(name, other)


def _is_path(name: str) -> bool:
    return name.endswith((".jsonl", ".json", ".parquet"))


class JsonLines:
    """One JSON object per line; lines are found once and parsed when they are asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self._bytes = np.memmap(name, dtype=np.uint8, mode="r")
        except FileNotFoundError:
            raise DataError(f"dataset {name!r} does not exist (looked in {Path(name).absolute().parent})") from None
        except (ValueError, OSError) as error:  # an empty file can't be mapped
            empty = Path(name).is_file() and not Path(name).stat().st_size
            raise DataError(f"dataset {name!r} {'is empty' if empty else f'can not be read: {error}'}") from None
        self._starts, self._ends, self._numbers = _lines(self._bytes)
        if not len(self._starts):
            raise DataError(f"dataset {name!r} is empty: it has no line with an object")
        self.columns = tuple(self[0])

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            row = json.loads(self._bytes[self._starts[index] : self._ends[index]].tobytes())
        except ValueError as error:
            raise DataError(f"{self.where(index)}: not valid JSON: {error} (every line is one object)") from None
        if not isinstance(row, dict):
            raise DataError(f"{self.where(index)}: a {type(row).__name__}, where every line must be an object")
        return row

    def where(self, index: int) -> str:
        """The file and the line."""
        return f"{self.name}, line {self._numbers[index]}"


def _lines(data: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first byte, end, line number from 1) of the lines that are not blank, int64[n] each; data: uint8[bytes]."""
    blocks = range(0, len(data), BLOCK)  # a mask over the whole file would take as much memory as the file
    found = [at + np.flatnonzero(data[at : at + BLOCK] == ord("\n")) for at in blocks]
    ends = np.concatenate([*found, [len(data)]]).astype(np.int64)
    starts = np.append(0, ends[:-1] + 1)
    filled = starts < ends
    for line in np.flatnonzero(filled)[np.isin(data[starts[filled]], WHITE)]:
        filled[line] = bool(data[starts[line] : ends[line]].tobytes().strip())
    return starts[filled], ends[filled], np.flatnonzero(filled) + 1


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
        row: dict[str, Any] = _plain(self._table.slice(index % len(self), 1).to_pylist()[0])
        return row

    def where(self, index: int) -> str:
        """The dataset and the row, from 0."""
        return f"{self.name}, row {index}"


def _plain(value: Any) -> Any:
    """The value as JSON has it: bytes in base64, dates and decimals as text."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


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
