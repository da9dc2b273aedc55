"""`main.py sft --bench`: the trainer of supervised fine-tuning, without its data: every made-up token is learned."""

from __future__ import annotations

import numpy as np

from spmd_rl.algorithms.supervised import learned
from spmd_rl.config.tree import Config
from spmd_rl.observe.logs import RankOutput
from spmd_rl.trainer.bench import Batch, bench
from spmd_rl.trainer.bench_lengths import drawn, limited
from spmd_rl.world.world import World


def run(world: World, output: RankOutput | None = None) -> None:
    """Measure; `output` is the first rank's."""
    bench(world, "sft", batch_of)


def batch_of(config: Config, kind: str, data_ranks: int, vocabulary: int) -> Batch:
    """The batch of one optimizer step."""
    wanted, rng = config.data.batch_size, np.random.default_rng(config.seed)
    lengths = limited(drawn(kind, wanted, config), data_ranks, config)
    documents = [(rng.integers(0, vocabulary, n).astype(np.int32), np.ones(n, np.uint8)) for n in lengths.tolist()]
    return Batch([learned(documents)], wanted)
