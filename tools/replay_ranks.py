"""A trainer rank of `tools/replay.py --train-only`: makes its orders from a journal and follows them.

Every rank reads the journal and keeps its own rows, as in supervised training; rank 0 compares what each step reports
with what the run reported then.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spmd_rl.algorithms import resolve, resolve_sources, supervised
from spmd_rl.config.tree import Config
from spmd_rl.envs.protocol import Environment
from spmd_rl.models.hf_config import read_config
from spmd_rl.models.hf_config import resolve as resolve_model
from spmd_rl.orchestrator import preflight
from spmd_rl.orchestrator.batch import make_batch
from spmd_rl.orchestrator.book import Book, Taken
from spmd_rl.orchestrator.lessons import Lesson, Lessons
from spmd_rl.orchestrator.past import JOURNAL
from spmd_rl.orchestrator.records import AnyRecord, Began, NoLog, RolledBack, Steered, Stepped, Took, timeless
from spmd_rl.orchestrator.seeds import seed_of
from spmd_rl.orchestrator.sources import make_sources
from spmd_rl.orchestrator.steering import parse
from spmd_rl.orchestrator.trainers import columns
from spmd_rl.rollouts.cost import TrainingCost
from spmd_rl.rollouts.packing import Cost, Packed, pack
from spmd_rl.trainer.role import TrainerRank, build_learner, silent
from spmd_rl.world.journal import read
from spmd_rl.world.mesh import Mesh
from spmd_rl.world.messages import Event, FreshOptimizer, Order, Stop, Train, Trained
from spmd_rl.world.watchdog import Watchdog
from spmd_rl.world.world import World
from tools.replay import settings

NEAR = 1e-3  # relative; on another number of ranks sums are taken in another order


class Comparison:
    """Steps as they were reported then, and as they are now."""

    def __init__(self, run: Path, exact: bool) -> None:
        records = [record for _, record in read(run / JOURNAL, AnyRecord)]
        self._then = {record.step: record.metrics for record in records if isinstance(record, Stepped)}
        self._exact = exact
        self.steps, self.first = 0, ""

    def tell(self, event: Event) -> None:
        """A step is complete."""
        if not isinstance(event, Trained) or event.phase != "rl" or event.step not in self._then:
            return
        self.steps += 1
        then, now = self._then[event.step], timeless(event.metrics)
        wrong = [name for name in then if not self._same(then[name], now.get(name, math.nan))]
        if wrong and not self.first:
            shown = ", ".join(f"{name} was {then[name]!r} and is {now.get(name)!r}" for name in wrong[:4])
            self.first = f"step {event.step} is the first one that differs: {shown}"

    def _same(self, then: float, now: float) -> bool:
        return then == now if self._exact else math.isclose(then, now, rel_tol=NEAR, abs_tol=1e-6)


def orders(run: Path, config: Config, index: int, ranks: int) -> Iterator[Order]:
    """What data rank `index` of `ranks` did in that run."""
    tokenizer = preflight.load_tokenizer(config)
    envs = preflight.load_environments(config, tokenizer)
    cost = TrainingCost.known(read_config(resolve_model(config.model.name)))
    for step, learned in enumerate(_warm_up(config, envs, tokenizer), 1):
        packed = pack(supervised.learned(learned), ranks, config.seq_len, cost)
        yield Train(step, "warmup", _rows([packed], index))
    if config.warmup.steps:
        yield FreshOptimizer("rl")
    book = Book(config, lambda source, number: envs[source].task(number, "train"), NoLog())
    algorithm, memory, lr = resolve(config.orchestrator.algorithm), {}, -1.0
    records = [record for _, record in read(run / JOURNAL, AnyRecord)]
    if any(isinstance(record, RolledBack) for record in records):
        raise ValueError(f"{run} went back to a checkpoint: its training can't be taken again from the journal alone")
    for record in records:
        taken = book.follow(record)
        if isinstance(record, Steered) and parse(record.command)[1] == "lr":
            lr = parse(record.command)[2]
        if isinstance(record, Took) and taken is not None:
            yield Train(record.step, "rl", _rows(_packed(taken, config, algorithm, memory, ranks, cost), index), lr)
    yield Stop()


def _warm_up(config: Config, envs: list[Environment], tokenizer: Any) -> list[list[Lesson]]:
    """What every step of the warm-up learned."""

    async def make() -> list[list[Lesson]]:
        lessons = Lessons(config, make_sources(config, envs), tokenizer)
        return [await lessons.step(step) for step in range(1, config.warmup.steps + 1)]

    return asyncio.run(make())


def _packed(
    taken: Taken, config: Config, algorithm: Any, memory: dict[str, float], ranks: int, cost: Cost | None
) -> list[Packed]:
    o = config.orchestrator
    oldest = taken.step - 1 - o.max_token_lag if o.max_token_lag else 0
    seed = seed_of(config.seed, "shuffle", taken.step)
    batch = make_batch(taken.groups, taken.dropped, o, algorithm, memory, seed, oldest, resolve_sources(o))
    return [pack(samples, ranks, config.seq_len, cost) for samples in batch.minibatches]


def _rows(packed: list[Packed], index: int) -> list[list[dict[str, Any]]]:
    return [[columns(row) for row in minibatch.rows[index]] for minibatch in packed]


def main() -> None:
    """This process is a rank."""
    run, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = settings(run)
    deadlines = config.deadlines
    deployment = replace(config.deployment, rank_map=())  # it spoke of another world
    config = replace(
        config, output_dir=f"{run}-train-only", ckpt=replace(config.ckpt, resume=""), deployment=deployment
    )
    watchdog = Watchdog(rank, ranks, "trainer", deadlines.heartbeat_s, deadlines.start_s)
    watchdog.start()
    began = next(record for _, record in read(run / JOURNAL, AnyRecord) if isinstance(record, Began))
    comparison = Comparison(run, exact=began.layout[0] == ranks)
    try:
        world = World.join(config, Mesh.all_train(ranks, config), watchdog)
        tell = comparison.tell if rank == 0 else silent
        dims = world.mesh.dims
        rows = orders(run, config, dims.data_rank(world.mesh.trainers.index(rank)), dims.data_ranks)
        TrainerRank(world, build_learner(world), tell).follow(rows)
        world.leave()
    except BaseException as error:
        watchdog.fail(error)
    if rank == 0:
        how = "equal" if began.layout[0] == ranks else "nearly equal, on another number of ranks"
        print(comparison.first or f"{how}: {comparison.steps} optimizer steps", flush=True)
    os._exit(int(bool(comparison.first)) if rank == 0 else 0)


if __name__ == "__main__":
    main()
