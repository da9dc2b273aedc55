"""What rank 0 does: check, connect, run the loop, draw the picture, say what to do next.

The loop itself is `loop.py`; this file puts its parts together and knows the threads behind them. Importing it needs no
torch: what owns process groups is imported where it is started.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_rl.config.tree import Config
from spmd_rl.envs.protocol import Environment
from spmd_rl.models.hf_config import read_config, resolve
from spmd_rl.observe.logs import RankOutput
from spmd_rl.observe.metrics import Metrics
from spmd_rl.observe.plots import reward_png
from spmd_rl.observe.progress import Progress
from spmd_rl.orchestrator import preflight
from spmd_rl.orchestrator.connect import after, expect_ready, first_error, router_for
from spmd_rl.orchestrator.gate import Gate, OrderedGate, QuietLoop
from spmd_rl.orchestrator.link import Link
from spmd_rl.orchestrator.lockstep import Lockstep
from spmd_rl.orchestrator.loop import Loop
from spmd_rl.orchestrator.past import Past, find_past, open_journal
from spmd_rl.orchestrator.report import Report
from spmd_rl.orchestrator.rollouts import Rollouts
from spmd_rl.orchestrator.routes import Routes
from spmd_rl.orchestrator.sampler import Services
from spmd_rl.orchestrator.signals import stop_signals
from spmd_rl.orchestrator.sources import make_sources
from spmd_rl.orchestrator.stall import watch_progress
from spmd_rl.orchestrator.steering import Steering
from spmd_rl.orchestrator.versions import Versions, probe_set
from spmd_rl.orchestrator.vitals import Vitals
from spmd_rl.rollouts.cost import TrainingCost
from spmd_rl.rollouts.packing import Cost
from spmd_rl.world.journal import Journal

if TYPE_CHECKING:
    from spmd_rl.world.orders import Dispatcher
    from spmd_rl.world.world import World

Leave = Callable[[], Awaitable[Any]]


@dataclass
class Parts:
    """What preflight found."""

    tokenizer: Any
    envs: list[Environment]
    stop_token_ids: list[int]
    probe: list = field(default_factory=list)
    past: Past | None = None
    cost: Cost | None = None


def run(world: World, output: RankOutput, loop_type: type[Loop] = Loop) -> None:
    """Orchestrate the whole run; returns when every rank was told to stop. Benchmarks bring a loop of their own."""
    config = world.config
    with world.watchdog.stage("preflight", config.deadlines.start_s):
        parts = _prepare(world)
        journal = open_journal(config, parts.past)
    metrics = Metrics(
        config.output_dir,
        tensorboard=config.log.tensorboard,
        wandb_project=config.log.wandb_project if config.log.wandb else "",
        config=asdict(config),
        append=parts.past is not None,
    )
    progress = Progress(config.log.progress, {"warmup": config.warmup.steps, "rl": config.max_steps}, output.screen)
    output.show = progress.write
    with metrics, progress, contextlib.closing(journal), asyncio.Runner(loop_factory=QuietLoop) as runner:
        loop = runner.run(_orchestrate(world, parts, journal, metrics, progress, loop_type))
        picture = reward_png(metrics.path, Path(config.output_dir) / "reward.png")
    print(farewell(config, loop.report, picture, loop.stopped_at))


def _prepare(world: World) -> Parts:
    config = world.config
    past = find_past(config, world.resume) if world.resume else None  # before anything is touched
    folder = resolve(config.model.name)
    preflight.check_disk(config)
    model_config = read_config(folder)
    tokenizer = preflight.load_tokenizer(config)
    preflight.check_vocabulary(tokenizer, model_config, config)
    preflight.check_reference(model_config, config)
    envs = preflight.load_environments(config, tokenizer)
    count = config.weights.probe_sequences
    prompts = [env.prompt(env.task(i, "train")) for i in range(count) for env in envs][:count]
    probe = probe_set(prompts, min(config.weights.probe_length, config.seq_len - 1))
    cost = TrainingCost.known(model_config)
    return Parts(tokenizer, envs, preflight.stop_tokens(tokenizer, folder), probe, past, cost)


async def _orchestrate(
    world: World, parts: Parts, journal: Journal, metrics: Metrics, progress: Progress, loop_type: type[Loop]
) -> Loop:
    from spmd_rl.world.orders import Dispatcher

    config, mesh, watchdog = world.config, world.mesh, world.watchdog
    link = Link(len(mesh.replicas), len(mesh.trainers), len(mesh.frozen), mesh.colocated, mesh.dims.cp)
    names = [f"rank {rank} ({mesh.role(rank)})" for rank in mesh.trainers]
    orders = Dispatcher(world.groups["data"], names, watchdog.fail, world.down("data"))
    gate = OrderedGate(asyncio.get_running_loop()) if config.clock.mode == "lockstep" else Gate()
    ready = expect_ready(link, len(mesh.leaders))
    steering = Steering(config.output_dir, progress.write)
    lockstep, leave = _start_clock(world, link, orders, gate)
    orders.start()
    rollouts, stops = Rollouts(config), parts.stop_token_ids
    routes = Routes(link) if config.trainer.router_replay else None
    services = Services(config, link, router_for(config, link.replicas), rollouts, stops, gate, routes=routes)
    teacher = None
    if link.frozen:
        router = router_for(config, link.frozen)
        teacher = Services(config, link, router, rollouts, stops, gate, first_replica=link.replicas)
    vitals = Vitals(make_sources(config, parts.envs))
    report = Report(config, link, metrics, progress, parts.tokenizer.decode, vitals.metrics)
    loop = loop_type(
        config, link, services, parts.envs, Versions(config, link, parts.probe), report, teacher,
        journal, lockstep, steering, parts.past, watchdog.span, parts.tokenizer, parts.cost,
    )  # fmt: skip
    with watchdog.stage("orchestrate", config.deadlines.heartbeat_s, whole=True), stop_signals(steering, watchdog):
        watchers = [watch_progress(link, config.deadlines.stall_s, watchdog.beat), steering.watch()]
        if lockstep:
            watchers.append(lockstep.run())
        await first_error(after(ready, loop.run()), [asyncio.create_task(watcher) for watcher in watchers])
        link.stop()
        await asyncio.to_thread(orders.join, config.deadlines.step_s)
        await leave()
    return loop


def _start_clock(world: World, link: Link, orders: Dispatcher, gate: Gate) -> tuple[Lockstep | None, Leave]:
    """Connect the link to the clock that the config asks for; what to await at the end."""
    from spmd_rl.world.clock import Conductor, Metronome

    config, mesh, watchdog = world.config, world.mesh, world.watchdog
    members = [f"rank {rank} ({mesh.role(rank)})" for rank in mesh.leaders]
    if isinstance(gate, OrderedGate):
        metronome = Metronome(world.groups["ctl"], members, watchdog.tick, world.down("ctl"))
        lockstep = Lockstep(config.clock, gate, metronome, orders, link.deliver, len(members), mesh.colocated)
        link.connect(lockstep, lockstep)
        return lockstep, lambda: asyncio.wait_for(lockstep.ended.wait(), config.deadlines.step_s)
    period_s = config.clock.period_ms / 1e3
    clock = Conductor(
        world.groups["ctl"], members, period_s, link.deliver, watchdog.fail, watchdog.tick, world.down("ctl")
    )
    link.connect(clock, orders)
    clock.start()
    return None, lambda: asyncio.to_thread(clock.join, config.deadlines.step_s)


def farewell(config: Config, report: Report, picture: Path, stopped_at: int = -1) -> str:
    """What came out, where it lies, what to do next."""
    out = Path(config.output_dir)
    if stopped_at >= 0:
        return f"\nstopped after step {stopped_at}; go on with the same command and --ckpt.resume latest"
    lines = [""]
    if report.evaluations:
        first, last = report.evaluations[0], report.evaluations[-1]
        lines.append(f"held-out reward, sampled  {first['eval/reward']:.3f} -> {last['eval/reward']:.3f}")
        if "eval/greedy" in last:
            lines.append(f"held-out reward, greedy   {first['eval/greedy']:.3f} -> {last['eval/greedy']:.3f}")
    lines += [
        f"model          {out / 'hf'}",
        f"picture        {picture}",
        *([f"timeline       {out / 'timeline.png'}, trace.json for Perfetto"] if config.log.timeline else []),
        f"metrics        {out / 'metrics.jsonl'}",
        f"rollouts       {out / 'rollouts'}",
        f"TensorBoard    tensorboard --logdir {out}",
        "",
        "next: change orchestrator.source to your own environment (README, 'Your own task'), or any key by a flag,",
        f"      e.g. --orchestrator.max-lag 3 --output-dir {out}-lag3",
    ]
    return "\n".join(lines)
