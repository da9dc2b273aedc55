"""The bucket plan: which bytes of the model travel in which message, from which sender.

The wire format is the Hugging Face checkpoint's names and layouts. The plan is computed once from a table of names,
shapes and dtypes and is equal on all ranks; bucket i is sent by sender i mod senders, so no single rank carries all.
Behind its tensors every bucket carries a trailer: the policy version and a checksum of its bytes.

It refuses to know about groups, threads and engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import torch
import xxhash

ALIGN_BYTES = 64  # tensors start on cache lines, and every dtype can be viewed in place
TRAILER_BYTES = 16  # int64 version, int64 checksum
EVERYONE = -1  # a bucket for all ranks of a replica

# splitmix64's constants, as the signed 64-bit numbers that torch computes with
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)

_WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WeightsError(RuntimeError):
    """Weights that arrived are not the weights that were sent, or not all of them."""


@dataclass(frozen=True)
class Piece:
    """One tensor inside a bucket."""

    name: str  # Hugging Face name
    shape: tuple[int, ...]
    dtype: str
    offset: int  # bytes from the start of the bucket
    nbytes: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor itself, as a view of the bucket's bytes."""
        flat = buffer[self.offset : self.offset + self.nbytes]
        return flat.view(_WIRE_DTYPES[self.dtype]).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """One message."""

    index: int
    sender: int
    pieces: tuple[Piece, ...]
    nbytes: int  # without the trailer
    taker: int = EVERYONE  # which rank of every replica it is for

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Zeroed room for the tensors, the padding between them and the trailer."""
        return torch.zeros(self.nbytes + TRAILER_BYTES, dtype=torch.uint8, device=device)

    def seal(self, buffer: torch.Tensor, version: int) -> None:
        """Write the trailer; the tensors are complete."""
        trailer = torch.tensor([version, checksum(buffer[: self.nbytes])], dtype=torch.int64)
        buffer[self.nbytes :].view(torch.int64).copy_(trailer)

    def verify(self, buffer: torch.Tensor, version: int) -> None:
        """WeightsError when the bucket is of another version or its bytes changed on the way."""
        stamped, expected = buffer[self.nbytes :].view(torch.int64).tolist()
        names = f"bucket {self.index} ({self.pieces[0].name} ... {self.pieces[-1].name})"
        if stamped != version:
            raise WeightsError(f"{names} carries policy version {stamped}, expected {version}")
        if checksum(buffer[: self.nbytes]) != expected:
            raise WeightsError(f"{names} of policy version {version} arrived damaged: its checksum differs")


@dataclass(frozen=True)
class Plan:
    """All buckets, in the order in which they are sent."""

    buckets: tuple[Bucket, ...]

    @classmethod
    def build(
        cls,
        table: list[tuple[str, tuple[int, ...], str]],
        bucket_bytes: int,
        senders: int,
        takers: Mapping[str, int] | None = None,
    ) -> Plan:
        """Cut the model into buckets of about `bucket_bytes`.

        Args:
            table: (name, shape, dtype) of every tensor, in checkpoint order.
            bucket_bytes: a bucket is closed before it grows past this; a larger tensor is a bucket of its own.
            senders: trainer ranks that send in turn.
            takers: of tensors that one rank of a replica takes alone: which one.
        """
        names = [name for name, _, _ in table]
        if len(set(names)) != len(names):
            raise WeightsError(f"tensor names repeat: {sorted({n for n in names if names.count(n) > 1})[:5]}")
        buckets: list[Bucket] = []
        pieces: dict[int, list[Piece]] = {}  # of the bucket that is being filled, by taker
        used: dict[int, int] = {}

        def close(taker: int) -> None:
            filled, nbytes = pieces.pop(taker, []), used.pop(taker, 0)
            if filled:
                buckets.append(Bucket(len(buckets), len(buckets) % senders, tuple(filled), nbytes, taker))

        for name, shape, dtype in table:
            if dtype not in _WIRE_DTYPES:
                raise WeightsError(f"tensor {name!r} has dtype {dtype!r}; these travel: {', '.join(_WIRE_DTYPES)}")
            nbytes, taker = torch.Size(shape).numel() * _WIRE_DTYPES[dtype].itemsize, (takers or {}).get(name, EVERYONE)
            if used.get(taker, 0) + nbytes > bucket_bytes:
                close(taker)
            offset = used.get(taker, 0)
            pieces.setdefault(taker, []).append(Piece(name, tuple(shape), dtype, offset, nbytes))
            used[taker] = offset + -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        for taker in sorted(pieces):
            close(taker)
        return cls(tuple(buckets))

    def of_taker(self, taker: int) -> Plan:
        """What one rank of a replica takes."""
        return Plan(tuple(bucket for bucket in self.buckets if bucket.taker in (EVERYONE, taker)))

    @property
    def names(self) -> list[str]:
        """Every tensor, in order."""
        return [piece.name for bucket in self.buckets for piece in bucket.pieces]

    @property
    def nbytes(self) -> int:
        """Bytes of one pull, trailers included."""
        return sum(bucket.nbytes + TRAILER_BYTES for bucket in self.buckets)

    def encode(self) -> bytes:
        """For ranks that do not hold the trainer's model."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Plan:
        """The inverse of `encode`."""
        return msgspec.msgpack.decode(data, type=cls)

    @property
    def digest(self) -> str:
        """Equal exactly when two plans are."""
        return hashlib.sha256(self.encode()).hexdigest()[:16]


def views(buckets: Iterable[Bucket], buffers: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of those buckets that have a buffer, by name; buffers are by the bucket's index."""
    return {p.name: p.view(buffers[b.index]) for b in buckets if b.index in buffers for p in b.pieces}


def expert_taker(expert: int, experts: int, ranks: int) -> int:
    """The rank of a replica that holds an expert: in order, as evenly as can be, the first ranks one more (vLLM's)."""
    each, more = divmod(experts, ranks)
    first = more * (each + 1)  # experts of the ranks that hold one more
    return expert // (each + 1) if expert < first else more + (expert - first) // each


def checksum(buffer: torch.Tensor) -> int:
    """A number below 2^63 in size over the bytes of `buffer` (uint8, length a multiple of 8) in their order."""
    if buffer.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(memoryview(buffer.numpy())) >> 1
    return device_checksum(buffer)


def device_checksum(buffer: torch.Tensor, chunk_words: int = 1 << 22) -> int:
    """The checksum for device memory: the sum of all words, each mixed with its position, as a signed 64-bit number.

    Each word is one state of splitmix64 (Steele, Lea, Flood 2014), `word + position * gamma`, and goes through its
    finalizer. That is a bijection for a given position, so every change inside one word is visible. (A plain weighted
    sum is linear: it does not see two tensors swapped that hold the same words in another order.)
    """
    words = buffer.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for start in range(0, words.numel(), chunk_words):
        part = words[start : start + chunk_words]
        position = torch.arange(start, start + part.numel(), dtype=torch.int64, device=buffer.device)
        mixed = part + position * _GAMMA
        mixed = _shift_xor(mixed, 30) * _FACTORS[0]
        mixed = _shift_xor(mixed, 27) * _FACTORS[1]
        total += _shift_xor(mixed, 31).sum()
    return int(total)


def _shift_xor(words: torch.Tensor, bits: int) -> torch.Tensor:
    """`words ^ (words >> bits)` as for unsigned words; torch's shift of int64 brings the sign in."""
    return words ^ ((words >> bits) & ((1 << (64 - bits)) - 1))
