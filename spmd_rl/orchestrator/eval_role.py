"""`main.py eval` on rank 0: a model on the held-out tasks of a config, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from spmd_rl.models.hf_config import read_config, resolve
from spmd_rl.observe.evaluations import score_table, write_evaluation
from spmd_rl.observe.logs import RankOutput
from spmd_rl.observe.samples import write_samples
from spmd_rl.orchestrator import preflight
from spmd_rl.orchestrator.asked import ask
from spmd_rl.orchestrator.evaluate import Evaluation, evaluate
from spmd_rl.orchestrator.sampler import Services
from spmd_rl.orchestrator.sources import make_sources
from spmd_rl.orchestrator.steering import Steering

if TYPE_CHECKING:
    from spmd_rl.world.world import World


def run(world: World, output: RankOutput) -> None:
    """Evaluate once, write what came out, and show it."""
    config = world.config
    with world.watchdog.stage("preflight", config.deadlines.start_s):
        folder = resolve(config.model.name)
        preflight.check_disk(config)
        tokenizer = preflight.load_tokenizer(config)
        preflight.check_vocabulary(tokenizer, read_config(folder), config)
        sources = make_sources(config, preflight.load_environments(config, tokenizer))
        stops = preflight.stop_tokens(tokenizer, folder)

    async def work(services: Services, steering: Steering) -> Evaluation:
        return await evaluate(services, sources, step=0)

    evaluation = ask(world, stops, work, print)
    path = write_evaluation(config.output_dir, evaluation.plain())
    write_samples(Path(config.output_dir) / "eval", 0, evaluation.shown, tokenizer.decode, len(evaluation.shown))
    with open(Path(config.output_dir) / "metrics.jsonl", "w", encoding="utf-8") as metrics:
        metrics.write(json.dumps({"phase": "eval", "step": 0, **evaluation.metrics}) + "\n")
    print(f"\n{config.model.name} on held-out tasks\n{score_table(evaluation.plain())}\n")
    print(f"scores         {path}\nrollouts       {path.parent / 'rollouts'}")
