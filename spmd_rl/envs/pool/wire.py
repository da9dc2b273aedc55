"""Messages as frames on a socket, and what can travel in them.

A frame is a length (u32, little endian) and one msgpack message with raw numpy buffers (`world/wire.py`). It refuses
to know what messages mean. Invariants: what one side sends arrives whole, in order, or the connection is lost; what
`plain` lets through arrives as what it was, but for tuples, which become lists.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from spmd_rl.envs.pool.messages import Message
from spmd_rl.world.wire import decode, encode

MAX_FRAME_BYTES = 2**30
MAX_TEXT = 4000  # characters of an error's message, or of its traceback
_LENGTH = struct.Struct("<I")


def frame(message: Message) -> bytes:
    """The bytes of one message. TypeError, OverflowError or ValueError for what can't travel."""
    data = encode(message)
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(data)} bytes is longer than {MAX_FRAME_BYTES}: send less at once")
    return _LENGTH.pack(len(data)) + data


class Frames(asyncio.Protocol):
    """One end of the connection. `heard` gets every message, `lost` is called once with the reason, "" for its end."""

    def __init__(self, type: Any, heard: Callable[[Any], None], lost: Callable[[str], None]) -> None:
        self._type, self._heard, self._lost = type, heard, lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def send(self, data: bytes) -> None:
        """Send a frame; into the void when the connection is lost."""
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """Hear and send nothing more."""
        self._heard = self._lost = _nobody
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            messages = list(self._whole())
        except (ValueError, TypeError) as error:  # user code wrote into the socket
            lost = self._lost
            self.close()
            lost(f"what came is no message: {error}")
            return
        for message in messages:
            self._heard(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        ended = exc is None or isinstance(exc, ConnectionError)  # also: with something that it had not read yet
        self._lost("" if ended else f"the connection broke: {exc}")

    def _whole(self) -> Iterator[Any]:
        """The messages that have come in full; they leave the buffer."""
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = start + _LENGTH.size + length
            if end > len(self._buffer):
                break
            yield decode(self._buffer[start + _LENGTH.size : end], self._type)
            start = end
        del self._buffer[:start]


def _nobody(_: Any) -> None:
    """Whom a closed connection tells."""


def plain(value: Any, where: str) -> Any:
    """`value`, if it arrives as what it is: numbers, text, bytes, None, lists, dicts and arrays (tuples become lists).

    TypeError names the first thing that would not, and its place.
    """
    if isinstance(value, Mapping):
        return {_key(key, where): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str | bytes | np.ndarray | np.bool_ | np.number):
        return value
    raise TypeError(
        f"{where} is a {type(value).__name__}, which can't leave a worker process: return numbers, text, lists, dicts "
        "or numpy arrays"
    )


def _key(key: Any, where: str) -> str | int:
    if isinstance(key, str | int):
        return key
    raise TypeError(f"{where} has the key {key!r}: keys of what leaves a worker process are text or whole numbers")


def sendable(text: str) -> str:
    """The text, with escapes for what has no UTF-8 (lone surrogates), and not all of it where it is very long."""
    cut = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT} more characters)"
    return cut.encode("utf-8", "backslashreplace").decode()


def pickled(value: Any, what: str) -> bytes:
    """For a worker process. TypeError, which says `what` it is, for what can't be pickled."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickling user's objects raises anything
        raise TypeError(
            f"{what} can't be sent to a worker process: {error}; define it at the top of a module, or name it as "
            "file.py:function"
        ) from error
