"""A rank of the doctor's world: `doctor_worker.py FOLDER CASE`. What is wrong with it, the case says.

All ranks are there before the first one asks for the others, so that a patience of seconds is enough on any machine.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from spmd_rl.doctor.cluster import Means, end, examine
from spmd_rl.doctor.collectives import Collectives
from spmd_rl.doctor.links import GroupWire
from spmd_rl.doctor.party import Member, Party
from spmd_rl.doctor.place import Place, Wishes
from tests.doctor.places import machine, of_ranks

STORE_S, COME_S = 3.0, 4.0
COLLECTIVE_S, SHORT_S = 20.0, 4.0  # short where a rank is lost, which others find out by it
LONG_S = 600.0
AHEAD_S = 100.0  # of the clock of the second host
SLOW_S = 0.2  # per message of more than a byte or two, from rank 1 to rank 2
CONFIG = ("--config", "configs/quickstart.toml", "--model.name", "some/model")


@dataclass(frozen=True)
class BadWire(GroupWire):
    """A wire that is slow between two ranks, or ends the process that uses it."""

    case: str = ""
    rank: int = field(default_factory=lambda: int(os.environ["RANK"]))

    def send(self, data: torch.Tensor, peer: int) -> None:
        if self.case == "slow" and (self.rank, peer) == (1, 2) and data.numel() > 2:
            time.sleep(SLOW_S)
        super().send(data, peer)

    def meet(self) -> None:
        if self.rank == 1 and self.case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.rank == 1 and self.case == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        super().meet()


def ahead(host: int) -> float:
    return time.time() + AHEAD_S * host


def wait_for_all(folder: Path, rank: int, size: int) -> None:
    (folder / f"ready_{rank}").touch()
    until = time.monotonic() + LONG_S
    while len(list(folder.glob("ready_*"))) < size and time.monotonic() < until:
        time.sleep(0.01)


def main(folder: Path, case: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    clock = time.time
    words = [*CONFIG, "--output-dir", str(folder / "run")]
    if case == "slow":  # two ranks on each of two hosts
        os.environ |= {"GROUP_RANK": str(rank // 2), "LOCAL_RANK": str(rank % 2)}
        clock = partial(ahead, rank // 2)
        words = []
    if case == "differ" and rank == 2:
        words += ["--seed", "1"]
    if case == "unreachable":
        os.environ["MASTER_PORT"] = "1"
    wait_for_all(folder, rank, size)
    if case == f"absent {rank}":
        time.sleep(LONG_S)

    def place(ranks: int, hosts: int, wishes: Wishes) -> Place:
        return of_ranks(machine(folder / f"root_{rank}", wishes=wishes, OMP_NUM_THREADS="1"), ranks, hosts)

    def collectives(party: Party, members: Sequence[Member]) -> Collectives:
        collective_s = SHORT_S if case in ("killed", "stopped") else COLLECTIVE_S
        return Collectives(party, members, collective_s, lambda *wire: BadWire(*wire, case), clock)

    means = Means(STORE_S, COME_S, facts_s=30.0, machine_s=30.0, place=place, collectives=collectives)
    end(*examine("rl", words, means), str(folder / "report.json"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
