"""Which rows the trainer ranks are ordered to learn from."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from spmd_rl.orchestrator.link import Link
from spmd_rl.orchestrator.trainers import Trainers
from spmd_rl.rollouts.packing import pack
from spmd_rl.rollouts.types import TrainSample


class Given:
    """Orders, as they were given."""

    def __init__(self) -> None:
        self.orders: list[list[Any]] = []

    def give(self, orders: list[Any]) -> None:
        self.orders.append(orders)


def samples(count: int) -> list[TrainSample]:
    """One token each, so that each fills a row."""
    one = np.ones(1, np.float32)
    return [TrainSample(np.full(1, i, np.int32), np.zeros(1, np.uint8), one, one) for i in range(count)]


@pytest.mark.parametrize(("trainers", "cp"), [(4, 1), (4, 2), (6, 3), (3, 3)])
def test_ranks_that_share_rows_get_the_same_ones(trainers: int, cp: int) -> None:
    async def main() -> list[list[int]]:
        link, given = Link(1, trainers, cp=cp), Given()
        link.connect(given, given)  # type: ignore[arg-type]
        Trainers(link, lambda folder: None).train("rl", 1, [pack(samples(link.data_ranks), link.data_ranks, 1)])
        (orders,) = given.orders
        return [[int(row["tokens"][0]) for row in order.rows[0]] for order in orders]

    rows = asyncio.run(main())
    assert len(rows) == trainers
    assert [len({tuple(row) for row in rows[i : i + cp]}) for i in range(0, trainers, cp)] == [1] * (trainers // cp)
    assert sorted(row[0] for row in rows) == sorted(list(range(trainers // cp)) * cp)
