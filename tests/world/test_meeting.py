"""Machines that meet: all hear the same, or the same error; the port is free again after it."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.world.meeting import MeetingError, Met, Node, interface_of, meet

ENV = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def free_port() -> int:
    with socket.create_server(("", 0)) as listening:
        return int(listening.getsockname()[1])


def node(rank: int, count: int, port: int, processes: int = 2, deadline_s: float = 20.0) -> Node:
    return Node(rank, count, "127.0.0.1", port, processes, deadline_s)


def all_meet(nodes: list[Node]) -> list[Met | str]:
    """What each one finds, or the error that it gets."""

    def one(node: Node) -> Met | str:
        try:
            return meet(node)
        except MeetingError as error:
            return str(error)

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(one, nodes))


@settings(max_examples=15)
@given(processes=st.lists(st.integers(1, 9), min_size=1, max_size=6), order=st.randoms(use_true_random=False))
def test_all_hear_what_all_start(processes: list[int], order: random.Random) -> None:
    port, count = free_port(), len(processes)
    nodes = [node(rank, count, port, processes[rank]) for rank in range(count)]
    order.shuffle(nodes)
    assert all_meet(nodes) == [Met(tuple(processes), "lo")] * count
    socket.create_server(("", port)).close()  # free for torchrun


def test_a_rank_that_is_claimed_twice_is_an_error_for_all() -> None:
    port = free_port()
    found = all_meet([node(rank, 3, port) for rank in (0, 1, 1)])
    assert len(set(found)) == 1 and "node rank 1 is claimed twice" in str(found[0])


def test_two_nodes_0_find_each_other() -> None:
    port = free_port()
    found = all_meet([node(0, 2, port), node(0, 2, port)])
    assert all("node rank 0 is claimed twice" in str(error) for error in found)


def test_different_numbers_of_nodes_are_an_error() -> None:
    port = free_port()
    found = all_meet([node(0, 3, port), node(1, 2, port)])
    assert all("says NNODES = 2, and node 0" in str(error) for error in found)


def test_who_does_not_come_is_named() -> None:
    port = free_port()
    found = all_meet([node(0, 4, port, deadline_s=1.0), node(2, 4, port, deadline_s=1.0)])
    assert all("of 4 nodes, 1, 3 did not come" in str(error) for error in found)


def test_nobody_listens() -> None:
    with pytest.raises(MeetingError, match=r"could not reach node 0 .*Connection refused"):
        meet(node(1, 2, free_port(), deadline_s=0.5))


def test_a_name_that_is_none_is_said_at_once() -> None:
    with pytest.raises(MeetingError, match=r"'nowhere\.invalid' can't be resolved"):
        meet(replace(node(1, 2, 1), address="nowhere.invalid", deadline_s=1e9))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_of_another_program_is_said_on_every_node(rank: int) -> None:
    with socket.create_server(("", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(1)
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(MeetingError, match="in use by another program: choose another MASTER_PORT"):
            meet(node(rank, 2, other.getsockname()[1]))


def test_strangers_and_nodes_that_give_up_are_no_guests() -> None:
    port = free_port()
    gone = b'spmd_rl {"rank": 1, "count": 3, "processes": 3, "token": "x", "name": "gone"}\n'
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, node(0, 3, port))
        for words in (gone, b"GET / HTTP/1.0\r\n\r\n"):
            with connect(port) as visitor:
                visitor.sendall(words)
        others = [pool.submit(meet, node(rank, 3, port, processes=5)) for rank in (1, 2)]
        assert [meeting.result() for meeting in (first, *others)] == [Met((2, 5, 5), "lo")] * 3


def connect(port: int) -> socket.socket:
    """As soon as somebody listens."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"NODE_RANK": ""}, "NODE_RANK not set"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR, MASTER_PORT not set"),
        ({"NODE_RANK": "2"}, "counted from 0 to 1"),
        ({"NODE_RANK": "one"}, "NODE_RANK = 'one'"),
        ({"NODE_RANK": "-1"}, "NODE_RANK = '-1'"),
        ({"MASTER_PORT": "0"}, "from 1 to 65535"),
        ({"MASTER_PORT": "70000"}, "from 1 to 65535"),
        ({"NNODES": "two"}, "NNODES = 'two'"),
    ],
)
def test_a_wrong_environment_is_named(change: dict[str, str], says: str) -> None:
    with pytest.raises(MeetingError, match=says):
        Node.from_env(1, env=ENV | change)


def test_how_many_processes_a_node_starts() -> None:
    def processes(*given: int, rank: int) -> int:
        found = Node.from_env(*given, env=ENV | {"NODE_RANK": str(rank)})
        assert found
        return found.processes

    assert [processes(0, 8, 1, rank=rank) for rank in (0, 1)] == [9, 8], "the orchestrator's process holds no GPU"
    assert [processes(3, 8, 1, rank=rank) for rank in (0, 1)] == [3, 3]
    assert Node.from_env(1, env={}) is None and Node.from_env(0, env={"NNODES": "1"}) is None
    with pytest.raises(MeetingError, match="no accelerator found here"):
        Node.from_env(0, env=ENV)


def test_interfaces_by_their_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") == ""
