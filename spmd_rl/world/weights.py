"""Weight sync: new policy versions travel from trainer ranks to inference ranks, bucket by bucket.

`Sender` lives on every trainer rank: the main thread copies tensors into the buckets this rank sends and goes on with
its next forward; one thread, the only owner of this rank's `weights/i` group, broadcasts them. `Receiver` lives
on every inference rank: one thread, the only owner of all `weights/*` groups there, receives into staging buffers
while the engine steps; the engine's thread then swaps the complete version in.

Invariants: a version is handed over complete and checked (order of versions, version stamp, checksum of each
bucket) or not at all; every tensor of the plan is written exactly once per version; senders and receivers walk the
buckets in one order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from spmd_rl.world.buckets import Bucket, Plan, WeightsError

Span = Callable[[str], AbstractContextManager[None]]

CLOSED = -1  # behind the last bucket of a version


def no_span(name: str) -> AbstractContextManager[None]:
    """Nobody keeps a timeline."""
    return nullcontext()


class Sender:
    """A trainer rank's end.

    Args:
        plan: equal on all trainer ranks.
        index: which sender this rank is.
        group: `weights/{index}`; this rank is its member 0.
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
    ) -> None:
        self.plan = plan
        self._group, self._device, self._fail, self._span = group, device, fail, span
        self._mine = [bucket for bucket in plan.buckets if bucket.sender == index]
        self._buffers = {bucket.index: bucket.allocate(device) for bucket in self._mine}
        self._home = {piece.name: (bucket, piece) for bucket in plan.buckets for piece in bucket.pieces}
        self._queue: queue.SimpleQueue[tuple[Bucket | None, int] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def send(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], deadline_s: float) -> None:
        """Copy every tensor of `version` out of the model; sending goes on beside the caller.

        All trainer ranks call it with the same iterable, whose gathers are collective; each keeps only its buckets.
        WeightsError when a name is unknown, comes twice, has another shape, or is missing.
        """
        self.wait(deadline_s)
        self._idle.clear()
        self._queue.put((None, version))  # every sender opens the version, also one that has no bucket to send
        missing = dict(self._home)
        left = {bucket.index: len(bucket.pieces) for bucket in self._mine}
        for name, tensor in tensors:
            if name not in missing:
                raise WeightsError(f"tensor {name!r} is not in the plan, or was given twice")
            bucket, piece = missing.pop(name)
            if tuple(tensor.shape) != piece.shape:
                raise WeightsError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the plan says {piece.shape}")
            if bucket.index not in left:
                continue
            piece.view(self._buffers[bucket.index]).copy_(tensor)
            left[bucket.index] -= 1
            if left[bucket.index] == 0:
                self._queue.put((bucket, version))
        if missing:
            raise WeightsError(f"{len(missing)} tensors were not given for version {version}: {sorted(missing)[:5]}")
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
                        dist.broadcast(buffer, group_src=0, group=self._group)
        except BaseException as error:
            self._fail(error)


class Receiver:
    """An inference rank's end.

    Args:
        groups: `weights/0`, `weights/1`, ... of all senders; member 0 of each is the sender.
        arrived: called on the receiving thread with each version that is complete and checked.
        fail: called on the receiving thread with the error that ended it.
        span: makes the context in which a version is received.
    """

    def __init__(
        self,
        groups: list[dist.ProcessGroup],
        device: torch.device,
        arrived: Callable[[int], None],
        fail: Callable[[BaseException], None],
        span: Span = no_span,
    ) -> None:
        self._span = span
        self._groups, self._device, self._arrived, self._fail = groups, device, arrived, fail
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._planned, self._complete = threading.Event(), threading.Event()
        self._plan: Plan | None = None
        self._staging: list[torch.Tensor] = []
        self._version = -1
        self.receive_s = 0.0
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def plan(self, deadline_s: float) -> Plan:
        """The plan, as soon as the senders have said it."""
        if not self._planned.wait(deadline_s):
            raise WeightsError(f"no bucket plan from the trainer ranks within {deadline_s:g} s")
        return self._plan

    def begin(self, version: int) -> None:
        """Start receiving `version` beside the caller."""
        self._complete.clear()
        self._queue.put(version)

    def wait(self, deadline_s: float) -> None:
        """Block until the version that was begun is complete and checked."""
        if not self._complete.wait(deadline_s):
            raise WeightsError(f"policy version did not arrive within {deadline_s:g} s")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The complete version, each tensor exactly once, as views of the staging buffers."""
        for bucket, buffer in zip(self._plan.buckets, self._staging, strict=True):
            for piece in bucket.pieces:
                yield piece.name, piece.view(buffer)

    def close(self, deadline_s: float) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join(deadline_s)

    def _run(self) -> None:
        try:
            _use(self._device)
            plans = [_receive_bytes(group, self._device) for group in self._groups]
            if len(set(plans)) != 1:
                raise WeightsError("the trainer ranks disagree about the bucket plan")
            self._plan = Plan.decode(plans[0])
            self._staging = [bucket.allocate(self._device) for bucket in self._plan.buckets]
            self._planned.set()
            while (version := self._queue.get()) is not None:
                self._receive(version)
                self._complete.set()
                self._arrived(version)
        except BaseException as error:
            self._fail(error)

    def _receive(self, version: int) -> None:
        if version <= self._version:
            raise WeightsError(f"asked for policy version {version} after {self._version}: versions only grow")
        for group in self._groups:
            if (opened := _receive_number(group, self._device)) != version:
                raise WeightsError(f"a trainer rank sends policy version {opened}, this rank expects {version}")
        started = time.perf_counter()  # waiting for the trainer to begin is not receiving
        with self._span("pull"):
            for bucket, buffer in zip(self._plan.buckets, self._staging, strict=True):
                dist.broadcast(buffer, group_src=0, group=self._groups[bucket.sender])
                bucket.verify(buffer, version)
        self._version = version
        self.receive_s = time.perf_counter() - started


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
