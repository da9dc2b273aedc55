"""Several machines meet before torchrun starts on each, so that what is wrong between them is said at once, on all.

Node rank 0 listens where torchrun's store will be (MASTER_ADDR, MASTER_PORT); every node, it too, connects there, says
who it is and how many ranks it starts, and hears what all of them start. torchrun itself would wait for minutes when a
node rank is claimed twice, and names neither node.

It refuses to know about torch, ranks and roles. Invariants: all nodes get the same answer or the same error; every wait
ends at the deadline; the port is free again when `meet` returns.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import socket
import struct
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MEET_S = 60.0  # by default
RETRY_S = 0.2
SAY_SO_S = 3.0  # a wait that takes longer is explained on the screen
MAX_BYTES = 65536
_SIOCGIFADDR = 0x8915


class MeetingError(RuntimeError):
    """The machines do not fit together, or not all of them are there."""


@dataclass(frozen=True)
class Node:
    """One machine's view of itself and of how many there shall be."""

    rank: int
    count: int
    address: str  # of node rank 0
    port: int
    processes: int  # ranks that it starts
    deadline_s: float = MEET_S
    host: str = field(default_factory=socket.gethostname)
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def from_env(
        cls, processes: int, accelerators: int = 0, spare: int = 0, env: Mapping[str, str] = os.environ
    ) -> Node | None:
        """What NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT say; None when this machine is alone. MeetingError.

        processes: ranks that this machine starts; 0 = one per accelerator, and `spare` more on the first machine.
        """
        count = _number(env, "NNODES", 1)
        if count <= 1:
            return None
        missing = [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
        if missing:
            raise MeetingError(f"NNODES = {count}, and {', '.join(missing)} not set: every node needs them")
        rank, port = _number(env, "NODE_RANK", 0), _number(env, "MASTER_PORT", 0)
        if rank >= count:
            raise MeetingError(f"NODE_RANK = {rank} with NNODES = {count}: nodes are counted from 0 to {count - 1}")
        if not 0 < port < 65536:
            raise MeetingError(f"MASTER_PORT = {port}: choose a port from 1 to 65535")
        if not processes and not accelerators:
            raise MeetingError(
                "no accelerator found here: say with NPROC or --nproc-per-node how many processes this machine starts"
            )
        processes = processes or accelerators + (spare if rank == 0 else 0)
        return cls(rank, count, env["MASTER_ADDR"], port, processes, _number(env, "SPMD_RL_MEET_S", int(MEET_S)))

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.host} (process {os.getpid()})"


@dataclass(frozen=True)
class Met:
    """What a meeting found."""

    processes: tuple[int, ...]  # of every node, by node rank
    interface: str  # network interface between this node and the others; empty: none was found

    @property
    def world_size(self) -> int:
        """Ranks of all nodes together."""
        return sum(self.processes)


def meet(node: Node) -> Met:
    """Wait until all nodes are there and agree. MeetingError says which are missing, or differ in what."""
    deadline = time.monotonic() + node.deadline_s
    listening = _listen(node) if node.rank == 0 else None
    host = _Host(node, deadline, listening) if listening else None
    try:
        answer, own_address = _ask(node, deadline)
    finally:
        if host:
            host.join()
    if "error" in answer:
        raise MeetingError(answer["error"])
    return Met(tuple(answer["processes"]), interface_of((host and host.address) or own_address))


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not (text.isascii() and text.isdigit()):
        raise MeetingError(f"{name} = {text!r}: must be a number, 0 or more")
    return int(text)


# --- every node -----------------------------------------------------------------------------------------------------


def _ask(node: Node, deadline: float) -> tuple[dict[str, Any], str]:
    """Say who this is; the host's answer, and this machine's address on the way there."""
    where, why, told = f"{node.address}:{node.port}", "", time.monotonic() + SAY_SO_S
    try:
        target = socket.gethostbyname(node.address), node.port
    except OSError as error:
        raise MeetingError(f"MASTER_ADDR = {node.address!r} can't be resolved on {node.host}: {error}") from None
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(target, timeout=min(left, 5.0)) as connection:
                _send(connection, asdict(node) | {"name": node.name})
                connection.settimeout(left + 2 * SAY_SO_S)  # the host tells at the deadline who did not come
                answer, own = _receive(connection), connection.getsockname()[0]
            if answer is not None:
                return answer, own
            why = "the connection was closed"
        except ValueError:
            raise MeetingError(
                f"port {node.port} of {node.address} is in use by another program: choose another MASTER_PORT, the "
                "same on all nodes"
            ) from None
        except OSError as error:
            why = error.strerror or str(error)
        if told and time.monotonic() > told:
            told = 0.0
            print(f"node {node.rank} waits for node 0 at {where} ({why})", flush=True)
        time.sleep(RETRY_S)
    raise MeetingError(
        f"node {node.rank} on {node.host} could not reach node 0 at {where} within {node.deadline_s:g} s ({why}): "
        "start node 0, see that MASTER_ADDR is its address and that no firewall closes MASTER_PORT"
    )


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(b"spmd_rl " + json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """One message; None when the other side closed first. ValueError when it is no message of ours."""
    data = b""
    while not data.endswith(b"\n"):
        if not (more := connection.recv(4096)):
            break
        data += more
        if not data.startswith(b"spmd_rl "[: len(data)]) or len(data) > MAX_BYTES:
            raise ValueError("not a message of this program")
    if not data:
        return None
    message: dict[str, Any] = json.loads(data.removeprefix(b"spmd_rl "))
    return message


def interface_of(address: str) -> str:
    """The network interface that has an IPv4 address; empty when none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
                if socket.inet_ntoa(found) == address:
                    return name
    return ""


# --- node rank 0 ----------------------------------------------------------------------------------------------------


def _listen(node: Node) -> socket.socket | None:
    """The listening socket. None when the port is taken: whoever holds it may be another node rank 0."""
    try:
        return socket.create_server(("", node.port), backlog=max(128, node.count))
    except PermissionError:
        raise MeetingError(
            f"MASTER_PORT = {node.port} needs rights that this user lacks: choose one above 1023"
        ) from None
    except OSError:
        return None


class _Host:
    """Node rank 0 as everybody's counterpart: collects who is there, then tells all of them the same."""

    def __init__(self, node: Node, deadline: float, listening: socket.socket) -> None:
        self._node, self._deadline, self._listening = node, deadline, listening
        self._here: dict[socket.socket, dict[str, Any]] = {}
        self.address = ""  # at which other machines reach this one
        self._thread = threading.Thread(target=self._run, name="meeting", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Until everybody was told, and the port is free."""
        self._thread.join()

    def _run(self) -> None:
        with self._listening, selectors.DefaultSelector() as selector:
            selector.register(self._listening, selectors.EVENT_READ)
            answer: dict[str, Any] | None = None
            while answer is None or not self._knows_itself():
                for key, _ in selector.select(timeout=RETRY_S):
                    self._heard(selector, key.fileobj)  # type: ignore[arg-type]
                answer = answer or self._judge()
            self._tell(answer)

    def _knows_itself(self) -> bool:
        """Whether this node, too, is there to be told. It never is when MASTER_ADDR leads elsewhere."""
        late = time.monotonic() > self._deadline
        return late or any(hello["token"] == self._node.token for hello in self._here.values())

    def _heard(self, selector: selectors.BaseSelector, source: socket.socket) -> None:
        if source is self._listening:
            connection, _ = self._listening.accept()
            connection.settimeout(2.0)
            selector.register(connection, selectors.EVENT_READ)
            return
        try:  # a second message is none of ours, and none at all means that this node has given up
            hello = None if source in self._here else _receive(source)
        except (OSError, ValueError):  # a port scanner, a browser
            hello = None
        if hello and hello.get("token"):
            self._here[source] = hello
            local = source.getsockname()[0]
            self.address = self.address if local.startswith("127.") and self.address else local
            return
        self._here.pop(source, None)
        selector.unregister(source)
        source.close()

    def _judge(self) -> dict[str, Any] | None:
        """The answer to all, or None as long as there is none."""
        by_rank: dict[int, dict[str, Any]] = {}
        for hello in self._here.values():
            if hello["count"] != self._node.count:
                return _error(
                    f"{hello['name']} says NNODES = {hello['count']}, and node 0 on {self._node.host} says "
                    f"{self._node.count}: start all nodes with the same number"
                )
            other = by_rank.setdefault(hello["rank"], hello)
            if other is not hello:
                return _error(
                    f"node rank {hello['rank']} is claimed twice, by {other['name']} and by {hello['name']}: give "
                    "every node a NODE_RANK of its own"
                )
        missing = [rank for rank in range(self._node.count) if rank not in by_rank]
        if not missing:
            return {"processes": [by_rank[rank]["processes"] for rank in sorted(by_rank)]}
        if time.monotonic() < self._deadline:
            return None
        return _error(
            f"of {self._node.count} nodes, {', '.join(map(str, missing))} did not come to "
            f"{self._node.address}:{self._node.port} within {self._node.deadline_s:g} s: start them, or lower NNODES"
        )

    def _tell(self, answer: dict[str, Any]) -> None:
        for connection in self._here:
            with contextlib.suppress(OSError), connection:
                _send(connection, answer)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)  # whoever closes first keeps the port busy: let the others


def _error(text: str) -> dict[str, Any]:
    return {"error": text}
