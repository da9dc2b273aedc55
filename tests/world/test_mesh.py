"""The mesh: every rank has one role, groups come in one order, and a world that does not fit names its keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import Config, DeploymentConfig, InferenceConfig, ParallelConfig, TrainerConfig
from spmd_rl.world.mesh import GroupSpec, Mesh, MeshError


def deployed(train: int = 0, infer: int = 0, tp: int = 1) -> Config:
    """With a rank of the orchestrator's own."""
    deployment = DeploymentConfig(train_ranks=train, infer_ranks=infer, orchestrator="own")
    return Config(deployment=deployment, inference=InferenceConfig(tp=tp))


@st.composite
def deployments(draw: st.DrawFn) -> tuple[int, int, int]:
    """(train ranks, inference ranks, tp) that make a mesh."""
    tp = draw(st.integers(1, 8))
    return draw(st.integers(1, 16)), tp * draw(st.integers(1, 8)), tp


def assert_is_a_mesh(mesh: Mesh, world_size: int, tp: int) -> None:
    roles = [mesh.role(rank) for rank in range(world_size)]
    assert roles == ["orchestrator"] + ["trainer"] * len(mesh.trainers) + ["inference"] * len(mesh.inference)
    assert (0, *mesh.trainers, *mesh.inference) == tuple(range(world_size))
    assert mesh.trainers and mesh.replicas
    for index, replica in enumerate(mesh.replicas):
        assert len(replica) == tp
        assert {mesh.replica_of(rank) for rank in replica} == {index}


@given(deployments(), st.sampled_from(["both", "train", "infer"]))
@settings(max_examples=100, deadline=None)
def test_every_rank_has_one_role(deployment, given_keys):
    train, infer, tp = deployment
    config = deployed(train * (given_keys != "infer"), infer * (given_keys != "train"), tp)
    mesh = Mesh.build(config, 1 + train + infer)
    assert_is_a_mesh(mesh, 1 + train + infer, tp)
    assert (len(mesh.trainers), len(mesh.inference)) == (train, infer)


@given(st.integers(1, 8), st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_derived_roles_halve_the_ranks(tp, more):
    """Half of the ranks after rank 0 train, rounded down; what tensor parallelism leaves over trains too."""
    free = 1 + tp + more
    mesh = Mesh.build(deployed(tp=tp), 1 + free)
    assert_is_a_mesh(mesh, 1 + free, tp)
    surplus = len(mesh.trainers) - free // 2
    assert 0 <= surplus < tp or len(mesh.replicas) == 1


@given(deployments())
@settings(max_examples=50, deadline=None)
def test_groups(deployment):
    train, infer, tp = deployment
    mesh = Mesh.build(deployed(train, infer, tp), 1 + train + infer)
    engines = tuple(range(1 + train, 1 + train + infer))
    expected = {
        "ctl": (0, 1, *engines[::tp]),
        "data": (0, *range(1, 1 + train)),
        "trainer": tuple(range(1, 1 + train)),
        "ckpt": tuple(range(1, 1 + train)),
    }
    expected |= {f"weights/{i}": (1 + i, *engines) for i in range(train)}
    expected["routes"] = (*range(1, 1 + train), *engines[::tp])
    for i in range(infer // tp):
        expected |= {f"replica/{i}": engines[i * tp : (i + 1) * tp], f"replica_cmd/{i}": engines[i * tp : (i + 1) * tp]}
    groups = mesh.groups()
    assert {group.name: group.ranks for group in groups} == expected
    assert len(groups) == len(expected)
    # A device group is nccl on accelerators; rank 0 has none.
    assert all(group.carries == "host" for group in groups if 0 in group.ranks)
    assert {group.name for group in groups if group.carries == "host"} == {"ctl", "data", "routes", "ckpt"} | {
        name for name in expected if name.startswith("replica_cmd/")
    }


def test_experts_of_their_own_come_over_groups_of_their_own():
    """One per sender and rank of a replica; only a replica's ranks of this number are in it."""
    config = deployed(2, 4, tp=2)
    divided = replace(config, inference=replace(config.inference, expert_parallel=True))
    groups = {group.name: group for group in Mesh.build(divided, 7).groups()}
    more = {name: groups.pop(name) for name in list(groups) if name.startswith("experts/")}
    assert tuple(groups.values()) == Mesh.build(config, 7).groups()
    assert {name: group.ranks for name, group in more.items()} == {
        "experts/0/0": (1, 3, 5),
        "experts/0/1": (1, 4, 6),
        "experts/1/0": (2, 3, 5),
        "experts/1/1": (2, 4, 6),
    }
    assert {group.carries for group in more.values()} == {"device"}


def test_one_order_of_groups_and_members():
    """Every rank makes them in this order; another one on some ranks would hang the start."""
    assert Mesh.build(deployed(2, 4, tp=2), 7).groups() == (
        GroupSpec("ctl", (0, 1, 3, 5), "host"),
        GroupSpec("data", (0, 1, 2), "host"),
        GroupSpec("weights/0", (1, 3, 4, 5, 6), "device"),
        GroupSpec("weights/1", (2, 3, 4, 5, 6), "device"),
        GroupSpec("routes", (1, 2, 3, 5), "host"),
        GroupSpec("replica/0", (3, 4), "device"),
        GroupSpec("replica_cmd/0", (3, 4), "host"),
        GroupSpec("replica/1", (5, 6), "device"),
        GroupSpec("replica_cmd/1", (5, 6), "host"),
        GroupSpec("trainer", (1, 2), "device"),
        GroupSpec("ckpt", (1, 2), "host"),
    )


@pytest.mark.parametrize("world_size", [1, 3])
def test_supervised_training_is_all_trainers(world_size):
    mesh = Mesh.all_train(world_size)
    assert [mesh.role(rank) for rank in range(world_size)] == ["trainer"] * world_size
    assert [group.name for group in mesh.groups()] == ["trainer", "ckpt"]
    assert "orchestrator" not in mesh.describe() and f"{world_size} rank" in mesh.describe()
    assert not mesh.spare  # rank 0 has an accelerator of its own, and rank 1 the next one


def test_a_bench_is_all_trainers():
    """As many as the config's trainer has; or all that were started, whatever the config of the run says."""
    trainer = TrainerConfig(parallel=ParallelConfig(cp=2))
    config = Config(deployment=DeploymentConfig(train_ranks=4, infer_ranks=8), trainer=trainer)
    assert Mesh.of("rl --bench", config, 0) == Mesh.all_train(4, config)
    assert (
        Mesh.of("rl --bench", config, 6).trainers == tuple(range(6)) and Mesh.of("rl --bench", config, 6).dims.cp == 2
    )
    assert Mesh.of("sft --bench", config, 0) == Mesh.of("sft", config, 0) == Mesh.all_train(2, config)


@given(st.integers(0, 6), st.integers(0, 9), st.integers(1, 4), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_a_world_fits_or_names_its_keys(train, infer, tp, world_size):
    config = deployed(train, infer, tp)
    try:
        mesh = Mesh.build(config, world_size)
    except MeshError as error:
        for key in (f"deployment.infer_ranks = {infer}", f"inference.tp = {tp}"):
            assert key in str(error)
        if infer % tp == 0:
            assert f"deployment.train_ranks = {train}" in str(error)
            assert f"Start {Mesh.smallest(config)} processes" in str(error)
    else:
        assert_is_a_mesh(mesh, world_size, tp)
        assert train in (0, len(mesh.trainers)) and infer in (0, len(mesh.inference))
        assert Mesh.smallest(config) <= world_size


@given(st.integers(0, 6), st.integers(0, 4), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_the_smallest_world_fits_and_no_smaller_one(train, replicas, tp):
    config = deployed(train, replicas * tp, tp)
    smallest = Mesh.smallest(config)
    assert_is_a_mesh(Mesh.build(config, smallest), smallest, tp)
    with pytest.raises(MeshError):
        Mesh.build(config, smallest - 1)


def test_no_number_of_ranks_fits_half_a_replica():
    config = deployed(train=1, infer=3, tp=2)
    for world_size in (4, 5, Mesh.smallest(config)):
        with pytest.raises(MeshError, match=r"infer_ranks = 3 .* multiple of inference\.tp = 2") as raised:
            Mesh.build(config, world_size)
        assert "Start" not in str(raised.value)


def test_a_description_for_people():
    assert Mesh.build(deployed(1, 4, tp=2), 6).describe().splitlines() == [
        "mesh of 6 ranks",
        "  rank 0            orchestrator",
        "  rank 1            trainer, dp_shard 1",
        "  ranks 2-3         inference replica 0, tp 2",
        "  ranks 4-5         inference replica 1, tp 2",
    ]


def test_frozen_replicas_are_engines_that_get_no_weights():
    deployment = DeploymentConfig(train_ranks=1, infer_ranks=2, teacher_ranks=2)
    config = Config(deployment=deployment, inference=InferenceConfig(tp=2))
    assert Mesh.smallest(config) == 6
    mesh = Mesh.build(config, 6)
    assert (mesh.replicas, mesh.frozen, mesh.engines) == (((2, 3),), ((4, 5),), ((2, 3), (4, 5)))
    assert [mesh.role(rank) for rank in (4, 5)] == ["inference"] * 2 and mesh.replica_of(5) == 1
    groups = {group.name: group.ranks for group in mesh.groups()}
    assert groups["ctl"] == (0, 1, 2, 4) and groups["weights/0"] == (1, 2, 3)
    assert groups["replica/1"] == groups["replica_cmd/1"] == (4, 5)
    assert "ranks 4-5         frozen replica 0, tp 2" in mesh.describe()
    with pytest.raises(MeshError, match=r"teacher_ranks = 1 is not a multiple of inference.tp = 2"):
        Mesh.build(replace(config, deployment=replace(deployment, teacher_ranks=1)), 5)
    with pytest.raises(MeshError, match=r"7 ranks do not fit: .* \+ 2 teacher ranks .* \+ teacher_ranks = 7"):
        Mesh.build(config, 7)


@given(st.integers(1, 4), st.integers(1, 6))
def test_a_model_that_is_only_asked_has_no_trainer(tp, replicas):
    mesh = Mesh.all_infer(deployed(tp=tp), 1 + tp * replicas)
    assert len(mesh.replicas) == replicas and mesh.trainers == () == mesh.frozen
    assert [mesh.role(rank) for rank in range(mesh.world_size)] == ["orchestrator"] + ["inference"] * tp * replicas
    assert mesh.leaders == mesh.engine_leaders
    assert {spec.name.split("/")[0] for spec in mesh.groups()} == {"ctl", "replica", "replica_cmd"}
    assert "trainer" not in mesh.describe()


def test_ranks_that_make_no_replica_are_an_error():
    with pytest.raises(
        MeshError, match=r"4 ranks do not fit: 1 orchestrator \+ replicas of inference.tp = 2 ranks. Start 3"
    ):
        Mesh.all_infer(deployed(tp=2), 4)


def together(world_size: int, spare: bool = True, tp: int = 1, **deployment) -> Mesh:
    config = Config(deployment=DeploymentConfig(**deployment), inference=InferenceConfig(tp=tp))
    return Mesh.build(config, world_size, spare)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2), st.booleans())
def test_ranks_that_do_both(tp, replicas, teachers, spare):
    """All but the orchestrator's own and the teacher's train and infer; their weights need no group."""
    own, both, teacher = int(spare), tp * replicas, tp * teachers
    mesh = together(own + both + teacher, spare, tp, placement="colocated", teacher_ranks=teacher)
    assert mesh.colocated and mesh.shares == (not spare)
    assert mesh.trainers == mesh.inference == tuple(range(own, own + both))
    assert [mesh.role(rank) for rank in mesh.trainers] == ["colocated"] * both
    assert mesh.leaders == mesh.engine_leaders and len(mesh.frozen) == teachers
    groups = {group.name: group.ranks for group in mesh.groups()}
    assert not any(name.startswith("weights/") for name in groups)
    assert groups["ctl"] == tuple(dict.fromkeys((0, *mesh.leaders)))
    assert groups["data"] == tuple(dict.fromkeys((0, *mesh.trainers)))
    assert all(len(set(ranks)) == len(ranks) for ranks in groups.values())


@pytest.mark.parametrize("spare", [True, False])
def test_numbers_that_are_given_say_whether_rank_0_has_a_rank_of_its_own(spare):
    assert not together(5, spare, train_ranks=2, infer_ranks=2).shares
    mesh = together(4, spare, train_ranks=2, infer_ranks=2)
    assert mesh.shares and mesh.trainers == (0, 1) and mesh.inference == (2, 3)
    assert mesh.role(0) == "trainer" and mesh.groups()[0] == GroupSpec("ctl", (0, 2, 3), "host")
    assert together(4, spare).shares == (not spare)
    assert together(4, spare, orchestrator="own").trainers[0] == 1
    assert together(4, spare, orchestrator="shared").trainers[0] == 0
    assert together(1, spare, placement="colocated", orchestrator="shared").trainers == (0,)


@pytest.mark.parametrize(
    ("world_size", "keys"),
    [
        (4, {"placement": "colocated", "train_ranks": 2}),
        (4, {"placement": "colocated", "train_ranks": 3, "infer_ranks": 2}),
        (1, {"placement": "colocated", "orchestrator": "own"}),
        (1, {"orchestrator": "shared"}),
    ],
)
def test_a_world_that_does_not_fit_either_way_is_an_error(world_size, keys):
    with pytest.raises(MeshError, match="do not fit"):
        together(world_size, **keys)


@given(st.booleans(), st.sampled_from(["auto", "own", "shared"]), st.integers(0, 4), st.integers(0, 4))
def test_the_smallest_world_fits(colocated, orchestrator, train, infer):
    keys = {"placement": "colocated" if colocated else "disaggregated", "orchestrator": orchestrator}
    if colocated:
        infer = train
    config = Config(deployment=DeploymentConfig(train_ranks=train, infer_ranks=infer, **keys))
    mesh = Mesh.build(config, Mesh.smallest(config))
    assert mesh.shares == (orchestrator == "shared") != mesh.spare and mesh.colocated == colocated
