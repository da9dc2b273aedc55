"""An environment and functions that do what they are told, in worker processes: also hang, crash and refuse to end."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.config.tree import SamplingConfig, SourceConfig
from spmd_rl.envs.pool.environment import PooledEnvironment
from spmd_rl.envs.pool.pool import Pool
from spmd_rl.envs.pool.spec import EnvironmentSpec
from spmd_rl.envs.protocol import Generation, Policy, PromptTooLong, Split, turns_to_sample
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Sample, Task

INNER = Pool(0, 1)  # nothing is started before it is used
SAMPLING = SamplingConfig(temperature=0.5, max_tokens=8)


class Letters:
    """A tokenizer of one token per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def spin() -> None:
    """C code that never ends and never lets go of the interpreter's lock."""
    re.match(r"(a|a)*b", "a" * 64)


def crash() -> None:
    """What a bug in C does."""
    ctypes.string_at(0)


class Obedient:
    """Does in `rollout` what task.data["do"] says."""

    def __init__(self, tokenizer: Letters, seed: int = 0, make: str = "", note: str = "") -> None:
        if make:
            getattr(self, make)()
        self.tokenizer, self.seed, self.note = tokenizer, seed, note

    def task(self, index: int, split: Split) -> Task:
        if index == 666:
            raise LookupError("no such task")
        number = int(np.random.default_rng([self.seed, index]).integers(100))
        return Task("obedient", index, {"do": "talk", "number": number, "split": split})

    def prompt(self, task: Task) -> np.ndarray:
        return np.asarray(self.tokenizer.encode(f"{task.data['do']} {task.index}"), dtype=np.int32)

    def teacher(self, task: Task, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return self.prompt(task), rng.integers(0, 9, 3).astype(np.int32)

    def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
        return f"{len(heard)} {rng.integers(1000)}"

    async def check_reward(self, tasks: int) -> None:
        await asyncio.sleep(0)
        if tasks > 4:
            raise ValueError(f"{tasks} are too many")

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        return await getattr(self, task.data["do"])(task, policy)

    # --- what a task may ask for ----------------------------------------------------------------------------------

    async def talk(self, task: Task, policy: Policy, turns: int = 3) -> Episode:
        given, said = self.prompt(task), []
        tokens = np.empty(0, np.int32)
        for turn in range(task.data.get("turns", turns)):
            tokens = np.concatenate([tokens, given])
            sampled = await policy.generate(tokens, replace(policy.sampling, max_tokens=2 + turn))
            said.append((given, sampled))
            tokens = np.concatenate([tokens, sampled.tokens])
            given = np.asarray([turn], np.int32)
        sample = turns_to_sample(said, policy.sampling.temperature)
        return Episode(task, (sample,), Reward(float(tokens.sum()), {"turns": float(len(said))}), "truncated")

    async def parallel(self, task: Task, policy: Policy) -> Episode:
        asks = [np.asarray([number], np.int32) for number in range(4)]
        heard = await asyncio.gather(*(policy.generate(tokens, policy.sampling) for tokens in asks))
        return self._over(task, [int(generation.tokens[0]) for generation in heard])

    async def withdraws(self, task: Task, policy: Policy) -> Episode:
        slow = asyncio.create_task(policy.generate(np.asarray([1], np.int32), policy.sampling))
        await policy.generate(np.asarray([2], np.int32), policy.sampling)
        slow.cancel()
        await asyncio.wait([slow])
        await policy.generate(np.asarray([3], np.int32), policy.sampling)
        return self._over(task, "cancelled" if slow.cancelled() else "answered")

    async def leaves_a_question(self, task: Task, policy: Policy) -> Episode:
        self.left = asyncio.create_task(policy.generate(np.asarray([1], np.int32), policy.sampling))
        await asyncio.sleep(0)
        return self._over(task, "left")

    async def finds_what_was_left(self, task: Task, policy: Policy) -> Episode:
        return self._over(task, "cancelled" if self.left.cancelled() else "waiting")

    async def asks_late(self, task: Task, policy: Policy) -> Episode:
        self.policy = policy
        return self._over(task, "kept")

    async def asks_for_another(self, task: Task, policy: Policy) -> Episode:
        await self.policy.generate(np.asarray([1], np.int32), policy.sampling)
        return self._over(task, "answered")

    async def catches(self, task: Task, policy: Policy) -> Episode:
        try:
            await policy.generate(np.asarray([1], np.int32), policy.sampling)
        except ValueError as error:
            return self._over(task, str(error))
        return self._over(task, "nothing")

    async def catches_no_room(self, task: Task, policy: Policy) -> Episode:
        try:
            await policy.generate(np.asarray([1], np.int32), policy.sampling)
        except PromptTooLong as error:
            return self._over(task, str(error))
        return self._over(task, "nothing")

    async def odd_sampling(self, task: Task, policy: Policy) -> Episode:
        await policy.generate(np.asarray([1], np.int32), replace(policy.sampling, max_tokens="many"))
        return self._over(task, "sampled")

    async def histories(self, task: Task, policy: Policy) -> Episode:
        column = np.arange(3)
        sample = Sample(
            column.astype(np.int32), (column > 0).astype(np.uint8), -column.astype(np.float32),
            np.where(column > 0, 5, -1).astype(np.int32), np.ones(3, np.float32), agent="left", reward=0.25,
        )  # fmt: skip
        return Episode(task, (sample, replace(sample, agent="right", reward=None)), RewardError("no judge", "judge"))

    async def pid(self, task: Task, policy: Policy) -> Episode:
        return self._over(task, os.getpid())

    async def waits(self, task: Task, policy: Policy) -> Episode:
        print(f"task {task.index} waits in {os.getpid()}")
        try:
            await asyncio.sleep(3600)
        finally:
            print(f"task {task.index} was cancelled")
        raise AssertionError

    async def deaf(self, task: Task, policy: Policy) -> Episode:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                print(f"task {task.index} does not listen")

    async def spins(self, task: Task, policy: Policy) -> Episode:
        await policy.generate(np.asarray([1], np.int32), policy.sampling)
        spin()
        raise AssertionError

    async def exits(self, task: Task, policy: Policy) -> Episode:
        print("my last words")
        os._exit(7)

    async def blocks_and_exits(self, task: Task, policy: Policy) -> Episode:
        time.sleep(0.2)
        os._exit(7)

    async def crashes(self, task: Task, policy: Policy) -> Episode:
        crash()
        raise AssertionError

    async def killed(self, task: Task, policy: Policy) -> Episode:
        os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(3600)
        raise AssertionError

    async def fills_memory(self, task: Task, policy: Policy) -> Episode:
        return self._over(task, len(bytearray(2**32)))

    async def raises(self, task: Task, policy: Policy) -> Episode:
        raise LookupError("not \ud800 there" + "!" * 2**20)

    async def leaves(self, task: Task, policy: Policy) -> Episode:
        sys.exit(3)

    async def returns_nothing(self, task: Task, policy: Policy) -> None:
        return None

    async def returns_a_number(self, task: Task, policy: Policy) -> Episode:
        return Episode(task, (), 1.0)  # type: ignore[arg-type]

    async def reads_standard_input(self, task: Task, policy: Policy) -> Episode:
        return self._over(task, sys.stdin.read())

    def _over(self, task: Task, found: Any) -> Episode:
        return Episode(task, (), RewardError(str(found)))


class Bare:
    """An environment with nothing optional."""

    def __init__(self, tokenizer: Letters, seed: int = 0, data: Any = None) -> None:
        self.data = data
        self.teacher = None

    def task(self, index: int, split: Split) -> Task:
        return Task("bare", index, {"rows": [{"what": self.data() if callable(self.data) else self.data}]})

    def prompt(self, task: Task) -> np.ndarray:
        return np.asarray([1], np.int32)

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        raise NotImplementedError


class Unmakeable(Bare):
    """Takes its worker along when it is made."""

    def __init__(self, tokenizer: Letters, seed: int = 0, make: str = "") -> None:
        if make == "exits":
            os._exit(7)
        time.sleep(3600)


class Adder:
    """A policy that says its prompt's sum and its length; `think` is awaited first."""

    def __init__(self, think: Callable[[np.ndarray], Any] | None = None) -> None:
        self.sampling = SAMPLING
        self.think = think
        self.asked: list[tuple[list[int], int]] = []

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        assert tokens.dtype == np.int32 and isinstance(sampling, SamplingConfig)
        self.asked.append((tokens.tolist(), sampling.max_tokens))
        if self.think is not None:
            await self.think(tokens)
        said = np.asarray([tokens.sum() % 251, len(tokens)], np.int32)
        return Generation(said, np.float32([-0.5, -0.25]), np.int32([3, 4]), "stop")


def obedient(pool: Pool, *, deadline_s: float = 300.0, env: str = "Obedient", **args: Any) -> PooledEnvironment:
    """An environment of this file in the pool."""
    source = SourceConfig(env=f"tests.envs.pool_envs:{env}", args=args)
    return PooledEnvironment(EnvironmentSpec(source, Letters(), 3), pool, deadline_s=deadline_s)


def told(do: str, index: int = 0, **data: Any) -> Task:
    """A task that says what to do."""
    return Task("obedient", index, {"do": do, **data})


# --- functions for calls ----------------------------------------------------------------------------------------------


def add(a: int, b: int) -> int:
    """A function as any other."""
    return a + b


def do(what: str, number: int = 0) -> Any:
    """One of the things that can happen to a call."""
    match what:
        case "answer":
            return number
        case "raise":
            raise LookupError(f"number {number}")
        case "exit":
            os._exit(number % 256)
        case "crash":
            crash()
        case "spin":
            spin()
        case "leave":
            sys.exit(number)
        case "pid":
            return os.getpid()
        case "where":
            return [threading.current_thread() is threading.main_thread(), os.getcwd(), sys.stdin.read()]
        case "hang":
            time.sleep(3600)


async def later(number: int) -> int:
    """A function that is awaited."""
    await asyncio.sleep(0.01)
    return number


def number(text: str) -> int:
    """A ValueError for what is none."""
    return int(text)


def fill(mb: int) -> int:
    """Take so much memory."""
    return len(bytearray(mb * 2**20))


def imported(names: list[str]) -> list[str]:
    """Which of these modules are imported."""
    return [name for name in names if name in sys.modules]


def flood(lines: int, width: int) -> None:
    """Print a lot."""
    for line in range(lines):
        print(f"{line:06d}" + "x" * width)


def leave_a_child() -> int:
    """The pid of a process that nobody waits for."""
    return subprocess.Popen(["sleep", "1000"]).pid


async def pool_in_pool() -> list[int]:
    """The pids of this worker and of one of a pool of its own, which is left open."""
    return [os.getpid(), await INNER.call(do, {"what": "pid"}, 300.0)]


def alive(pid: int) -> bool:
    """Whether there is such a process, and it is not just waiting to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def until(found: Callable[[], Any]) -> None:
    """Return when it is so; TimeoutError after a minute."""
    async with asyncio.timeout(60):
        while not found():
            await asyncio.sleep(0.01)
