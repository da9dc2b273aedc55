"""The agents that an environment of verifiers plays with, every one of them the policy; and one episode of it.

It does what verifiers' own agents and `Env.run_episode` do, without servers: their `Env.setup`, `run` and `finalize`
see agents with `run` and `interaction`, one new set for each episode.

It refuses to know what becomes of the traces. Invariants: whatever belongs to one episode lives in its `Table`; runs
are listed in the order in which they began; no agent is played by another model than the policy.

Checked with verifiers 0.4.0.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any, NoReturn

import verifiers.v1 as vf
from verifiers.v1.errors import boundary

from spmd_rl.envs.adapters.verifiers_client import Conversation
from spmd_rl.envs.adapters.verifiers_rendering import Rendering
from spmd_rl.envs.adapters.verifiers_run import MODEL, AgentRun, Seat
from spmd_rl.envs.adapters.verifiers_tools import Workshop
from spmd_rl.envs.protocol import Policy

IN_PROCESS = ("null", "bash")  # harnesses that the chat loop of this adapter stands for


class NoRuntime(vf.Runtime):
    """Where a task would run programs. It runs none, and says so."""

    def __init__(self) -> None:
        super().__init__("none")
        self.config = vf.SubprocessConfig()

    async def start(self) -> None:
        """There is nothing to start."""

    async def run(self, argv: list[str], env: dict[str, str]) -> NoReturn:
        _no_programs(f"run {argv[0]!r}")

    async def write(self, path: str, data: bytes) -> NoReturn:
        _no_programs(f"write {path!r}")

    async def _read(self, path: str, max_bytes: int | None = None) -> NoReturn:
        _no_programs(f"read {path!r}")


class Table:
    """One episode: who plays, and what was played."""

    def __init__(
        self, env: vf.Env, seats: dict[str, Seat], workshop: Workshop, rendering: Rendering, policy: Policy
    ) -> None:
        limit = env.config.max_concurrent_agents
        self.gate = asyncio.Semaphore(limit) if limit else None
        self.runs: list[AgentRun] = []
        self.finished: list[vf.Trace] = []
        self._env, self._seats, self._workshop = env, seats, workshop
        self._rendering, self._policy = rendering, policy
        self._own_tasks = type(env.taskset).task_type()

    async def play(self, task: vf.Task) -> vf.Episode:
        """One episode. Raises vf.EnvError for what the environment's hooks raise, TimeoutError for its deadlines."""
        env, limits = self._env, self._env.config.timeout
        of = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agents = vf.Agents(env.config, lambda name, _: PolicyAgent(self._seats[name], self))
        episode = vf.Episode(env=vf.EnvInfo(id=env.config.env_id), task=of)
        async with asyncio.timeout(limits.episode):
            async with boundary(vf.EnvError, f"{type(env).__name__}.setup()"):
                await env.setup(agents)
            async with boundary(vf.EnvError, f"{type(env).__name__}.run()"):
                await env.run(task, agents)
        episode.traces = self.finished
        async with asyncio.timeout(limits.finalize), boundary(vf.EnvError, f"{type(env).__name__}.finalize()"):
            await env.finalize(task, episode)
        episode.ok = all(trace.ok for trace in episode.traces)
        return episode

    async def open(self, seat: Seat, task: vf.Task, trainable: bool, by_user: bool, watch: Any) -> AgentRun:
        """A run at work on the task."""
        run = AgentRun(seat, task, Conversation(self._rendering, self._policy, seat.max_tokens), by_user)
        run.trace.agent.trainable = trainable
        if watch is not None:
            watch(run.trace)
        self.runs.append(run)
        await run.open(self._workshop, shared=isinstance(task, self._own_tasks))
        return run


class PolicyAgent:
    """A seat in one episode: what an environment's `run` knows as `agents.<name>`."""

    def __init__(self, seat: Seat, table: Table) -> None:
        self.config, self.trainable = seat.config, True
        self._seat, self._table = seat, table

    async def run(self, task: vf.Task, *, on_trace: Callable[[vf.Trace], None] | None = None, **borrowed: Any) -> Any:
        """Do the task from its prompt to the end. The trace."""
        _refuse(borrowed)
        async with self._table.gate or nullcontext():
            run = await self._table.open(self._seat, task, self.trainable, False, on_trace)
            try:
                if run.ok:
                    await run.step()
                if run.ok:
                    run.trace.stop("agent_completed")
                trace = await run.close()
            except BaseException:
                await run.abort()
                raise
        self._table.finished.append(trace)
        return trace

    @asynccontextmanager
    async def interaction(
        self, task: vf.Task, *, on_trace: Callable[[vf.Trace], None] | None = None, **borrowed: Any
    ) -> AsyncIterator[vf.Interaction]:
        """Do the task turn by turn; the caller is the user."""
        _refuse(borrowed)
        async with self._table.gate or nullcontext():
            run = await self._table.open(self._seat, task, self.trainable, True, on_trace)
        interaction = vf.Interaction(run, gate=self._table.gate)
        try:
            if run.failure is not None:
                raise run.failure
            yield interaction
        except Exception as error:
            if run.failure is None:
                run.fail(error)
            raise
        except BaseException:
            await run.abort()
            raise
        finally:
            trace = await interaction.close()
            if trace.is_completed:
                self._table.finished.append(trace)

    def provision(self, task: vf.Task | None = None) -> NoReturn:
        """There are no containers."""
        _no_programs("have a container provisioned")


def seats(env: vf.Env, max_turns: int, max_tokens: int) -> dict[str, Seat]:
    """The environment's agents by name. ValueError for one that the policy can't play in process."""
    runtime, found = NoRuntime(), {}
    for name, harness in env.config.agent_harnesses().items():
        config = getattr(env.config, name)
        if harness.id not in IN_PROCESS:
            raise ValueError(
                f"agent {name!r} is played by the harness {harness.id!r}, a program of its own that needs a container; "
                f"here agents chat in process: set agents.{name}.harness.id = 'null' if that will do"
            )
        if config.model is not None or config.client is not None:
            raise ValueError(f"agent {name!r} is played by a model of its own; here every agent is the policy")
        if config.runtime.type not in ("prime", "subprocess"):  # prime: what stands there by default
            raise ValueError(f"agent {name!r} asks for a {config.runtime.type} container; this adapter runs none")
        sampling = config.sampling.model_dump(exclude_unset=True) if config.sampling else {}
        if wrong := sorted(sampling.keys() - {"max_tokens"}):
            raise ValueError(
                f"agents.{name}.sampling.{wrong[0]}: how is sampled says orchestrator.sampling; an agent may only "
                "lower max_tokens"
            )
        limits = [limit for limit in (sampling.get("max_tokens"), max_tokens) if limit]
        sampling = vf.SamplingConfig(max_tokens=min(limits, default=None))
        config = config.model_copy(
            update={
                "harness": harness,
                "model": MODEL,
                "sampling": sampling,
                "max_turns": config.max_turns or max_turns or None,
            }
        )
        context = vf.ModelContext(model=MODEL, client=vf.EvalClientConfig(), sampling=sampling)
        found[name] = Seat(name, config, context, runtime, min(limits, default=0))
    return found


def _refuse(borrowed: dict[str, Any]) -> None:
    """What only runs in containers have: a runtime, servers of tools, artifacts."""
    if asked := [name for name, value in borrowed.items() if value]:
        _no_programs(f"play with {asked[0]}")


def _no_programs(what: str) -> NoReturn:
    raise vf.SandboxError(f"the taskset wants to {what}; this adapter runs no programs and no containers")
