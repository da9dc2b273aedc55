"""The ranks of `bench e2e`: the product's own roles, but rank 0 measures. Arguments: model, new tokens, result file."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from spmd_rl.algorithms import resolve
from spmd_rl.config.tree import (
    AlgorithmConfig,
    Config,
    DeploymentConfig,
    EvalConfig,
    InferenceConfig,
    ModelConfig,
    OptimConfig,
    OrchestratorConfig,
    SamplingConfig,
    SourceConfig,
    TrainerConfig,
)
from spmd_rl.inference import role as inference
from spmd_rl.orchestrator import role as orchestrator
from spmd_rl.orchestrator.batch import make_batch
from spmd_rl.orchestrator.loop import Loop
from spmd_rl.rollouts.packing import pack
from spmd_rl.rollouts.types import Group
from spmd_rl.trainer import role as trainer
from spmd_rl.world.mesh import Mesh
from spmd_rl.world.watchdog import Watchdog
from spmd_rl.world.world import World

TASKS, ROLLOUTS, ALONE, STEPS = 16, 8, 5, 14


def config(folder: str, new_tokens: int, output_dir: str) -> Config:
    return Config(
        output_dir=output_dir,
        max_steps=STEPS,
        seq_len=8192,
        model=ModelConfig(name=folder),
        trainer=TrainerConfig(optim=OptimConfig(lr=1e-5)),
        orchestrator=OrchestratorConfig(
            batch_size=TASKS * ROLLOUTS,
            group_size=ROLLOUTS,
            max_lag=1,
            sampling=SamplingConfig(max_tokens=new_tokens),
            algorithm=AlgorithmConfig(zero_variance="keep"),  # every step samples as much as it trains on
            source=(SourceConfig(env="tools.bench_parts.fixed_env:Fixed"),),
            eval=EvalConfig(tasks=0),
        ),
        inference=InferenceConfig(vllm={"max_num_seqs": TASKS * ROLLOUTS}),
        deployment=DeploymentConfig(train_ranks=1, infer_ranks=1),
    )


class MeasuredLoop(Loop):
    """The product's loop, with the two halves alone before it."""

    async def _begin(self) -> int:
        self.versions.publish(0)
        await self.versions.report(0)
        sample_s, groups = [], []
        for _ in range(ALONE):
            started = time.perf_counter()
            groups = await asyncio.gather(*(self._group(task) for task in range(TASKS)))
            sample_s.append(time.perf_counter() - started)
        train_s = []
        settings = self.config.orchestrator
        batch = make_batch(list(groups), [], settings, resolve(settings.algorithm), {}, 0)
        packed = [pack(samples, 1, self.config.seq_len) for samples in batch.minibatches]
        for number in range(ALONE):
            started = time.perf_counter()
            await self.trainers.train("alone", number + 1, packed)
            train_s.append(time.perf_counter() - started)
        figures = {"sample_s": statistics.median(sample_s[1:]), "train_s": statistics.median(train_s[1:])}
        (Path(self.config.output_dir) / "alone.json").write_text(json.dumps(figures))
        self.report.start("rl")
        self._sampler.admit(version=0)
        return 0

    async def _group(self, task_index: int) -> Group:
        env = self.envs[0]
        task = env.task(10_000 + task_index, "train")
        jobs = []
        for sample in range(ROLLOUTS):
            ids = {"group": 10_000 + task_index, "rollout": 10**6 + task_index * ROLLOUTS + sample, "seed": sample}
            policy = self.services.policy(self.config.orchestrator.sampling, **ids)
            jobs.append(self.services.attempt(env, task, policy))
        return Group(task_index, task, tuple(await asyncio.gather(*jobs)), 0)


def measure(world: World, out: str) -> None:
    """Rank 0."""
    from spmd_rl.observe.logs import redirect_rank_output

    folder = Path(world.config.output_dir)
    output = redirect_rank_output(folder, 0, console=False)
    orchestrator.run(world, output, MeasuredLoop)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [record for line in lines if (record := json.loads(line))["phase"] == "rl"]
    steps = steps[3:-2]  # without the fill of the pipeline and its end, where nothing is sampled any more
    step_s = statistics.mean(record["time/step_s"] for record in steps)
    alone = json.loads((folder / "alone.json").read_text())
    figures = {
        **alone,
        "step_s": step_s,
        "ratio": step_s / max(alone.values()),
        "rollouts_per_s": TASKS * ROLLOUTS / step_s,
        "new_tokens_per_s": statistics.mean(record["tokens/sampled"] for record in steps) / step_s,
        "lag_mean": statistics.mean(record["lag/mean"] for record in steps),
        "cpu_s": {
            role: statistics.mean(record[key] for record in steps)
            for role, key in (
                ("orchestrator", "cpu/orchestrator_s"),
                ("trainer", "cpu/trainer_s"),
                ("engine", "cpu/engines_s"),
            )
        },
    }
    Path(out).write_text(json.dumps(figures))


def main() -> None:
    folder, new_tokens, out = sys.argv[1:]
    run = config(folder, int(new_tokens), str(Path(tempfile.gettempdir()) / f"bench_e2e_{os.environ['MASTER_PORT']}"))
    rank, mesh = int(os.environ["RANK"]), Mesh.build(run, 3)
    watchdog = Watchdog(rank, 3, mesh.role(rank), 60)
    watchdog.start()
    try:
        world = World.join(run, mesh, watchdog)
        if rank == 0:
            measure(world, out)
        else:
            (trainer if rank == 1 else inference).run(world)
        world.leave()
    except BaseException as error:
        watchdog.fail(error)
    os._exit(0)


if __name__ == "__main__":
    main()
