"""Messages of any size between two ranks of a gloo group.

A message is one frame of fixed size that says how long the message is; what does not fit follows in a second one, so
that most messages cost one latency. A peer that does not answer makes the wait fail, and the error names it.

A pipe belongs to the one thread that owns its group.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

FRAME_BYTES = 4096
_HEAD_BYTES = 8


class PeerError(RuntimeError):
    """A peer did not take part in an exchange."""


class Pipe:
    """Both directions between this rank and one peer, with reused frame buffers."""

    def __init__(self, group: dist.ProcessGroup, peer: int, name: str) -> None:
        self.group, self.peer, self.name = group, peer, name
        self._in = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        self._out = torch.zeros(FRAME_BYTES, dtype=torch.uint8)

    def send_start(self, payload: bytes) -> list[dist.Work]:
        """Start sending; the caller waits for the returned works before the next send."""
        room = FRAME_BYTES - _HEAD_BYTES
        frame = self._out.numpy()
        frame[:_HEAD_BYTES].view(np.int64)[0] = len(payload)
        head = payload[:room]
        frame[_HEAD_BYTES : _HEAD_BYTES + len(head)] = np.frombuffer(head, dtype=np.uint8)
        works = [self._isend(self._out)]
        if len(payload) > room:
            works.append(self._isend(torch.frombuffer(bytearray(payload[room:]), dtype=torch.uint8)))
        return works

    def send(self, payload: bytes) -> None:
        """Send and wait."""
        self.wait(self.send_start(payload))

    def receive(self) -> bytes:
        """Wait for the next message."""
        return self.receive_finish(self.receive_start())

    def receive_start(self) -> dist.Work:
        """Post the receive of the next frame."""
        with self._named():
            return dist.irecv(self._in, group=self.group, group_src=self.peer)

    def receive_finish(self, work: dist.Work) -> bytes:
        """Wait for the frame and what follows it."""
        with self._named():
            work.wait()
            frame = self._in.numpy()
            size = int(frame[:_HEAD_BYTES].view(np.int64)[0])
            head = frame[_HEAD_BYTES : _HEAD_BYTES + size].tobytes()
            if size == len(head):
                return head
            rest = torch.empty(size - len(head), dtype=torch.uint8)
            dist.irecv(rest, group=self.group, group_src=self.peer).wait()
            return head + rest.numpy().tobytes()

    def wait(self, works: Iterable[dist.Work]) -> None:
        """Wait until sends are done."""
        with self._named():
            for work in works:
                work.wait()

    def _isend(self, tensor: torch.Tensor) -> dist.Work:
        with self._named():
            return dist.isend(tensor, group=self.group, group_dst=self.peer)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerError(f"exchange with {self.name} failed: {error}") from error


class Loopback:
    """One end of a pipe between two threads of this rank, which orchestrates beside its other role."""

    def __init__(self, inbox: queue.SimpleQueue[bytes], outbox: queue.SimpleQueue[bytes], timeout_s: float) -> None:
        self._inbox, self._outbox, self._timeout_s = inbox, outbox, timeout_s

    @classmethod
    def both_ends(cls, timeout_s: float) -> tuple[Loopback, Loopback]:
        """(the orchestrator's, the other role's)."""
        down: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        up: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        return cls(up, down, timeout_s), cls(down, up, timeout_s)

    def send_start(self, payload: bytes) -> list[dist.Work]:
        """Never waits."""
        self._outbox.put(payload)
        return []

    def send(self, payload: bytes) -> None:
        """The same."""
        self._outbox.put(payload)

    def receive(self) -> bytes:
        """Wait for the next message."""
        return self.receive_finish(None)

    def receive_start(self) -> None:
        """Nothing to prepare."""

    def receive_finish(self, work: None) -> bytes:
        """Wait for the next message. PeerError when none comes."""
        try:
            return self._inbox.get(timeout=self._timeout_s)
        except queue.Empty:
            raise PeerError(f"the other thread of this rank said nothing for {self._timeout_s:g} s") from None

    def wait(self, works: Iterable[dist.Work]) -> None:
        """Nothing to wait for."""


AnyPipe = Pipe | Loopback


def pipes_to(group: dist.ProcessGroup, names: Sequence[str], own: Loopback | None = None) -> list[AnyPipe]:
    """From rank 0, the group's member 0, to everybody in `names`; where it is the first of them itself, by `own`."""
    if own is None:
        return [Pipe(group, member + 1, name) for member, name in enumerate(names)]
    return [own, *(Pipe(group, member + 1, name) for member, name in enumerate(names[1:]))]


def pipe_from(group: dist.ProcessGroup, own: Loopback | None = None) -> AnyPipe:
    """To rank 0, the group's member 0; on rank 0 itself, `own`."""
    return own or Pipe(group, 0, "rank 0 (orchestrator)")
