"""What a rank does that trains and infers in turns: an inference rank whose guest is a trainer rank.

One thread does both, so they never compete: between two steps of its engine the rank carries out the trainer's next
order. Before it trains, the engine gives its memory back (`deployment.release_memory`), and its requests wait; the
order that would send a policy version copies the weights inside the process instead, which wakes the engine. Ranks of a
tensor-parallel replica take each turn together, when their leader says so; replicas need not agree, for nothing but
the trainer's own collectives joins them.

It refuses to know what is trained on and what is generated. Invariant: orders are carried out in the order in which
they were given, each once, on every rank.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable

import torch

from spmd_rl.colocated.budget import check_room
from spmd_rl.colocated.ledger import Ledger
from spmd_rl.colocated.routes import RouteExchange
from spmd_rl.inference.build import build_engine
from spmd_rl.inference.engine import Engine
from spmd_rl.inference.role import Knocked, ReplicaRank
from spmd_rl.models.hf_config import resolve
from spmd_rl.models.hf_folder import tensor_shapes
from spmd_rl.trainer.learner import Learner
from spmd_rl.trainer.role import Replay, TrainerRank, build_learner, routed_sizes, silent
from spmd_rl.world.clock import Leader
from spmd_rl.world.messages import Event, Order, Pulled, Ready, Restore, Send, Sent, Stop, Train, Trained, Validate
from spmd_rl.world.pipe import pipe_from
from spmd_rl.world.routes import RouteStore
from spmd_rl.world.wire import decode
from spmd_rl.world.world import World

NEEDS_MEMORY = (Train, Validate, Restore)


def run(world: World) -> None:
    """Build the engine, put it to sleep, build the learner, and take turns until rank 0 says stop."""
    config, watchdog, mesh = world.config, world.watchdog, world.mesh
    replica = mesh.replica_of(world.rank)
    leads = world.rank == mesh.engines[replica][0]
    clock = Leader(world.groups["ctl"], watchdog.fail, watchdog.tick, world.up("ctl")) if leads else None
    if clock:
        clock.start()
    folder = resolve(config.model.name)
    parameters = sum(math.prod(shape) for shape in tensor_shapes(folder).values())
    sharers = len(mesh.trainers) // mesh.dims.dp_replicate
    check_room(config, parameters, sharers, world.device, int(os.environ["LOCAL_WORLD_SIZE"]))
    ledger = Ledger(world.device)
    with watchdog.stage("build the engine", config.deadlines.start_s):
        started = time.perf_counter()
        torch.set_num_threads(config.inference.threads)
        group = world.groups[f"replica/{replica}"]
        llm = build_engine(config, folder, group, replica, world.local_rank, world.device)
        store = RouteStore() if config.trainer.router_replay else None
        engine = Engine(llm, world.rank, keep=store.put if store and leads else None)
        ledger.note("infer")
        if config.deployment.release_memory:
            engine.sleep()
    ledger.note("asleep")
    learner = build_learner(world)
    tell = clock.tell if clock else silent
    knock = (lambda: clock.inbox.put(Knocked())) if clock else (lambda: None)
    turns = Turns(world, engine, learner, tell, knock, ledger, _replay(world, learner, store) if store else None)
    rank = ReplicaRank(world, engine, clock, turns, store)
    tell(Ready(world.rank, {"build_s": time.perf_counter() - started}))
    turns.start()
    torch.set_num_threads(config.inference.threads)
    if clock:
        rank.lead()
        clock.join(config.deadlines.step_s)
    else:
        rank.follow()


def _replay(world: World, learner: Learner, store: RouteStore) -> Replay:
    leaders = [world.mesh.trainers.index(replica[0]) for replica in world.mesh.replicas]
    exchange = RouteExchange(world.groups["routes"], store, leaders, *routed_sizes(world, learner))
    return lambda order, rows: exchange.exchange(order.step, rows, order.routes)


class Turns:
    """The trainer's orders, as interludes of an inference rank.

    Args:
        tell: the leader's, for events; of other ranks nobody hears.
        knock: called on the receiving thread for every order that has come.
    """

    def __init__(
        self,
        world: World,
        engine: Engine,
        learner: Learner,
        tell: Callable[[Event], None],
        knock: Callable[[], None],
        ledger: Ledger,
        replay: Replay | None = None,
    ) -> None:
        self.done, self._over = 0, False
        self._world, self._engine, self._learner, self._tell, self._ledger = world, engine, learner, tell, ledger
        self._speaks = world.rank == world.mesh.trainers[0]
        self._trainer = TrainerRank(world, learner, self._tell_for_all if self._speaks else silent, routes=replay)
        self._names = [name for name, _, _ in learner.shards.table()]
        self._bytes = sum(p.numel() for p in learner.model.parameters()) * learner.dtype.itemsize
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._knock, self._left_at = knock, time.perf_counter()
        self._thread = threading.Thread(target=self._receive, name="data", daemon=True)

    def start(self) -> None:
        """Begin to receive."""
        self._thread.start()

    @property
    def waiting(self) -> bool:
        """An order has come."""
        return not self._orders.empty()

    def carry_out(self, deadline_s: float) -> None:
        """The next order; queue.Empty when none comes within the deadline."""
        self._do(self._orders.get(timeout=deadline_s))

    def finish(self, deadline_s: float) -> None:
        """All that are left, to the last, which is Stop."""
        while not self._over:
            self.carry_out(deadline_s)

    def _receive(self) -> None:
        try:
            pipe = pipe_from(self._world.groups["data"], self._world.up("data"))
            order: Order | None = None
            while not isinstance(order, Stop):
                order = decode(pipe.receive(), Order)
                self._orders.put(order)
                self._knock()
        except BaseException as error:
            self._world.watchdog.fail(error)

    def _do(self, order: Order) -> None:
        config = self._world.config
        waited_s = time.perf_counter() - self._left_at
        if isinstance(order, NEEDS_MEMORY) and config.deployment.release_memory:
            self._ledger.note("infer")
            self._engine.sleep()
            self._ledger.note("asleep")
        torch.set_num_threads(config.trainer.threads)
        if isinstance(order, Send):
            with self._world.watchdog.stage("swap weights", config.deadlines.step_s):
                self._copy(order)
        else:
            self._trainer.carry_out(order, waited_s)
        torch.set_num_threads(config.inference.threads)
        self._left_at = time.perf_counter()
        self._over = isinstance(order, Stop)
        self.done += 1

    def _copy(self, order: Send) -> None:
        """The weights become the engine's, as policy version `order.version`; both sides score the probe set."""
        started = time.perf_counter()
        self._learner.free_gradients()
        self._engine.swap(order.version, self._learner.full_tensors(), self._names)
        copy_s = time.perf_counter() - started
        self._tell(Pulled(self._world.rank, order.version, self._bytes, 0.0, copy_s, 0))
        logprobs = self._learner.score(order.probe) if order.probe else []
        if order.probe:
            self._engine.probe(order.probe)
        if self._speaks:
            self._tell(Sent(order.version, copy_s, logprobs))

    def _tell_for_all(self, event: Event) -> None:
        """The first trainer rank's word, with what every phase needs of memory."""
        if isinstance(event, Trained):
            self._ledger.note("train")
            event = Trained(event.step, event.phase, event.metrics | self._ledger.metrics())
        self._tell(event)
