"""A run is told something while it goes on: what takes effect, and when."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from spmd_rl.config.tree import CkptConfig
from spmd_rl.orchestrator.stall import watch_progress
from spmd_rl.orchestrator.steering import SteerError, Steering, parse
from spmd_rl.world.messages import Save, Train
from tests.orchestrator.fake_cluster import Delays
from tests.orchestrator.fake_run import Run, make_config, prepare
from tests.orchestrator.virtual_time import run


def steered(tmp_path: Path, *commands: tuple[float, str], stall_s: float = 1e9, **options) -> Run:
    """A run whose folder gets these commands, each at its virtual second."""
    config = replace(make_config(max_steps=6, **options), output_dir=str(tmp_path), ckpt=CkptConfig(interval=0))
    (tmp_path / "steer").mkdir()

    async def main() -> Run:
        made = await prepare(config, delays=Delays(train=10.0, tail=9.0))
        made.loop.steering = steering = Steering(tmp_path, print)
        loop = asyncio.get_running_loop()
        for at, command in commands:
            loop.call_later(at, (tmp_path / f"steer/{at:09.1f}.txt").write_text, command)
        watchers = [steering.watch(), watch_progress(made.loop.link, stall_s, lambda: None)]
        tasks = [asyncio.create_task(watcher) for watcher in watchers]
        whole = asyncio.create_task(made.loop.run())
        done, _ = await asyncio.wait({whole, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        made.seconds = loop.time()
        for task in tasks:
            task.cancel()
        await made.cluster.close()
        return made

    return run(main())


def rates(made: Run) -> list[float]:
    return [orders[0].lr for orders in made.cluster.orders if isinstance(orders[0], Train)]


def test_a_learning_rate_holds_from_the_next_step_on(tmp_path):
    made = steered(tmp_path, (8.0, "set lr=0.5"), (22.0, "set lr=0"))
    assert list(dict.fromkeys(rates(made))) == [-1, 0.5, 0]
    assert [command for _, command in made.report.commands] == ["set lr=0.5", "set lr=0"]


def test_a_paused_run_waits_as_long_as_it_must_and_is_no_stall(tmp_path):
    made = steered(tmp_path, (15.0, "pause"), (9000.0, "resume"), stall_s=300.0)
    assert 9000 < made.seconds < 9100
    assert len(rates(made)) == 6


def test_save_eval_and_stop(tmp_path):
    made = steered(tmp_path, (15.0, "save"), (16.0, "eval"), (35.0, "stop"), eval_tasks=1)
    saved = [int(o[0].folder[-6:]) for o in made.cluster.orders if isinstance(o[0], Save)]
    assert saved[0] >= 1 and saved[-1] == made.loop.stopped_at == len(rates(made)) < 6
    assert made.report.evaluations[0][0] == 0
    assert len(made.report.evaluations) == 2
    assert "export" not in made.cluster.order_names()


@pytest.mark.parametrize("command", ["", "set", "set lr", "set lr=nan", "set lr=inf", "stop now", "set top_p=1"])
def test_nonsense_is_an_error(command):
    with pytest.raises(SteerError):
        parse(command)
