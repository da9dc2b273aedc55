"""Lockstep: however long things take, two runs write one journal; and so does one that died and was taken up again."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import CkptConfig, ClockConfig, Config
from spmd_rl.orchestrator.connect import after, expect_ready
from spmd_rl.orchestrator.gate import OrderedGate, QuietLoop
from spmd_rl.orchestrator.link import Link
from spmd_rl.orchestrator.lockstep import Lockstep
from spmd_rl.orchestrator.loop import Loop
from spmd_rl.orchestrator.past import JOURNAL, find_past, open_journal
from spmd_rl.orchestrator.records import Answered, AnyRecord, Steered
from spmd_rl.orchestrator.rollouts import Rollouts
from spmd_rl.orchestrator.router import Router
from spmd_rl.orchestrator.sampler import Services
from spmd_rl.orchestrator.steering import Steering
from spmd_rl.orchestrator.versions import Versions
from spmd_rl.world.checkpoints import CheckpointError
from spmd_rl.world.journal import read
from tests.orchestrator.fake_run import PROBE, FakeEnvironment, Recorder, make_config
from tests.orchestrator.fake_ticks import Death, FakeRanks


class SlowEnvironment(FakeEnvironment):
    """Thinks for a random real time between turns, on a thread or not: who is through first is chance."""

    async def rollout(self, task, policy):
        await self._think()
        episode = await super().rollout(task, policy)
        await self._think()
        return episode

    async def _think(self) -> None:
        if random.random() < 0.5:
            await asyncio.to_thread(time.sleep, random.random() * 0.003)
        else:
            await asyncio.sleep(random.random() * 0.003)


def lockstep_config(folder: Path, *, interval: int = 0, steps: int = 3, ticks: int = 2, **options) -> Config:
    config = make_config(**({"groups": 2, "max_steps": 5, "eval_tasks": 2, "eval_interval": 2} | options))
    clock = ClockConfig(mode="lockstep", steps_per_tick=steps, train_ticks=ticks)
    return replace(config, output_dir=str(folder), clock=clock, ckpt=CkptConfig(interval=interval))


def live(config: Config, engines: int = 1, turns: int = 2, dies_at: int = 0, resume: bool = False, steer=None):
    """One life of a run; (True when it came to its end, its ranks)."""
    try:
        past = find_past(config, "latest") if resume else None
    except CheckpointError:
        past = None
    journal = open_journal(config, past)
    ranks = FakeRanks(engines, dies_at)
    if past:
        ranks.restore(json.loads((Path(past.folder) / "state.json").read_text())["weights"])

    async def main() -> None:
        link = Link(engines, 1)
        gate = OrderedGate(asyncio.get_running_loop())
        lockstep = Lockstep(config.clock, gate, ranks, ranks, link.deliver, 1 + engines)
        link.connect(lockstep, lockstep)
        ready = expect_ready(link, 1 + engines)
        router = Router(engines, slack=config.orchestrator.group_size)
        services = Services(config, link, router, Rollouts(config), [2], gate)
        env = SlowEnvironment(turns)
        versions, steering = Versions(config, link, PROBE), Steering(config.output_dir, print)
        if steer:
            steer(steering)
        loop = Loop(
            config, link, services, [env], versions, Recorder(), None, journal, lockstep, steering, past
        )  # fmt: skip
        clock = asyncio.create_task(lockstep.run())
        whole = asyncio.create_task(after(ready, loop.run()))
        done, _ = await asyncio.wait({clock, whole}, return_when=asyncio.FIRST_COMPLETED)
        if clock in done:
            journal.append = lambda record: None  # the dead write nothing
            whole.cancel()
            await asyncio.wait({whole})
            clock.result()
        whole.result()
        link.stop()
        await clock

    try:
        with asyncio.Runner(loop_factory=QuietLoop) as runner:
            runner.run(asyncio.wait_for(main(), 60))
        return True, ranks
    except Death:
        return False, ranks
    finally:
        journal.close()


def journal_of(config: Config) -> bytes:
    return (Path(config.output_dir) / JOURNAL).read_bytes()


def records_of(config: Config, kind: type) -> list:
    path = Path(config.output_dir) / JOURNAL
    return [record for _, record in read(path, AnyRecord) if isinstance(record, kind)]


OPTIONS = {
    "engines": st.integers(1, 3),
    "turns": st.integers(1, 3),
    "max_lag": st.integers(0, 3),
    "order": st.sampled_from(["fifo", "window", "completion"]),
    "steps": st.integers(1, 8),
    "ticks": st.integers(1, 5),
}


@settings(max_examples=12, deadline=None)
@given(**OPTIONS)
def test_two_runs_write_the_same_journal(tmp_path_factory, engines, turns, **options):
    configs = [lockstep_config(tmp_path_factory.mktemp("run"), interval=2, **options) for _ in range(2)]
    trained = [live(config, engines, turns)[1].trained for config in configs]
    assert trained[0] == trained[1] and len(trained[0]) == 5
    assert same_journal(*configs)


def same_journal(one: Config, other: Config) -> bool:
    """Byte for byte; but a checkpoint's folder is no part of it."""
    return journal_of(one) == journal_of(other)


@settings(max_examples=20, deadline=None)
@given(death=st.floats(0.02, 0.98), again=st.floats(0.02, 2.0), interval=st.integers(1, 3), **OPTIONS)
def test_a_run_that_died_and_was_taken_up_again_is_the_same(
    tmp_path_factory, death, again, interval, engines, turns, **options
):
    """Journal and all that was trained on, bit for bit, whenever it died, and when it dies again."""
    whole, dead = (lockstep_config(tmp_path_factory.mktemp("run"), interval=interval, **options) for _ in range(2))
    _, ranks = live(whole, engines, turns)
    assert not live(dead, engines, turns, dies_at=max(1, int(death * ranks.exchanges)))[0]
    ended, last = live(dead, engines, turns, dies_at=int(again * ranks.exchanges), resume=True)
    if not ended:
        ended, last = live(dead, engines, turns, resume=True)
    assert ended and same_journal(whole, dead)
    assert last.trained == ranks.trained[-len(last.trained) :]


def test_engines_are_really_interrupted_and_versions_change_in_the_middle(tmp_path):
    """Else the tests above would hold because nothing happens in them."""
    config = lockstep_config(tmp_path / "a", interval=1, steps=1, ticks=3, max_lag=2)
    config = replace(config, orchestrator=replace(config.orchestrator, sampling=replace(
        config.orchestrator.sampling, max_tokens=9)))  # fmt: skip
    (tmp_path / "a").mkdir()
    live(config, turns=2)
    past = find_past(replace(config, max_steps=9), "latest")
    calls = [call for _, _, heard in past.snapshot["calls"] for call in heard]
    assert past.step == 5 and calls == []  # at the end nothing is in flight
    snapshots = [path / "snapshot.bin" for path in sorted((tmp_path / "a/checkpoints").iterdir())]
    assert len(snapshots) == 6
    assert any(b"partial" in path.read_bytes() for path in snapshots)
    assert len({record.id for record in records_of(config, Answered)}) > 20


def test_another_seed_is_another_run(tmp_path):
    configs = []
    for seed in range(2):
        (tmp_path / str(seed)).mkdir()
        configs.append(replace(lockstep_config(tmp_path / str(seed)), seed=seed))
        live(configs[-1])
    assert not same_journal(*configs)


def test_a_command_is_in_the_journal_and_stops_at_a_boundary(tmp_path):
    (tmp_path / "steer").mkdir(parents=True)
    (tmp_path / "steer/1.txt").write_text("set lr=0.25")
    (tmp_path / "steer/2.txt").write_text("nonsense")
    config = lockstep_config(tmp_path)
    live(config)
    assert records_of(config, Steered) == [Steered(1, "set lr=0.25")]
    assert list((tmp_path / "steer").iterdir()) == []


@pytest.mark.parametrize("how", ["file", "signal"])
def test_a_stopped_run_is_taken_up_where_it_stopped(tmp_path, how):
    """Not bit for bit the run that nobody stopped: the stop itself is a fence. But nothing is lost."""
    config = lockstep_config(tmp_path, max_lag=2)

    def steer(steering: Steering) -> None:
        if how == "file":
            (tmp_path / "stop").write_text("")
        else:
            asyncio.get_running_loop().call_later(0.05, steering.stop)

    ended, ranks = live(config, steer=steer)
    assert ended and len(ranks.trained) < 5
    ended, rest = live(config, resume=True)
    assert ended and [step for step, _ in ranks.trained + rest.trained] == [1, 2, 3, 4, 5]
