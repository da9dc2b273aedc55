"""Ticks: what rank 0 pays to decide for 512 leaders, how long a tick of a real star takes, what idle ticks cost.

Deciding and encoding are measured in this process: one request of 512 tokens for each of 512 leaders; the raw limit is
to copy as many bytes. The star is 12 processes of this machine over gloo, ticking as fast as they can while each tick
carries decisions down and events up; the raw limit is a ping-pong of equal frames between the same processes in the
same run. With more processes than cores both are a figure of the machine: the ratio is what the exchange adds.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from spmd_rl.world.clock import Conductor
from spmd_rl.world.messages import Generate
from spmd_rl.world.wire import encode
from tools.bench_parts.ranks import finish, run_ranks

LEADERS, TOKENS, RUNS, PROCESSES = 512, 512, 51, 12
TARGETS = {"decide_encode_s": 0.005, "tick_s": 0.002, "conductor_share": 0.01, "leader_share": 0.01}


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return the figures."""
    report = {**decide_and_encode(), **run_ranks("clock_ranks.py", PROCESSES)}
    r, ms = report, 1e3
    print(
        f"{LEADERS} leaders, a request of {TOKENS} tokens each: decide {r['decide_s'] * ms:.2f} ms + encode "
        f"{r['encode_s'] * ms:.2f} ms = {r['decide_encode_s'] * ms:.2f} ms CPU ({verdict(r, 'decide_encode_s')}); "
        f"to copy as many bytes: {r['copy_s'] * ms:.2f} ms"
    )
    print(f"a star of {PROCESSES} processes on {r['cores']} cores; CPU is that of rank 0's thread")
    print(f"  raw ping-pong  {r['raw_s'] * ms:.2f} ms, CPU {r['raw_cpu_s'] * ms:.2f} ms")
    print(f"  empty tick     {r['empty_tick_s'] * ms:.2f} ms, CPU {r['empty_cpu_s'] * ms:.2f} ms")
    print(
        f"  full tick      {r['full_tick_s'] * ms:.2f} ms, CPU {r['full_cpu_s'] * ms:.2f} ms ({verdict(r, 'tick_s')}), "
        f"x {r['tick_ratio']:.2f} of raw; {r['full_decisions']:.1f} decisions and {r['full_events']:.1f} events each"
    )
    print(f"idle, a tick every {r['idle_tick_s'] * ms:.1f} ms; CPU as a share of wall time")
    for who, name in (("conductor", "rank 0"), ("leader", "worst leader")):
        print(
            f"  {name:<13}  {r[f'{who}_share']:.2%} in the clock's thread ({verdict(r, f'{who}_share')}), "
            f"{r[f'{who}_process_share']:.2%} in the process, with gloo's threads"
        )
    return finish({"targets": TARGETS, **report}, json_path)


def verdict(report: dict[str, Any], key: str) -> str:
    """For people."""
    met, target = report[key] <= TARGETS[key], TARGETS[key]
    return (
        f"{'met' if met else 'MISSED'}: target {f'{target:.0%}' if key.endswith('share') else f'{target * 1e3:g} ms'}"
    )


def decide_and_encode() -> dict[str, float]:
    """CPU seconds of one tick's decisions; medians."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 150_000, TOKENS).astype(np.int32) for _ in range(LEADERS)]
    seconds: dict[str, list[float]] = {"decide": [], "encode": [], "copy": [], "decide_encode": []}
    for number in range(RUNS + 1):
        clock = Conductor(None, [""] * LEADERS, 1.0, print, print)  # never started: it only collects decisions here
        down: list[list[Generate]] = [[] for _ in prompts]
        started = time.process_time()
        for member, prompt in enumerate(prompts):
            request = Generate(number * LEADERS + member, prompt, TOKENS, 1.0, 2**62 + member, [0])
            down[member].append(request)
            clock.decide(member, request)
        decided = time.process_time()
        messages = [encode(decisions) for decisions in down]
        encoded = time.process_time()
        copies = [bytes(memoryview(message)) for message in messages]
        seconds["copy"].append(time.process_time() - encoded)
        seconds["decide"].append(decided - started)
        seconds["encode"].append(encoded - decided)
        seconds["decide_encode"].append(encoded - started)
        assert len(copies) == LEADERS
    figures = {f"{name}_s": statistics.median(values[1:]) for name, values in seconds.items()}
    return figures | {"bytes": sum(map(len, messages))}
