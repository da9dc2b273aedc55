"""What a trainer rank does: carry out orders, one after the other, as all trainer ranks do in the same order.

This is the training loop, for reinforcement learning and for supervised training alike: an order is a batch to learn
from, rows to validate on, a fresh optimizer, a policy version to send, an export, a checkpoint to write or to go back
to. In RL orders come from rank 0; in supervised training every rank makes its own (`sft.py`). Sending and saving go on
beside the next forward on threads of their own. Only the first trainer rank reports.

It refuses to know about rollouts, engines and what a step is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spmd_rl.rollouts.types import Row
from spmd_rl.trainer.checkpoint import Checkpoints
from spmd_rl.trainer.learner import Learner
from spmd_rl.trainer.optim import learning_rate
from spmd_rl.world.buckets import Plan
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
from spmd_rl.world.weights import Sender
from spmd_rl.world.wire import decode
from spmd_rl.world.world import World


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
        plan = Plan.build(learner.parameter_table(), int(config.weights.bucket_mb * 2**20), len(world.mesh.trainers))
        sender = Sender(plan, index, world.groups[f"weights/{index}"], world.device, watchdog.fail, watchdog.span)
    trainer = TrainerRank(world, learner, clock.tell if clock else silent, sender)
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
        return Learner(world.config, _device_mesh(world), world.device, group, watchdog.beat, watchdog.span)


def received_orders(world: World) -> Iterator[Order]:
    """Rank 0's orders, as they come."""
    pipe = pipe_from(world.groups["data"], world.up("data"))
    while True:
        with world.watchdog.stage("wait for an order"):
            order = decode(pipe.receive(), Order)
        yield order


def silent(event: Event) -> None:
    """What all trainer ranks but the first say."""


def _device_mesh(world: World) -> DeviceMesh | None:
    """The trainer ranks as a torch mesh; None when one float32 rank needs no sharding."""
    if len(world.mesh.trainers) == 1 and world.config.trainer.model.dtype == "float32":
        return None
    with as_default(world.groups["trainer"]):
        return init_device_mesh(world.device.type, (len(world.mesh.trainers),), mesh_dim_names=("dp_shard",))


class TrainerRank:
    """One trainer rank.

    Args:
        tell: where events go.
        sender: to the engines; None where there are none.
    """

    def __init__(
        self, world: World, learner: Learner, tell: Callable[[Event], None], sender: Sender | None = None
    ) -> None:
        self.tell = tell
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
        minibatches = [[Row(**columns) for columns in rows] for rows in order.rows]
        only_critic = order.phase == "rl" and order.step <= config.orchestrator.algorithm.critic.warmup_steps
        metrics = self._learner.step(minibatches, lr, train_policy=not only_critic)
        metrics |= {"time/train_s": time.perf_counter() - started, "time/wait_s": waited_s}
        metrics["cpu/trainer_s"] = time.process_time() - cpu
        self.tell(Trained(order.step, order.phase, metrics))

    def _save(self, order: Save) -> None:
        """Begin to write; `Saved` follows when it is complete."""
        parts = self._learner.checkpoint_parts()
        self._checkpoints.save(order.folder, parts, order.state, lambda: self.tell(Saved(order.folder)), order.snapshot)

    def _send(self, order: Send) -> None:
        """Copy the weights out, then score the probe set with them while they travel."""
        assert self._sender is not None
        started = time.perf_counter()
        self._sender.send(order.version, self._learner.full_tensors(), self._deadline_s)
        gather_s = time.perf_counter() - started
        logprobs = self._learner.score(order.probe) if order.probe else []
        self.tell(Sent(order.version, gather_s, logprobs))
