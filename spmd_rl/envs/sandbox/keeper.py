"""The process that keeps a box: its files in a tmpfs, and the PID namespace that all its programs run in.

A tmpfs has what a folder on the disk lacks: a size and a number of files that the kernel enforces, and an end that
can't be forgotten. The keeper is the first process of its PID namespace, so the kernel ends every other one with it,
in whatever state it is; and it waits for the end of its stdin, so it ends with this process, however that goes.
(bwrap's --die-with-parent holds only once its own start is over: killed in between, it left processes behind.)
It refuses to know what runs in the box. Invariants: nothing is written to the host's disks; what is mounted here is
seen in no other mount namespace.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
from contextlib import suppress
from pathlib import Path

from spmd_rl.envs.sandbox.cgroup import Cgroup
from spmd_rl.envs.sandbox.interface import Limits, SandboxError
from spmd_rl.envs.sandbox.way import Way

READY_S, GONE_S = 20.0, 10.0
# Any folder that exists will do to mount on: what lies there is hidden from the box's own processes only.
MOUNT_POINTS = ("/mnt", "/srv", "/media", "/opt", "/run", "/tmp")
OWN_FILES = 32  # files and folders that the box itself needs

# $1: options of the tmpfs; $2: where; $3: a folder to show as "python", or nothing; $4: the cgroup, or nothing.
SCRIPT = """set -e
[ -z "$4" ] || echo 0 >"$4/cgroup.procs"
mount -t tmpfs -o "$1" spmd_rl "$2"
if [ -n "$3" ]; then mkdir "$2/python"; mount --rbind "$3" "$2/python"; fi
echo ready
exec cat
"""


class Keeper:
    """Starts and ends the process. `folder` is open after `start`: the root of the tmpfs."""

    def __init__(self, way: Way, limits: Limits, prefix: str, cgroup: Cgroup | None) -> None:
        """`prefix`: a folder of the host to show in the tmpfs as `python`, "" for none."""
        self._way, self._limits, self._prefix, self._cgroup = way, limits, prefix, cgroup
        self._popen: subprocess.Popen[bytes] | None = None
        self.place = _mount_point(prefix)
        self.folder = -1

    async def start(self) -> None:
        """Mount. SandboxError when this machine does not let us."""
        limits, cgroup = self._limits, "" if self._cgroup is None else str(self._cgroup.path)
        options = f"size={limits.folder_mb}m,nr_inodes={limits.files + OWN_FILES},mode=755,nosuid,nodev"
        # A /proc of its own, as bwrap looks itself up there.
        unshare = ["unshare", "--mount-proc", "--propagation", "private", "--pid", "--fork", "--kill-child"]
        if not self._way.privileged:
            unshare += ["--user", "--map-root-user"]
        script = ["sh", "-c", SCRIPT, "sh", options, self.place, self._prefix, cgroup]
        self._popen = subprocess.Popen(
            [*unshare, "--", *script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath)},
            start_new_session=True,
        )
        said = await _first_line(self._popen.stdout.fileno())
        if said != "ready":
            raise SandboxError(
                f"the bwrap sandbox can't mount a tmpfs in a namespace of its own: {said or 'no answer'}. In a "
                "container that takes --cap-add SYS_ADMIN with --security-opt seccomp=unconfined (or --privileged)"
            )
        self.folder = os.open(f"/proc/{self._popen.pid}/root{self.place}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def enter(self) -> list[str]:
        """The arguments to put before a program so that it runs with the keeper, as the user the box runs as."""
        if self._popen is None:
            raise SandboxError("the box is closed, or was never opened")
        # `unshare` waits outside of the PID namespace that it made.
        namespaces = f"/proc/{self._popen.pid}/ns"
        enter = ["nsenter", f"--mount={namespaces}/mnt", f"--pid={namespaces}/pid_for_children"]
        if not self._way.privileged:
            enter += [f"--user={namespaces}/user", "--preserve-credentials"]
        elif self._way.uid is not None:
            enter += [f"--setuid={self._way.uid}", f"--setgid={self._way.uid}"]
        return [*enter, "--"]

    async def stop(self) -> None:
        """End the process, and with it the files and all programs."""
        if self.folder >= 0:
            os.close(self.folder)
            self.folder = -1
        if self._popen is None:
            return
        popen, self._popen = self._popen, None
        popen.kill()
        popen.stdin.close()
        popen.stdout.close()
        await _ended(popen)


async def _ended(popen: subprocess.Popen[bytes]) -> None:
    """Wait for a process that was killed."""
    if popen.poll() is not None:
        return
    pidfd = os.pidfd_open(popen.pid)
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(_readable(pidfd), GONE_S)
    finally:
        os.close(pidfd)
        popen.poll()


async def _first_line(stream: int) -> str:
    """What a process says until the end of a line, or of the stream; "" when it says nothing in time."""
    os.set_blocking(stream, False)
    said = b""
    with suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            while not said.endswith(b"\n"):
                await _readable(stream)
                data = os.read(stream, 4096)
                said += data
                if not data:
                    break
    return said.decode("utf-8", "replace").strip()


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(descriptor, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def _mount_point(prefix: str) -> str:
    """A folder that everybody may enter, and that hides nothing the box is made of."""
    needed = [prefix, *filter(None, map(shutil.which, ("bwrap", "prlimit")))]
    real = [Path(path).resolve() for path in needed if path]
    for place in MOUNT_POINTS:
        with suppress(OSError):
            mode = os.lstat(place).st_mode
            if stat.S_ISDIR(mode) and mode & stat.S_IXOTH and not any(path.is_relative_to(place) for path in real):
                return place
    raise SandboxError(f"the bwrap sandbox finds no folder to mount on: make one of {', '.join(MOUNT_POINTS)}")
