"""Rank 0's parts put together: who must be ready, which error ends a run, and the last words."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from spmd_rl.config.tree import Config
from spmd_rl.orchestrator.connect import expect_ready, first_error
from spmd_rl.orchestrator.link import Link
from spmd_rl.orchestrator.role import farewell
from spmd_rl.world.messages import Ready


class Odd(Exception):
    """An error of a rollout, of the loop, of the watch."""


async def never() -> None:
    await asyncio.Event().wait()


async def fail(error: BaseException, after_s: float = 0.0) -> None:
    await asyncio.sleep(after_s)
    raise error


async def in_groups() -> None:
    """As from rollouts inside the loop's task group."""
    async with asyncio.TaskGroup() as outer:
        outer.create_task(inner())
        await never()


async def inner() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail(Odd("first")))
        await never()


def ended(main, beats) -> None:
    async def both() -> None:
        await first_error(main, [asyncio.create_task(beats), asyncio.create_task(never())])

    asyncio.run(both())


def test_a_run_that_ends_well_ends_its_watch() -> None:
    ended(asyncio.sleep(0), never())


def test_the_error_of_a_rollout_comes_out_of_its_groups() -> None:
    with pytest.raises(Odd, match="first"):
        ended(in_groups(), never())


def test_the_watch_ends_a_run_that_waits_for_ever() -> None:
    with pytest.raises(Odd, match="stalled"):
        ended(never(), fail(Odd("stalled"), 0.01))


def test_everybody_is_ready_when_the_last_leader_is() -> None:
    async def main() -> None:
        link = Link(2, 1)
        ready = expect_ready(link, 3)
        for rank in (1, 4, 4):  # one says it twice
            link.deliver(0, Ready(rank, {}))
        await asyncio.sleep(0)
        assert not ready.is_set()
        link.deliver(0, Ready(2, {}))
        await asyncio.sleep(0)
        assert ready.is_set()

    asyncio.run(main())


def test_the_last_words_name_what_came_out_and_where_it_lies() -> None:
    config = replace(Config(), output_dir="outputs/mine")
    evaluations = [{"eval/reward": 0.125, "eval/greedy": 0.25}, {"eval/reward": 0.75, "eval/greedy": 1.0}]
    text = farewell(config, SimpleNamespace(evaluations=evaluations), Path("outputs/mine/reward.png"))
    assert "sampled  0.125 -> 0.750" in text
    assert "greedy   0.250 -> 1.000" in text
    for name in ("outputs/mine/hf", "outputs/mine/reward.png", "outputs/mine/metrics.jsonl", "outputs/mine/rollouts"):
        assert name in text


def test_the_last_words_of_a_run_that_evaluated_nothing() -> None:
    text = farewell(Config(), SimpleNamespace(evaluations=[]), Path("p.png"))
    assert "held-out" not in text
