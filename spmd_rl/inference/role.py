"""What an inference rank does: step its engine for ever, and between two steps do what rank 0 decided.

The engine never waits for a tick, nor for weights: the leader takes what the last tick brought, starts a pull on the
receiver's thread, and swaps a version in when it is complete. In lockstep it waits for both: each tick is so many
steps, and a swap belongs to a tick. In a tensor-parallel replica the leader tells its followers, before each step, what
it is about to do, so that every rank's scheduler takes the same step.

What becomes of requests in flight when weights are swapped (`weights.mode`): they go on with their KV cache
(in_flight), they are finished first while new ones wait (drain), or they begin anew behind their tokens (recompute).

A replica may have guests on its accelerators, who have their turns between two of its steps (`Interludes`): all ranks
of the replica take such a turn together, when the leader says so.

It refuses to know about tasks, rewards and trainers, and what its guests do.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import torch

from spmd_rl.inference.build import build_engine
from spmd_rl.inference.engine import Engine
from spmd_rl.models.hf_config import resolve
from spmd_rl.world.clock import Leader
from spmd_rl.world.messages import (
    Cancel,
    Decision,
    EngineLoad,
    Fence,
    Fenced,
    ForgetRoutes,
    Generate,
    Pull,
    Pulled,
    Ready,
    SendRoutes,
    Stop,
    Tick,
)
from spmd_rl.world.pipe import Pipe
from spmd_rl.world.routes import RouteSender, RouteStore
from spmd_rl.world.weights import Receiver
from spmd_rl.world.wire import decode, encode
from spmd_rl.world.world import World

IDLE_S = 1.0  # an idle leader looks up this often, so that its watchdog sees progress
LOAD_EVERY_S = 0.25


class Interludes(Protocol):
    """What else a rank does between two steps of its engine; the same sequence on all ranks of a replica."""

    @property
    def waiting(self) -> bool:
        """One has come."""

    @property
    def done(self) -> int:
        """How many were carried out."""

    def carry_out(self, deadline_s: float) -> None:
        """The next one; waits for it."""

    def finish(self, deadline_s: float) -> None:
        """All that are left, to the last."""


class Knocked:
    """Put into the leader's inbox when an interlude has come, so that an idle engine wakes up."""


@dataclass(frozen=True)
class Arrived:
    """Put into the leader's inbox by the receiver's thread, so that an idle engine wakes up."""

    version: int


class Turn(msgspec.Struct):
    """What all ranks of a replica do next, in this order: swap, decisions, an interlude, one step."""

    decisions: list[Decision] = []
    swap: int = -1  # policy version to swap in; -1 = none
    interlude: bool = False
    step: bool = False


def run(world: World) -> None:
    """Build the engine and serve until rank 0 says stop."""
    deadlines, replica = world.config.deadlines, world.mesh.replica_of(world.rank)
    torch.set_num_threads(world.config.inference.threads)
    leads = world.rank == world.mesh.engines[replica][0]
    frozen = replica >= len(world.mesh.replicas)
    name = world.config.orchestrator.algorithm.reference if frozen else world.config.model.name
    # The clock starts before the engine is built: ticks of ranks that are ready must not wait for it.
    clock = Leader(world.groups["ctl"], world.watchdog.fail, world.watchdog.tick) if leads else None
    if clock:
        clock.start()
    with world.watchdog.stage("build the engine", deadlines.start_s):
        started = time.perf_counter()
        group = world.groups[f"replica/{replica}"]
        llm = build_engine(world.config, resolve(name), group, replica, world.local_rank, world.device)
        # Without trainers nothing is ever pulled: the folder's weights are the one version there is.
        routes = _routes(world) if leads and not frozen and world.config.trainer.router_replay else None
        version = -1 if frozen or world.mesh.trainers else 0
        engine = Engine(llm, world.rank, version, keep=routes.put if routes else None)
        built_s = time.perf_counter() - started
    rank = ReplicaRank(world, engine, clock, routes=routes)
    if clock:
        clock.tell(Ready(world.rank, {"build_s": built_s}))
        rank.lead()
        clock.join(deadlines.step_s)
    else:
        rank.follow()


def _routes(world: World) -> RouteSender:
    mesh, group = world.mesh, world.groups["routes"]
    return RouteSender(group, range(len(mesh.trainers)), world.watchdog.fail, world.watchdog.span)


class ReplicaRank:
    """One rank of a replica.

    `clock` is None on followers, `interludes` where it has no guests, `routes` where none are kept.
    """

    def __init__(
        self,
        world: World,
        engine: Engine,
        clock: Leader | None,
        interludes: Interludes | None = None,
        routes: RouteStore | None = None,
    ) -> None:
        self._world, self._engine, self._clock, self._interludes = world, engine, clock, interludes
        self._routes = routes
        self._replica = world.mesh.replica_of(world.rank)
        members = world.mesh.engines[self._replica]
        cmd = world.groups[f"replica_cmd/{self._replica}"]
        self._down = [Pipe(cmd, i, f"rank {rank}") for i, rank in enumerate(members) if i] if clock else []
        self._up = None if clock else Pipe(cmd, 0, f"rank {members[0]} (leader of replica {self._replica})")
        watchdog = world.watchdog
        # A frozen replica is in none of these groups: its tokens carry version -1, which is no version of the policy.
        weights, experts = (
            [group for name, group in world.groups.items() if name.startswith(kind)]
            for kind in ("weights/", "experts/")
        )
        arrived = (lambda version: clock.inbox.put(Arrived(version))) if clock else (lambda version: None)
        staging = world.config.weights.staging
        taker, place = members.index(world.rank), (watchdog.fail, watchdog.span, staging)
        self._receiver = Receiver(weights, world.device, arrived, *place, experts, taker) if weights else None
        self._lockstep = world.config.clock.mode == "lockstep"
        self._drains = world.config.weights.mode == "drain"
        self._recomputes = world.config.weights.mode == "recompute"
        self._pulls: deque[Pull] = deque()  # decided, not begun: one version at a time is in the staging buffers
        self._pulling: Pull | None = None
        self._arrived = False  # what is pulled can be swapped in
        self._held: list[Decision] = []  # requests that wait for a swap (drain)
        self._probe: list[np.ndarray] = []
        self._told_load, self._told_steps = 0.0, -1

    def lead(self) -> None:
        """The leader's loop."""
        going = True
        while going:
            decisions = self._take()
            if decisions and isinstance(tick := decisions[-1], Tick):
                going = self._tick(decisions[:-1], tick)
                self._clock.ticked()
            else:
                going = self._turn(decisions)

    def _turn(self, decisions: list[Decision]) -> bool:
        """One round at the engine's own pace: what came, a swap if one can be done, one step. False at the end."""
        if self._arrived and self._drains:
            decisions = self._hold(decisions)
        self._begin_pull(decisions)
        swap = -1
        if self._arrived and not self._engine.probing and not (self._drains and self._engine.busy):
            swap = self._pulling.version
            decisions, self._held = [*self._held, *decisions], []
        if self._interludes is not None and self._interludes.waiting and not self._engine.probing:
            return self._say_and_do(Turn(decisions, swap, interlude=True))
        # Requests of this turn make the engine busy; followers come to the same answer.
        step = self._engine.busy or swap >= 0 or any(isinstance(d, Generate) for d in decisions)
        return self._say_and_do(Turn(decisions, swap, step=step))

    def _tick(self, decisions: list[Decision], tick: Tick) -> bool:
        """A whole tick of lockstep: what came, the swaps that belong here, and its steps. False at the end."""
        due = self._pulling is not None and self._pulling.tick <= tick.number
        if due and self._drains:
            decisions = self._hold(decisions)
        self._begin_pull(decisions)
        going = self._say_and_do(Turn(decisions))
        while going and self._pulling is not None and self._pulling.tick <= tick.number:
            self._receiver.wait(self._world.config.deadlines.step_s)
            while self._drains and self._engine.busy:
                self._say_and_do(Turn(step=True))
            held, self._held = self._held, []
            self._say_and_do(Turn(swap=self._pulling.version))
            while self._engine.probing:  # the next swap must not depend on how long this one's probe takes
                self._say_and_do(Turn(step=True))
            self._begin_pull(held)
            self._say_and_do(Turn(held))
        while going and self._interludes is not None and self._interludes.done < tick.orders:
            while self._engine.probing:
                self._say_and_do(Turn(step=True))
            self._say_and_do(Turn(interlude=True))
        for _ in range(tick.steps if going else 0):
            self._say_and_do(Turn(step=self._engine.busy))
        return going

    def _hold(self, decisions: list[Decision]) -> list[Decision]:
        """Keep new requests back; the other decisions."""
        cancelled = {decision.id for decision in decisions if isinstance(decision, Cancel)}
        self._held += [d for d in decisions if isinstance(d, Generate)]
        self._held = [d for d in self._held if d.id not in cancelled]
        return [d for d in decisions if not isinstance(d, Generate)]

    def _begin_pull(self, decisions: list[Decision]) -> None:
        """Move pulls out of what was decided, and the next one back in when its turn has come."""
        self._pulls.extend(d for d in decisions if isinstance(d, Pull))
        decisions[:] = [d for d in decisions if not isinstance(d, Pull)]
        if self._pulls and self._pulling is None:
            self._pulling = self._pulls.popleft()
            decisions.append(self._pulling)

    def _say_and_do(self, turn: Turn) -> bool:
        if self._down and (turn.decisions or turn.swap >= 0 or turn.interlude or turn.step):
            self._tell_followers(turn)
        return self._do(turn)

    def follow(self) -> None:
        """A follower's loop: what the leader says."""
        while True:
            with self._world.watchdog.stage("wait for the leader"):
                turn = decode(self._up.receive(), Turn)
            if not self._do(turn):
                return

    def _take(self) -> list[Decision]:
        """Everything that has come down; waits only while there is nothing to step, in lockstep for a whole tick."""
        decisions: list[Decision] = []
        waits = not self._engine.busy and not self._arrived and (self._pulling is not None or not self._pulls)
        waits = waits and not (self._interludes is not None and self._interludes.waiting)
        while True:
            block = self._lockstep or (waits and not decisions)
            try:
                if block:
                    with self._world.watchdog.stage("idle"):
                        item = self._clock.inbox.get(timeout=IDLE_S)
                else:
                    item = self._clock.inbox.get_nowait()
            except queue.Empty:
                if not self._lockstep:
                    return decisions
                continue
            if isinstance(item, Arrived):
                self._arrived, waits = not self._lockstep, False  # in lockstep a swap waits for its tick instead
            elif isinstance(item, Knocked):
                waits = False
            else:
                decisions.append(item)
            if isinstance(item, Tick | Stop):
                return decisions

    def _tell_followers(self, turn: Turn) -> None:
        data = encode(turn)
        for pipe, works in [(pipe, pipe.send_start(data)) for pipe in self._down]:
            pipe.wait(works)

    def _do(self, turn: Turn) -> bool:
        """Take the turn; False when the run is over."""
        if turn.swap >= 0:  # first: requests of this turn belong to the new version
            self._swap(turn.swap)
        for decision in turn.decisions:
            match decision:
                case Generate():
                    self._tell(self._engine.add(decision))
                case Cancel():
                    self._tell(self._engine.cancel(decision.id))
                case Fence():
                    self._tell(Fenced(self._world.rank, self._engine.restart()))
                case Pull():
                    self._probe = decision.probe
                    self._receiver.begin(decision.version)
                case SendRoutes() if isinstance(self._routes, RouteSender):
                    self._routes.send(decision)
                case ForgetRoutes() if self._routes is not None:
                    self._routes.forget(decision.requests)
                case Stop():
                    if self._routes is not None:
                        self._routes.close(self._world.config.deadlines.step_s)
                    if self._receiver:
                        self._receiver.close(self._world.config.deadlines.step_s)
                    if self._interludes is not None:
                        self._interludes.finish(self._world.config.deadlines.step_s)
                    return False
        if turn.interlude:
            self._interludes.carry_out(self._world.config.deadlines.step_s)
        if turn.step and self._engine.busy:
            phase = "prefill" if self._engine.prefills else "engine step"
            with self._world.watchdog.stage(phase, self._world.config.deadlines.step_s):
                for event in self._engine.step():
                    self._tell(event)
        self._tell_load()
        return True

    def _swap(self, version: int) -> None:
        deadline_s = self._world.config.deadlines.step_s
        with self._world.watchdog.stage("swap weights", deadline_s):
            self._receiver.wait(deadline_s)  # a follower may be a bucket behind its leader
            plan = self._receiver.plan(deadline_s)
            started = time.perf_counter()
            self._engine.swap(version, self._receiver.tensors(deadline_s), plan.names)
            if self._recomputes:
                self._engine.restart()
            self._pulling, self._arrived = None, False
            stall_s = time.perf_counter() - started
            receive_s, staging_bytes = self._receiver.receive_s, self._receiver.staging_bytes
            self._tell(Pulled(self._world.rank, version, plan.nbytes, receive_s, stall_s, staging_bytes))
            if self._probe:
                self._engine.probe(self._probe)

    def _tell(self, event) -> None:
        if event is not None and self._clock is not None:
            self._clock.tell(event)

    def _tell_load(self) -> None:
        now, engine = time.monotonic(), self._engine
        if now - self._told_load >= LOAD_EVERY_S and engine.steps != self._told_steps:
            self._told_load, self._told_steps = now, engine.steps
            self._tell(EngineLoad(self._world.rank, engine.steps, engine.step_s, engine.tokens, time.process_time()))
