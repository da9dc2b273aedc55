"""One rank of two trainers and two leaders that hand over routed experts: `routes_worker.py FOLDER`.

Steps 1 to 3 are as they should be. In the fourth replica 0 sends damaged bytes, in the fifth experts that the model
does not have, and in the sixth it is a step behind. What the trainers saw lands in FOLDER/rank{r}.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch.distributed as dist

from spmd_rl.rollouts.types import Row
from spmd_rl.world import routes
from spmd_rl.world.messages import SendRoutes
from spmd_rl.world.routes import RouteReceiver, RouteSender, RoutesError

TRAINERS, REPLICAS = 2, 2
LAYERS, TOP_K = 3, 2
EXPERTS = {0: 300, 1: 7}  # of the model that a replica is believed to serve: two bytes an index, and one
STEPS = (1, 2, 3)
DAMAGED, TOO_LARGE, LATE = 4, 5, 6
LENGTH = 4000  # of a row


def block(replica: int, request: int) -> np.ndarray:
    """What a replica keeps of a request."""
    kind = np.uint16 if EXPERTS[replica] > 256 else np.uint8
    rng = np.random.default_rng([replica, request])
    return rng.integers(0, EXPERTS[replica], (100 * (request + 1), LAYERS, TOP_K), dtype=kind)


def table(step: int, trainer: int) -> np.ndarray:
    """`Row.routes` of the one row that a trainer has in a step."""
    rng = np.random.default_rng([step, trainer])
    pieces, place = [], 0
    for request in range(6):
        replica, first = int(rng.integers(REPLICAS)), int(rng.integers(50))
        stop = first + int(rng.integers(1, 50))
        if step >= DAMAGED:  # both replicas are asked by both trainers
            replica = request % 2
        pieces.append((replica, request, first, stop, place))
        place += stop - first + 3
    return np.asarray(pieces, np.int64)


def row_of(step: int, trainer: int) -> Row:
    zeros = np.zeros(LENGTH, np.float32)
    whole, ends = np.zeros(LENGTH, np.int32), np.asarray([0, LENGTH], np.int32)
    return Row(whole, whole, zeros, zeros, zeros + 1, ends, routes=table(step, trainer))


def lead(group: dist.ProcessGroup, replica: int) -> None:
    failed: list[BaseException] = []
    right = routes.digest
    sender = RouteSender(group, range(TRAINERS), failed.append, lambda name: contextlib.nullcontext())
    for request in range(6):
        sender.put(request, 0, block(replica, request))
    for step in (*STEPS, DAMAGED, TOO_LARGE, LATE):
        assert not failed, failed  # in the last step the trainers leave without taking what is sent
        pieces = [rows[rows[:, 0] == replica][:, 1:4] for rows in (table(step, t) for t in range(TRAINERS))]
        if step == DAMAGED and replica == 0:
            routes.digest = lambda body: right(body) ^ 1
        if step == TOO_LARGE and replica == 0:
            routes.digest = right
            for request in range(6):
                sender.put(request, 0, block(0, request) + np.uint16(EXPERTS[0]))
        sender.send(SendRoutes(step - (step == LATE and replica == 0), pieces))
        dist.barrier(group=meeting)  # the sending thread reads `digest`, which changes
    sender.close(60)


def train(group: dist.ProcessGroup, trainer: int) -> list:
    receiver = RouteReceiver(group, range(TRAINERS, TRAINERS + REPLICAS), LAYERS, TOP_K, max(EXPERTS.values()))
    saw: list = []
    for step in (*STEPS, DAMAGED, TOO_LARGE, LATE):
        row = row_of(step, trainer)
        try:
            (filled,) = receiver.fill(step, [row])
            saw.append(agrees(row, filled.routed_experts))
        except RoutesError as error:
            saw.append(str(error))
            if step != LATE:
                drain(receiver, step, row)
        dist.barrier(group=meeting)
    return [*saw, receiver.bytes]


def agrees(row: Row, found: np.ndarray) -> bool:
    """Whether every position has what its replica keeps, and all others nothing."""
    right = np.full((LENGTH, LAYERS, TOP_K), -1)
    for replica, request, first, stop, place in row.routes.tolist():
        right[place : place + stop - first] = block(replica, request)[first:stop]
    return bool((found == right).all()) and found.dtype == np.int16


def drain(receiver: RouteReceiver, step: int, row: Row) -> None:
    """What replica 1 has sent for the step in which replica 0 was wrong."""
    receiver._receive(step, 1, [row])


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    everyone = list(range(TRAINERS + REPLICAS))
    # Pairs talk in one group and all meet in another: DETAIL counts what a group was used for.
    talking, meeting = dist.new_group(everyone, backend="gloo"), dist.new_group(everyone, backend="gloo")
    if rank < TRAINERS:
        seen = train(talking, rank)
        (Path(sys.argv[1]) / f"rank{rank}.json").write_text(json.dumps(seen))
    else:
        lead(talking, rank - TRAINERS)
    dist.destroy_process_group()
