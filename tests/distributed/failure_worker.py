"""A rank that fails: `failure_worker.py FOLDER HOW VICTIM`, with the start and the end that main.py gives every rank.

All ranks join the world and meet; then the victim is killed, stopped, hangs or raises, and all others wait for it in a
collective, as innocent ranks do.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from spmd_rl.config.tree import Config, DeadlineConfig
from spmd_rl.world.mesh import Mesh
from spmd_rl.world.watchdog import Watchdog
from spmd_rl.world.world import World

HEARTBEAT_S = 3.0
STAGE_S = 2.0  # the deadline of the stage in which the victim hangs
LONG_S = 600.0  # far beyond the patience of every test


def fail_now(how: str, watchdog: Watchdog) -> None:
    """What happens to the victim."""
    match how:
        case "kill":
            with watchdog.stage("the fatal stage"):
                time.sleep(0.5)  # so that it is posted
                os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            with watchdog.stage("the fatal stage"):
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            with watchdog.stage("the fatal stage", STAGE_S):
                time.sleep(LONG_S)
        case "raise":
            with watchdog.stage("the fatal stage", STAGE_S):
                raise ValueError("the loss is not a number")
        case "wait":  # longer than any deadline, in a stage that has none
            with watchdog.stage("wait for a slow friend"):
                time.sleep(2 * HEARTBEAT_S)


def play(folder: Path, how: str, victim: int, rank: int, watchdog: Watchdog, world: World) -> None:
    with watchdog.stage("meet", 120.0):
        dist.barrier()
    if rank == victim:
        (folder / "event").touch()
        fail_now(how, watchdog)
    with watchdog.stage("wait for the victim"):
        dist.barrier()


def main(folder: Path, how: str, victim: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    config = Config(
        output_dir=str(folder / "run"), deadlines=DeadlineConfig(heartbeat_s=HEARTBEAT_S, start_s=120.0, step_s=120.0)
    )
    if how == "differ" and rank == victim:
        config = replace(config, seed=1)
    mesh = Mesh.build(config, size)
    watchdog = Watchdog(rank, size, mesh.role(rank), HEARTBEAT_S, 120.0)
    watchdog.last_words = (folder / f"words_{rank}").touch
    watchdog.start()
    try:
        world = World.join(config, mesh, watchdog)
        play(folder, how, victim, rank, watchdog, world)
        world.leave()
    except BaseException as error:
        watchdog.fail(error)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
