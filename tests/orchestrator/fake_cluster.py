"""Engines and trainers that are not there: everything behind `Link`, in virtual time.

`FakeCluster` is both ends that a `Link` talks to (`Decides`, `Gives`). Its trainer carries out one order after the
other; its replicas sample made-up tokens, each after a delay with a heavy tail, and stamp every token with the version
that they hold at that moment. All that is said to it is recorded and checked against the protocol: nothing after
Stop, versions in order, whole orders, each request once. It can misbehave as well.

Every token of request i is `TOKEN + i`, so whoever trains on a token is caught with the request it came from.
"""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.orchestrator.link import Link
from spmd_rl.world.checkpoints import SNAPSHOT, STATE, seal
from spmd_rl.world.messages import (
    Cancel,
    Decision,
    EngineLoad,
    Export,
    Exported,
    FreshOptimizer,
    Generate,
    Generated,
    Order,
    Probed,
    Pull,
    Pulled,
    Refused,
    Save,
    Saved,
    Send,
    Sent,
    Stop,
    Train,
    Trained,
)

TOKEN = 1_000_000  # the first request's token
TICK_S = 0.02
BYTES = 4096  # per pull

TRAINER_METRICS = {  # what a trainer reports of a step (spmd_rl/trainer: loss.py, learner.py, role.py)
    "loss": 0.5,
    "entropy": 1.5,
    "offpolicy/k3_mean": 1e-3,
    "offpolicy/k3_max": 1e-2,
    "tokens/trained": 7.0,
    "tokens/ce": 0.0,
    "masked_fraction": 0.0,
    "grad_norm": 0.25,
    "lr": 1e-3,
    "cpu/trainer_s": 0.5,
}


class ProtocolError(AssertionError):
    """The orchestrator said what it must not say."""


@dataclass(frozen=True)
class Delays:
    """Virtual seconds. Generations last `generate` × (0.1 + Pareto(tail)): the smaller the tail, the heavier."""

    seed: int = 0
    generate: float = 1.0
    tail: float = 1.2
    train: float = 1.0
    send: float = 0.1
    score: float = 0.0  # of the trainer, after it has sent
    pull: float = 0.2
    probe: float = 0.1
    export: float = 0.5


@dataclass
class Misbehaviour:
    """What goes wrong."""

    refuse: Callable[[Generate], bool] = lambda request: False  # the engine does not take it
    silent: Callable[[Generate], bool] = lambda request: False  # never answered, unless cancelled
    disagree: Callable[[int, int, np.ndarray], np.ndarray] = lambda rank, version, logprobs: logprobs
    slow: dict[int, float] = field(default_factory=dict)  # replica → factor on the time of its generations


class FakeCluster:
    """All ranks but rank 0."""

    def __init__(
        self,
        link: Link,
        delays: Delays | None = None,
        misbehaviour: Misbehaviour | None = None,
        resumed: int | None = None,
    ) -> None:
        self.resumed = resumed  # step of the checkpoint that this life of the run goes on from
        self.link, self.delays = link, delays or Delays()
        self.misbehaviour = misbehaviour or Misbehaviour()
        self.orders: list[list[Order]] = []  # all orders, as given: one per trainer rank
        self.decisions: list[tuple[int, Decision]] = []  # (replica, decision), all of them
        self.requests: dict[int, Generate] = {}
        self.answers: dict[int, Generated | Refused] = {}
        self.sent: dict[int, asyncio.Event] = {}  # by version
        self.stopped: set[str] = set()
        self._ordered: asyncio.Queue[list[Order]] = asyncio.Queue()
        self._replicas = [_Replica(self, number) for number in range(link.replicas)]
        loops = [self._train(), *(loop for replica in self._replicas for loop in replica.loops())]
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        for task in self._tasks:
            task.add_done_callback(lambda task: None if task.cancelled() else task.result())  # raises what it raised
        link.connect(self, self)

    # What a Link says.

    def decide(self, member: int, decision: Decision) -> None:
        """To the clock: one decision for member 0 (the trainers' leader) or 1… (the replicas)."""
        self._require("decisions" not in self.stopped, f"{decision} after Stop")
        self._require(1 <= member <= len(self._replicas), f"{decision} for member {member}")
        self.decisions.append((member - 1, decision))
        if isinstance(decision, Generate):
            self._require(decision.id not in self.requests, f"request {decision.id} twice")
            self._require(len(decision.tokens) > 0 and decision.max_tokens > 0, f"request {decision.id} is empty")
            self.requests[decision.id] = decision
        self._replicas[member - 1].inbox.put_nowait(decision)

    def stop(self) -> None:
        """To the clock: the last tick."""
        self._require("decisions" not in self.stopped, "Stop twice")
        self.stopped.add("decisions")

    def give(self, orders: list[Order]) -> None:
        """To the dispatcher: one order per trainer rank."""
        self._require("orders" not in self.stopped, f"{type(orders[0]).__name__} after Stop")
        self._require(len(orders) == self.link.trainers, f"{len(orders)} orders for {self.link.trainers} trainer ranks")
        self._require(len({type(order) for order in orders}) == 1, "orders of several kinds")
        self._check_sequence(orders)
        self.orders.append(orders)
        self._ordered.put_nowait(orders)
        if isinstance(orders[0], Stop):
            self.stopped.add("orders")

    # What a test asks.

    def order_names(self) -> list[str]:
        """All orders so far, in short: "warmup 1", "fresh", "send 0", "rl 1", "export", "stop"."""
        return [_short(orders[0]) for orders in self.orders]

    def trained(self, phase: str = "rl") -> list[list[np.ndarray]]:
        """Per optimizer step of the phase, the documents int32[T] that all trainer ranks got together."""
        return [_documents(o) for o in self.orders if isinstance(o[0], Train) and o[0].phase == phase]

    def versions(self, request: int) -> np.ndarray:
        """int32[n]: which version sampled each token of an answered request."""
        return self.answers[request].versions

    async def close(self) -> None:
        """Nothing of it runs on."""
        tasks = self._tasks + [task for replica in self._replicas for task in replica.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # What happens inside.

    async def _train(self) -> None:
        """The trainer ranks: one order after the other."""
        while True:
            order = (await self._ordered.get())[0]
            match order:
                case Train():
                    await asyncio.sleep(self.delays.train)
                    seconds = {"time/train_s": self.delays.train, "time/wait_s": 0.0}
                    self.tell(0, Trained(order.step, order.phase, TRAINER_METRICS | seconds))
                case Send():
                    await asyncio.sleep(self.delays.send)
                    self.sent.setdefault(order.version, asyncio.Event()).set()
                    await asyncio.sleep(self.delays.score)
                    self.tell(0, Sent(order.version, self.delays.send, score(order.probe, order.version)))
                case Save():
                    await asyncio.sleep(self.delays.export)
                    write_checkpoint(order)
                    self.tell(0, Saved(order.folder))
                case Export():
                    await asyncio.sleep(self.delays.export)
                    self.tell(0, Exported(order.folder))

    def tell(self, member: int, event: Any) -> None:
        """Up to rank 0."""
        if isinstance(event, Generated | Refused):
            self._require(event.id not in self.answers, f"the fake itself answered request {event.id} twice")
            self.answers[event.id] = event
        self.link.deliver(member, event)

    def _check_sequence(self, orders: list[Order]) -> None:
        """Steps and versions count up; version v > 0 is what RL step v made; all ranks do the same."""
        names, name = self.order_names(), _short(orders[0])
        if self.resumed is not None:
            return self._check_resumed(orders[0], names, name)
        match orders[0]:
            case Train(step=step, phase=phase):
                # A step that goes back to a checkpoint takes the place of one that trains.
                before = [n for n in names if n.startswith((phase, "restore"))]
                self._require(name == f"{phase} {len(before) + 1}", f"{name} after {before}")
                self._require(phase == "rl" or not any(n.startswith("rl") for n in names), f"{name} after RL began")
                self._require(len({tuple(map(len, order.rows)) for order in orders}) == 1, f"{name}: unequal rows")
                self._require(step == 1 or phase == "warmup" or f"send {step - 1}" in names, f"{name} before its send")
            case Send(version=version):
                before = [n for n in names if n.startswith("send")]
                self._require(version == len(before), f"{name} after {before}")
                last = [n for n in names if n.startswith(("rl", "restore"))][-1:]
                made = ([f"rl {version}"], ["restore"]) if version else ([],)
                self._require(last in made, f"{name} after {last}")
                self._require(all(order is orders[0] for order in orders), f"{name} differs between ranks")

    def _check_resumed(self, order: Order, names: list[str], name: str) -> None:
        """After the optimizer and the weights are there, steps go on behind the checkpoint, and so do versions."""
        steps = [n for n in names if n.startswith(("rl", "restore"))]
        done = self.resumed + len(steps) - 1
        match order:
            case Train():
                self._require(names[:2] == ["fresh", "restore"], f"{name} after {names}")
                self._require(name == f"rl {done + 1}", f"{name} after {steps}")
            case Send(version=version):
                self._require(version == done, f"{name} after {steps}")

    def _require(self, holds: bool, why: str) -> None:
        if not holds:
            raise ProtocolError(why)


class _Replica:
    """One engine: any number of requests at once, one pull at a time."""

    def __init__(self, cluster: FakeCluster, number: int) -> None:
        self.cluster, self.number, self.rank = cluster, number, 1 + cluster.link.trainers + number
        self.inbox: asyncio.Queue[Decision] = asyncio.Queue()
        self.running: dict[int, asyncio.Task] = {}
        self._pulls: asyncio.Queue[Pull] = asyncio.Queue()
        self._since: list[float] = [0.0]  # when each version of `_held` came
        self._held: list[int] = [-1]
        self._tokens = 0

    def loops(self) -> list:
        """Coroutines that go on until they are cancelled."""
        return [self._listen(), self._pull()]

    async def _listen(self) -> None:
        """Ticks: what was decided arrives a little later, in order."""
        while True:
            arrived = [await self.inbox.get()]
            await asyncio.sleep(TICK_S)
            while not self.inbox.empty():
                arrived.append(self.inbox.get_nowait())
            for decision in arrived:
                self._take(decision)

    def _take(self, decision: Decision) -> None:
        match decision:
            case Generate() if self.cluster.misbehaviour.refuse(decision):
                self._tell(Refused(decision.id, "ValueError: the prompt is not to my taste"))
            case Generate():
                self.running[decision.id] = asyncio.create_task(self._generate(decision))
            case Cancel(id=id) if id in self.running:
                self.running.pop(id).cancel()
                none = np.zeros(0, np.int32)
                self._tell(Generated(id, none, none.astype(np.float32), none, "aborted", ""))
            case Pull():
                self._pulls.put_nowait(decision)

    async def _generate(self, request: Generate) -> None:
        delays, misbehaviour = self.cluster.delays, self.cluster.misbehaviour
        salt = request.salt or f"v{self._held[-1]}"
        if misbehaviour.silent(request):
            await asyncio.Event().wait()
        rng = np.random.default_rng([delays.seed, request.id])
        n = int(rng.integers(1, request.max_tokens + 1))
        started = asyncio.get_running_loop().time()
        lasts = delays.generate * (0.1 + rng.pareto(delays.tail)) * misbehaviour.slow.get(self.number, 1.0)
        await asyncio.sleep(lasts)
        times = started + lasts * np.arange(1, n + 1) / n
        versions = np.asarray([self._held[bisect_right(self._since, t) - 1] for t in times], np.int32)
        tokens = np.full(n, TOKEN + request.id, np.int32)
        logprobs = -rng.random(n).astype(np.float32)
        del self.running[request.id]
        self._tokens += n
        reason = "length" if n == request.max_tokens else "stop"
        self._tell(Generated(request.id, tokens, logprobs, versions, reason, salt))
        self._tell(
            EngineLoad(self.rank, steps=self._tokens, step_s=started + lasts, tokens=self._tokens, cpu_s=started)
        )

    async def _pull(self) -> None:
        """Versions arrive after they were sent, and one is probed before the next one may come."""
        cluster, delays = self.cluster, self.cluster.delays
        while True:
            pull = await self._pulls.get()
            first = self._held[-1] < 0 and cluster.resumed is not None
            if pull.version != self._held[-1] + 1 and not first:
                raise ProtocolError(f"replica {self.number} holds {self._held[-1]} and was told to pull {pull.version}")
            await cluster.sent.setdefault(pull.version, asyncio.Event()).wait()
            receive_s = delays.pull * (1 + self.number)
            await asyncio.sleep(receive_s)
            self._since.append(asyncio.get_running_loop().time())
            self._held.append(pull.version)
            self._tell(Pulled(self.rank, pull.version, BYTES, receive_s, stall_s=receive_s / 10, staging_bytes=BYTES))
            if pull.probe:
                await asyncio.sleep(delays.probe)
                scores = score(pull.probe, pull.version)
                disagree = cluster.misbehaviour.disagree
                self._tell(Probed(self.rank, pull.version, [disagree(self.rank, pull.version, s) for s in scores]))

    def _tell(self, event: Any) -> None:
        self.cluster.tell(1 + self.number, event)


def write_checkpoint(order: Save) -> None:
    """As the first trainer rank does it, without tensors; not at all for a run without an output folder."""
    target = Path(order.folder)
    if not target.parents[1].is_dir():
        return
    writing = target.with_suffix(".tmp")
    writing.mkdir(parents=True)
    (writing / STATE).write_text(json.dumps(order.state))
    (writing / SNAPSHOT).write_bytes(order.snapshot)
    seal(writing, target)


def score(probe: list[np.ndarray], version: int) -> list[np.ndarray]:
    """What both sides say about a probe set: float32[T-1] per sequence."""
    return [-(1 + (sequence[1:] + version) % 5).astype(np.float32) for sequence in probe]


def _short(order: Order) -> str:
    match order:
        case Train(step=step, phase=phase):
            return f"{phase} {step}"
        case FreshOptimizer():
            return "fresh"
        case Send(version=version):
            return f"send {version}"
        case _:
            return type(order).__name__.lower()


def _documents(orders: list[Train]) -> list[np.ndarray]:
    """All documents of a step but the padding, which is one token 0."""
    rows = [row for order in orders for minibatch in order.rows for row in minibatch]
    documents = [part for row in rows for part in np.split(row["tokens"], row["cu_seqlens"][1:-1])]
    return [document for document in documents if len(document) > 1]
