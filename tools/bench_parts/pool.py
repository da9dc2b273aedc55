"""The pool of worker processes: what a call and a generation cost, how fast a worker starts, how late the loop gets.

A call adds two numbers in a worker. The raw limit is a pipe of the same length to a process that echoes it: blocking
reads and writes, no event loop. With 64 in flight both share what two processes can do, so the time of one call holds
63 others'; `per_call` is the time between two answers. The rollouts are of 4 generations of 32 tokens that a policy on
the parent's loop answers after a sleep; the lag is that of the parent's loop, with the rollouts in workers and, for
comparison, on the loop itself.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from spmd_rl.config.tree import SamplingConfig, SourceConfig
from spmd_rl.envs.pool.environment import PooledEnvironment
from spmd_rl.envs.pool.lag import LoopLag, lag_metrics
from spmd_rl.envs.pool.pool import Pool
from spmd_rl.envs.pool.spec import EnvironmentSpec
from spmd_rl.envs.protocol import Environment, Generation, Policy, Split, turns_to_sample
from spmd_rl.rollouts.types import Episode, Reward, Task
from tools.bench_parts.ranks import finish

WORKERS, CALLS, IN_FLIGHT, DEADLINE_S = 2, 2000, 64, 60.0
ROLLOUTS, ROUNDS, TURNS, TOKENS, SLEEP_S = 256, 4, 4, 32, 0.5
STARTS = 5
TARGETS = {"call_ms_p50": 2.0, "in_flight_per_call_ms": 2.0, "lag_ms_p99": 20.0}
MESSAGE_BYTES = 100  # about that of the call
ECHO = f"import os\nwhile data := os.read(0, {MESSAGE_BYTES}): os.write(1, data)"


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return the figures."""
    report = {**starts(), **raw_echoes(), **asyncio.run(calls()), **asyncio.run(rollouts())}
    report["call_ratio"] = report["call_ms_p50"] / report["raw_ms_p50"]
    r = report
    print(f"start: a bare interpreter {r['bare_start_s']:.2f} s; a worker that is ready {r['start_s']:.2f} s")
    print(f"{WORKERS} processes, {r['cores']} cores; ms, median (p99)")
    print(f"  raw echo          {r['raw_ms_p50']:.3f} ({r['raw_ms_p99']:.3f})")
    print(
        f"  call              {r['call_ms_p50']:.3f} ({r['call_ms_p99']:.3f}), x {r['call_ratio']:.1f} of raw "
        f"({verdict(r, 'call_ms_p50')})"
    )
    print(
        f"  {IN_FLIGHT} in flight, raw  {r['raw_in_flight_ms_p50']:.2f} ({r['raw_in_flight_ms_p99']:.2f}), "
        f"{r['raw_in_flight_per_call_ms']:.3f} per call"
    )
    print(
        f"  {IN_FLIGHT} in flight       {r['in_flight_ms_p50']:.2f} ({r['in_flight_ms_p99']:.2f}), "
        f"{r['in_flight_per_call_ms']:.3f} per call ({verdict(r, 'in_flight_per_call_ms')})"
    )
    print(f"  generation        {r['generation_ms']:.3f} per turn of one rollout, the policy answering at once")
    print(f"{ROLLOUTS} rollouts in flight, {r['generations_per_s']:.0f} generations/s; lag of the parent's loop, ms")
    for where, name in (("", "in workers"), ("own_", "on the loop")):
        print(
            f"  {name:<12} p50 {r[f'{where}lag_ms_p50']:.2f}, p99 {r[f'{where}lag_ms_p99']:.2f}, "
            f"max {r[f'{where}lag_ms_max']:.2f}" + ("" if where else f" ({verdict(r, 'lag_ms_p99')})")
        )
    return finish({"targets": TARGETS, **report}, json_path)


def verdict(report: dict[str, Any], key: str) -> str:
    """For people."""
    return f"{'met' if report[key] <= TARGETS[key] else 'MISSED'}: target {TARGETS[key]:g} ms"


def starts() -> dict[str, float]:
    """Seconds until a process is there, medians."""

    def bare() -> None:
        subprocess.run([sys.executable, "-c", "pass"], check=True)

    def worker() -> None:
        with Pool(0, 1) as pool:
            asyncio.run(pool.call(add, {"a": 1, "b": 2}, DEADLINE_S))

    return {
        "cores": os.cpu_count() or 0,
        "bare_start_s": statistics.median(timed(bare) for _ in range(STARTS)),
        "start_s": statistics.median(timed(worker) for _ in range(STARTS)),
    }


def raw_echoes() -> dict[str, float]:
    """Milliseconds of an exchange over pipes, alone and with many in flight over all processes."""
    command = [sys.executable, "-c", ECHO]
    echoes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(WORKERS)]
    message = bytes(MESSAGE_BYTES)

    def send(number: int) -> float:
        began = time.perf_counter()
        os.write(echoes[number % WORKERS].stdin.fileno(), message)
        return began

    def receive(number: int) -> float:
        left = MESSAGE_BYTES
        while left:
            left -= len(os.read(echoes[number % WORKERS].stdout.fileno(), left))
        return time.perf_counter()

    for number in range(WORKERS):
        send(number)
        receive(number)
    alone = [-send(number) + receive(number) for number in range(CALLS)]
    began = time.perf_counter()
    sent = [send(number) for number in range(IN_FLIGHT)]
    many = []
    for number in range(CALLS):
        many.append(receive(number) - sent[number])
        sent.append(send(number + IN_FLIGHT))
    seconds = time.perf_counter() - began
    for echo in echoes:
        echo.kill()
        echo.communicate()
    return {**spread("raw", alone), **spread("raw_in_flight", many), "raw_in_flight_per_call_ms": seconds / CALLS * 1e3}


async def calls() -> dict[str, float]:
    """The same through the pool."""
    with Pool(0, WORKERS) as pool:

        async def one() -> float:
            began = time.perf_counter()
            assert await pool.call(add, {"a": 1, "b": 2}, DEADLINE_S) == 3
            return time.perf_counter() - began

        await asyncio.gather(*(one() for _ in range(4 * WORKERS)))
        alone = [await one() for _ in range(CALLS)]
        free = asyncio.Semaphore(IN_FLIGHT)

        async def bounded() -> float:
            async with free:
                return await one()

        began = time.perf_counter()
        many = await asyncio.gather(*(bounded() for _ in range(CALLS)))
        seconds = time.perf_counter() - began
    return {**spread("call", alone), **spread("in_flight", many), "in_flight_per_call_ms": seconds / CALLS * 1e3}


async def rollouts() -> dict[str, float]:
    """Many rollouts at once."""
    source = SourceConfig(env="tools.bench_parts.pool:Turns")
    with Pool(WORKERS, 0) as pool:
        env = PooledEnvironment(EnvironmentSpec(source, None, 0), pool, deadline_s=DEADLINE_S)
        began = time.perf_counter()
        await env.rollout(Task("turns", 0, {"turns": 500}), Sleeper(0.0))
        generation_s = (time.perf_counter() - began) / 500
        lag, seconds = await lag_with(env)
    own, _ = await lag_with(Turns(None))
    return {
        "generation_ms": generation_s * 1e3,
        "generations_per_s": ROLLOUTS * ROUNDS * TURNS / seconds,
        "generations_per_s_if_free": ROLLOUTS / SLEEP_S,
        **lag_metrics("", lag),
        **lag_metrics("own_", own),
    }


async def lag_with(env: Environment) -> tuple[np.ndarray, float]:
    """(milliseconds of the loop's delay float32[k], seconds) of all rollouts, `ROLLOUTS` at a time."""
    lag, policy = LoopLag(0.005), Sleeper(SLEEP_S)
    lag.start()
    began = time.perf_counter()

    async def chain(number: int) -> None:
        for round in range(ROUNDS):
            episode = await env.rollout(Task("turns", number * ROUNDS + round, {"turns": TURNS}), policy)
            assert episode.samples[0].mask.sum() == TURNS * TOKENS

    await asyncio.gather(*(chain(number) for number in range(ROLLOUTS)))
    seconds = time.perf_counter() - began
    lag.stop()
    return lag.take(), seconds


class Turns:
    """As many generations as the task says; a few tokens are added before each."""

    def __init__(self, tokenizer: Any, seed: int = 0) -> None:
        self.given = np.arange(TOKENS, dtype=np.int32)

    def task(self, index: int, split: Split) -> Task:
        """Never asked for."""
        return Task("turns", index, {"turns": TURNS})

    def prompt(self, task: Task) -> np.ndarray:
        """int32[TOKENS]"""
        return self.given

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """All turns."""
        turns, tokens = [], np.empty(0, np.int32)
        for _ in range(task.data["turns"]):
            tokens = np.concatenate([tokens, self.given])
            sampled = await policy.generate(tokens, policy.sampling)
            turns.append((self.given, sampled))
            tokens = np.concatenate([tokens, sampled.tokens])
        return Episode(task, (turns_to_sample(turns, 1.0),), Reward(1.0))


class Sleeper:
    """A policy that thinks for about so long."""

    def __init__(self, seconds: float) -> None:
        self.sampling, self._seconds = SamplingConfig(), seconds
        self._rng = np.random.default_rng(0)

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        """int32[TOKENS], always the same."""
        await asyncio.sleep(self._seconds * 2 * self._rng.random())
        said = np.arange(TOKENS, dtype=np.int32)
        return Generation(said, np.full(TOKENS, -0.5, np.float32), np.zeros(TOKENS, np.int32), "stop")


def add(a: int, b: int) -> int:
    """What a call does."""
    return a + b


def spread(name: str, seconds: list[float]) -> dict[str, float]:
    """Median and p99 in milliseconds."""
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return {f"{name}_ms_p50": float(p50), f"{name}_ms_p99": float(p99)}


def timed(action: Any) -> float:
    """Seconds."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
