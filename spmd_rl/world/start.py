"""How a process that is no rank gets its ranks: as a job of the cluster, on one of several machines, or here.

It refuses to know what ranks do. Invariant: nothing is started or submitted before the world fits the config.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from spmd_rl.config import Config, to_toml
from spmd_rl.config.commands import ASKING, command_of
from spmd_rl.world import slurm
from spmd_rl.world.accelerators import accelerators_here
from spmd_rl.world.launcher import launch
from spmd_rl.world.meeting import Node, meet
from spmd_rl.world.mesh import Mesh, hosts_of
from spmd_rl.world.placement import PROCESSES, crossings


def start(program: str, argv: Sequence[str], config: Config, nproc: int, dry_run: bool) -> int:
    """Start `program ARGV`; the exit code.

    nproc: processes of this machine; 0 = the fewest that will do. Raises ConfigError, MeshError and MeetingError.
    """
    command = command_of(argv)
    # The orchestrator's process holds no accelerator, so the first host starts one more; with "rl" it need not.
    spare = int(command in ASKING or (command == "rl" and config.deployment.orchestrator != "shared"))
    if config.slurm.nodes:
        ranks = slurm.layout(config.slurm, nproc or Mesh.of(command, config, 0).world_size, spare)
        mesh = Mesh.of(command, config, sum(ranks), ranks[0] > config.slurm.gpus, ranks)
        print(slurm.submit(command, config, ranks, dry_run))
        if dry_run:
            print("\n".join([mesh.describe(), *crossings(mesh, hosts_of(ranks, mesh.world_size))]))
        return 0
    here = accelerators_here(os.environ)
    node = Node.from_env(nproc, here, spare)
    if dry_run:
        alike = (nproc,) * (node.count if node else 1)
        print(show(config, Mesh.of(command, config, sum(alike), not 0 < nproc <= here, alike if nproc else ())))
        return 0
    if node is None:
        mesh = Mesh.of(command, config, nproc, not 0 < nproc <= here)
        return launch(program, argv, mesh.world_size, config.output_dir)
    met = meet(node)
    Mesh.of(command, config, met.world_size, met.processes[0] > here, met.processes)
    os.environ[PROCESSES] = ",".join(map(str, met.processes))
    return launch(program, argv, node.processes, config.output_dir, node, met)


def show(config: Config, mesh: Mesh) -> str:
    """What would be started, for people."""
    return f"{to_toml(config)}\n{mesh.describe()}"
