"""Ticks: the exchange between rank 0 and the leaders on the `ctl` group.

One tick is a star of point-to-point messages, started by rank 0: decisions go down to every leader, events come up.
It starts at once when there are decisions, else after the period. One thread per process owns `ctl` and does nothing
else; gloo releases the GIL, so engines and trainers never wait for a tick: they work on what the last one brought.

A peer that does not answer makes the wait fail, and the error names it.

`Conductor` and `Leader` are the two ends. In lockstep a tick also carries `Tick`, how many engine steps belong to it,
and a leader answers when they are done; `Metronome` is rank 0's end then. It has no thread and no period: who calls
`exchange` decides when the next tick is.

All three say when a tick that carried something began and ended (`record`, for the timeline); idle ones are many, and
of no interest.

It refuses to know what other decisions, and what events mean.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from spmd_rl.world.messages import Decision, Event, Stop, Tick
from spmd_rl.world.pipe import Loopback, pipe_from, pipes_to
from spmd_rl.world.wire import decode, encode

MIN_GAP = 0.25  # of the period: shorter gaps between ticks cost engine throughput
QUIET_S, QUIET_FACTOR = 1.0, 2.5  # after so long without a word ticks come more slowly, to save rank 0's CPU


Record = Callable[[int, int], object]  # start and end of a tick, in time.monotonic_ns


def nobody(start_ns: int, end_ns: int) -> None:
    """Nobody keeps a timeline."""


class Conductor(threading.Thread):
    """Rank 0's end: starts every tick.

    Args:
        group: `ctl`; this rank is its member 0.
        names: who each other member of the group is, in group order.
        period_s: longest time between two ticks.
        deliver: called on this thread with (member, event) for everything that comes up.
        fail: called on this thread with the error that ended the clock.
        record: told of every tick that carried something.
        own: to the first member, where that is this rank itself.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        names: list[str],
        period_s: float,
        deliver: Callable[[int, Any], None],
        fail: Callable[[BaseException], None],
        record: Record = nobody,
        own: Loopback | None = None,
    ) -> None:
        super().__init__(name="clock", daemon=True)
        self._pipes = pipes_to(group, names, own)
        self._period_s, self._deliver, self._fail, self._record = period_s, deliver, fail, record
        self._pending: list[list[Decision]] = [[] for _ in names]
        self._changed = threading.Condition()
        self._stopping = False
        self._word_at = time.monotonic()  # when somebody last said something
        self.ticks = 0

    def decide(self, member: int, decision: Decision) -> None:
        """Queue a decision for one leader (0 = the first after rank 0); it leaves with the next tick."""
        with self._changed:
            self._pending[member].append(decision)
            self._changed.notify()

    def stop(self) -> None:
        """Tell every leader to stop; the tick that carries this is the last."""
        with self._changed:
            self._stopping = True
            for pending in self._pending:
                pending.append(Stop())
            self._changed.notify()

    def run(self) -> None:
        try:
            while self._tick():
                pass
        except BaseException as error:
            self._fail(error)

    def _tick(self) -> bool:
        quiet = time.monotonic() - self._word_at > QUIET_S
        with self._changed:
            if not any(self._pending):
                self._changed.wait(self._period_s * (QUIET_FACTOR if quiet else 1.0))
            down, self._pending = self._pending, [[] for _ in self._pipes]
            last = self._stopping
        started, started_ns, carried = time.monotonic(), time.monotonic_ns(), any(down)
        sends = [pipe.send_start(encode(decisions)) for pipe, decisions in zip(self._pipes, down, strict=True)]
        receives = [pipe.receive_start() for pipe in self._pipes]
        for member, (pipe, send, receive) in enumerate(zip(self._pipes, sends, receives, strict=True)):
            pipe.wait(send)
            for event in decode(pipe.receive_finish(receive), list[Event]):
                self._deliver(member, event)
                carried = True
        if carried:
            self._word_at = time.monotonic()
            self._record(started_ns, time.monotonic_ns())
        self.ticks += 1
        time.sleep(max(0.0, MIN_GAP * self._period_s - (time.monotonic() - started)))
        return not last


class Metronome:
    """Rank 0's end in lockstep; called by one thread at a time.

    Args:
        group, names, record, own: as `Conductor`'s.
    """

    def __init__(
        self, group: dist.ProcessGroup, names: list[str], record: Record = nobody, own: Loopback | None = None
    ) -> None:
        self._record = record
        self._pipes = pipes_to(group, names, own)

    def exchange(self, down: dict[int, list[Decision]]) -> list[tuple[int, Event]]:
        """Send to the members that `down` names (0 = the first after rank 0), and wait for what each of them answers.

        The answers come in order of members, whoever was first.
        """
        started_ns = time.monotonic_ns()
        sends = {member: self._pipes[member].send_start(encode(decisions)) for member, decisions in down.items()}
        receives = {member: self._pipes[member].receive_start() for member in down}
        events: list[tuple[int, Event]] = []
        for member in sorted(down):
            self._pipes[member].wait(sends[member])
            answer = decode(self._pipes[member].receive_finish(receives[member]), list[Event])
            events += [(member, event) for event in answer]
        if events or any(down.values()):
            self._record(started_ns, time.monotonic_ns())
        return events


class Leader(threading.Thread):
    """A leader's end: answers ticks until one brings `Stop`.

    `inbox` holds what came down, in order; `tell` queues an event for the next answer. The answer to a `Tick` waits
    until the main thread calls `ticked`. `record` is told of every tick that carried something, from the arrival of its
    decisions on. `own`: to rank 0, where that is this rank itself.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        fail: Callable[[BaseException], None],
        record: Record = nobody,
        own: Loopback | None = None,
    ) -> None:
        super().__init__(name="clock", daemon=True)
        self._pipe = pipe_from(group, own)
        self._fail, self._record = fail, record
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._ticked = threading.Semaphore(0)
        self.inbox: queue.SimpleQueue[Decision] = queue.SimpleQueue()

    def tell(self, event: Event) -> None:
        """Queue an event; it leaves with the answer to the next tick."""
        self._events.put(event)

    def ticked(self) -> None:
        """The steps of a `Tick` are done, and all they gave was told."""
        self._ticked.release()

    def run(self) -> None:
        try:
            while self._answer():
                pass
        except BaseException as error:
            self._fail(error)

    def _answer(self) -> bool:
        decisions = decode(self._pipe.receive(), list[Decision])
        started_ns = time.monotonic_ns()
        for decision in decisions:
            self.inbox.put(decision)
        if decisions and isinstance(decisions[-1], Tick):
            self._ticked.acquire()
        events: list[Event] = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        self._pipe.send(encode(events))
        if decisions or events:
            self._record(started_ns, time.monotonic_ns())
        return not any(isinstance(decision, Stop) for decision in decisions)
