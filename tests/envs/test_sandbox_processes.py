"""How many processes a bwrap box may have, in each way a machine offers; what is left when we are killed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from spmd_rl.envs.sandbox import Limits, Result, SandboxError, open_sandbox
from spmd_rl.envs.sandbox.bwrap import BwrapBox
from spmd_rl.envs.sandbox.cgroup import PREFIX
from spmd_rl.envs.sandbox.way import Way, find_way

ROOT = Path(__file__).parents[2]
FORKS = """
import os, time
count = 0
try:
    while count < 200:
        if os.fork() == 0:
            time.sleep(100)
        count += 1
except OSError as error:
    print(error.errno, end=" ")
print(count)
"""
BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


def ways() -> dict[str, Way]:
    """All the ways of this machine: root has two, and each may do without the other."""
    best = find_way()
    found = {"the best": best}
    if best.privileged and best.uid is not None:
        found["a user of its own"] = replace(best, cgroups=None)
        if best.cgroups is not None:
            found["a cgroup alone"] = replace(best, uid=None)
    return found


def in_box(best: Way, *commands, timeout_s: float = 60.0, **limits) -> list[Result]:
    async def inside() -> list[Result]:
        box = BwrapBox(Limits(**limits), best)
        try:
            await box.open()
            await box.write("forks.py", FORKS)
            return [await box.exec(command, timeout_s=timeout_s) for command in commands]
        finally:
            await box.close()

    return asyncio.run(inside())


@pytest.mark.parametrize("best", ways().values(), ids=ways())
def test_forks_come_to_an_end(best: Way):
    forks, again = in_box(best, ["python", "forks.py"], ["python", "forks.py"], processes=20)
    for result in (forks, again):  # what the first one left is gone
        error, count = map(int, result.stdout.split())
        assert error == 11 and 15 <= count <= 21  # itself counts, too


@pytest.mark.parametrize("best", ways().values(), ids=ways())
def test_a_fork_bomb_is_cleared_away(best: Way):
    before = processes()
    bomb, after = in_box(best, ["python", "-c", BOMB], "echo well", timeout_s=2, processes=40)
    assert bomb.timed_out and (after.code, after.stdout) == (0, "well\n")
    assert not [pid for pid in processes() - before if "os.fork" in command_line(pid)]


@pytest.mark.parametrize("best", ways().values(), ids=ways())
def test_files_belong_to_the_box(best: Way):
    (result,) = in_box(best, "stat -c '%U %a' forks.py . && echo >> forks.py && touch new && rm forks.py")
    assert (result.code, result.stdout) == (0, "box 644\nbox 755\n")


def test_a_box_has_a_user_of_its_own_where_root_can_give_it_one():
    async def inside() -> set[int]:
        async with open_sandbox("bwrap") as box:
            running = asyncio.create_task(box.exec("sleep 1000"))
            while not (sleeping := [pid for pid in family(os.getpid()) if command_line(pid).startswith("sleep")]):
                await asyncio.sleep(0.01)
            users = {Path(f"/proc/{pid}").stat().st_uid for pid in sleeping}
            running.cancel()
            await asyncio.wait([running])
            return users

    first, second = asyncio.run(inside()), asyncio.run(inside())
    if find_way().uid is None:
        assert first == second == {os.geteuid()}
    else:
        assert len(first | second) == 2 and min(first | second) >= 20_000


# As a user that is not root, whoever runs the tests.

AS_A_USER = """
import asyncio, json, sys
from spmd_rl.envs.sandbox import Limits, open_sandbox
from spmd_rl.envs.sandbox.way import find_way
forks = sys.stdin.read()
async def main():
    assert find_way().uid is None and not find_way().privileged
    async with open_sandbox("bwrap", files={"forks.py": forks}, limits=Limits(processes=20, folder_mb=2)) as box:
        for command in ("python forks.py", "id -u; ls -A /tmp; stat -c %U forks.py", "head -c 3M /dev/zero > x"):
            result = await box.exec(command)
            print(json.dumps([result.code, result.stdout, result.stderr]))
        print(json.dumps((await box.read("forks.py")).decode() == forks))
asyncio.run(main())
"""


@pytest.fixture
def for_anybody() -> Iterator[Path]:
    """The sandbox's source where any user can read it."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "spmd_rl", "envs")
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "spmd_rl/envs/sandbox", package / "sandbox", ignore=no_caches)
        (package / "__init__.py").touch()
        (package.parent / "__init__.py").touch()
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755)
        yield Path(folder)


def test_without_root(for_anybody: Path):
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    pythons = (sys.executable, "/usr/bin/python3")  # root's own may be out of reach for others
    python = next(python for python in pythons if not subprocess.run([*drop, python, "-c", ""]).returncode)
    done = subprocess.run(
        [*drop, python, "-c", AS_A_USER],
        input=FORKS,
        capture_output=True,
        text=True,
        cwd="/",
        env={"PYTHONPATH": str(for_anybody), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    forks, seen, full, same = map(json.loads, done.stdout.splitlines())
    error, count = map(int, forks[1].split())
    assert error == 11 and 15 <= count <= 20
    assert seen == [0, "1000\nbox\n", ""]
    assert full[0] == 1 and "No space left" in full[2]
    assert same is True


# When this process is killed, or a part of the sandbox is.

KILLED = """
import asyncio
from spmd_rl.envs.sandbox import open_sandbox
async def main():
    async with open_sandbox("bwrap") as box:
        print("open", flush=True)
        await box.exec("setsid sleep 1000 & sleep 1000")
asyncio.run(main())
"""


def processes() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}


def command_line(pid: int) -> str:
    """Empty for a process that has ended, also where nobody has taken notice."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def family(pid: int) -> set[int]:
    """A process and its descendants."""
    found, queue = set(), [pid]
    while queue:
        found.add(pid := queue.pop())
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            queue += map(int, children.read_text().split())
    return found


def wait_for(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within 30 s")


def test_nothing_runs_on_when_we_are_killed():
    program = subprocess.Popen([sys.executable, "-c", KILLED], cwd=ROOT, stdout=subprocess.PIPE)
    assert program.stdout.readline() == b"open\n"
    wait_for(lambda: sum(command_line(pid).startswith("sleep") for pid in family(program.pid)) >= 2)
    its = family(program.pid) - {program.pid}
    assert any("cat" in command_line(pid) for pid in its)  # the keeper
    program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    wait_for(lambda: not any(command_line(pid) for pid in its))
    remove_groups(program.pid)


def remove_groups(pid: int) -> None:
    """What the next box would sweep away some time later; a process that is left in one would keep it."""
    parent = find_way().cgroups

    def removed() -> bool:
        left = list(parent.glob(f"{PREFIX}{pid}-*"))
        for group in left:
            with suppress(OSError):
                group.rmdir()
        return not left

    if parent is not None:
        wait_for(removed)


def test_a_subprocess_outlives_us_by_its_deadline_at_most():
    unsafe = KILLED.replace('"bwrap"', '"subprocess", allow_unsafe=True').replace("setsid sleep 1000 &", "")
    unsafe = unsafe.replace('sleep 1000")', 'sleep 1000; true", timeout_s=2)')
    program = subprocess.Popen([sys.executable, "-c", unsafe], cwd=ROOT, stdout=subprocess.PIPE)
    assert program.stdout.readline() == b"open\n"
    wait_for(lambda: any(command_line(pid).startswith("sleep") for pid in family(program.pid)))
    its = family(program.pid) - {program.pid}
    program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    wait_for(lambda: not any(command_line(pid) for pid in its))


@pytest.mark.parametrize("delay_s", [0, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03])
def test_nothing_runs_on_when_we_are_killed_early(delay_s: float):
    """bwrap and its child each take a moment until they are tied to us."""
    program = subprocess.Popen([sys.executable, "-c", KILLED], cwd=ROOT, stdout=subprocess.PIPE)
    assert program.stdout.readline() == b"open\n"
    time.sleep(delay_s)
    its = family(program.pid) - {program.pid}
    program.send_signal(signal.SIGSTOP)
    its |= family(program.pid) - {program.pid}
    program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    wait_for(lambda: not any(command_line(pid) for pid in its))
    remove_groups(program.pid)


@contextmanager
def fake(name: str, script: str) -> Iterator[None]:
    """Put a program first on PATH, for any user."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        program = Path(folder, name)
        program.write_text(f"#!/bin/sh\n{script}\n")
        for path in (program.parent, program):
            path.chmod(0o755)
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield


async def use() -> Result:
    async with open_sandbox("bwrap") as box:
        return await box.exec("true")


def test_a_sandbox_that_fails_is_no_result():
    broken = "cannot be: no permission"
    for name, way_out in {"bwrap": "", "unshare": ".*SYS_ADMIN", "nsenter": "", "mount": ".*SYS_ADMIN"}.items():
        with fake(name, f"echo '{broken}' >&2; exit 1"), pytest.raises(SandboxError, match=f"{broken}{way_out}"):
            asyncio.run(use())


def test_bwrap_killed_from_outside_is_no_result():
    async def inside() -> None:
        async with open_sandbox("bwrap") as box:
            running = asyncio.create_task(box.exec("sleep 1000"))
            while not any(command_line(pid).startswith("sleep") for pid in family(os.getpid())):
                await asyncio.sleep(0.01)
            (outer,) = [pid for pid in family(os.getpid()) if command_line(pid).startswith("bwrap")]
            os.kill(outer, signal.SIGKILL)
            with pytest.raises(SandboxError):
                await running
            assert (await box.exec("echo well")).stdout == "well\n"

    asyncio.run(inside())


def test_another_python(tmp_path: Path):
    """Any folder will do, also one that only its owner may enter."""
    prefix = tmp_path / "python"
    (prefix / "bin").mkdir(parents=True)
    program = prefix / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    program.write_text("#!/bin/sh\necho from $0\n")
    program.chmod(0o755)

    async def inside() -> Result:
        box = BwrapBox(Limits(), prefix=str(prefix))
        try:
            await box.open()
            return await box.exec("python; python3")
        finally:
            await box.close()

    result = asyncio.run(inside())
    assert (result.code, result.stdout) == (0, "from /opt/bin/python\nfrom /opt/bin/python3\n")
    program.chmod(0o700)
    with pytest.raises(SandboxError, match="chmod -R o"):
        asyncio.run(inside())
    program.unlink()
    with pytest.raises(SandboxError, match="finds no python"):
        asyncio.run(inside())


def test_no_group_is_left():
    parent = find_way().cgroups
    if parent is not None:
        asyncio.run(use())
        assert not [name for name in os.listdir(parent) if name.startswith(f"{PREFIX}{os.getpid()}-")]
