"""Rank 0's asyncio side of the world: requests that can be awaited, orders, and events by kind.

The threads that own `ctl` and `data` are handed in; what they deliver is brought onto the event loop here. Tests hand
in fakes, so the whole orchestrator runs without torch, engines and trainers.

Invariant: every request is answered exactly once, or its future ends with the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from spmd_rl.orchestrator.records import Answered, Asked, Log, NoLog, checksum
from spmd_rl.world.messages import Cancel, Decision, EngineLoad, Event, Generate, Generated, Order, Refused, Stop


class RefusedError(RuntimeError):
    """The engine did not take a request."""


class Decides(Protocol):
    """The clock: decisions to the leaders (member 0 is the trainer's, where there is one)."""

    def decide(self, member: int, decision: Decision) -> None: ...

    def stop(self) -> None: ...


class Gives(Protocol):
    """Orders to the trainer ranks."""

    def give(self, orders: list[Order]) -> None: ...


class Link:
    """Everything rank 0 says and hears.

    Args:
        replicas: how many engine leaders of the policy there are (the members of the clock behind the trainer's).
        trainers: how many trainer ranks there are; 0 where a model is only asked.
        frozen: how many leaders of a teacher's engines there are (replicas from number `replicas` on).
        colocated: the ranks that train are those of the policy's replicas, so the first leader speaks for both.
        cp: so many trainer ranks in a row share their rows.
    """

    def __init__(self, replicas: int, trainers: int, frozen: int = 0, colocated: bool = False, cp: int = 1) -> None:
        self.replicas, self.trainers, self.frozen, self.colocated = replicas, trainers, frozen, colocated
        self.cp, self.data_ranks = cp, trainers // cp
        self.loads: dict[int, EngineLoad] = {}  # newest counters by rank
        self.tokens = 0  # generated so far, as reported with finished requests
        self.heard = 0  # events so far that mean progress
        self.log: Log = NoLog()  # of requests and answers
        self.next_id = 0
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Generated]] = {}
        self._listeners: dict[type, Callable[[Any], None]] = {}
        self._clock: Decides | None = None
        self._orders: Gives | None = None

    def connect(self, clock: Decides, orders: Gives | None) -> None:
        """Attach the threads; they deliver through `deliver`."""
        self._clock, self._orders = clock, orders

    def listen(self, kind: type, listener: Callable[[Any], None]) -> None:
        """Call `listener` on the event loop for every event of `kind`."""
        self._listeners[kind] = listener

    def deliver(self, member: int, event: Event) -> None:
        """Bring an event onto the event loop; callable from any thread."""
        self._loop.call_soon_threadsafe(self._handle, event)

    def new_id(self) -> int:
        """An id that no request has had."""
        self.next_id += 1
        return self.next_id - 1

    async def generate(self, replica: int, *, id: int | None = None, rollout: int = -1, **request: Any) -> Generated:
        """Ask a replica for a generation (fields of `Generate`; `id` from `new_id`). RefusedError when it refuses.

        Cancelling the caller cancels the request.
        """
        id = self.new_id() if id is None else id
        future: asyncio.Future[Generated] = self._loop.create_future()
        self._waiting[id] = future
        generate = Generate(id=id, **request)
        if generate.begun is None:  # else it was asked in an earlier life of the run
            self.log.append(Asked(id, replica, rollout, len(generate.tokens), checksum(generate.tokens)))
        self.decide(replica, generate)
        try:
            return await future
        except asyncio.CancelledError:
            self.decide(replica, Cancel(id))
            raise
        finally:
            self._waiting.pop(id, None)

    def decide(self, replica: int, decision: Decision) -> None:
        """One decision to one replica, with the next tick."""
        self._clock.decide((0 if self.colocated else min(1, self.trainers)) + replica, decision)

    def decide_all(self, decision: Decision) -> None:
        """One decision to every replica of the policy."""
        for replica in range(self.replicas):
            self.decide(replica, decision)

    def order(self, orders: list[Order]) -> None:
        """One order per trainer rank."""
        self._orders.give(orders)

    def order_all(self, order: Order) -> None:
        """The same order to every trainer rank."""
        self.order([order] * self.trainers)

    def stop(self) -> None:
        """The last thing that is said."""
        if self.trainers:
            self.order_all(Stop())
        self._clock.stop()

    def state(self) -> dict[str, Any]:
        """Counters, for a snapshot."""
        return {"next_id": self.next_id, "tokens": self.tokens}

    def restore(self, state: dict[str, Any]) -> None:
        """Count on from a snapshot."""
        self.next_id, self.tokens = state["next_id"], state["tokens"]

    @property
    def waiting(self) -> int:
        """Requests that engines have not answered yet."""
        return len(self._waiting)

    def _handle(self, event: Event) -> None:
        self.heard += not isinstance(event, EngineLoad)
        match event:
            case Generated():
                self.tokens += len(event.tokens)
                sums = checksum(event.tokens, event.logprobs, event.versions)
                self.log.append(Answered(event.id, len(event.tokens), sums, event.stop_reason))
                future = self._waiting.get(event.id)
                if future is not None and not future.done():
                    future.set_result(event)
            case Refused():
                future = self._waiting.get(event.id)
                if future is not None and not future.done():
                    future.set_exception(RefusedError(event.why))
            case EngineLoad():
                self.loads[event.rank] = event
            case _:
                self._listeners[type(event)](event)
