"""Bytes on the wire: msgpack with raw numpy buffers.

`encode` and `decode` turn the typed messages of `messages.py` (and plain dicts and lists) into bytes and back. An array
travels as one msgpack extension: a short header (dtype, shape) and its raw buffer, so that nothing is pickled and
no element becomes a Python object. Decoded arrays are read-only views into the received bytes.

It refuses to know who sends what to whom, and imports no torch.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

ARRAY_CODE = 1


def _pack(value: Any) -> Any:
    """What msgspec does not know: numpy's scalars become plain numbers, its arrays an extension."""
    if isinstance(value, np.generic) and isinstance(number := value.item(), bool | int | float | str):
        return number
    if not isinstance(value, np.ndarray):
        raise TypeError(
            f"cannot send a {type(value).__name__}: messages hold numbers, text, lists, dicts and numpy arrays"
        )
    if value.dtype.hasobject:
        raise TypeError("cannot send an array of Python objects")
    if value.dtype.kind == "V":  # its short name on the wire would not bring the fields back
        raise TypeError(f"cannot send an array of {value.dtype}: send a dict of plain arrays, one per field")
    descr = value.dtype.str.encode()
    header = struct.pack(f"<BB{value.ndim}q", len(descr), value.ndim, *value.shape)
    return msgspec.msgpack.Ext(ARRAY_CODE, header + descr + np.ascontiguousarray(value).tobytes())


def _unpack_array(code: int, data: memoryview) -> np.ndarray:
    if code != ARRAY_CODE:
        raise ValueError(f"unknown msgpack extension {code}")
    descr_length, ndim = struct.unpack_from("<BB", data, 0)
    shape = struct.unpack_from(f"<{ndim}q", data, 2)
    start = 2 + 8 * ndim
    dtype = np.dtype(bytes(data[start : start + descr_length]).decode())
    return np.frombuffer(data.toreadonly(), dtype=dtype, offset=start + descr_length).reshape(shape)


def encode(message: Any) -> bytes:
    """Any message as bytes. TypeError for what cannot travel, OverflowError for integers beyond 64 bits."""
    return msgspec.msgpack.encode(message, enc_hook=_pack)


def decode(data: bytes | bytearray | memoryview, type: Any = Any) -> Any:
    """The message back, checked against `type` (a Struct, a union of tagged Structs, a list of them)."""
    return _decoder(type).decode(data)


@lru_cache(maxsize=64)
def _decoder(type: Any) -> msgspec.msgpack.Decoder[Any]:
    """Made once per type: msgspec takes longer to look through a union of messages than to read one."""
    return msgspec.msgpack.Decoder(type, ext_hook=_unpack_array)
