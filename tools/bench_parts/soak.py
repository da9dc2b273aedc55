"""Soak: does the memory of rank 0 stay flat over half a million rollouts?

Part "fake": the main loop as it is, its journal and its checkpoints on a real disk, against the fake cluster of the
tests in virtual time. Whatever is fake forgets what it has seen, so what grows is the loop's own. RSS of this process
is read after every step. Flat means that the mean of the last quarter of the steps is that of the second quarter, but
for the target's share; the first quarter fills caches and pools. The slope is a least-squares fit over the last three
quarters: it shows growth that is too small for the verdict; what grows by step shows sooner in smaller batches.

SOAK_ROLLOUTS overrides how many rollouts are trained on.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from spmd_rl.config.tree import CkptConfig, Config
from spmd_rl.orchestrator.batch import Batch
from spmd_rl.orchestrator.past import open_journal
from spmd_rl.orchestrator.window import Window
from spmd_rl.world.checkpoints import prune
from spmd_rl.world.journal import Journal
from spmd_rl.world.messages import Decision, Generate, Generated, Order, Pulled, Refused, Saved, Send, Train

# The tests' cluster, because a second one would have to be kept true as well: engines and trainers that cost nothing,
# with delays of a heavy tail, are what lets one process see as many rollouts as a run of days.
from tests.orchestrator import fake_run
from tests.orchestrator.fake_cluster import FakeCluster
from tests.orchestrator.virtual_time import run as run_in_virtual_time
from tools.bench_parts.ranks import finish

ROLLOUTS = 500_000
GROUPS, GROUP_SIZE, MAX_TOKENS, MAX_LAG, REPLICAS, CKPT_INTERVAL = 32, 16, 8, 1, 2, 50
KEPT = 64  # versions that the fake remembers; the bound of the window lets no request span nearly as many
TARGET = 0.02  # by which the mean RSS of the last quarter may differ from that of the second one
PAGE = os.sysconf("SC_PAGE_SIZE")


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return the figures."""
    f = fake(int(os.environ.get("SOAK_ROLLOUTS", ROLLOUTS)))
    print(
        f"fake cluster: {f['rollouts']:,} rollouts in {f['steps']} steps of {GROUPS} × {GROUP_SIZE}, max_lag {MAX_LAG} "
        f"(lag at most {f['lag_max']}), a checkpoint every {CKPT_INTERVAL} steps"
    )
    print(
        f"{f['rollouts_per_s']:,.0f} rollouts/s, {f['wall_s']:.0f} s (CPU {f['cpu_s']:.0f} s, the fake's included); "
        f"journal {f['journal_mb']:.0f} MB"
    )
    means = "  ".join(f"{mb:.2f}" for mb in f["rss_mb_mean"])
    print(
        f"RSS in MB, at the start {f['rss_mb_start']:.2f}; means of the quarters  {means}; most {f['rss_mb_max']:.2f}"
    )
    print(f"RSS in MB, at the ends of the quarters  {'  '.join(f'{mb:.2f}' for mb in f['rss_mb_end'])}")
    print(f"last quarter / second: {f['growth']:+.2%}  {'met' if f['flat'] else 'MISSED'}: target ± {TARGET:.0%}")
    print(f"slope of the last three quarters: {f['bytes_per_step']:+,.0f} bytes a step")
    return finish({"target": TARGET, "fake": f}, json_path)


def fake(rollouts: int) -> dict[str, Any]:
    """The figures of one run against the fake cluster."""
    steps = max(8, -(-rollouts // (GROUPS * GROUP_SIZE)))
    with tempfile.TemporaryDirectory() as folder:
        small = fake_run.make_config(
            max_steps=steps,
            groups=GROUPS,
            group_size=GROUP_SIZE,
            max_tokens=MAX_TOKENS,
            max_lag=MAX_LAG,
            output_dir=folder,
        )
        config = replace(small, ckpt=CkptConfig(interval=CKPT_INTERVAL))
        watch, journal = Watch(config), open_journal(config, None)
        started, started_cpu = time.perf_counter(), time.process_time()
        try:
            run_in_virtual_time(train(config, journal, watch))
        finally:
            journal.close()
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    return {
        "rollouts": watch.rollouts,
        "steps": steps,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "rollouts_per_s": watch.rollouts / wall_s,
        "journal_mb": journal.offset / 1e6,
        "lag_max": watch.lag_max,
        **judge(watch.rss, watch.rss_start),
    }


async def train(config: Config, journal: Journal, watch: Watch) -> None:
    """One whole run, put together as the tests do it."""
    with mock.patch.object(fake_run, "FakeCluster", ForgetfulCluster):
        made = await fake_run.prepare(
            config, [ForgetfulEnvironment()], replicas=REPLICAS, report=lambda link: watch, journal=journal
        )
    try:
        await made.loop.run()
        made.loop.link.stop()
    finally:
        await made.cluster.close()


def judge(rss: np.ndarray, start: int) -> dict[str, Any]:
    """Figures and verdict of RSS after every step, in bytes."""
    quarters = np.array_split(rss, 4)
    means = [float(quarter.mean()) for quarter in quarters]
    growth = means[3] / means[1] - 1
    settled = rss[len(quarters[0]) :]
    return {
        "rss_mb_start": start / 1e6,
        "rss_mb_mean": [mean / 1e6 for mean in means],
        "rss_mb_end": [float(quarter[-1]) / 1e6 for quarter in quarters],
        "rss_mb_max": float(rss.max()) / 1e6,
        "growth": growth,
        "flat": abs(growth) <= TARGET,
        "bytes_per_step": float(np.polyfit(np.arange(len(settled)), settled, 1)[0]),
    }


def resident() -> int:
    """RSS of this process in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE


class Watch:
    """A `Report` that counts, checks the order of steps and their lag, and reads RSS; its own size is fixed."""

    def __init__(self, config: Config) -> None:
        o = config.orchestrator
        self.rss = np.ones(config.max_steps)  # bytes after each step
        self.rss_start = resident()
        self.rollouts = self.lag_max = self._step = 0
        self._bound = Window(o.groups_per_batch, o.max_lag, o.window_fraction, o.order).bound

    def start(self, phase: str, pull: Any = None) -> None:
        pass

    def rl_step(self, step: int, batch: Batch, packed: Any, trained: Any, pull: Any, collapse: Any = None) -> None:
        assert trained.step == step == self._step + 1, "steps are booked in order"
        self._step, self.rollouts = step, self.rollouts + len(batch.episodes)
        self.lag_max = max(self.lag_max, int(batch.lags(step).max()))
        assert self._bound is None or self.lag_max <= self._bound, "nothing is staler than the window allows"
        self.rss[step - 1] = resident()

    def state(self) -> dict[str, Any]:
        return {}


class ForgetfulEnvironment(fake_run.FakeEnvironment):
    """Without a history."""

    async def rollout(self, task: Any, policy: Any) -> Any:
        return await self.attempt(task, policy)


class ForgetfulCluster(FakeCluster):
    """Remembers requests in flight and orders not yet carried out; counters take the place of everything older.

    What is checked is the same: each request once and answered once, steps and versions in order, nothing after Stop.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._newest = -1  # request
        self._steps = self._versions = 0  # ordered

    def decide(self, member: int, decision: Decision) -> None:
        # Not the tests' own: that one makes a text of every request, in case it is wrong, which takes most of the time.
        self._require("decisions" not in self.stopped, "a decision after Stop")
        self._require(1 <= member <= len(self._replicas), f"a decision for member {member}")
        if isinstance(decision, Generate):
            self._require(decision.id > self._newest, f"request {decision.id} after {self._newest}")
            self._require(len(decision.tokens) > 0 and decision.max_tokens > 0, f"request {decision.id} is empty")
            self._newest, self.requests[decision.id] = decision.id, decision
        self._replicas[member - 1].inbox.put_nowait(decision)

    def give(self, orders: list[Order]) -> None:
        super().give(orders)
        self.orders.clear()

    def tell(self, member: int, event: Any) -> None:
        if isinstance(event, Generated | Refused):
            self._require(self.requests.pop(event.id, None) is not None, f"the fake answered {event.id} out of turn")
        super().tell(member, event)
        self.answers.clear()
        if isinstance(event, Pulled):
            replica = self._replicas[member - 1]
            del replica._held[:-KEPT], replica._since[:-KEPT]
            self.sent.pop(event.version - KEPT, None)
        elif isinstance(event, Saved):
            prune(Path(event.folder).parent, keep=2, keep_every=0)  # as a trainer does it

    def _check_sequence(self, orders: list[Order]) -> None:
        match orders[0]:
            case Train(step=step, phase=phase):
                self._require(phase == "rl" and step == self._steps + 1, f"{phase} {step} after {self._steps}")
                self._require(self._versions == step, f"rl {step} before its send")
                self._require(len({tuple(map(len, order.rows)) for order in orders}) == 1, f"{step}: unequal rows")
                self._steps = step
            case Send(version=version):
                self._require(version == self._versions, f"send {version} after {self._versions - 1}")
                self._require(version == self._steps, f"send {version} after step {self._steps}")
                self._versions += 1
