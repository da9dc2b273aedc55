"""What the journal holds: rank 0's decisions and what happened, one record each, in the order in which it was so.

A record says what, never when or where: no time, no host, no process, so that two equal runs write equal journals.
Requests and answers are there as counts and checksums, finished rollouts and whatever a decision needs in full: from a
checkpoint and the records behind it a run can be taken up again (`book.py`).
"""

from __future__ import annotations

from typing import Any, Literal, Protocol
from zlib import crc32

import msgspec
import numpy as np

from spmd_rl.observe.names import is_time

Fate = Literal["finished", "invalid", "equal", "gated", "discarded", "stale"]


class Record(msgspec.Struct, tag=True, frozen=True):
    """Base of all records; the class name is the tag in the file."""


class Began(Record, frozen=True):
    """The run begins, or goes on from a checkpoint of `step` (-1: from nothing)."""

    run: dict[str, Any]  # what a resumed run must have in common with it
    layout: list[int]  # trainer ranks, replicas of the policy, frozen replicas
    step: int = -1


class Asked(Record, frozen=True):
    """A request went to a replica."""

    id: int
    replica: int
    rollout: int
    tokens: int
    checksum: int


class Answered(Record, frozen=True):
    """Its answer came."""

    id: int
    tokens: int
    checksum: int  # of ids, logprobs and versions
    stop_reason: str


class Admitted(Record, frozen=True):
    """A group was opened under a policy version."""

    group: int
    version: int
    source: int
    index: int  # of the task


class Rolled(Record, frozen=True):
    """A rollout of an open group ended."""

    group: int
    sample: int
    episode: dict[str, Any]  # rollouts.plain


class Closed(Record, frozen=True):
    """All rollouts of a group ended, or it was given up."""

    group: int
    fate: Fate


class Took(Record, frozen=True):
    """A batch was taken for an optimizer step."""

    step: int
    groups: list[int]


class Stepped(Record, frozen=True):
    """An optimizer step is complete; what it reported, times aside."""

    step: int
    phase: str
    metrics: dict[str, float]


class Released(Record, frozen=True):
    """The weights of a step serve everywhere: the slots of its groups are free."""

    groups: list[int]
    version: int


class RolledBack(Record, frozen=True):
    """Step `step` took the weights back to a checkpoint instead of training."""

    step: int
    folder: str


class Evaluated(Record, frozen=True):
    """An evaluation, times aside."""

    step: int
    metrics: dict[str, float]


class Checkpointed(Record, frozen=True):
    """A checkpoint was ordered after this step."""

    step: int


class Steered(Record, frozen=True):
    """Somebody told the run something; it holds from this step on."""

    step: int
    command: str


AnyRecord = (
    Began
    | Asked
    | Answered
    | Admitted
    | Rolled
    | Closed
    | Took
    | Stepped
    | Released
    | RolledBack
    | Evaluated
    | Checkpointed
    | Steered
)


class Log(Protocol):
    """Where records go."""

    def append(self, record: Record) -> None:
        """Add one."""

    def sync(self) -> None:
        """Return when all are on the disk."""


class NoLog:
    """A journal that nobody keeps: of tests, and while a run is put back to where it was."""

    position = (0, 0)

    def append(self, record: Record) -> None:
        """Forget it."""

    def sync(self) -> None:
        """Nothing to do."""


def checksum(*columns: np.ndarray) -> int:
    """Of the bytes of some arrays."""
    value = 0
    for column in columns:
        value = crc32(np.ascontiguousarray(column), value)
    return value


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that are equal in two equal runs."""
    return {name: value for name, value in metrics.items() if not is_time(name)}
