"""What a trainer rank does: carry out orders, one after the other, as all trainer ranks do in the same order.

This is the training loop, for reinforcement learning and for supervised training alike: an order is a batch to learn
from, rows to validate on, a fresh optimizer, a policy version to send, an export, a checkpoint to write or to go back
to. In RL orders come from rank 0; in supervised training every rank makes its own (`sft.py`). Sending and saving go on
beside the next forward on threads of their own. Only the first trainer rank reports.

It refuses to know about rollouts, engines and what a step is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from spmd_rl.models import build as models
from spmd_rl.models.deepep import DeepEP
from spmd_rl.models.experts_parallel import AllToAll, ExchangeMaker, ep_problem
from spmd_rl.rollouts.types import Row
from spmd_rl.trainer.checkpoint import Checkpoints
from spmd_rl.trainer.gather import Gather
from spmd_rl.trainer.learner import Learner
from spmd_rl.trainer.optim import learning_rate
from spmd_rl.trainer.parallel import TrainerMeshes
from spmd_rl.world.buckets import Plan, expert_taker
from spmd_rl.world.clock import Leader
from spmd_rl.world.groups import as_default
from spmd_rl.world.messages import (
    Event,
    Export,
    Exported,
    FreshOptimizer,
    Order,
    Ready,
    Restore,
    Save,
    Saved,
    Send,
    Sent,
    Stop,
    Train,
    Trained,
    Validate,
    Validated,
)
from spmd_rl.world.pipe import pipe_from
from spmd_rl.world.routes import RouteReceiver
from spmd_rl.world.trainer_mesh import TrainerDims, largest_ep
from spmd_rl.world.weights import Sender
from spmd_rl.world.wire import decode
from spmd_rl.world.world import World

Replay = Callable[[Train, list[Row]], list[Row]]  # a batch's rows with the experts that engines took for them


def run(world: World) -> None:
    """Build the learner and follow rank 0's orders until it says stop."""
    config, deadlines, watchdog = world.config, world.config.deadlines, world.watchdog
    index = world.mesh.trainers.index(world.rank)
    clock = Leader(world.groups["ctl"], watchdog.fail, watchdog.tick, world.up("ctl")) if index == 0 else None
    if clock:
        clock.start()
    started = time.perf_counter()
    learner = build_learner(world)
    with watchdog.stage("plan the weights", deadlines.start_s):
        sender = _sender(world, learner, index)
    routes = _receive_routes(world, learner) if config.trainer.router_replay else None
    trainer = TrainerRank(world, learner, clock.tell if clock else silent, sender, routes)
    trainer.tell(Ready(world.rank, {"build_s": time.perf_counter() - started}))
    trainer.follow(received_orders(world))
    if clock:
        clock.join(deadlines.step_s)


def build_learner(world: World) -> Learner:
    """This rank's share of the model."""
    torch.set_num_threads(world.config.trainer.threads)
    with world.watchdog.stage("build the model", world.config.deadlines.start_s):
        group = world.groups["trainer"] if len(world.mesh.trainers) > 1 else None
        watchdog = world.watchdog
        return Learner(world.config, _meshes(world), world.device, group, watchdog.beat, watchdog.span)


def received_orders(world: World) -> Iterator[Order]:
    """Rank 0's orders, as they come."""
    pipe = pipe_from(world.groups["data"], world.up("data"))
    while True:
        with world.watchdog.stage("wait for an order"):
            order = decode(pipe.receive(), Order)
        yield order


def _sender(world: World, learner: Learner, index: int) -> Sender:
    """To the engines. ValueError where these would divide experts that the model does not have."""
    config, mesh, groups, takers = world.config, world.mesh, world.groups, {}
    if config.inference.expert_parallel:
        takers = {
            name: expert_taker(expert, experts, config.inference.tp)
            for name, (expert, experts) in learner.shards.experts().items()
        }
        if not takers:
            raise ValueError(
                f"inference.expert_parallel divides experts, and {config.model.name!r} has none that travel one by "
                "one: leave it out, or use trainer.model.impl = custom with a mixture of experts"
            )
    plan = Plan.build(learner.shards.table(), int(config.weights.bucket_mb * 2**20), len(mesh.trainers), takers)
    experts = [groups[f"experts/{index}/{k}"] for k in range(config.inference.tp)] if mesh.divided else []
    watchdog = world.watchdog
    return Sender(plan, index, groups[f"weights/{index}"], world.device, watchdog.fail, watchdog.span, experts)


def _receive_routes(world: World, learner: Learner) -> Replay:
    mesh = world.mesh
    leaders = range(len(mesh.trainers), len(mesh.trainers) + len(mesh.replicas))
    receiver = RouteReceiver(world.groups["routes"], leaders, *routed_sizes(world, learner))
    return lambda order, rows: receiver.fill(order.step, rows)


def routed_sizes(world: World, learner: Learner) -> tuple[int, int, int]:
    """Layers, experts per token, experts. ValueError where the model has no experts that could be replayed."""
    config = getattr(learner.model, "config", None)
    if not getattr(learner.model, "moe_layers", None):
        raise ValueError(
            f"trainer.router_replay forces a router's choices, and {type(learner.model).__name__} of "
            f"{world.config.model.name!r} has no router of ours: leave it off, or use trainer.model.impl = custom with "
            "a mixture of experts"
        )
    return config.num_hidden_layers, config.num_experts_per_tok, config.num_experts


def silent(event: Event) -> None:
    """What all trainer ranks but the first say."""


def _meshes(world: World) -> TrainerMeshes | None:
    """The trainer ranks as torch meshes; None when one float32 rank needs no sharding."""
    dims, exchange = _expert_parallelism(world)
    if len(world.mesh.trainers) == 1 and world.config.trainer.model.dtype == "float32":
        return None
    with as_default(world.groups["trainer"]):
        return TrainerMeshes.build(dims, world.device.type, exchange)


def _expert_parallelism(world: World) -> tuple[TrainerDims, ExchangeMaker]:
    """The mesh's dimensions with the number of ranks that share experts, and how these talk.

    Raises ValueError where that number does not fit the model, on all ranks alike and before anything is allocated.
    """
    config, dims = world.config, world.mesh.dims
    settings = config.trainer.parallel
    if dims.ep == 1:
        return dims, AllToAll
    experts = models.expert_count(models.resolve(config.model.name), config.trainer.model.impl)
    if dims.ep == 0:
        host_of = [world.hosts.first[rank] for rank in world.mesh.trainers]
        dims = replace(dims, ep=largest_ep(dims, host_of, experts) if experts else 1)
    if problem := ep_problem(dims.ep, experts):
        raise ValueError(f"model folder {config.model.name!r}: {problem}")
    if settings.ep_comm_backend == "torch":
        return dims, AllToAll
    chunk = settings.deepep_token_chunk_size
    return dims, DeepEP(chunk or config.seq_len, bool(chunk), settings.deepep_num_sms)


class TrainerRank:
    """One trainer rank.

    Args:
        tell: where events go.
        sender: to the engines; None where there are none.
        routes: gives rows the routed experts of the engines; None where none are replayed.
    """

    def __init__(
        self,
        world: World,
        learner: Learner,
        tell: Callable[[Event], None],
        sender: Sender | None = None,
        routes: Replay | None = None,
    ) -> None:
        self.tell, self._routes = tell, routes
        self._gather = Gather(learner.shards, sender.plan) if sender else None
        self._world, self._learner, self._sender = world, learner, sender
        self._checkpoints = Checkpoints(world.groups["ckpt"], world.config.ckpt.keep, world.config.ckpt.keep_every)
        self._deadline_s = world.config.deadlines.step_s

    def follow(self, orders: Iterator[Order]) -> None:
        """The loop: one order at a time, until Stop."""
        while True:
            started = time.perf_counter()
            order = next(orders)
            self.carry_out(order, time.perf_counter() - started)
            if isinstance(order, Stop):
                return

    def carry_out(self, order: Order, waited_s: float) -> None:
        """One order; `waited_s` is how long this rank had nothing to do before it."""
        with self._world.watchdog.stage(type(order).__name__.lower(), self._deadline_s):
            match order:
                case Train():
                    self._train(order, waited_s)
                case Validate():
                    metrics = self._learner.validate([Row(**columns) for columns in order.rows])
                    self.tell(Validated(order.step, metrics))
                case FreshOptimizer():
                    self._learner.start_rl()
                case Send():
                    self._send(order)
                case Export():
                    self._learner.export(order.folder)
                    self.tell(Exported(order.folder))
                case Save():
                    self._save(order)
                case Restore():
                    self._checkpoints.wait()
                    self._checkpoints.load(order.folder, self._learner.checkpoint_parts())
                case Stop():
                    self._checkpoints.wait()
                    if self._sender:
                        self._sender.close(self._deadline_s)

    def _train(self, order: Train, waited_s: float) -> None:
        config = self._world.config
        recipe = config.warmup if order.phase == "warmup" else config.trainer
        steps = config.warmup.steps if order.phase == "warmup" else config.max_steps
        lr = learning_rate(order.step - 1, recipe.optim, recipe.scheduler, steps) if order.lr < 0 else order.lr
        started, cpu = time.perf_counter(), time.process_time()
        minibatches = self._rows(order)
        only_critic = order.phase == "rl" and order.step <= config.orchestrator.algorithm.critic.warmup_steps
        metrics = self._learner.step(minibatches, lr, train_policy=not only_critic)
        metrics |= {"time/train_s": time.perf_counter() - started, "time/wait_s": waited_s}
        metrics["cpu/trainer_s"] = time.process_time() - cpu
        self.tell(Trained(order.step, order.phase, metrics))

    def _rows(self, order: Train) -> list[list[Row]]:
        """By minibatch; with the routed experts that engines send for them."""
        rows = [Row(**columns) for of_minibatch in order.rows for columns in of_minibatch]
        if self._routes is not None and order.phase == "rl":
            with self._world.watchdog.span("wait for routes"):
                rows = self._routes(order, rows)
        ends = np.cumsum([len(of_minibatch) for of_minibatch in order.rows])
        return [rows[end - len(part) : end] for end, part in zip(ends.tolist(), order.rows, strict=True)]

    def _save(self, order: Save) -> None:
        """Begin to write; `Saved` follows when it is complete."""
        parts = self._learner.checkpoint_parts()
        self._checkpoints.save(order.folder, parts, order.state, lambda: self.tell(Saved(order.folder)), order.snapshot)

    def _send(self, order: Send) -> None:
        """Copy the weights out, then score the probe set with them while they travel."""
        assert self._sender is not None
        started = time.perf_counter()
        self._sender.send(order.version, self._write, self._deadline_s)
        gather_s = time.perf_counter() - started
        logprobs = self._learner.score(order.probe) if order.probe else []
        self.tell(Sent(order.version, gather_s, logprobs))

    def _write(self, views: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Fills what this rank sends; every tensor is progress, for a watchdog that looks on."""
        assert self._gather is not None
        for name in self._gather.write(views):
            self._learner.beat(f"gather {name}")
            yield name
