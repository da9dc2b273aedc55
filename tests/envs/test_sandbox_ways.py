"""Which way to make a bwrap box a machine offers, and its cgroups, on trees of files."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from spmd_rl.envs.sandbox import Limits, SandboxError, cgroup, way
from spmd_rl.envs.sandbox.cgroup import PREFIX, find_parent, make_cgroup
from spmd_rl.envs.sandbox.seccomp import filter_program
from spmd_rl.envs.sandbox.way import find_way

# Cgroups, on trees of files.


def proc(folder: Path, groups: str, mounts: list[str]) -> Path:
    (folder / "proc").mkdir()
    (folder / "proc/cgroup").write_text(groups)
    (folder / "proc/mountinfo").write_text("\n".join(["1 0 8:1 / / rw - ext4 /dev/x rw", *mounts]))
    return folder / "proc"


def group(folder: Path, controllers: str | None = None) -> Path:
    folder.mkdir(parents=True)
    if controllers is not None:
        (folder / "cgroup.subtree_control").write_text(controllers)
    return folder


def test_the_parent_on_v1(tmp_path: Path):
    mount = f"40 31 0:36 /docker/abc {tmp_path}/pids rw - cgroup cgroup rw,pids"
    other = f"41 31 0:37 /docker/abc {tmp_path}/memory rw - cgroup cgroup rw,memory"
    group(tmp_path / "pids/job")
    files = proc(tmp_path, "8:pids:/docker/abc/job\n4:memory:/docker/abc\n0::/\n", [other, mount])
    assert find_parent(files) == tmp_path / "pids/job"


def test_the_parent_on_v2(tmp_path: Path):
    group(tmp_path / "cg", "cpu pids")
    group(tmp_path / "cg/user", "cpu memory pids")
    group(tmp_path / "cg/user/job", "")
    files = proc(tmp_path, "0::/user/job\n", [f"40 31 0:36 / {tmp_path}/cg rw - cgroup2 cgroup2 rw"])
    assert find_parent(files) == tmp_path / "cg/user"
    (tmp_path / "cg/user/cgroup.subtree_control").write_text("cpu\n")
    assert find_parent(files) == tmp_path / "cg"
    (tmp_path / "cg/cgroup.subtree_control").write_text("")
    (tmp_path / "cgroup.subtree_control").write_text("pids")  # above the mount is no group
    assert find_parent(files) is None


def test_no_parent(tmp_path: Path):
    assert find_parent(proc(tmp_path, "0::/\n", [])) is None


def test_a_group_limits_processes_and_memory(tmp_path: Path, monkeypatch):
    made = make_cgroup(Limits(processes=10), tmp_path)
    assert (made.path / "pids.max").read_text() == "14" and not (made.path / "memory.max").exists()
    assert made.path.name.startswith(f"{PREFIX}{os.getpid()}-")

    def mkdir(path: Path) -> None:  # as cgroup v2 does
        os.mkdir(path)
        (path / "memory.max").touch()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    made = make_cgroup(Limits(memory_mb=100, folder_mb=20), tmp_path)
    assert (made.path / "memory.max").read_text() == str(120 * 2**20)


def test_groups_of_the_dead_are_swept(tmp_path: Path, monkeypatch):
    ended = subprocess.Popen(["true"])
    ended.wait()
    kept = [tmp_path / f"{PREFIX}{os.getpid()}-old", tmp_path / f"{PREFIX}{os.getppid()}-x", tmp_path / "other"]
    full, gone = tmp_path / f"{PREFIX}{ended.pid}-full", tmp_path / f"{PREFIX}{ended.pid}-gone"
    for folder in (*kept, full, gone):
        folder.mkdir()
    (full / "pid").touch()
    make_cgroup(Limits(), tmp_path)
    assert gone.exists()  # too new: it may be another container's
    monkeypatch.setattr(cgroup, "NEW_S", 0.0)
    make_cgroup(Limits(), tmp_path)
    assert not gone.exists() and full.exists() and all(path.exists() for path in kept)


def test_a_group_that_holds_on_is_told(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(cgroup, "ATTEMPTS", 2)
    made = make_cgroup(Limits(), tmp_path)  # its files can't be removed with it, as those of a real one can
    with pytest.raises(SandboxError, match="still holds"):
        asyncio.run(made.remove())


# Which way.


@pytest.mark.parametrize(
    ("root", "namespaces", "parent", "kernel", "expected"),
    [
        (True, True, None, (4, 0), (True, True)),
        (True, False, Path("/x"), (4, 0), (True, False)),
        (True, False, None, (6, 0), "pids controller"),
        (False, True, None, (5, 14), (False, False)),
        (False, True, None, (5, 13), "counts them for the whole user"),
        (False, True, Path("/x"), (5, 13), (False, False)),
        (False, False, Path("/x"), (6, 0), "apparmor_restrict_unprivileged_userns = 0"),
    ],
)
def test_the_way_is_the_strongest_or_none(monkeypatch, root, namespaces, parent, kernel, expected):
    monkeypatch.setattr(way, "_may_mount", lambda: root)
    monkeypatch.setattr(way, "_user_namespaces_for_all", lambda: namespaces)
    monkeypatch.setattr(way, "_kernel", lambda: kernel)
    monkeypatch.setattr(way, "find_parent", lambda: parent)
    if isinstance(expected, str):
        with pytest.raises(SandboxError, match=expected):
            find_way()
    else:
        found = find_way()
        assert (found.privileged, found.uid is not None) == expected and found.cgroups == parent


def test_a_machine_without_a_filter():
    assert len(filter_program("aarch64")) % 8 == 0 and filter_program("aarch64") != filter_program("x86_64")
    with pytest.raises(SandboxError, match="no system call filter for riscv64"):
        filter_program("riscv64")
