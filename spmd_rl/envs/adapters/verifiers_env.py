"""A taskset of verifiers (0.4, `verifiers.v1`) as an environment: in process, token for token, no HTTP, no subprocess.

`verifiers:<taskset>` names an installed taskset package, as `prime env` or pip install it. Its tasks, tools, stops,
rewards and metrics are its own; the policy plays every agent. What needs a container or another model is refused. The
chat loop stands for their harness `null`, and for `bash`, which is what an agent has that says nothing; the shell and
the editor that `bash` brings are not offered.

It refuses to know how a run goes (`verifiers_run`) and how messages become tokens (`verifiers_rendering`). Invariants:
an error is never a zero; a timeout that was scored counts as truncated; one instance serves many rollouts at once,
and what belongs to one of them lives in its `Table`.

Checked with verifiers 0.4.0.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import numpy as np
import verifiers.v1 as vf
from pydantic import ValidationError

from spmd_rl.config.imports import load_object
from spmd_rl.envs.adapters.first_prompt import first_prompt
from spmd_rl.envs.adapters.verifiers import explained
from spmd_rl.envs.adapters.verifiers_agents import Table, seats
from spmd_rl.envs.adapters.verifiers_rendering import Choice, rendering
from spmd_rl.envs.adapters.verifiers_run import AgentRun
from spmd_rl.envs.adapters.verifiers_tasks import tasks_of
from spmd_rl.envs.adapters.verifiers_tools import Workshop
from spmd_rl.envs.protocol import Policy, Split
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Sample, Status, Task


class VerifiersEnvironment:
    """One taskset.

    Args:
        tokenizer: a Hugging Face tokenizer.
        seed: orders the training tasks of a finite taskset.
        taskset: its id, which is the name of its module.
        options: the taskset's own settings.
        env: id of an environment to pair it with, as `best-of-n`; empty: the taskset's own, else one agent.
        env_options: that environment's settings, but for its agents.
        agents: settings by agent: {"agent": {"max_turns": 4, "timeout": {"rollout": 60}}}.
        tasks: use the first so many tasks; 0: all.
        heldout: share of the tasks, by their content, kept from training.
        max_turns: replies of one agent's run at most, where its settings have no limit; 0: no limit.
        max_tokens: new tokens of a reply at most; 0: the policy's limit, which holds in any case.
        renderer: auto (the package `renderers` for models whose name it knows, else the tokenizer's chat template),
            template, a renderer's name, or {"name": …} with its settings.
        solve: import path of a teacher, a function (task, heard, rng) → text; for the supervised warm-up.

    ValueError for what is not there or can't be played in process.
    """

    def __init__(
        self,
        tokenizer: Any,
        seed: int = 0,
        taskset: str = "",
        *,
        options: dict[str, Any] | None = None,
        env: str = "",
        env_options: dict[str, Any] | None = None,
        agents: dict[str, dict[str, Any]] | None = None,
        tasks: int = 0,
        heldout: float = 0.1,
        max_turns: int = 0,
        max_tokens: int = 0,
        renderer: Choice = "auto",
        solve: str = "",
    ) -> None:
        self._source = f"verifiers:{taskset}"
        self._env = _load(self._source, taskset, options or {}, env, env_options or {}, agents or {})
        try:
            self._seats = seats(self._env, max_turns, max_tokens)
            self._rendering = rendering(tokenizer, renderer)
        except ValueError as error:
            raise ValueError(f"{self._source}: {error}") from error
        chosen = self._env.taskset.take(tasks) if tasks else self._env.taskset
        self._tasks = tasks_of(self._source, chosen, seed, heldout)
        self._workshop: Workshop | None = None  # made where it is used: it belongs to an event loop
        self._starting = asyncio.Lock()
        if solve:
            self.solve = load_object(solve, f"{self._source}: solve")

    def task(self, index: int, split: Split) -> Task:
        """The taskset's number and the row, as plain JSON."""
        return self._tasks.task(index, split)

    def prompt(self, task: Task) -> np.ndarray:
        """int32[T]: what the policy is asked first. A rollout is begun to see it."""
        return first_prompt(task, lambda policy: self._once(task, policy))

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """One episode of the taskset's environment."""
        async with self._starting:
            if self._workshop is None:
                self._workshop = await self._start()
        return await self._play(task, policy, self._workshop)

    async def _play(self, task: Task, policy: Policy, workshop: Workshop) -> Episode:
        table = Table(self._env, self._seats, workshop, self._rendering, policy)
        try:
            played = await table.play(self._tasks.of(task))
        except TimeoutError:
            why = f"{type(self._env).__name__} missed its deadline (env_options.timeout)"
            return Episode(task, (), RewardError(why, "TimeoutError"), status="timeout")
        return _episode(task, table.runs, valid=played.ok or self._env.complete(played))

    async def _start(self) -> Workshop:
        """What all rollouts of an event loop share. It is in use until the process ends."""
        workshop = Workshop(self._env.taskset.toolsets(self._env.taskset.config))
        await self._env.start()
        return workshop

    async def _once(self, task: Task, policy: Policy) -> Episode:
        """A rollout that shares nothing with others."""
        workshop = await self._start()
        try:
            return await self._play(task, policy, workshop)
        finally:
            await workshop.close()
            await self._env.stop()


def _load(
    source: str,
    taskset: str,
    options: dict[str, Any],
    env: str,
    env_options: dict[str, Any],
    agents: dict[str, dict[str, Any]],
) -> vf.Env:
    """The environment of verifiers. ValueError says what is wrong with the settings."""
    data = {**env_options, **agents, "id": env, "taskset": {**options, "id": taskset}}
    with explained(source, taskset, env):
        vf.taskset_config_type(taskset)
        kind = vf.env_config_type(taskset, env)
        if unknown := sorted(agents.keys() - {n for n, f in kind.model_fields.items() if _is_agent(f.default)}):
            has = ", ".join(n for n, f in kind.model_fields.items() if _is_agent(f.default))
            raise ValueError(f"{source}: there is no agent {unknown[0]!r}; the agents are {has}")
        try:
            return vf.load_environment(vf.resolve_env_config(data))
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)]
            raise ValueError(f"{source}: {'; '.join(wrong)}") from None


def _is_agent(default: Any) -> bool:
    return isinstance(default, vf.AgentConfig)


def _episode(task: Task, runs: list[AgentRun], valid: bool) -> Episode:
    """What was played, as samples and a reward. Not `valid`: an agent failed, and the environment can't do without."""
    ours = [run for run in runs if run.trace.agent.trainable]
    if not valid:
        failed = next((run for run in [*ours, *runs] if not run.trace.ok), None)
        return _failed(task, failed, "the environment calls its episode incomplete")
    ours = [run for run in ours if run.trace.ok]
    for run in ours:
        if late := [name for name, reward in run.trace.rewards.items() if reward is None]:
            stop = run.trace.stop_condition
            why = f"agent {run.trace.agent.name!r}: rewards were not computed ({stop}): {', '.join(late)}"
            return Episode(task, (), RewardError(why, "TimeoutError"), status="timeout")
        if not run.trace.rewards:
            why = f"the taskset has no reward for agent {run.trace.agent.name!r}: there is nothing to learn from"
            return Episode(task, (), RewardError(why), status="failed")
    samples = [sample for run in ours for sample in _samples(run, len(runs) > 1, len(ours) > 1)]
    if not samples:
        stops = ", ".join(str(run.trace.stop_condition) for run in ours) or "no trainable agent ran"
        late = any(run.trace.is_timeout for run in ours)
        why = RewardError(f"the policy said nothing ({stops})", "TimeoutError" if late else "NothingSampled")
        return Episode(task, (), why, status="timeout" if late else "failed")
    value = float(np.mean([run.trace.reward for run in ours]))
    return Episode(task, tuple(samples), Reward(value, _parts(ours)), status=_status(ours))


def _failed(task: Task, run: AgentRun | None, otherwise: str) -> Episode:
    error = run.trace.last_error if run else None
    if error is None:
        return Episode(task, (), RewardError(otherwise), status="failed")
    why = f"agent {run.trace.agent.name!r}: {error.type}: {error.message}\n{error.traceback or ''}"
    return Episode(task, (), RewardError(why.rstrip(), error.type), status="failed")


def _samples(run: AgentRun, named: bool, own_reward: bool) -> tuple[Sample, ...]:
    name = run.trace.agent.name if named else ""
    return run.conversation.samples(name, run.trace.reward if own_reward else None)


def _status(runs: list[AgentRun]) -> Status:
    cut = any(run.trace.is_timeout or run.trace.is_truncated or run.conversation.status != "ok" for run in runs)
    return "truncated" if cut else "ok"


def _parts(runs: list[AgentRun]) -> dict[str, float]:
    """Weighted rewards and metrics by name; with several agents by agent, the mean of each one's runs."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    named = len({run.trace.agent.name for run in runs}) > 1
    for run in runs:
        prefix = f"{run.trace.agent.name}/" if named else ""
        for name, reward in run.trace.rewards.items():
            found[prefix + name].append(reward.value)
        for name, value in run.trace.metrics.items():
            if value is not None:
                found[prefix + (f"metric_{name}" if name in run.trace.rewards else name)].append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}
