"""Everything around environments: orchestration per core, the worker pool, the sandbox, the verifiers adapter.

Orchestration is what rank 0 does for a rollout beside waiting for its tokens: making the task, rendering the prompt,
running the environment under a deadline, parsing and rewarding, checking the episode. The policy is a fake one that
answers at once with the same wrong answer, so that a game goes through all of its turns. Figures are per second of CPU
of the one process, medians of several rounds; so a machine that is busy elsewhere hardly matters.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from dataclasses import replace
from typing import Any

import numpy as np

from spmd_rl.config.tree import Config, SamplingConfig, SourceConfig
from spmd_rl.envs.load import load
from spmd_rl.envs.protocol import Generation
from spmd_rl.models.byte_tokenizer import make_byte_tokenizer
from spmd_rl.orchestrator.rollouts import Rollouts
from tools.bench_parts import pool, sandbox, verifiers
from tools.bench_parts.ranks import finish

ROUNDS, ROLLOUTS, AT_ONCE = 5, 1024, 256
# Environment, its arguments, what the policy always says, turns.
CASES = {
    "copy": ({}, "abcdefg", 1),
    "arithmetic": ({}, "0", 1),
    "guess": ({"turns": 3, "numbers": 50}, "1", 3),
    "calculator": ({}, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>', 5),
}
TARGETS = {"single_turn_per_s": 2000.0, "three_turns_per_s": 800.0}


def main(json_path: str | None = None) -> dict[str, Any]:
    """Print and return the figures."""
    report: dict[str, Any] = {"rollouts_per_s": {name: measure(name) for name in CASES}}
    rates = report["rollouts_per_s"]
    report["single_turn_per_s"], report["three_turns_per_s"] = min(rates["copy"], rates["arithmetic"]), rates["guess"]
    print("rollouts per second of rank 0's CPU, the policy answering at once")
    for name, (_, _, turns) in CASES.items():
        print(f"  {name:<12} {turns} turn{'s' * (turns > 1):<1}  {rates[name]:8.0f}")
    for key, target in TARGETS.items():
        met = "met" if report[key] >= target else "MISSED"
        print(f"  {key.replace('_per_s', '').replace('_', ' ')}: {report[key]:.0f} ({met}: target {target:.0f})")
    parts = {"pool": pool, "sandbox": sandbox, "verifiers": verifiers}
    for name, part in parts.items():
        print(f"\n-- {name}")
        report[name] = part.main()
    return finish({"targets": TARGETS, **report}, json_path)


def measure(name: str) -> float:
    """Rollouts per CPU second."""
    args, says, turns = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_byte_tokenizer(folder)
    env = load(SourceConfig(env=name, args=args), tokenizer, seed=0)
    config = replace(Config(), seq_len=1 << 20)
    answer = np.asarray([*tokenizer.encode(says), tokenizer.eos_token_id], np.int32)
    policy = Parrot(answer)

    async def run() -> float:
        rollouts = Rollouts(config)
        numbers = iter(range(ROLLOUTS))

        async def chain() -> None:
            for number in numbers:
                episode = await rollouts.run(env, env.task(number, "train"), policy, 60.0)
                assert episode.status == "ok" and int(episode.samples[0].mask.sum()) == turns * len(answer), episode

        began = time.process_time()
        await asyncio.gather(*(chain() for _ in range(AT_ONCE)))
        return ROLLOUTS / (time.process_time() - began)

    return statistics.median(asyncio.run(run()) for _ in range(ROUNDS))


class Parrot:
    """A policy that says the same every time."""

    def __init__(self, answer: np.ndarray) -> None:
        self.sampling = SamplingConfig(max_tokens=1000)
        count = len(answer)
        versions = np.zeros(count, np.int32)
        self._generation = Generation(answer, np.full(count, -0.5, np.float32), versions, "stop")

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        """At once, but after others had their turn."""
        await asyncio.sleep(0)
        return self._generation
