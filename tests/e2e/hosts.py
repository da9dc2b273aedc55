"""Several machines on this one: own addresses, host names, processes and disks, joined by a switch; for root only.

Every machine is a set of namespaces (network, mounts, names, processes) that one process holds; the switch is a bridge
in a network namespace of its own. All of them end with the process that made them, however that ends, and with them
their links, addresses and mounts: nothing is left in the namespaces of this machine.

    with Hosts(tmp_path, 2) as hosts:
        hosts[0].start(["hostname"], screen=tmp_path / "screen.txt")

Under `hosts.disk` every machine sees a folder of its own, which is `hosts[i].disk` to whoever looks from outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ("ip", "tc", "unshare", "nsenter", "mount")
_PR_SET_PDEATHSIG = 1
_PRIVATE = ("--mount", "--uts", "--ipc", "--net", "--pid")
SLOW = "tbf rate 20mbit burst 64kb latency 400ms"  # a link that is slow in either direction


@functools.cache
def why_not() -> str:
    """Why this machine can't stand for several; empty when it can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        return f"{', '.join(missing)} not installed (Debian, Ubuntu: apt install iproute2 util-linux)"
    build = f"ip link add br0 type bridge; ip link add v0 type veth peer name v1; tc qdisc add dev v0 root {SLOW}"
    tried = subprocess.run(["unshare", *_PRIVATE, "--fork", "--mount-proc", "sh", "-ec", build], capture_output=True)
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode().strip()}"


@dataclass
class Host:
    """One machine. pid: of the process that holds it, as seen from outside."""

    name: str
    address: str
    disk: Path
    pid: int
    port: str  # its plug in the switch

    def enter(self, *command: str, namespaces: Sequence[str] = _PRIVATE) -> list[str]:
        """A command that runs another one on this machine."""
        return ["nsenter", "--target", str(self.pid), *namespaces, "--", *command]

    def start(self, command: Sequence[str], screen: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Run something there, in the repository's root, with its output in a file."""
        with open(screen, "wb") as file:
            return subprocess.Popen(
                self.enter("env", "-C", str(ROOT), *command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def kill(self) -> None:
        """The machine is gone, and all of its processes at once."""
        os.kill(self.pid, signal.SIGKILL)


class Hosts:
    """`count` machines with addresses 10.77.0.1, 10.77.0.2, …; a context manager."""

    def __init__(self, folder: Path, count: int) -> None:
        self.disk = folder / "disk"  # as every machine sees its own
        self._folder, self._count = folder, count
        self._stack = contextlib.ExitStack()
        self._hosts: list[Host] = []

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as stack:
            self._stack = stack
            self.disk.mkdir()
            self._switch = self._hold("--net")
            self._in_switch("ip link add br0 type bridge && ip link set br0 up")
            names = "".join(f"10.77.0.{i + 1} host{i}\n" for i in range(self._count))
            (self._folder / "etc_hosts").write_text(f"127.0.0.1 localhost\n{names}")
            self._hosts = [self._plug_in(i) for i in range(self._count)]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def cut(self, index: int) -> None:
        """From now on nothing reaches this machine, and nobody is told."""
        self._in_switch(f"ip link set {self._hosts[index].port} down")

    def join(self, index: int) -> None:
        """The link that was cut is whole again."""
        self._in_switch(f"ip link set {self._hosts[index].port} up")

    def slow_down(self, index: int) -> None:
        """Its link carries 20 Mbit/s from now on, each way."""
        host = self._hosts[index]
        _call(host.enter("sh", "-c", f"tc qdisc add dev eth0 root {SLOW}", namespaces=["--net"]))
        self._in_switch(f"tc qdisc add dev {host.port} root {SLOW}")

    def _plug_in(self, index: int) -> Host:
        disk = self._folder / f"disk_of_host{index}"
        disk.mkdir()
        pid = self._hold(*_PRIVATE, "--mount-proc")
        host = Host(f"host{index}", f"10.77.0.{index + 1}", disk, pid, f"port{index}")
        _call(f"ip link add {host.port} netns {self._switch} type veth peer name eth0 netns {pid}".split())
        self._in_switch(f"ip link set {host.port} master br0 up")
        script = f"""
            mount --bind {disk} {self.disk} && mount --bind {self._folder}/etc_hosts /etc/hosts
            mount -t tmpfs tmpfs /dev/shm
            hostname {host.name}
            ip link set lo up && ip address add {host.address}/24 dev eth0 && ip link set eth0 up
        """
        _call(host.enter("sh", "-ec", script))
        return host

    def _in_switch(self, script: str) -> None:
        _call(["nsenter", "--target", str(self._switch), "--net", "--", "sh", "-ec", script])

    def _hold(self, *namespaces: str) -> int:
        """A process that does nothing but hold new namespaces; its id."""
        fork = ("--fork", "--kill-child") if "--pid" in namespaces else ()
        holder = subprocess.Popen(
            ["unshare", *namespaces, *fork, "sh", "-c", "echo ready; exec sleep infinity"],
            stdout=subprocess.PIPE,
            preexec_fn=_end_with_parent,
        )
        self._stack.callback(holder.wait)
        self._stack.callback(holder.kill)
        assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
        if not fork:
            return holder.pid
        return int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text())


class Launched:
    """A command under way on every machine; leaving the context ends what is left of it."""

    def __init__(self, hosts: Hosts, commands: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]]) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "VLLM_", "SPMD_RL"))}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._screens: list[Path] = []
        for host, command, env in zip(hosts, commands, envs, strict=True):
            screen = host.disk.with_name(f"{uuid.uuid4().hex}-screen-of-{host.name}.txt")
            self._screens.append(screen)
            self._processes.append(host.start(command, screen, inherited | {"OMP_NUM_THREADS": "1"} | dict(env)))

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def screen(self, index: int) -> str:
        """What a machine's screen shows."""
        return self._screens[index].read_text(errors="replace")

    def screens(self) -> str:
        """The ends of all of them."""
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self._screens)

    def wait(self, timeout_s: float = 240.0) -> list[int]:
        """Exit codes, once all have ended. AssertionError when they do not."""
        deadline = time.monotonic() + timeout_s
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self._processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {timeout_s:g} s; the screens show:\n{self.screens()}") from None

    def until(self, what: Callable[[], bool], timeout_s: float = 240.0) -> None:
        """Until something is true. AssertionError when the command ends before."""
        deadline = time.monotonic() + timeout_s
        while not what():
            assert all(process.poll() is None for process in self._processes), f"ended early:\n{self.screens()}"
            assert time.monotonic() < deadline, f"waited for {timeout_s:g} s:\n{self.screens()}"
            time.sleep(0.1)

    def terminate(self, index: int) -> None:
        """SIGTERM for the command on a machine."""
        entered = self._processes[index].pid
        child = Path(f"/proc/{entered}/task/{entered}/children").read_text().split()[0]
        os.kill(int(child), signal.SIGTERM)


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
