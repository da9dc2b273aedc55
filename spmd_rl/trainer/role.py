"""What a trainer rank does: carry out rank 0's orders, one after the other, as all trainer ranks do in the same order.

An order is a step on this rank's rows, a fresh optimizer, sending a policy version, or an export. Sending goes on
beside the next forward on a thread of its own. Only trainer rank 0 reports, with ticks.

It refuses to know about rollouts, engines and what a step is for: warm-up and RL are the same order.
"""

from __future__ import annotations

import time

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spmd_rl.rollouts.types import Row
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
    Send,
    Sent,
    Stop,
    Train,
    Trained,
)
from spmd_rl.world.pipe import Pipe
from spmd_rl.world.weights import Sender
from spmd_rl.world.wire import decode
from spmd_rl.world.world import World


def run(world: World) -> None:
    """Build the learner and follow orders until rank 0 says stop."""
    config, deadlines, watchdog = world.config, world.config.deadlines, world.watchdog
    torch.set_num_threads(config.trainer.threads)
    index = world.mesh.trainers.index(world.rank)
    clock = Leader(world.groups["ctl"], watchdog.fail) if index == 0 else None
    if clock:
        clock.start()
    with watchdog.stage("build the model", deadlines.start_s):
        started = time.perf_counter()
        group = world.groups["trainer"] if len(world.mesh.trainers) > 1 else None
        learner = Learner(config, _device_mesh(world), world.device, group, watchdog.beat)
        plan = Plan.build(learner.parameter_table(), int(config.weights.bucket_mb * 2**20), len(world.mesh.trainers))
        sender = Sender(plan, index, world.groups[f"weights/{index}"], world.device, watchdog.fail)
        built_s = time.perf_counter() - started
    trainer = TrainerRank(world, learner, sender, clock)
    trainer.tell(Ready(world.rank, {"build_s": built_s}))
    trainer.follow_orders()
    if clock:
        clock.join(deadlines.step_s)


def _device_mesh(world: World) -> DeviceMesh | None:
    """The trainer ranks as a torch mesh; None when one float32 rank needs no sharding."""
    if len(world.mesh.trainers) == 1 and world.config.trainer.model.dtype == "float32":
        return None
    with as_default(world.groups["trainer"]):
        return init_device_mesh(world.device.type, (len(world.mesh.trainers),), mesh_dim_names=("dp_shard",))


class TrainerRank:
    """One trainer rank; `clock` is None on all but the first."""

    def __init__(self, world: World, learner: Learner, sender: Sender, clock: Leader | None) -> None:
        self._world, self._learner, self._sender, self._clock = world, learner, sender, clock
        self._orders = Pipe(world.groups["data"], 0, "rank 0 (orchestrator)")
        self._deadline_s = world.config.deadlines.step_s

    def tell(self, event: Event) -> None:
        """Report to rank 0; silent on all ranks but the first trainer."""
        if self._clock:
            self._clock.tell(event)

    def follow_orders(self) -> None:
        """The loop: one order at a time."""
        watchdog = self._world.watchdog
        while True:
            started = time.perf_counter()
            with watchdog.stage("wait for an order"):
                order = decode(self._orders.receive(), Order)
            waited_s = time.perf_counter() - started
            with watchdog.stage(type(order).__name__.lower(), self._deadline_s):
                match order:
                    case Train():
                        self._train(order, waited_s)
                    case FreshOptimizer():
                        self._learner.start_rl()
                    case Send():
                        self._send(order)
                    case Export():
                        self._learner.export(order.folder)
                        self.tell(Exported(order.folder))
                    case Stop():
                        self._sender.close(self._deadline_s)
                        return

    def _train(self, order: Train, waited_s: float) -> None:
        config = self._world.config
        recipe = config.warmup if order.phase == "warmup" else config.trainer
        steps = config.warmup.steps if order.phase == "warmup" else config.max_steps
        lr = learning_rate(order.step - 1, recipe.optim, recipe.scheduler, steps)
        started, cpu = time.perf_counter(), time.process_time()
        minibatches = [[Row(**columns) for columns in rows] for rows in order.rows]
        only_critic = order.phase == "rl" and order.step <= config.orchestrator.algorithm.critic.warmup_steps
        metrics = self._learner.step(minibatches, lr, train_policy=not only_critic)
        metrics |= {"time/train_s": time.perf_counter() - started, "time/wait_s": waited_s}
        metrics["cpu/trainer_s"] = time.process_time() - cpu
        self.tell(Trained(order.step, order.phase, metrics))

    def _send(self, order: Send) -> None:
        """Copy the weights out, then score the probe set with them while they travel."""
        started = time.perf_counter()
        self._sender.send(order.version, self._learner.full_tensors(), self._deadline_s)
        gather_s = time.perf_counter() - started
        logprobs = self._learner.score(order.probe) if order.probe else []
        self.tell(Sent(order.version, gather_s, logprobs))
