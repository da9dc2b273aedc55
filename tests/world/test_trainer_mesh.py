"""The trainer's grid: every rank has one place, numbers that don't fit name their keys, hosts are kept together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.config.tree import Config, DeploymentConfig, InferenceConfig, ParallelConfig, TrainerConfig
from spmd_rl.world.mesh import Mesh, MeshError, hosts_of
from spmd_rl.world.placement import PROCESSES, better_order, crossings, processes_by_host, wrong_hosts
from spmd_rl.world.trainer_mesh import TrainerDims, largest_ep


def configured(train: int = 0, infer: int = 0, tp: int = 1, rank_map: tuple[int, ...] = (), **parallel: int) -> Config:
    return Config(
        trainer=TrainerConfig(parallel=ParallelConfig(**parallel)),
        deployment=DeploymentConfig(train_ranks=train, infer_ranks=infer, orchestrator="own", rank_map=rank_map),
        inference=InferenceConfig(tp=tp),
    )


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_every_rank_has_one_place(dp_replicate, dp_shard, cp):
    ranks = dp_replicate * dp_shard * cp
    dims = TrainerDims.of(ParallelConfig(dp_replicate=dp_replicate, cp=cp), [0] * ranks)
    assert dims == TrainerDims(dp_replicate, dp_shard, cp)
    for groups, size in ((dims.fsdp_groups(), dp_shard * cp), (dims.cp_groups(), cp)):
        assert [rank for group in groups for rank in group] == list(range(ranks))
        assert {len(group) for group in groups} == {size}
    for number, group in enumerate(dims.cp_groups()):
        assert {dims.data_rank(rank) for rank in group} == {number}
    assert dims.data_ranks == dp_replicate * dp_shard == len(dims.cp_groups())


@pytest.mark.parametrize(
    ("ranks", "parallel", "says"),
    [
        (6, {"dp_replicate": 2, "cp": 2}, r"6 trainer ranks .*dp_replicate = 2 × .*cp = 2.* a multiple of 4 .* as 8"),
        (1, {"cp": 3}, r"1 trainer rank can't .*cp = 3.*such as 3"),
        (4, {"ep": 3}, r"ep = 3 does not divide dp_shard × cp = 4 .* one of 1, 2, 4"),
        (4, {"dp_replicate": 2, "ep": 4}, r"ep = 4 does not divide dp_shard × cp = 2"),
        (4, {"nodes_per_fsdp_group": 2}, r"nodes_per_fsdp_group = 2 does not divide the 1 host"),
    ],
)
def test_numbers_that_do_not_fit_name_their_keys(ranks, parallel, says):
    with pytest.raises(MeshError, match=says):
        Mesh.build(configured(ranks, 1, **parallel), 1 + ranks + 1)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.integers(1, 2), st.booleans())
def test_the_smallest_world_fits_the_grid(dp_replicate, cp, ep, tp, colocated):
    config = configured(tp=tp, dp_replicate=dp_replicate, cp=cp, ep=ep)
    placement = "colocated" if colocated else "disaggregated"
    config = replace(config, deployment=replace(config.deployment, placement=placement))
    mesh = Mesh.build(config, Mesh.smallest(config))
    assert mesh.dims.ranks == len(mesh.trainers)
    assert Mesh.of("sft", config, 0).dims.ranks == TrainerDims.smallest(config.trainer.parallel)


@given(st.integers(1, 4), st.integers(1, 2), st.integers(2, 20))
def test_derived_roles_leave_the_trainer_a_number_that_fits(cp, tp, free):
    """As near to half of the ranks as cp and tensor parallelism allow."""
    try:
        mesh = Mesh.build(configured(tp=tp, cp=cp), 1 + free)
    except MeshError:
        assert not [n for n in range(tp, free, tp) if (free - n) % cp == 0]
    else:
        assert len(mesh.trainers) % cp == 0 and abs(len(mesh.trainers) - free / 2) <= cp * tp


def test_the_description_shows_dims_and_groups():
    lines = Mesh.build(configured(8, 1, dp_replicate=2, cp=2, ep=4), 10).describe().splitlines()
    assert lines[2:6] == [
        "  ranks 1-8         trainer, dp_replicate 2 × dp_shard 2 × cp 2, ep 4",
        "                      fsdp: 1-4 | 5-8",
        "                      cp: 1-2 | 3-4 | 5-6 | 7-8",
        "                      ep: 1-4 | 5-8",
    ]
    assert "ep auto" in Mesh.build(configured(2, 1, ep=0), 4).describe()


def test_a_map_gives_roles_to_other_ranks():
    """The engine sits beside rank 0, on the first host."""
    mesh = Mesh.build(configured(4, 3, cp=2, rank_map=(0, 4, 5, 6, 7, 1, 2, 3)), 8)
    assert mesh.trainers == (4, 5, 6, 7) and mesh.replicas == ((1,), (2,), (3,))
    assert [mesh.role(rank) for rank in (0, 1, 4)] == ["orchestrator", "inference", "trainer"]
    assert {spec.name: spec.ranks for spec in mesh.groups()}["weights/0"] == (4, 1, 2, 3)
    assert "ranks 4-7         trainer, dp_shard 2 × cp 2" in mesh.describe()
    scattered = Mesh.build(configured(2, 1, rank_map=(0, 3, 1, 2)), 4)
    assert "ranks 3,1         trainer" in scattered.describe()


@pytest.mark.parametrize("rank_map", [(1, 0, 2), (0, 1), (0, 1, 1), (0, 1, 3), (0, 1, 2, 3)])
def test_a_map_that_is_none_is_an_error(rank_map):
    with pytest.raises(MeshError, match=r"rank_map = .* each of the ranks 0 to 2 once, with 0"):
        Mesh.build(configured(1, 1, rank_map=rank_map), 3)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_copies_follow_from_hosts(groups, nodes, each):
    """Every `nodes` hosts hold one copy; the engine is on a host of its own."""
    hosts = groups * nodes
    config = configured(hosts * each, 1, nodes_per_fsdp_group=nodes, rank_map=(0, *range(2, 2 + hosts * each), 1))
    mesh = Mesh.build(config, 2 + hosts * each, processes=(2, *[each] * hosts))
    assert (mesh.dims.dp_replicate, mesh.dims.dp_shard) == (groups, nodes * each)
    host_of = hosts_of((2, *[each] * hosts), mesh.world_size)
    for group in mesh.dims.fsdp_groups():
        assert len({host_of[mesh.trainers[i]] for i in group}) == nodes
    assert wrong_hosts(config, mesh, host_of) == ""


def test_hosts_other_than_guessed_are_an_error():
    config = configured(4, 1, nodes_per_fsdp_group=1, rank_map=(0, 2, 3, 4, 5, 1))
    mesh = Mesh.build(config, 6, processes=(2, 2, 2))
    assert mesh.dims.dp_replicate == 2 and "dp_replicate = 1" in wrong_hosts(config, mesh, [0, 0, 1, 1, 1, 1])
    assert "3 and 1 trainer ranks" in wrong_hosts(config, mesh, [0, 0, 1, 1, 1, 2])


def test_uneven_hosts_make_no_copies():
    with pytest.raises(MeshError, match=r"nodes_per_fsdp_group = 1: groups of hosts have 3 and 4 trainer ranks"):
        Mesh.build(configured(7, 1, nodes_per_fsdp_group=1), 9, processes=(4, 4, 1))


def test_hosts_from_the_environment():
    assert processes_by_host({"WORLD_SIZE": "9", "GROUP_WORLD_SIZE": "2"}) == (5, 4)
    assert processes_by_host({"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}) == (4, 4)
    assert processes_by_host({"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "3"}) == ()  # nobody can tell
    assert processes_by_host({"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "3", PROCESSES: "2,5,1"}) == (2, 5, 1)
    assert processes_by_host({"WORLD_SIZE": "8"}) == processes_by_host({}) == ()


def test_a_group_that_crosses_hosts_for_nothing_is_named_with_the_way_out():
    """Two hosts of four, rank 0 orchestrates: cp groups 1-2, 3-4, 5-6 and the replica of rank 7."""
    config, hosts = configured(6, 1, cp=2), hosts_of((4, 4), 8)
    mesh = Mesh.build(config, 8)
    (line,) = crossings(mesh, hosts)
    assert line.startswith("trainer.parallel.cp = 2 crosses hosts although it fits on one (ranks 3, 4), which is slow")
    order = better_order(mesh, hosts)
    assert f"deployment.rank_map = {order} " in line
    moved = Mesh.build(replace(config, deployment=replace(config.deployment, rank_map=tuple(order))), 8)
    assert crossings(moved, hosts) == [] and len(moved.trainers) == 6


def test_what_fits_on_no_host_is_no_news():
    assert crossings(Mesh.build(configured(8, 1, cp=8), 10), hosts_of((5, 5), 10)) == []
    assert crossings(Mesh.build(configured(4, 4, tp=4), 9), hosts_of((5, 4), 9)) == []
    (line,) = crossings(Mesh.build(configured(3, 4, tp=4), 8), hosts_of((5, 3), 8))
    assert "inference.tp = 4 crosses hosts" in line and "rank_map = [0, 5, 6, 7, 1, 2, 3, 4]" in line


def test_without_an_order_the_numbers_are_said():
    """Three and three ranks: only one pair fits on each host, and three pairs are asked for."""
    (line,) = crossings(Mesh.all_train(6, configured(cp=2)), hosts_of((3, 3), 6))
    assert "(ranks 2, 3)" in line and "start a multiple of 2 trainer ranks on every host" in line


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_a_better_order_is_an_order_and_is_better(processes, cp, tp, colocated, random):
    config = configured(tp=tp, cp=cp)
    placement = "colocated" if colocated else "disaggregated"
    config = replace(config, deployment=replace(config.deployment, placement=placement))
    world = sum(processes)
    try:
        mesh = Mesh.build(config, world)
    except MeshError:
        return
    hosts = hosts_of(processes, world)
    order = better_order(mesh, hosts)
    if order:
        moved = Mesh.build(replace(config, deployment=replace(config.deployment, rank_map=tuple(order))), world)
        assert crossings(moved, hosts) == []


def test_experts_stay_on_a_host():
    hosts = [0] * 4 + [1] * 4
    assert largest_ep(TrainerDims(dp_shard=8), hosts, experts=64) == 4
    assert largest_ep(TrainerDims(dp_replicate=4, dp_shard=2), hosts, experts=64) == 2
    assert largest_ep(TrainerDims(dp_shard=8), [0] * 8, experts=12) == 4
    assert largest_ep(TrainerDims(dp_shard=8), [0] * 3 + [1] * 5, experts=64) == 1
