"""What a bwrap box adds to a run of Python: `pass` in a box and as a plain subprocess, one after the other and four in
flight, on one event loop; and what a box costs to open and close.

Python starts without its `site` module (-I -S), and with it (-I): an installation's .pth files can take longer than all
the rest. Rounds alternate between subprocess and box, so that a machine that gets slower is slower for both; medians of
all runs. CPU seconds are those of all processes of a run: on a machine with other work they say more than the clock.
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
from typing import Any

from spmd_rl.envs.sandbox import Sandbox, open_sandbox
from spmd_rl.envs.sandbox.jail import python
from tools.bench_parts.ranks import finish

ROUNDS, RUNS, AT_ONCE, BOXES = 8, 8, 4, 12
FLAGS = {"bare": ["-I", "-S"], "site": ["-I"]}
TARGET_S = 0.025  # a run without site in a box, one after the other

Run = Callable[[int], Awaitable[None]]


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return the figures."""
    r, ms = asyncio.run(measure()), 1e3
    print(f"python -c pass, medians of {ROUNDS * RUNS} runs, ms; target for a box, one by one: {TARGET_S * ms:g} ms")
    print(f"{'':>24}  {'subprocess':>12}  {'box':>12}  {'more':>8}")
    for flags, arguments in FLAGS.items():
        for how, text in (("one", "one by one"), ("four", f"{AT_ONCE} in flight"), ("cpu", "CPU")):
            plain, box = r[f"plain_{flags}_{how}_s"] * ms, r[f"box_{flags}_{how}_s"] * ms
            print(f"{' '.join(arguments):>8} {text:>15}  {plain:12.1f}  {box:12.1f}  {box - plain:8.1f}")
    print(f"open a box: {r['open_s'] * ms:.1f} ms; close it: {r['close_s'] * ms:.1f} ms", end="; ")
    print(f"of a run in a box our event loop pays {r['loop_cpu_s'] * ms:.1f} ms CPU")
    print(f"target {'met' if r['target_met'] else 'MISSED'}")
    return finish({"target_s": TARGET_S, **r}, json_path)


async def measure() -> dict[str, Any]:
    """Seconds; those of `four` are wall-clock time over the number of runs."""
    times: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        boxes = [await stack.enter_async_context(open_sandbox("bwrap")) for _ in range(AT_ONCE)]
        runs = {
            f"{who}_{flags}": run
            for flags, arguments in FLAGS.items()
            for who, run in (("plain", plain(arguments)), ("box", boxed(arguments, boxes)))
        }
        for _ in range(ROUNDS):
            for name, run in runs.items():
                cpu, own = cpu_of_children(), time.thread_time()
                times.setdefault(f"{name}_one_s", []).extend(await one_by_one(run))
                times.setdefault(f"{name}_cpu_s", []).append((cpu_of_children() - cpu) / RUNS)
                if name == "box_bare":
                    times.setdefault("loop_cpu_s", []).append((time.thread_time() - own) / RUNS)
                times.setdefault(f"{name}_four_s", []).append(await in_flight(run))
    times["open_s"], times["close_s"] = await open_and_close()
    report: dict[str, Any] = {name: statistics.median(values) for name, values in times.items()}
    return {**report, "target_met": report["box_bare_one_s"] <= TARGET_S}


def plain(flags: list[str]) -> Run:
    """Python as a subprocess; in a session of its own, as a box is: the scheduler shares by session."""
    command = [str(python(sys.base_prefix)), *flags, "-c", "pass"]

    async def run(_: int) -> None:
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, start_new_session=True)
        await process.communicate()

    return run


def boxed(flags: list[str], boxes: list[Sandbox]) -> Run:
    """The same Python in one of the boxes."""

    async def run(i: int) -> None:
        result = await boxes[i].exec(["python", *flags, "-c", "pass"])
        if result.code:
            raise RuntimeError(f"Python does not run in a box: {result}")

    return run


async def one_by_one(run: Run) -> list[float]:
    """Seconds of each run."""
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        await run(0)
        seconds.append(time.perf_counter() - started)
    return seconds


async def in_flight(run: Run) -> float:
    """Seconds for a run when AT_ONCE are under way at any time."""

    async def some(i: int) -> None:
        for _ in range(RUNS):
            await run(i)

    started = time.perf_counter()
    await asyncio.gather(*map(some, range(AT_ONCE)))
    return (time.perf_counter() - started) / (AT_ONCE * RUNS)


def cpu_of_children() -> float:
    """CPU seconds of all processes that ended so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


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
