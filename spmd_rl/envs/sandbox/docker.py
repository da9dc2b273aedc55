"""A box by the docker command: one container per box, without network, capabilities or a writable root.

The working folder, /tmp and the home folder are tmpfs of the container, so files can't outgrow their size and nothing
is mounted from the host. All goes through `docker exec`, files too, so a link in the box leads to files of the image at
worst. It refuses to know what runs. Invariants: what a program left behind is killed before `exec` returns, or the box
has failed; a container that nobody removed ends by itself after `LIFETIME_S`.

Tested so far against a stand-in for the docker command only, never against a daemon.
"""

from __future__ import annotations

import asyncio
import os
import shutil

from spmd_rl.envs.sandbox.folder import parts
from spmd_rl.envs.sandbox.interface import (
    TIMEOUT_S,
    BoxFileError,
    Command,
    Limits,
    Result,
    Sandbox,
    SandboxError,
    as_argv,
    as_bytes,
    refused,
)
from spmd_rl.envs.sandbox.program import Ended, Program, Start, end_group

IMAGE = "python:3.11"  # has a shell, git and Python
FOLDER, HOME = "/sandbox", "/home/box"
UID = 65534
CALL_S = 120.0  # for docker to do anything that is not a program of the model's; to pull the image is not in it
LIFETIME_S = 6 * 3600
BAD_FILE = 3  # exit code of the scripts below when the file is to blame
ENVIRONMENT = {"HOME": HOME, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}

# The first process reaps what others leave behind, and is the one that `kill -1` spares.
FIRST = f"end=$(($(date +%s) + {LIFETIME_S})); while [ $(date +%s) -lt $end ]; do sleep 60 & wait; done"
KILL_ALL = "kill -9 -1 2>/dev/null; exit 0"
WRITE = f"""[ ! -e "$1" ] || [ -f "$1" ] || {{ echo "it is no regular file" >&2; exit {BAD_FILE}; }}
{{ mkdir -p -- "$(dirname -- "$1")" && cat >"$1"; }} || exit {BAD_FILE}
"""
READ = f"""[ -f "$1" ] || {{ echo "there is no such regular file" >&2; exit {BAD_FILE}; }}
head -c "$2" -- "$1" || exit {BAD_FILE}
"""


class DockerBox(Sandbox):
    """One container."""

    folder = FOLDER

    def __init__(self, limits: Limits, image: str = IMAGE) -> None:
        self._limits, self._image = limits, image
        self._one = asyncio.Lock()
        self._program: Program | None = None
        self._name = ""
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the container; see `Sandbox.open`."""
        if shutil.which("docker") is None:
            raise SandboxError("the docker sandbox needs the docker command: install docker, or use the bwrap sandbox")
        self._name = f"spmd_rl-box-{os.getpid()}-{os.urandom(6).hex()}"  # known before docker answers, to remove it
        self._check(await self._call(self._run_arguments()))

    async def exec(self, command: Command, *, timeout_s: float = TIMEOUT_S, stdin: bytes | str = b"") -> Result:
        """Run a program; see `Sandbox.exec`."""
        argv = as_argv(command, "sh")
        async with self._one:
            if (result := refused(argv)) is not None:
                return result
            try:
                ended = await self._exec(argv, timeout_s, as_bytes(stdin), self._limits.output_kb * 1024)
            finally:
                # To end the docker command ends nothing in the container. This also says whether that is still well.
                self._check(await self._exec([b"sh", b"-c", KILL_ALL.encode()]))
            return ended.result()

    async def write(self, path: str, data: bytes | str) -> None:
        """Make or replace a file; see `Sandbox.write`."""
        await self._script(path, WRITE, stdin=as_bytes(data))

    async def read(self, path: str, max_bytes: int = 2**20) -> bytes:
        """The start of a file; see `Sandbox.read`."""
        ended = await self._script(path, READ, str(max_bytes), keep=2 * max_bytes + 2)
        return bytes(ended.stdout.head)

    async def close(self) -> None:
        """Remove the container; see `Sandbox.close`."""
        self._closing = self._closing or asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._program is not None:
            await self._program.stop()
        if self._name:
            name, self._name = self._name, ""
            self._check(await self._call(["rm", "--force", "--volumes", name]))

    def _run_arguments(self) -> list[str]:
        limits, tmpfs = self._limits, f"rw,exec,nosuid,nodev,uid={UID},gid={UID},mode=0755"
        sizes = {FOLDER: limits.folder_mb, "/tmp": limits.folder_mb, HOME: limits.folder_mb}
        mounts = [f"{path}:{tmpfs},size={mb}m,nr_inodes={limits.files}" for path, mb in sizes.items()]
        ulimits = {
            "cpu": f"{limits.cpu_s}:{limits.cpu_s + 1}",
            "fsize": limits.file_mb * 2**20,
            "nofile": limits.open_files,
            "core": 0,
        }
        return [
            *("run", "--detach", "--rm", "--name", self._name, "--workdir", FOLDER, "--user", f"{UID}:{UID}"),
            *("--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            # Files are memory too: the tmpfs count.
            *("--memory", f"{limits.memory_mb + limits.folder_mb}m"),
            *("--memory-swap", f"{limits.memory_mb + limits.folder_mb}m"),
            *("--pids-limit", str(limits.processes + 4), "--entrypoint", "sh"),  # and the first process, and ours
            *(part for name, value in ulimits.items() for part in ("--ulimit", f"{name}={value}")),
            *(part for mount in mounts for part in ("--tmpfs", mount)),
            *(part for name, value in ENVIRONMENT.items() for part in ("--env", f"{name}={value}")),
            *(self._image, "-c", FIRST),
        ]

    async def _script(self, path: str, script: str, *more: str, stdin: bytes = b"", keep: int = 4096) -> Ended:
        """Run a script in the box that takes a file as $1."""
        name = f"{FOLDER}/{'/'.join(parts(path))}"
        argv = [as_bytes(part) for part in ("sh", "-c", script, "sh", name, *more)]
        async with self._one:
            ended = await self._exec(argv, CALL_S, stdin, keep)
        if ended.code == BAD_FILE:
            raise BoxFileError(f"{path[:200]!a}: {ended.stderr.text().strip()}")
        return self._check(ended)

    async def _exec(self, argv: list[bytes], timeout_s: float = CALL_S, stdin: bytes = b"", keep: int = 4096) -> Ended:
        if not self._name:
            raise SandboxError("the box is closed, or was never opened")
        return await self._call(["exec", "--interactive", self._name, *argv], timeout_s, stdin, keep)

    async def _call(
        self, arguments: list[str | bytes], timeout_s: float = CALL_S, stdin: bytes = b"", keep: int = 4096
    ) -> Ended:
        """Run the docker command; its environment, which says where the daemon is, stays out of the container."""
        start = Start(["docker", *arguments], dict(os.environ), end_group)
        self._program = Program(start, timeout_s=timeout_s, stdin=stdin, keep=keep)
        return await self._program.end()

    def _check(self, ended: Ended) -> Ended:
        """SandboxError unless docker did what it was asked to."""
        if ended.code or ended.killed:
            late = f"no answer within {CALL_S:g} s" if ended.killed else f"exit code {ended.code}"
            raise SandboxError(f"the docker sandbox failed, {late}: {ended.stderr.text().strip()}")
        return ended
