"""Routed experts of a rank that infers and trains in turns: its own come back as it kept them, or it is said why not.

Several ranks exchange theirs in tests/e2e/test_router_replay.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from spmd_rl.colocated.routes import RouteExchange
from spmd_rl.rollouts.types import Row
from spmd_rl.world.routes import RoutesError, RouteStore

LAYERS, TOP_K, EXPERTS, LENGTH = 3, 2, 300, 40
KEPT = np.random.default_rng(0).integers(0, EXPERTS, (30, LAYERS, TOP_K), dtype=np.uint16)
PIECES = np.asarray([(7, 4, 9), (7, 12, 30)])  # request, first position, one past the last


def row(pieces: np.ndarray = PIECES) -> Row:
    """Pieces of replica 0, one behind the other from position 2 on."""
    places = 2 + np.cumsum([0, *(pieces[:-1, 2] - pieces[:-1, 1])])
    routes = np.column_stack([np.zeros(len(pieces), np.int64), pieces, places])
    zeros, whole, ends = np.zeros(LENGTH, np.float32), np.zeros(LENGTH, np.int32), np.asarray([0, LENGTH], np.int32)
    return Row(whole, whole, zeros, zeros, zeros + 1, ends, routes=routes)


@pytest.fixture
def exchange(group: dist.ProcessGroup) -> RouteExchange:
    store = RouteStore()
    store.put(7, 0, KEPT)
    return RouteExchange(group, store, [0], LAYERS, TOP_K, EXPERTS)


def test_a_rank_gets_its_own_back(exchange):
    for step in (1, 2):
        (filled,) = exchange.exchange(step, [row()], [PIECES])
        expected = np.full((LENGTH, LAYERS, TOP_K), -1)
        expected[2:25] = np.concatenate([KEPT[4:9], KEPT[12:30]])
        assert filled.routes is None and np.array_equal(filled.routed_experts, expected)


def test_rows_without_routes_need_nothing(exchange):
    plain = replace(row(), routes=None)
    for pieces in ([], [np.zeros((0, 3), np.int64)]):
        (filled,) = exchange.exchange(1, [plain], pieces)
        assert filled.routed_experts is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (PIECES[:1], "sends 60 bytes of routed experts for step 3; step 3 needs 23 positions"),
        (np.asarray([(8, 0, 5)]), r"request 8 are not kept here"),
        (np.asarray([(7, 20, 31)]), r"positions 0 to 30, and 20 to 31 are asked for"),
    ],
    ids=["too little", "unknown", "too far"],
)
def test_what_does_not_fit_is_an_error(exchange, given, says):
    with pytest.raises(RoutesError, match=says):
        exchange.exchange(3, [row()], [given])


def test_what_nobody_asked_for_is_an_error(exchange):
    with pytest.raises(RoutesError, match=r"ranks \[0\] of the trainer sent .* that no row asked for"):
        exchange.exchange(3, [], [PIECES])
