"""The journal: an append-only file of checksummed records.

    header (once)  magic, 8 bytes
    record         length u32 | number u32 | checksum of these two u32 | checksum of the payload u32 | payload

A record is msgpack of one message (`wire.py`). A program that dies while it writes leaves a torn tail: a record that
runs past the end of the file, or zeros where a file system had only made room. That is no damage; the tail is cut off.
A last record that is as long as it says, with a payload that does not check out, may be room that a machine had made
and not filled before it died, or a flipped byte; nobody can tell. It is cut off too, and a copy is kept (`torn`).
Anything else that does not check out is a flipped byte or a foreign file, and an error: what stands behind it
can't be believed.

It refuses to know what records mean. Invariants: `read` gives exactly what `append` took, in order, up to the torn
tail; what was appended before a `sync` survives the machine, what was appended at all survives the process.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from zlib import crc32

from spmd_rl.world.wire import decode, encode

MAGIC = b"spmdrl\x01\n"
_HEAD = struct.Struct("<IIII")
_CHECKED = struct.Struct("<II")


class JournalError(ValueError):
    """The file is damaged, or no journal."""


class Journal:
    """A journal open for appending.

    Args:
        path: made if absent; an existing one is continued behind its last whole record.
        keep: bytes of an existing file that stay; what follows is cut off. None: all of it but a torn tail.
        known: an earlier `position`, before which nothing needs to be read again.
        writing: makes the context of every write, given the folder; it may say better what an OSError means.

    `torn` names the copy of a last record that was cut off though it was all there; None: there was none.
    """

    def __init__(
        self,
        path: str | Path,
        keep: int | None = None,
        known: tuple[int, int] = (0, 0),
        writing: Callable[[Path], AbstractContextManager[None]] = lambda folder: nullcontext(),
    ) -> None:
        self.path, self._writing = Path(path), writing
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.offset, self._number = (0, 0) if not self.path.exists() else _end(self.path, keep, known)
        self.torn = self._copy_torn() if keep is None and self.path.exists() else None
        # Unbuffered: a record is the kernel's when `append` returns, so killing the process loses none.
        self._file = open(self.path, "r+b" if self.path.exists() else "w+b", buffering=0)  # noqa: SIM115
        self._file.truncate(self.offset)
        self._file.seek(self.offset)
        if self.offset == 0:
            self._write(MAGIC)

    @property
    def position(self) -> tuple[int, int]:
        """(offset, number) of the next record."""
        return self.offset, self._number

    def append(self, record: Any) -> None:
        """Add one message."""
        payload = encode(record)
        numbers = _CHECKED.pack(len(payload), self._number)
        self._write(numbers + struct.pack("<II", crc32(numbers), crc32(payload)) + payload)
        self._number += 1

    def sync(self) -> None:
        """Return when everything appended so far is on the disk."""
        with self._writing(self.path.parent):
            os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        self._file.close()

    def _copy_torn(self) -> Path | None:
        with open(self.path, "rb") as file:
            file.seek(max(self.offset, len(MAGIC)))
            tail = file.read()
        if len(tail) < _HEAD.size or len(tail) != _HEAD.size + _HEAD.unpack(tail[: _HEAD.size])[0]:
            return None
        copy = self.path.with_suffix(".torn")
        with self._writing(self.path.parent):
            copy.write_bytes(tail)
        return copy

    def _write(self, data: bytes) -> None:
        self.offset += len(data)
        view = memoryview(data)
        with self._writing(self.path.parent):
            while view:  # a nearly full disk may take a part
                view = view[self._file.write(view) :]


def read(path: str | Path, type: Any = Any, start: int = 0) -> Iterator[tuple[int, Any]]:
    """(offset behind the record, message checked against `type`) from byte `start` (of a record, or 0) on.

    JournalError for damage; a torn tail ends the records.
    """
    for end, payload in _payloads(Path(path), start):
        try:
            yield end, decode(payload, type)
        except (ValueError, TypeError) as error:
            raise JournalError(f"{path}: the record that ends at byte {end} is not understood: {error}") from error


def _end(path: Path, keep: int | None, known: tuple[int, int]) -> tuple[int, int]:
    """(offset, number) at which an existing journal goes on."""
    if path.stat().st_size < known[0]:
        raise JournalError(
            f"{path} ends before byte {known[0]}, where its checkpoint was taken: restore it from a copy"
        )
    offset, number = known
    for end, _ in _payloads(path, offset):
        if keep is not None and end > keep:
            break
        offset, number = end, number + 1
    if keep is not None and number and offset != keep and keep != len(MAGIC):
        raise JournalError(f"{path}: byte {keep} is not the end of a record; is this the journal of that checkpoint?")
    return (offset, number) if number else (0, 0)


def _payloads(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        magic = file.read(len(MAGIC))
        if magic != MAGIC[: len(magic)]:
            raise JournalError(f"{path} is no journal (of this version): it begins with {magic!r}")
        at = file.seek(max(start, len(MAGIC)))
        expected: int | None = 0 if at == len(MAGIC) else None  # a read from the middle learns where it is
        while size - at >= _HEAD.size:
            head = file.read(_HEAD.size)
            length, number, head_sum, payload_sum = _HEAD.unpack(head)
            if crc32(head[: _CHECKED.size]) != head_sum:
                if _is_zero(head) and _is_zero(file.read()):
                    return
                raise _damaged(path, at)
            if at + _HEAD.size + length > size:
                return
            payload = file.read(length)
            end = at + _HEAD.size + length
            if crc32(payload) != payload_sum:
                if end == size:  # the last record: perhaps its room was made and not filled
                    return
                raise _damaged(path, at)
            if expected is not None and number != expected:
                raise JournalError(f"{path}: record {number} at byte {at} stands where record {expected} belongs")
            expected, at = number + 1, end
            yield end, payload


def _is_zero(data: bytes) -> bool:
    return not any(data)


def _damaged(path: Path, at: int) -> JournalError:
    return JournalError(
        f"{path} is damaged at byte {at}: a checksum does not match, and records follow. Restore the file from a copy; "
        f"or cut it there (truncate -s {at} {path}) and go on from a checkpoint that is older than that byte"
    )
