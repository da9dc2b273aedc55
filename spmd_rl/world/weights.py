"""Weight sync: new policy versions travel from trainer ranks to inference ranks, bucket by bucket.

`Sender` lives on every trainer rank: the main thread writes the buckets this rank sends and goes on with its next
forward; one thread, the only owner of this rank's `weights/i` and `experts/i/*` groups, broadcasts them. `Receiver`
lives on every inference rank: one thread, the only owner of all these groups there, receives into staging buffers while
the engine steps; the engine's thread then swaps the version in.

Where staging buffers hold the whole model, a version is complete and checked before its swap begins. Where they hold
two buckets, it arrives with its first bucket, and the others stream through while the engine stands still.

Invariants: no tensor is handed over before its bucket is checked (order of versions, version stamp, checksum); every
tensor of the plan is handed over exactly once per version, or the iteration raises; a buffer is not written to while
somebody may still read it; senders and receivers walk the buckets in one order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.distributed as dist

from spmd_rl.world.buckets import EVERYONE, TRAILER_BYTES, Bucket, Plan, WeightsError, views

Span = Callable[[str], AbstractContextManager[None]]
# Fills tensors in place, given by name, and says each name as soon as it is complete.
Write = Callable[[Mapping[str, torch.Tensor]], Iterable[str]]

CLOSED = -1  # behind the last bucket of a version
STREAM_BUFFERS = 2  # one is loaded into the engine while the other is received


def no_span(name: str) -> AbstractContextManager[None]:
    """Nobody keeps a timeline."""
    return nullcontext()


class Sender:
    """A trainer rank's end.

    Args:
        plan: equal on all trainer ranks.
        index: which sender this rank is.
        group: `weights/{index}`; this rank is its member 0.
        experts: `experts/{index}/k` by rank k of a replica, where its ranks hold experts of their own.
        fail: called on the sending thread with the error that ended it.
        span: makes the context in which a bucket is sent.
    """

    def __init__(
        self,
        plan: Plan,
        index: int,
        group: dist.ProcessGroup,
        device: torch.device,
        fail: Callable[[BaseException], None],
        span: Span = no_span,
        experts: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.plan = plan
        self._group, self._device, self._fail, self._span = group, device, fail, span
        self._groups = {EVERYONE: group, **dict(enumerate(experts))}
        self._mine = [bucket for bucket in plan.buckets if bucket.sender == index]
        self._buffers = {bucket.index: bucket.allocate(device) for bucket in self._mine}
        self._views = views(self._mine, self._buffers)
        self._queue: queue.SimpleQueue[tuple[Bucket | None, int] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def send(self, version: int, write: Write, deadline_s: float) -> None:
        """Let every tensor that this rank sends be written; sending goes on beside the caller.

        All trainer ranks call it, for writing may be collective. WeightsError when `write` does not name each of them
        once.
        """
        self.wait(deadline_s)
        self._idle.clear()
        self._queue.put((None, version))  # every sender opens the version, also one that has no bucket to send
        missing = {piece.name: bucket for bucket in self._mine for piece in bucket.pieces}
        left = {bucket.index: len(bucket.pieces) for bucket in self._mine}
        for name in write(self._views):
            bucket = missing.pop(name, None)
            if bucket is None:
                raise WeightsError(f"tensor {name!r} is not one that this rank sends, or was written twice")
            left[bucket.index] -= 1
            if left[bucket.index] == 0:
                self._queue.put((bucket, version))
        if missing:
            raise WeightsError(f"{len(missing)} tensors were not written for version {version}: {sorted(missing)[:5]}")
        self._queue.put((None, CLOSED))

    def wait(self, deadline_s: float) -> None:
        """Until the last version has left the buffers."""
        if not self._idle.wait(deadline_s):
            raise WeightsError(f"the last policy version was not taken by the inference ranks within {deadline_s:g} s")

    def close(self, deadline_s: float) -> None:
        """Finish sending and end the thread."""
        self.wait(deadline_s)
        self._queue.put(None)
        self._thread.join(deadline_s)

    def _run(self) -> None:
        try:
            _use(self._device)
            _broadcast_bytes(self.plan.encode(), self._group, self._device)
            while (item := self._queue.get()) is not None:
                bucket, version = item
                if version == CLOSED:
                    self._idle.set()
                elif bucket is None:
                    _broadcast_number(version, self._group, self._device)
                else:
                    buffer = self._buffers[bucket.index]
                    with self._span("send a bucket"):
                        bucket.seal(buffer, version)
                        dist.broadcast(buffer, group_src=0, group=self._groups[bucket.taker])
        except BaseException as error:
            self._fail(error)


class Receiver:
    """An inference rank's end.

    Args:
        groups: `weights/0`, `weights/1`, ... of all senders; member 0 of each is the sender.
        experts: `experts/0/k`, `experts/1/k`, ... where ranks of a replica hold experts of their own.
        taker: k, this rank's place in its replica.
        arrived: called on the receiving thread with each version that can be swapped in.
        fail: called on the receiving thread with the error that ended it.
        span: makes the context in which a version is received.
        staging: what the staging buffers hold: the whole model, or two buckets of it.
    """

    def __init__(
        self,
        groups: list[dist.ProcessGroup],
        device: torch.device,
        arrived: Callable[[int], None],
        fail: Callable[[BaseException], None],
        span: Span = no_span,
        staging: Literal["whole", "buckets"] = "whole",
        experts: Sequence[dist.ProcessGroup] = (),
        taker: int = EVERYONE,
    ) -> None:
        self._experts, self._taker = experts, taker
        self._span, self._streams = span, staging == "buckets"
        self._groups, self._device, self._arrived, self._fail = groups, device, arrived, fail
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._planned, self._ready, self._swapping = threading.Event(), threading.Event(), threading.Event()
        self._plan: Plan | None = None
        # Buffers go round: free, received into, checked, handed over, free. Both queues keep the order of buckets.
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._checked: queue.SimpleQueue[torch.Tensor | BaseException] = queue.SimpleQueue()
        self._version = -1
        self.receive_s = 0.0
        self.staging_bytes = 0
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def plan(self, deadline_s: float) -> Plan:
        """This rank's part of the plan, as soon as the senders have said it."""
        if not self._planned.wait(deadline_s):
            raise WeightsError(f"no bucket plan from the trainer ranks within {deadline_s:g} s")
        return self._plan

    def begin(self, version: int) -> None:
        """Start receiving `version` beside the caller."""
        self._ready.clear()
        self._swapping.clear()
        self._queue.put(version)

    def wait(self, deadline_s: float) -> None:
        """Block until the version that was begun can be swapped in."""
        if not self._ready.wait(deadline_s):
            raise WeightsError(f"policy version did not arrive within {deadline_s:g} s")

    def tensors(self, deadline_s: float) -> Iterator[tuple[str, torch.Tensor]]:
        """The version that arrived, each tensor exactly once, in the order of the plan.

        Views of the staging buffers where these hold the whole model; they stay as they are until the next `begin`.
        Else clones: vLLM keeps tensors until their layer is complete, some to the end, and buffers are used again.

        WeightsError when a bucket does not come within `deadline_s`, or not as it was sent. Where versions stream,
        tensors may have been handed over before: the caller's model is then of no version.
        """
        self._swapping.set()
        for bucket in self._plan.buckets:
            buffer = self._next_checked(bucket, deadline_s)
            for piece in bucket.pieces:
                tensor = piece.view(buffer)
                yield piece.name, tensor.clone() if self._streams else tensor
            if self._streams and self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # clones are made when the stream gets there
            self._free.put(buffer)

    def close(self, deadline_s: float) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join(deadline_s)

    def _next_checked(self, bucket: Bucket, deadline_s: float) -> torch.Tensor:
        try:
            buffer = self._checked.get(timeout=deadline_s)
        except queue.Empty:
            raise WeightsError(
                f"bucket {bucket.index} of policy version {self._version} did not arrive within {deadline_s:g} s"
            ) from None
        if isinstance(buffer, BaseException):
            raise WeightsError(f"bucket {bucket.index} of policy version {self._version}: {buffer}") from buffer
        return buffer

    def _run(self) -> None:
        try:
            _use(self._device)
            plans = [_receive_bytes(group, self._device) for group in self._groups]
            if len(set(plans)) != 1:
                raise WeightsError("the trainer ranks disagree about the bucket plan")
            self._plan = Plan.decode(plans[0]).of_taker(self._taker)
            buffers = self._allocate(self._plan.buckets)
            for buffer in buffers:
                self._free.put(buffer)
            self.staging_bytes = sum(buffer.numel() for buffer in buffers)
            self._planned.set()
            while (version := self._queue.get()) is not None:
                self._receive(version, room=len(buffers))
        except BaseException as error:
            self._checked.put(error)  # the engine's thread may be waiting in the middle of a swap
            self._fail(error)

    def _allocate(self, buckets: tuple[Bucket, ...]) -> list[torch.Tensor]:
        if not self._streams:
            return [bucket.allocate(self._device) for bucket in buckets]
        largest = max(buckets, key=lambda bucket: bucket.nbytes)
        return [largest.allocate(self._device) for _ in buckets[:STREAM_BUFFERS]]

    def _receive(self, version: int, room: int) -> None:
        if version <= self._version:
            raise WeightsError(f"asked for policy version {version} after {self._version}: versions only grow")
        for group in self._groups:
            if (opened := _receive_number(group, self._device)) != version:
                raise WeightsError(f"a trainer rank sends policy version {opened}, this rank expects {version}")
        buckets = self._plan.buckets
        self._version, self.receive_s = version, 0.0  # waiting for the trainer to begin is not receiving
        with self._span("pull"):
            for bucket in buckets[:room]:
                self._receive_bucket(bucket, version)
                if bucket is buckets[0 if self._streams else -1]:
                    self._ready.set()
                    self._arrived(version)
        if len(buckets) > room:
            self._swapping.wait()
            with self._span("pull"):
                for bucket in buckets[room:]:
                    self._receive_bucket(bucket, version)

    def _receive_bucket(self, bucket: Bucket, version: int) -> None:
        whole = self._free.get()  # the swap's own deadline is what ends this
        started = time.perf_counter()
        buffer = whole[: bucket.nbytes + TRAILER_BYTES]
        groups = self._groups if bucket.taker == EVERYONE else self._experts
        dist.broadcast(buffer, group_src=0, group=groups[bucket.sender])
        bucket.verify(buffer, version)
        self.receive_s += time.perf_counter() - started
        self._checked.put(whole)


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a new thread begins on device 0, whatever the main thread chose


def _broadcast_number(number: int, group: dist.ProcessGroup, device: torch.device) -> None:
    dist.broadcast(torch.tensor([number], dtype=torch.int64, device=device), group_src=0, group=group)


def _receive_number(group: dist.ProcessGroup, device: torch.device) -> int:
    number = torch.zeros(1, dtype=torch.int64, device=device)
    dist.broadcast(number, group_src=0, group=group)
    return int(number)


def _broadcast_bytes(data: bytes, group: dist.ProcessGroup, device: torch.device) -> None:
    _broadcast_number(len(data), group, device)
    dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), group_src=0, group=group)


def _receive_bytes(group: dist.ProcessGroup, device: torch.device) -> bytes:
    data = torch.empty(_receive_number(group, device), dtype=torch.uint8, device=device)
    dist.broadcast(data, group_src=0, group=group)
    return data.cpu().numpy().tobytes()
