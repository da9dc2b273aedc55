"""How many accelerators a host has, and whether rank 0 gets a process without one."""

from __future__ import annotations

import pytest

from spmd_rl.world.accelerators import accelerators_here, spare_process


@pytest.fixture
def eight(tmp_path):
    for name in ["nvidiactl", "nvidia-uvm", *(f"nvidia{i}" for i in range(8))]:
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(("visible", "count"), [(None, 8), ("0,1,2", 3), ("", 0), ("-1", 0), ("GPU-a, GPU-b", 2)])
def test_what_may_be_used(eight, visible, count):
    assert accelerators_here({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, eight) == count


def test_a_host_without_any(tmp_path):
    assert accelerators_here({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 0
    assert spare_process("auto", {"LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "3"}, tmp_path)


@pytest.mark.parametrize(
    ("hosts", "local", "world", "spare"),
    [(1, 8, 8, False), (1, 9, 9, True), (2, 8, 16, False), (2, 9, 17, True), (2, 8, 17, True), (4, 8, 32, False)],
)
def test_a_process_to_spare(eight, hosts, local, world, spare):
    env = {"GROUP_WORLD_SIZE": str(hosts), "LOCAL_WORLD_SIZE": str(local), "WORLD_SIZE": str(world)}
    assert spare_process("auto", env, eight) == spare
    assert spare_process("cpu", env, eight)
