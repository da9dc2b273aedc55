"""What a bwrap box adds to a run of Python: `python -I -c pass` in a box and as a plain subprocess, one after the other
and four in flight, on one event loop; and what a box costs to open and close.

Rounds alternate between both, so that a machine that gets slower is slower for both; medians of all runs. CPU seconds
are those of all processes of a run: on a machine with other work they say more than the clock.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from spmd_rl.envs.sandbox import open_sandbox
from tools.bench_parts.ranks import finish

ROUNDS, RUNS, AT_ONCE, BOXES = 12, 8, 4, 12
PASS = ["-I", "-c", "pass"]
TARGET_S = 0.025  # a run in a box, one after the other


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return the figures."""
    r, ms = asyncio.run(measure()), 1e3
    print(f"python -I -c pass, medians of {ROUNDS * RUNS} runs; target for a box: {TARGET_S * ms:g} ms")
    print(f"{'':>20}  {'subprocess':>12}  {'box':>12}  {'ratio':>6}")
    for name, text in (("one", "one by one, ms"), ("four", f"{AT_ONCE} in flight, ms")):
        plain, box = r[f"plain_{name}_s"], r[f"box_{name}_s"]
        print(f"{text:>20}  {plain * ms:12.1f}  {box * ms:12.1f}  {box / plain:6.2f}")
    plain, box = r["plain_cpu_s"], r["box_cpu_s"]
    print(f"{'CPU, ms':>20}  {plain * ms:12.1f}  {box * ms:12.1f}  {box / plain:6.2f}")
    print(f"{'runs a second':>20}  {1 / r['plain_four_s']:12.0f}  {1 / r['box_four_s']:12.0f}")
    print(f"open a box: {r['open_s'] * ms:.1f} ms; close it: {r['close_s'] * ms:.1f} ms; `true` in it: ", end="")
    print(f"{r['true_s'] * ms:.1f} ms; of its own CPU our event loop spends {r['loop_cpu_s'] * ms:.1f} ms on a run")
    print(f"one by one: {'met' if r['target_met'] else 'MISSED'}")
    return finish({"target_s": TARGET_S, **r}, json_path)


async def measure() -> dict[str, Any]:
    """Seconds; those of `four` are wall-clock time over the number of runs."""
    python = str(Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}"))
    times: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        boxes = [await stack.enter_async_context(open_sandbox("bwrap")) for _ in range(AT_ONCE)]

        async def plain(_: int) -> None:
            process = await asyncio.create_subprocess_exec(
                python,
                *PASS,
                stdout=PIPE,
                stderr=PIPE,
                start_new_session=True,  # as a box: the scheduler shares by session
            )
            await process.communicate()

        async def boxed(i: int) -> None:
            result = await boxes[i].exec(["python", *PASS])
            assert result.code == 0, result.stderr

        async def nothing(i: int) -> None:
            await boxes[i].exec(["true"])

        for _ in range(ROUNDS):
            for name, run in (("plain", plain), ("box", boxed)):
                cpu = cpu_of_children()
                times.setdefault(f"{name}_one_s", []).extend(await one_by_one(run))
                times.setdefault(f"{name}_cpu_s", []).append((cpu_of_children() - cpu) / RUNS)
                times.setdefault(f"{name}_four_s", []).append(await in_flight(run))
            times.setdefault("true_s", []).extend(await one_by_one(nothing))
        cpu = time.thread_time()
        await one_by_one(boxed)
        times["loop_cpu_s"] = [(time.thread_time() - cpu) / RUNS]
    times["open_s"], times["close_s"] = await open_and_close()
    report: dict[str, Any] = {name: statistics.median(values) for name, values in times.items()}
    return {**report, "target_met": report["box_one_s"] <= TARGET_S}


async def one_by_one(run: Callable[[int], Awaitable[None]]) -> list[float]:
    """Seconds of each run."""
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        await run(0)
        seconds.append(time.perf_counter() - started)
    return seconds


def cpu_of_children() -> float:
    """CPU seconds of all processes that ended so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


async def in_flight(run: Callable[[int], Awaitable[None]]) -> float:
    """Seconds for a run when AT_ONCE are under way at any time."""

    async def some(i: int) -> None:
        for _ in range(RUNS):
            await run(i)

    started = time.perf_counter()
    await asyncio.gather(*map(some, range(AT_ONCE)))
    return (time.perf_counter() - started) / (AT_ONCE * RUNS)


async def open_and_close() -> tuple[list[float], list[float]]:
    """Seconds to open, and to close, a box in which nothing ran."""
    opened, closed = [], []
    for _ in range(BOXES):
        started = time.perf_counter()
        async with open_sandbox("bwrap"):
            opened.append(time.perf_counter() - started)
            started = time.perf_counter()
        closed.append(time.perf_counter() - started)
    return opened, closed
