"""The worker process: builds environments, runs rollouts and functions, and says all it has to say over one socket.

Everything happens on the main thread, in one event loop: rollouts as coroutines beside each other, a function of a call
to its end. So user code has the main thread that signals need, and what blocks it shows as a missing sign of life.

It refuses to know about deadlines, other workers and the policy. Invariants: every job that arrives is answered by
exactly one `Done`, `Failed` or `Ended` while the process lives; it never outlives the process that started it; it has
no standard input, and what it prints goes to the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import inspect
import io
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine
from functools import lru_cache
from typing import Any

from spmd_rl.config.imports import load_object
from spmd_rl.envs.load import load
from spmd_rl.envs.pool import messages, wire
from spmd_rl.envs.pool.lag import LoopLag
from spmd_rl.envs.pool.process import DUMP_SIGNAL
from spmd_rl.envs.pool.remote_policy import PolicyError, RemotePolicy
from spmd_rl.envs.pool.spec import OPTIONAL, EnvironmentSpec
from spmd_rl.envs.pool.wire import plain
from spmd_rl.envs.protocol import Environment
from spmd_rl.rollouts.plain import plain_episode
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Task

PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when the thread that started it ends
MAX_LINE = 400  # characters of a line of a traceback: the last one may hold a whole completion
FIRST_TO_GO = "500"  # the kernel, out of memory, looks for a worker before it looks for the trainer


class Worker:
    """One worker: what it was told to make, and what it is doing."""

    def __init__(self) -> None:
        self._frames = wire.Frames(messages.ToWorker, self._heard, _lost)
        self._envs: dict[int, Environment] = {}
        self._jobs: dict[int, asyncio.Task[Any]] = {}
        self._policies: dict[int, RemotePolicy] = {}
        self._cancelled: set[int] = set()
        self._lag = LoopLag()
        self._beat_s = 1.0
        self._beating: asyncio.TimerHandle | None = None
        self._stopped = asyncio.Event()

    async def run(self, connection: socket.socket) -> None:
        """Work until told to stop."""
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: self._frames, connection)
        await self._stopped.wait()

    def _heard(self, message: messages.ToWorker) -> None:
        match message:
            case messages.Start():
                _limit_memory(message.memory_mb)
                self._beat_s = message.beat_s
                self._send(messages.Ready())
            case messages.Build():
                self._send(self._built(message))
            case messages.Call():
                self._begin(message.job, _call, message)
            case messages.Method():
                self._begin(message.job, self._method, message)
            case messages.Rollout():
                self._begin(message.job, self._rollout, message)
            case messages.Answer() | messages.Refusal():
                if policy := self._policies.get(message.job):
                    policy.heard(message)
            case messages.Cancel():
                if task := self._jobs.get(message.job):
                    self._cancelled.add(message.job)
                    task.cancel()
            case messages.Stop():
                self._stopped.set()

    def _send(self, message: messages.Message) -> None:
        self._frames.send(wire.frame(message))

    def _built(self, message: messages.Build) -> messages.Built | messages.NotBuilt:
        try:
            spec: EnvironmentSpec = pickle.loads(message.spec)
            env = self._envs[message.env] = load(spec.source, spec.tokenizer, spec.seed)
            return messages.Built(message.env, [name for name in OPTIONAL if callable(getattr(env, name, None))])
        except BaseException as error:
            return messages.NotBuilt(message.env, type(error).__name__, _text(error), _trace(error))

    # --- jobs -----------------------------------------------------------------------------------------------------

    def _begin(self, job: int, work: Callable[[Any], Coroutine[Any, Any, Any]], message: messages.ToWorker) -> None:
        if not self._jobs:
            self._lag.start()
        if self._beating is None:
            self._beating = asyncio.get_running_loop().call_later(self._beat_s, self._beat)
        task = self._jobs[job] = asyncio.create_task(_guarded(work, message))
        # A callback, as a task that is cancelled before its first step never gets to say anything.
        task.add_done_callback(lambda task: self._over(job, task))

    def _over(self, job: int, task: asyncio.Task[Any]) -> None:
        del self._jobs[job]
        if not self._jobs:
            self._lag.stop()
        cancelled = job in self._cancelled
        self._cancelled.discard(job)
        try:
            said = wire.frame(messages.Done(job, task.result()))
        except BaseException as error:
            ended = cancelled and isinstance(error, asyncio.CancelledError)
            said = wire.frame(messages.Ended(job) if ended else _failed(job, error))
        self._frames.send(said)

    async def _method(self, message: messages.Method) -> Any:
        result = getattr(self._envs[message.env], message.name)(*pickle.loads(message.arguments))
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, Task):
            data = plain(result.data, "task.data")
            return {"source": result.source, "index": plain(result.index, "task.index"), "data": data}
        return plain(result, f"the result of {message.name}")

    async def _rollout(self, message: messages.Rollout) -> dict[str, Any]:
        policy = self._policies[message.job] = RemotePolicy(message.job, message.sampling, self._send)
        try:
            episode = await self._envs[message.env].rollout(message.task, policy)
        finally:
            del self._policies[message.job]
            policy.close()
        if not isinstance(episode, Episode):
            raise TypeError(f"the environment returned {type(episode).__name__}, not an Episode")
        if not isinstance(episode.reward, Reward | RewardError):
            kind = type(episode.reward).__name__
            raise TypeError(f"the episode's reward is {kind}; return Reward(number) or RewardError(why)")
        return plain_episode(episode)

    def _beat(self) -> None:
        self._beating = None
        if self._jobs:
            self._send(messages.Beat(self._lag.take()))
            self._beating = asyncio.get_running_loop().call_later(self._beat_s, self._beat)


async def _guarded(work: Callable[[Any], Coroutine[Any, Any, Any]], message: messages.ToWorker) -> Any:
    try:
        return await work(message)
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:  # a SystemExit in a task would end the whole worker
        raise RuntimeError(f"it raised {error!r}") from error


async def _call(message: messages.Call) -> Any:
    result = _function(message.path or message.function)(**pickle.loads(message.arguments))
    return plain(await result if inspect.isawaitable(result) else result, "the result")


@lru_cache(maxsize=32)
def _function(where: str | bytes) -> Callable[..., Any]:
    if isinstance(where, str):
        function: Callable[..., Any] = load_object(where, "function")
        return function
    try:
        return pickle.loads(where)
    except Exception as error:
        raise ImportError(
            f"the function can't be loaded in a worker process: {error}; define it in a module that can be imported "
            "there, or name it as file.py:function"
        ) from error


def _lost(why: str) -> None:
    """The pool is gone. What runs here may hang, so this is no time for good order."""
    if why:
        print(f"worker: {why}", file=sys.stderr)
    os._exit(1)


def _failed(job: int, error: BaseException) -> messages.Failed:
    number = error.number if isinstance(error, PolicyError) else -1
    kind, is_value_error = type(error).__name__, isinstance(error, ValueError)
    return messages.Failed(job, kind, _text(error), _trace(error), is_value_error, number)


def _text(error: BaseException) -> str:
    try:
        return wire.sendable(str(error))
    except Exception as broken:  # user's exceptions can do anything
        return f"(its message can't be made: {type(broken).__name__})"


def _trace(error: BaseException) -> str:
    try:
        lines = "".join(traceback.format_exception(error)).splitlines()
        return wire.sendable("\n".join(line[:MAX_LINE] for line in lines)[-wire.MAX_TEXT :])  # its end says most
    except Exception:
        return ""


def _limit_memory(memory_mb: int) -> None:
    if not memory_mb:
        return
    # RLIMIT_AS would also count what is only reserved, such as files that are mapped to be read.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = memory_mb * 2**20 if hard == resource.RLIM_INFINITY else min(memory_mb * 2**20, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main(fd: int, parent: int) -> None:
    """Be the worker at the other end of `fd`, for the process `parent`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it could be asked for
        return
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)  # also while C code holds the interpreter's lock for ever
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash in every rollout must not fill the disk
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(FIRST_TO_GO)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    connection.setblocking(False)
    asyncio.run(_work(connection))


async def _work(connection: socket.socket) -> None:
    await Worker().run(connection)
