"""Two ranks of the bench `routes`: `routes_ranks.py OUT`. Rank 0 trains, rank 1 leads."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.rollouts.types import Row
from spmd_rl.world.messages import SendRoutes
from spmd_rl.world.routes import RouteReceiver, RouteSender

LAYERS, TOP_K, EXPERTS = 48, 8, 128
PIECES, LENGTH = 64, 4070  # 100 MB: 260,000 positions of 384 bytes
ROUNDS = 7


def main(out: str) -> None:
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    size = PIECES * LENGTH * LAYERS * TOP_K
    raw = [timed(lambda: raw_send(rank, size, group)) for _ in range(ROUNDS)]
    table = np.asarray([(0, i, 0, LENGTH, i * LENGTH) for i in range(PIECES)], np.int64)
    if rank == 1:
        sender = RouteSender(group, [0], fail, lambda name: contextlib.nullcontext())
        for request in range(PIECES):
            block = np.random.default_rng(request).integers(0, EXPERTS, (LENGTH, LAYERS, TOP_K), dtype=np.uint8)
            sender.put(request, 0, block)
        for step in range(ROUNDS):
            timed(lambda step=step: sender.send(SendRoutes(step, [table[:, 1:4]])))
        sender.close(600)
    else:
        receiver = RouteReceiver(group, [1], LAYERS, TOP_K, EXPERTS)
        zeros, ends = np.zeros(PIECES * LENGTH, np.int32), np.asarray([0, PIECES * LENGTH], np.int32)
        row = Row(zeros, zeros, zeros, zeros, zeros, ends, routes=table)
        ours = [timed(lambda step=step: receiver.fill(step, [row])) for step in range(ROUNDS)]
        raw_s, ours_s = statistics.median(raw), statistics.median(ours)
        figures = {"bytes": size, "pieces": PIECES, "raw_s": raw_s, "ours_s": ours_s, "ratio": raw_s / ours_s}
        Path(out).write_text(json.dumps(figures | {"rounds": ROUNDS}))
    dist.destroy_process_group()


def raw_send(rank: int, size: int, group: dist.ProcessGroup) -> None:
    body = torch.zeros(size, dtype=torch.uint8)
    if rank == 1:
        dist.send(body, group=group, group_dst=0)
    else:
        dist.recv(body, group=group, group_src=1)


def timed(what) -> float:
    """Seconds, from the moment at which both ranks begin."""
    dist.barrier()
    started = time.perf_counter()
    what()
    return time.perf_counter() - started


def fail(error: BaseException) -> None:
    raise error


if __name__ == "__main__":
    main(sys.argv[1])
