"""Lockstep: everything happens at a tick that is counted, nothing at a time that is measured.

    settle → decisions go down with the tick → engines take its steps → what they gave comes up → the next tick

Before a tick leaves, every rollout has come as far as it can without an engine (`gate.py`). An optimizer step takes
`clock.train_ticks`, however long the trainer really needs; its result, its weights and all that follows from it arrive
at that tick, and whoever is early waits. So what rank 0 hears, and in which order, is a function of what it decided.

It stands where the free clock stands (`Decides`, `Gives` of `link.py`) and refuses to know what decisions are for.
Invariants: no decision depends on time; events of one tick are delivered in order of members.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from spmd_rl.config.tree import ClockConfig
from spmd_rl.orchestrator.gate import OrderedGate
from spmd_rl.orchestrator.link import Gives
from spmd_rl.world.messages import (
    Decision,
    Event,
    Export,
    Exported,
    Fence,
    Fenced,
    Generate,
    Order,
    Partial,
    Pull,
    Ready,
    Save,
    Saved,
    Send,
    Sent,
    Stop,
    Tick,
    Train,
    Trained,
)

TRAINER = 0  # the member whose events come from the trainer ranks
POLL_S = 0.002  # how often the trainer is asked while everybody waits for it
START_S = 0.02  # and everybody, while ranks are still being built

FROM_TRAINER = (Trained, Sent, Saved, Exported)
Named = tuple[type, object]  # kind of event, and which one


class Exchanges(Protocol):
    """The other end of the ticks (`world.clock.Metronome`)."""

    def exchange(self, down: dict[int, list[Decision]]) -> list[tuple[int, Event]]: ...


class Lockstep:
    """Rank 0's clock in lockstep.

    Args:
        exchanges: sends a tick and returns what came up; called on one thread.
        orders: to the trainer ranks.
        deliver: takes (member, event) on the event loop.
        members: how many leaders there are, the trainer's included.
        colocated: the first leader speaks for the trainer and for an engine, and orders belong to ticks.
    """

    def __init__(
        self,
        config: ClockConfig,
        gate: OrderedGate,
        exchanges: Exchanges,
        orders: Gives,
        deliver: Callable[[int, Event], None],
        members: int,
        colocated: bool = False,
    ) -> None:
        self.tick = 0
        self._config, self._gate, self._exchanges, self._orders = config, gate, exchanges, orders
        self._deliver, self._colocated = deliver, colocated
        self._engines = range(0 if colocated else 1, members)
        self._everybody = range(members)
        self._given = 0  # orders
        self._pending: defaultdict[int, list[Decision]] = defaultdict(list)
        self._due: list[tuple[int, Named]] = []  # what the trainer will say, and at which tick it counts
        self._early: dict[Named, Event] = {}
        self._free_at = 0  # when the trainer has done all it was ordered
        self._sent_at = 0  # when the last version has left the trainer: behind its swap, where engines stage no more
        self._fence: asyncio.Future[list[Partial]] | None = None
        self._stopping = False
        self.ended = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="clock")

    # --- what the link says ---------------------------------------------------------------------------------------

    def decide(self, member: int, decision: Decision) -> None:
        """One decision for a leader, with the next tick."""
        if isinstance(decision, Pull):
            decision = msgspec.structs.replace(decision, tick=self._free_at + 1)
            self._sent_at = decision.tick + 1
        self._pending[member].append(decision)

    def give(self, orders: list[Order]) -> None:
        """Orders to the trainer ranks; what they will answer is due at a tick that follows from them."""
        match orders[0]:
            case Train(step=step, phase=phase):
                self._free_at = max(self.tick, self._free_at) + self._config.train_ticks
                self._expect(self._free_at, (Trained, (phase, step)))
            case Send(version=version):
                self._free_at = max(self._free_at, self._sent_at)  # waiting sooner for it would be for ever
                self._expect(self._free_at, (Sent, version))
            case Save(folder=folder):
                self._expect(max(self.tick, self._free_at) + self._config.train_ticks, (Saved, folder))
            case Export(folder=folder):
                self._expect(max(self.tick, self._free_at) + 1, (Exported, folder))
        self._given += 1
        self._orders.give(orders)

    def stop(self) -> None:
        """The next tick is the last."""
        self._stopping = True

    # --- what the loop asks ---------------------------------------------------------------------------------------

    async def fence(self) -> list[Partial]:
        """Let all engines begin their requests anew, between two ticks; what these had, by request id."""
        self._fence = asyncio.get_running_loop().create_future()
        return await self._fence

    def go_on_from(self, tick: int) -> None:
        """The next tick has this number: a run is taken up again."""
        assert not self._due, "the trainer still has something to say"
        self.tick = tick
        self._free_at = self._sent_at = 0

    async def run(self) -> None:
        """Tick until `stop`."""
        await self._start()
        while True:
            await self._gate.settle()
            pending, self._pending = self._pending, defaultdict(list)
            if self._stopping:
                await self._exchange({member: [*pending[member], Stop()] for member in self._everybody})
                self.ended.set()
                return
            fence, self._fence = self._fence, None
            steps = 0 if fence else self._config.steps_per_tick
            tail = [*([Fence()] if fence else []), Tick(self.tick, steps, self._given if self._colocated else 0)]
            answers = await self._exchange({member: [*_by_id(pending[member]), *tail] for member in self._engines})
            self.tick += 1
            partials = [p for _, event in answers if isinstance(event, Fenced) for p in event.partials]
            for member, event in answers:
                if isinstance(event, FROM_TRAINER):
                    self._early[_name(event)] = event
                elif not isinstance(event, Fenced):
                    self._deliver(member, event)
            await self._hear_trainer()
            if fence:
                fence.set_result(sorted(partials, key=lambda partial: partial.id))

    async def _start(self) -> None:
        """Until every leader has built what it is."""
        ready = 0
        while ready < len(self._everybody):
            for member, event in await self._exchange({member: [] for member in self._everybody}):
                ready += isinstance(event, Ready)
                self._deliver(member, event)
            await asyncio.sleep(START_S)

    async def _hear_trainer(self) -> None:
        """Deliver what is due by now, in the order in which it was ordered; wait for it if need be."""
        due = [name for tick, name in self._due if tick <= self.tick]
        self._due = [(tick, name) for tick, name in self._due if tick > self.tick]
        while not all(name in self._early for name in due):
            self._early |= {_name(event): event for _, event in await self._exchange({TRAINER: []})}
            await asyncio.sleep(POLL_S)
        for name in due:
            self._deliver(TRAINER, self._early.pop(name))

    async def _exchange(self, down: dict[int, list[Decision]]) -> list[tuple[int, Event]]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._exchanges.exchange, down)

    def _expect(self, tick: int, name: Named) -> None:
        self._due.append((tick, name))
        self._due.sort(key=lambda entry: entry[0])  # stable: what is due together comes in the order of the orders


def _name(event: Event) -> Named:
    match event:
        case Trained():
            return Trained, (event.phase, event.step)
        case Sent():
            return Sent, event.version
        case Saved() | Exported():
            return type(event), event.folder
    raise ValueError(f"a trainer rank says {type(event).__name__}, which was not asked for")


def _by_id(decisions: list[Decision]) -> list[Decision]:
    """The decisions with requests in order of their ids, in the places that requests have.

    Requests of a run that is taken up again are asked in the order of rollouts, and were in flight in that of ids.
    """
    requests = iter(sorted((d for d in decisions if isinstance(d, Generate)), key=lambda request: request.id))
    return [next(requests) if isinstance(d, Generate) else d for d in decisions]
