"""One rank of a world of five that does everything the groups are for: `world_worker.py FOLDER`.

Rank 0 orchestrates, 1 and 2 train, 3 and 4 infer. The parts run one after the other; what each rank saw lands in
FOLDER/rank{r}.json. At the end some ranks die and the others write down whom they name.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from spmd_rl.config.tree import Config, DeploymentConfig
from spmd_rl.world.buckets import Plan
from spmd_rl.world.clock import Conductor, Leader
from spmd_rl.world.groups import as_default, init_world, make_groups
from spmd_rl.world.mesh import Mesh
from spmd_rl.world.messages import Generate, Generated, Order, Refused, Stop, Train
from spmd_rl.world.orders import Dispatcher
from spmd_rl.world.pipe import FRAME_BYTES, PeerError, Pipe
from spmd_rl.world.weights import Receiver, Sender
from spmd_rl.world.wire import decode

TRAINERS, LEADERS = (1, 2), (1, 3, 4)
STAGING = {3: "whole", 4: "buckets"}
CPU = torch.device("cpu")
PATIENCE_S = 120.0
DECISIONS = 150  # to every leader
ALONE = 100  # the first ones leave only when all before are answered, which takes two ticks each
ORDERS = 40
IDLE_S = 0.5
VERSIONS = (0, 1, 2, 5)
TABLE = [
    *((f"layers.{i}.weight", (31, 7 + i), "float32") for i in range(6)),
    ("norm.weight", (33,), "bfloat16"),
    ("lm_head.weight", (200, 64), "bfloat16"),  # larger than a bucket
    ("scale", (), "float32"),
]
BUCKET_BYTES = 4096
# Around what fits into one frame, and far beyond.
SIZES = [0, 1, FRAME_BYTES - 9, FRAME_BYTES - 8, FRAME_BYTES - 7, FRAME_BYTES, 3 * FRAME_BYTES, 1_000_000]


def tokens_of(rank: int, index: int) -> np.ndarray:
    """The content of message `index` to or from a rank: mostly short, sometimes many frames long."""
    random = np.random.default_rng([rank, index])
    size = random.choice([0, 5, 900, 1100, 50_000], p=[0.2, 0.3, 0.2, 0.2, 0.1])
    return random.integers(0, 2**31 - 1, size, dtype=np.int32)


def weights_of(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a policy version, in the order of the table."""
    generator = torch.Generator().manual_seed(version)
    for name, shape, dtype in TABLE:
        yield name, torch.randn(shape, generator=generator).to(getattr(torch, dtype))


def digest(array: np.ndarray) -> str:
    return sha256(array.tobytes()).hexdigest()[:16]


class Rank:
    """What this rank is, and what it saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        init_world(PATIENCE_S)
        self.rank = dist.get_rank()
        self.mesh = Mesh.build(Config(deployment=DeploymentConfig(train_ranks=2, infer_ranks=2)), dist.get_world_size())
        self.groups = make_groups(self.mesh, self.rank, CPU, PATIENCE_S)
        self.saw: dict[str, Any] = {"groups": list(self.groups)}
        self.recorded: list[list[int]] = []
        self.errors: dict[str, queue.SimpleQueue[BaseException]] = {
            name: queue.SimpleQueue() for name in ("ctl", "data", "weights")
        }

    def record(self, start_ns: int, end_ns: int) -> None:
        self.recorded.append([start_ns, end_ns])

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.mesh.role(rank)})"

    def next_error(self, thread: str) -> str:
        """The error with which a thread ends."""
        error = self.errors[thread].get(timeout=PATIENCE_S)
        return f"{type(error).__name__}: {error}"

    def conductor(self, deliver: Callable[[int, Any], None]) -> Conductor:
        names = [self.name(rank) for rank in LEADERS]
        clock = Conductor(self.groups["ctl"], names, 0.004, deliver, self.errors["ctl"].put, self.record)
        clock.start()
        return clock

    def leader(self) -> Leader:
        clock = Leader(self.groups["ctl"], self.errors["ctl"].put, self.record)
        clock.start()
        return clock

    def dispatcher(self) -> Dispatcher:
        names = [self.name(rank) for rank in TRAINERS]
        dispatcher = Dispatcher(self.groups["data"], names, self.errors["data"].put)
        dispatcher.start()
        return dispatcher

    def sender(self, plan: Plan) -> Sender:
        index = TRAINERS.index(self.rank)
        return Sender(plan, index, self.groups[f"weights/{index}"], CPU, self.errors["weights"].put)

    def receiver(self, arrived: Callable[[int], None] = lambda version: None) -> Receiver:
        """Rank 3 stages whole versions, rank 4 two buckets, of the same broadcasts."""
        groups, staging = [self.groups["weights/0"], self.groups["weights/1"]], STAGING[self.rank]
        return Receiver(groups, CPU, arrived, self.errors["weights"].put, staging=staging)

    def save(self) -> None:
        """Write what was seen so far; whoever reads the file sees all of it or none."""
        path = self.folder / f"rank{self.rank}.json"
        path.with_suffix(".part").write_text(json.dumps(self.saw))
        path.with_suffix(".part").rename(path)


# --- ctl --------------------------------------------------------------------------------------------------------------


def conduct(me: Rank) -> None:
    """Rank 0: decisions one by one, then in bursts, until every leader has answered all of them."""
    heard: dict[int, list] = {rank: [] for rank in LEADERS}
    arrived = threading.Condition()

    def deliver(member: int, event: Any) -> None:
        with arrived:
            tokens = getattr(event, "tokens", np.zeros(0))
            heard[LEADERS[member]].append([type(event).__name__, event.id, digest(tokens)])
            arrived.notify()

    def answered(decisions: int) -> bool:
        with arrived:
            return arrived.wait_for(lambda: all(len(events) >= 2 * decisions for events in heard.values()), PATIENCE_S)

    clock = me.conductor(deliver)
    for index in range(DECISIONS):
        if index <= ALONE:
            answered(index)
        for member, rank in enumerate(LEADERS):
            clock.decide(member, Generate(index, tokens_of(rank, index), 1, 1.0, index, []))
    me.saw["complete"] = answered(DECISIONS)
    time.sleep(IDLE_S)  # ticks that carry nothing
    clock.stop()
    clock.join(PATIENCE_S)
    me.saw["recorded"] = me.recorded
    me.saw |= {"heard": heard, "ticks": clock.ticks, "clock ended": not clock.is_alive()}


def lead(me: Rank) -> None:
    """A leader: every decision is answered by two events."""
    clock = me.leader()
    decided = []
    while not isinstance(decision := clock.inbox.get(timeout=PATIENCE_S), Stop):
        decided.append([decision.id, digest(decision.tokens)])
        answer = tokens_of(100 + me.rank, decision.id)
        none = np.zeros(0, dtype=np.float32)
        clock.tell(Generated(decision.id, answer, none, none, "stop", ""))
        clock.tell(Refused(decision.id, "twice"))
    clock.join(PATIENCE_S)
    me.saw["recorded"] = me.recorded
    me.saw |= {"decided": decided, "left in inbox": clock.inbox.qsize(), "clock ended": not clock.is_alive()}


def echo(me: Rank) -> None:
    """Messages of every critical size between rank 0 and each leader, and back."""
    payloads = [np.random.default_rng(size).bytes(size) for size in SIZES]
    if me.rank == 0:
        pipes = [Pipe(me.groups["ctl"], member + 1, me.name(rank)) for member, rank in enumerate(LEADERS)]
        for payload in payloads:
            for pipe, works in [(pipe, pipe.send_start(payload)) for pipe in pipes]:
                pipe.wait(works)
        me.saw["echoes"] = [[pipe.receive() == payload for payload in payloads] for pipe in pipes]
    else:
        pipe = Pipe(me.groups["ctl"], 0, me.name(0))
        received = [pipe.receive() for _ in payloads]
        me.saw["received"] = [one == other for one, other in zip(received, payloads, strict=True)]
        for payload in received:
            pipe.send(payload)


# --- data -------------------------------------------------------------------------------------------------------------


def train_order(rank: int, index: int) -> Train:
    """Uneven rows: every rank has its own."""
    return Train(index, "rl", [[{"tokens": tokens_of(rank, 1000 + index + k)} for k in range(rank)]])


def dispatch(me: Rank) -> None:
    dispatcher = me.dispatcher()
    for index in range(ORDERS):
        dispatcher.give([train_order(rank, index) for rank in TRAINERS])
    try:
        dispatcher.give([Stop()])
    except ValueError as error:
        me.saw["refused"] = str(error)
    dispatcher.give([Stop()] * len(TRAINERS))
    dispatcher.join(PATIENCE_S)
    me.saw["dispatcher ended"] = not dispatcher.is_alive()


def obey(me: Rank) -> None:
    pipe = Pipe(me.groups["data"], 0, me.name(0))
    orders = []
    while not isinstance(order := decode(pipe.receive(), Order), Stop):
        orders.append([order.step, [digest(row["tokens"]) for rows in order.rows for row in rows]])
    me.saw["orders"] = orders


# --- weights ----------------------------------------------------------------------------------------------------------


def copied(model: dict[str, torch.Tensor], views: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """What a rank writes that has the whole model."""
    for name, view in views.items():
        view.copy_(model[name])
        yield name


def send_versions(me: Rank) -> None:
    """The tensors change as soon as `send` is back, as in an optimizer step."""
    sender = me.sender(Plan.build(TABLE, BUCKET_BYTES, len(TRAINERS)))
    model = {name: tensor.clone() for name, tensor in weights_of(VERSIONS[0])}
    for version in VERSIONS:
        for name, tensor in weights_of(version):
            model[name].copy_(tensor)
        sender.send(version, partial(copied, model), PATIENCE_S)
        for tensor in model.values():
            tensor.fill_(float("nan"))
    sender.close(PATIENCE_S)
    small = me.sender(Plan.build(TABLE[-1:], BUCKET_BYTES, len(TRAINERS)))  # one bucket: the second has none to send
    small.send(1, partial(copied, {"scale": torch.tensor(7.0)}), PATIENCE_S)
    small.close(PATIENCE_S)
    other = me.sender(Plan.build(TABLE[me.rank :], BUCKET_BYTES, len(TRAINERS)))  # plans that are not the same
    other.close(PATIENCE_S)
    ahead = me.sender(Plan.build(TABLE[-1:], BUCKET_BYTES, len(TRAINERS)))
    ahead.send(8, partial(copied, {"scale": torch.tensor(8.0)}), PATIENCE_S)


def receive_versions(me: Rank) -> None:
    arrived: list[int] = []
    receiver = me.receiver(arrived.append)
    plan = receiver.plan(PATIENCE_S)
    exact = []
    for version in VERSIONS:
        receiver.begin(version)
        receiver.wait(PATIENCE_S)
        got, expected = list(receiver.tensors(PATIENCE_S)), list(weights_of(version))
        same = all(torch.equal(a[1], b[1]) and a[1].dtype == b[1].dtype for a, b in zip(got, expected, strict=True))
        exact.append([[name for name, _ in got], same])
    me.saw |= {"buckets": len(plan.buckets), "names": plan.names, "exact": exact, "staged": receiver.staging_bytes}
    receiver.close(PATIENCE_S)
    me.saw["arrived"] = arrived

    small = me.receiver()
    small.begin(1)
    small.wait(PATIENCE_S)
    me.saw["small"] = [[name, float(tensor)] for name, tensor in small.tensors(PATIENCE_S)]
    small.begin(1)
    me.saw["an old version"] = me.next_error("weights")
    me.receiver()
    me.saw["two plans"] = me.next_error("weights")
    me.receiver().begin(9)
    me.saw["another version"] = me.next_error("weights")


# --- groups -----------------------------------------------------------------------------------------------------------


def state() -> list:
    """Everything that `as_default` restores."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = [os.environ.get(name) for name in names]
    threads = torch.set_num_threads is ORIGINAL_SET_NUM_THREADS
    random = sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    return [environment, dist.get_rank(), dist.get_world_size(), threads, random]


ORIGINAL_SET_NUM_THREADS = torch.set_num_threads


def lend_groups(me: Rank) -> None:
    """Trainer ranks: a device mesh over their own group; then an exception; then a variable that was not set."""
    os.environ.pop("LOCAL_RANK")
    before = state()
    with as_default(me.groups["trainer"], local_rank=5):
        me.saw["inside"] = state()[:3]
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        total = torch.tensor([float(me.rank)])
        dist.all_reduce(total, group=mesh.get_group("dp"))
        dist.all_reduce(total)  # the default group is the trainers' here
        me.saw["sum"] = total.item()
        torch.manual_seed(1)
        torch.set_num_threads = lambda threads: None
    me.saw["restored"] = state() == before
    try:
        with as_default(me.groups["trainer"]):
            me.saw["local rank"] = os.environ["LOCAL_RANK"]
            torch.rand(3)
            torch.set_num_threads = lambda threads: None
            os.environ.pop("RANK")
            raise KeyError("no such layer")
    except KeyError:
        me.saw["restored after an exception"] = state() == before
    total = torch.tensor([float(me.rank)])
    dist.all_reduce(total, group=mesh.get_group("dp"))
    me.saw["sum after"] = total.item()


# --- the end ----------------------------------------------------------------------------------------------------------


def take_orders(me: Rank) -> None:
    """As long as rank 0 gives some."""
    pipe = Pipe(me.groups["data"], 0, me.name(0))
    with contextlib.suppress(PeerError):
        while True:
            pipe.receive()


def part_ways(me: Rank) -> None:
    """Leader 3 and trainer 2 die in mid-talk; then rank 0 leaves, and the other leaders lose it."""
    if me.rank == 0:
        me.conductor(lambda member, event: None)
        me.saw["clock lost"] = me.next_error("ctl")
        dispatcher = me.dispatcher()
        while dispatcher.is_alive():
            dispatcher.give([train_order(rank, 0) for rank in TRAINERS])
            time.sleep(0.01)
        me.saw["data lost"] = me.next_error("data")
        return
    if me.rank in LEADERS:
        me.leader()
    if me.rank in TRAINERS:
        threading.Thread(target=take_orders, args=(me,), daemon=True).start()
    if me.rank in (2, 3):
        time.sleep(0.2)
        me.save()
        os._exit(9)
    me.saw["leader lost"] = me.next_error("ctl")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    me = Rank(folder)
    if me.rank == 0:
        conduct(me)
        echo(me)
        dispatch(me)
    if me.rank in LEADERS:
        lead(me)
        echo(me)
    if me.rank in TRAINERS:
        obey(me)
        lend_groups(me)
        send_versions(me)
    if me.rank in me.mesh.inference:
        receive_versions(me)
    dist.barrier()
    part_ways(me)
    me.save()
    os._exit(0)  # some threads wait for ranks that are gone


if __name__ == "__main__":
    main(Path(sys.argv[1]))
