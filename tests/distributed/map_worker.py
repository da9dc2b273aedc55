"""One of three ranks whose roles `deployment.rank_map` gives out: `map_worker.py FOLDER` writes what it heard."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from spmd_rl.config.tree import Config, DeploymentConfig
from spmd_rl.world.groups import init_world, make_groups
from spmd_rl.world.mesh import Mesh


def main(folder: str) -> None:
    init_world(60)
    rank = dist.get_rank()
    deployment = DeploymentConfig(train_ranks=1, infer_ranks=1, orchestrator="own", rank_map=(0, 2, 1))
    mesh = Mesh.build(Config(deployment=deployment), 3)
    groups = make_groups(mesh, rank, torch.device("cpu"), 60)
    heard = torch.tensor([rank])
    if "weights/0" in groups:
        dist.broadcast(heard, group=groups["weights/0"], group_src=0)
    seen = {"role": mesh.role(rank), "heard": heard.item(), "ctl": groups["ctl"].rank()}
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
