"""A rank of three on "hosts" a, b, c: b and c lack a model that a has. FOLDER must hold a/model.

Every rank writes what happened into FOLDER/RANK.json. With a second argument, rank 1 receives a byte that was not sent.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from spmd_rl.config.tree import Config, ModelConfig
from spmd_rl.world import model_copies
from spmd_rl.world.hosts import Hosts


def main(folder: Path, damage: bool) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    name = str(folder / "a/model")
    config = Config(output_dir=str(folder / "abc"[rank]), model=ModelConfig(name=name, from_rank_0=True))
    lacks = model_copies.Lacks(Hosts(("a", "b", "c"), (0, 1, 2), (0, 1, 2)), {"model.name": (1, 2)})
    model_copies.PIECE_BYTES = 1000
    if damage and rank == 1:
        share = model_copies._share
        model_copies._share = lambda data, group: share(data, group).replace(b"\x07" * 500, b"\x08" * 500)
    beats: list[None] = []
    try:
        found = model_copies.fetch(config, rank, lacks, lambda: beats.append(None)).model.name
    except Exception as error:  # of the damaged rank, and of those that lose it
        found = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.json").write_text(json.dumps({"found": found, "beats": len(beats)}))
    if not damage:
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), damage=len(sys.argv) > 2)
