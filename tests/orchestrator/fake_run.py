"""One run of the main loop against a fake cluster, with a fake environment, and all that can be asked about it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from spmd_rl.config.tree import (
    AlgorithmConfig,
    Config,
    DeadlineConfig,
    EvalConfig,
    OrchestratorConfig,
    SamplingConfig,
    SourceConfig,
    WarmupConfig,
    WeightsConfig,
)
from spmd_rl.envs.protocol import STATUS_OF, Policy, Split, turns_to_sample
from spmd_rl.orchestrator.batch import Batch
from spmd_rl.orchestrator.link import Link
from spmd_rl.orchestrator.loop import Loop
from spmd_rl.orchestrator.past import Past
from spmd_rl.orchestrator.records import NoLog
from spmd_rl.orchestrator.rollouts import Rollouts
from spmd_rl.orchestrator.router import Router
from spmd_rl.orchestrator.routes import Routes
from spmd_rl.orchestrator.sampler import Services
from spmd_rl.orchestrator.versions import Versions
from spmd_rl.rollouts.types import Episode, Reward, Task
from spmd_rl.world.messages import Trained
from tests.orchestrator.fake_cluster import Delays, FakeCluster, Misbehaviour
from tests.orchestrator.virtual_time import run

PROMPT, HELDOUT, TOOL = 1_000, 500_000, 7  # prompts of training task i: PROMPT + i; of held-out tasks: HELDOUT + i
PROBE = [np.arange(5, dtype=np.int32), np.arange(4, dtype=np.int32)]


class FakeEnvironment:
    """Tasks without meaning, attempts of some turns; the reward of an attempt is a function of its tokens.

    Before each attempt (they are numbered from 0 as they start) comes `act(number, task)`: it may raise or wait, and
    what it returns, unless None, is the result. `pause(task)` is how many seconds lie between tokens and reward.
    `history` holds the tasks of all attempts.
    """

    def __init__(
        self,
        turns: int = 1,
        act: Callable[[int, Task], Awaitable[Any]] | None = None,
        pause: Callable[[Task], float] = lambda task: 0.0,
        source: str = "fake",
    ) -> None:
        self.turns, self.act, self.pause, self.source = turns, act, pause, source
        self.history: list[Task] = []

    def task(self, index: int, split: Split) -> Task:
        return Task(self.source, index, {"split": split})

    def prompt(self, task: Task) -> np.ndarray:
        first = PROMPT if task.data["split"] == "train" else HELDOUT
        return np.asarray([first + task.index, 3], np.int32)

    async def rollout(self, task: Task, policy: Policy) -> Any:
        self.history.append(task)
        acted = await self.act(len(self.history) - 1, task) if self.act else None
        return await self.attempt(task, policy) if acted is None else acted

    async def attempt(self, task: Task, policy: Policy) -> Episode:
        tokens = added = self.prompt(task)
        turns = []
        for _ in range(self.turns):
            generation = await policy.generate(tokens, policy.sampling)
            turns.append((added, generation))
            added = np.asarray([TOOL], np.int32)
            tokens = np.concatenate([tokens, generation.tokens, added])
        await asyncio.sleep(self.pause(task))
        sample = turns_to_sample(turns, policy.sampling.temperature)
        return Episode(task, (sample,), Reward(float(tokens.sum() % 3)), STATUS_OF[generation.stop_reason])

    def teacher(self, task: Task, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return self.prompt(task), np.asarray([TOOL] * int(rng.integers(1, 4)), np.int32)


@dataclass
class Recorder:
    """A `Report` that remembers."""

    started: list[tuple[str, Any]] = field(default_factory=list)
    warmup: list[Trained] = field(default_factory=list)
    batches: dict[int, Batch] = field(default_factory=dict)
    pulls: dict[int, dict[str, float]] = field(default_factory=dict)
    collapses: dict[int, Any] = field(default_factory=dict)
    rollbacks: list[tuple[int, str]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float], list[Episode]]] = field(default_factory=list)
    resumed: list[tuple[int, int]] = field(default_factory=list)
    commands: list[tuple[int, str]] = field(default_factory=list)
    last: int | None = None  # step that was booked

    def start(self, phase, pull=None) -> None:
        self.started.append((phase, pull))

    def _follows(self, step: int) -> None:
        assert self.last in (None, step - 1), "steps are booked in order"
        self.last = step

    def warmup_step(self, trained) -> None:
        self.warmup.append(trained)

    def rl_step(self, step, batch, packed, trained, pull, collapse=None) -> None:
        assert trained.step == step, "steps are booked in order"
        self._follows(step)
        self.batches[step], self.pulls[step], self.collapses[step] = batch, pull, collapse

    def rolled_back(self, step, folder, dropped, pull) -> None:
        self.rollbacks.append((step, folder))
        self._follows(step)

    def evaluation(self, evaluation) -> None:
        self.evaluations.append((evaluation.step, evaluation.metrics, evaluation.shown))

    def taken_up(self, folder, saved, step, pull) -> None:
        self.resumed.append((saved, step))

    def steered(self, step, command) -> None:
        self.commands.append((step, command))

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state) -> None:
        pass


@dataclass
class Run:
    """A run that was made, or is about to be."""

    config: Config
    cluster: FakeCluster
    services: Services
    report: Any
    loop: Loop
    seconds: float = 0.0  # virtual
    evaluation: Any = None  # of a test that evaluates alone


def make_config(
    *,
    max_steps: int = 3,
    groups: int = 2,
    group_size: int = 2,
    max_tokens: int = 4,
    warmup_steps: int = 0,
    eval_tasks: int = 0,
    eval_interval: int = 0,
    env_s: float = 1e9,
    sources: int = 1,
    seq_len: int = 64,
    output_dir: str = "nowhere",
    weights: WeightsConfig | None = None,
    **orchestrator: Any,
) -> Config:
    """A small run: `groups` groups of `group_size` rollouts a step."""
    return Config(
        output_dir=output_dir,
        max_steps=max_steps,
        seq_len=seq_len,
        warmup=WarmupConfig(steps=warmup_steps, batch_size=3),
        weights=weights or WeightsConfig(),
        deadlines=replace(DeadlineConfig(), env_s=env_s),
        orchestrator=OrchestratorConfig(
            batch_size=groups * group_size,
            group_size=group_size,
            sampling=SamplingConfig(max_tokens=max_tokens),
            source=tuple(SourceConfig(ratio=1.0 + i) for i in range(sources)),
            eval=EvalConfig(tasks=eval_tasks, interval=eval_interval, samples=2),
            algorithm=AlgorithmConfig(zero_variance="keep"),  # which tasks are trained on is known then
            **({"max_retries": 0} | orchestrator),
        ),
    )


async def prepare(
    config: Config,
    envs: Sequence[FakeEnvironment] | None = None,
    *,
    replicas: int = 1,
    trainers: int = 1,
    delays: Delays | None = None,
    misbehaviour: Misbehaviour | None = None,
    report: Callable[[Link], Any] = lambda link: Recorder(),
    probe: list[np.ndarray] = PROBE,
    journal: Any = None,
    past: Past | None = None,
) -> Run:
    """All parts, put together as `role.py` does it."""
    link = Link(replicas, trainers)
    cluster = FakeCluster(link, delays, misbehaviour, past.step if past else None)
    router = Router(replicas, slack=config.orchestrator.group_size)
    routes = Routes(link) if config.trainer.router_replay else None
    services = Services(config, link, router, Rollouts(config), stop_token_ids=[2], routes=routes)
    recorder = report(link)
    versions = Versions(config, link, probe)
    environments = list(envs or [FakeEnvironment()])
    loop = Loop(config, link, services, environments, versions, recorder, journal=journal or NoLog(), past=past)
    return Run(config, cluster, services, recorder, loop)


def train(config: Config, envs: Sequence[FakeEnvironment] | None = None, **options: Any) -> Run:
    """One whole run in virtual time, with Stop at the end; raises what the loop raises (an exception group or not)."""

    async def main() -> Run:
        made = await prepare(config, envs, **options)
        try:
            await made.loop.run()
            made.loop.link.stop()
            made.seconds = asyncio.get_running_loop().time()
        finally:
            await made.cluster.close()
        return made

    return run(main())
