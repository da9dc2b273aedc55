"""Rollouts of the verifiers adapter on one core: a policy that answers at once, everything else as in a run.

Tasks are those of the tests' offline taskset. The process is held to one core, and CPU seconds are counted, so that
what else runs on the machine shows in the wall time alone. The policy's answers are made before, so its share is next
to nothing.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.adapters.verifiers import environment_class
from spmd_rl.envs.protocol import Generation
from spmd_rl.models.byte_tokenizer import make_byte_tokenizer
from tools.bench_parts.ranks import finish

TASKSETS = Path(__file__).parents[2] / "tests" / "envs" / "adapters"
ROLLOUTS, ROUNDS, AT_ONCE = 400, 5, 128
CALL = '<tool_call>{"name": "calc_add", "arguments": {"a": 1, "b": 2}}</tool_call>'
CASES: dict[str, tuple[dict[str, Any], int, float]] = {  # arguments of the environment, turns, target in rollouts/s
    "one turn": ({}, 1, 350.0),
    "three turns": ({"env": "offline_game", "options": {"length": 3}}, 3, 200.0),
    "a tool call": ({"options": {"kind": "sum"}}, 2, 0.0),
}


class Instant:
    """Answers at once: a tool call where tools are shown and were not called yet."""

    def __init__(self, tokenizer: Any) -> None:
        self.sampling = SamplingConfig(max_tokens=64)
        ids = {words: tokenizer.encode(words + "<|im_end|>") for words in ("abcd", CALL)}
        self._answers = {words: self._generation(answer) for words, answer in ids.items()}
        self._called = tokenizer.encode("<tool_response>")[0]
        self._shown = tokenizer.encode("<tool_call>")[0]

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        await asyncio.sleep(0)
        calls = (tokens == self._shown).any() and not (tokens == self._called).any()
        return self._answers[CALL if calls else "abcd"]

    @staticmethod
    def _generation(ids: list[int]) -> Generation:
        count = len(ids)
        return Generation(np.asarray(ids, np.int32), np.zeros(count, np.float32), np.zeros(count, np.int32), "stop")


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return the figures."""
    sys.path.insert(0, str(TASKSETS))  # a taskset is found by its module's name
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_byte_tokenizer(folder)
    load = os.getloadavg()[0]
    print(f"medians of {ROUNDS} rounds of {ROLLOUTS} rollouts, {AT_ONCE} at once, one core; load average {load:.1f}")
    print(f"{'':14}{'renderer':12}{'rollouts/s wall':>18}{'per CPU second':>18}{'target':>10}")
    cases = []
    for name, (args, turns, target) in CASES.items():
        for renderer in ("template", "qwen3"):
            env = environment_class("offline_taskset")(tokenizer, 0, "offline_taskset", renderer=renderer, **args)
            wall, cpu = measure(env, lambda: Instant(tokenizer), turns)
            cases.append({"case": name, "renderer": renderer, "per_s": wall, "per_cpu_s": cpu, "target": target})
            verdict = "" if not target else "met" if cpu >= target else "MISSED"
            print(f"{name:14}{renderer:12}{wall:18,.0f}{cpu:18,.0f}{target or '–':>10}  {verdict}")
    return finish({"rollouts": ROLLOUTS, "at_once": AT_ONCE, "load": load, "cases": cases}, json_path)


def measure(env: Any, policy: Callable[[], Instant], turns: int) -> tuple[float, float]:
    """(rollouts per second, rollouts per CPU second)."""
    tasks = [env.task(i, "train") for i in range(ROLLOUTS)]
    wall, cpu = [], []

    async def rounds() -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(task: Any) -> Any:
            async with gate:
                return await env.rollout(task, policy())

        for _ in range(ROUNDS + 1):
            started, started_cpu = time.perf_counter(), time.process_time()
            episodes = await asyncio.gather(*map(one, tasks))
            wall.append(time.perf_counter() - started)
            cpu.append(time.process_time() - started_cpu)
            assert all(episode.valid and starts(episode.samples[0].mask) == turns for episode in episodes)

    asyncio.run(rounds())
    return ROLLOUTS / statistics.median(wall[1:]), ROLLOUTS / statistics.median(cpu[1:])


def starts(mask: np.ndarray) -> int:
    """How many replies a sample holds."""
    return int((np.diff(mask.astype(np.int8)) == 1).sum())
