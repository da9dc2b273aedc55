"""Five real ranks: ticks, orders, weights and lent groups, each group used as the roles use it.

One launch does it all; each test reads what the ranks wrote down.
"""

from __future__ import annotations

import itertools
import json

import pytest

from spmd_rl.config.tree import Config, DeploymentConfig
from spmd_rl.world.buckets import TRAILER_BYTES, Plan
from spmd_rl.world.mesh import Mesh
from tests.distributed.launch import start_ranks
from tests.distributed.world_worker import (
    ALONE,
    BUCKET_BYTES,
    DECISIONS,
    LEADERS,
    ORDERS,
    SIZES,
    TABLE,
    TRAINERS,
    VERSIONS,
    digest,
    tokens_of,
    train_order,
)

INFERENCE = (3, 4)


@pytest.fixture(scope="module")
def saw(tmp_path_factory):
    """What each rank wrote down."""
    folder = tmp_path_factory.mktemp("world")
    with start_ranks("world_worker.py", 5, folder) as started:
        codes = started.wait(240)
        assert codes == [0, 0, 9, 9, 0], started.output()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(5)]


def test_every_rank_has_its_groups_in_the_mesh_order(saw):
    mesh = Mesh.build(Config(deployment=DeploymentConfig(train_ranks=2, infer_ranks=2)), 5)
    for rank in range(5):
        assert saw[rank]["groups"] == [spec.name for spec in mesh.groups() if rank in spec.ranks]


def test_every_decision_arrives_once_and_in_order_at_its_leader(saw):
    for rank in LEADERS:
        assert saw[rank]["decided"] == [[index, digest(tokens_of(rank, index))] for index in range(DECISIONS)]


def test_every_event_arrives_once_and_in_order(saw):
    assert saw[0]["complete"]
    nothing = digest(tokens_of(0, 0)[:0])
    for rank in LEADERS:
        expected = []
        for index in range(DECISIONS):
            expected += [["Generated", index, digest(tokens_of(100 + rank, index))], ["Refused", index, nothing]]
        assert saw[0]["heard"][str(rank)] == expected


def test_stop_is_the_last_that_a_clock_says(saw):
    assert saw[0]["ticks"] > 2 * ALONE
    assert all(saw[rank]["clock ended"] for rank in (0, *LEADERS))
    assert all(saw[rank]["left in inbox"] == 0 for rank in LEADERS)


def test_ticks_that_carry_something_are_recorded_and_idle_ones_are_not(saw):
    for rank in (0, *LEADERS):
        recorded = saw[rank]["recorded"]
        assert ALONE <= len(recorded) < saw[0]["ticks"]
        assert all(start < end for start, end in recorded)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(recorded))


def test_messages_of_any_size_go_both_ways(saw):
    assert saw[0]["echoes"] == [[True] * len(SIZES)] * len(LEADERS)
    assert all(saw[rank]["received"] == [True] * len(SIZES) for rank in LEADERS)


def test_orders_arrive_in_order_each_rank_its_rows(saw):
    for rank in TRAINERS:
        expected = [train_order(rank, index) for index in range(ORDERS)]
        assert saw[rank]["orders"] == [
            [o.step, [digest(row["tokens"]) for rows in o.rows for row in rows]] for o in expected
        ]
    assert saw[0]["refused"] == "1 orders for 2 trainer ranks"
    assert saw[0]["dispatcher ended"]


def test_versions_arrive_bit_exact_with_every_name_once(saw):
    """Though the trainer's tensors change as soon as they have been copied out."""
    names = [name for name, _, _ in TABLE]
    for rank in INFERENCE:
        assert saw[rank]["buckets"] > 2 * len(TRAINERS)
        assert saw[rank]["names"] == names
        assert saw[rank]["exact"] == [[names, True]] * len(VERSIONS)
        assert saw[rank]["arrived"] == list(VERSIONS)
        assert saw[rank]["small"] == [["scale", 7.0]]
    plan = Plan.build(TABLE, BUCKET_BYTES, len(TRAINERS))
    largest = max(bucket.nbytes for bucket in plan.buckets) + TRAILER_BYTES
    assert [saw[rank]["staged"] for rank in INFERENCE] == [plan.nbytes, 2 * largest]


def test_a_version_out_of_order_is_an_error(saw):
    for rank in INFERENCE:
        assert saw[rank]["an old version"] == ("WeightsError: asked for policy version 1 after 1: versions only grow")
        assert saw[rank]["another version"] == (
            "WeightsError: a trainer rank sends policy version 8, this rank expects 9"
        )


def test_trainer_ranks_with_other_plans_are_an_error(saw):
    for rank in INFERENCE:
        assert saw[rank]["two plans"] == "WeightsError: the trainer ranks disagree about the bucket plan"


def test_a_lent_group_is_a_whole_world_and_everything_is_restored(saw):
    for index, rank in enumerate(TRAINERS):
        assert saw[rank]["inside"] == [[str(index), "2", "5"], index, 2]
        assert saw[rank]["sum"] == 2 * sum(TRAINERS)  # all-reduced twice
        assert saw[rank]["restored"]
        assert saw[rank]["local rank"] == str(index)
        assert saw[rank]["restored after an exception"]
        assert saw[rank]["sum after"] == sum(TRAINERS)


def test_who_is_lost_is_named(saw):
    """Leader 3 and trainer 2 died while rank 0 talked to them; then rank 0 left."""
    assert saw[0]["clock lost"].startswith("PeerError: exchange with rank 3 (inference) failed: ")
    assert saw[0]["data lost"].startswith("PeerError: exchange with rank 2 (trainer) failed: ")
    for rank in (1, 4):
        assert saw[rank]["leader lost"].startswith("PeerError: exchange with rank 0 (orchestrator) failed: ")
