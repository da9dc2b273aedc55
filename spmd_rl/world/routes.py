"""Routed experts on their way from the engines that took them to the trainer ranks that replay them (R3).

A leader keeps, by request, which experts took each token. Rank 0 knows which requests a batch is made of, and says so
twice, in a few numbers each time: to the leaders what goes to which trainer rank, to the trainer ranks what comes from
which leader (`Row.routes`). The block itself goes from leader to trainer rank, as raw bytes over a group of its own: a
head of four numbers, then the bytes. So rank 0 never holds it, and nothing is pickled.

It refuses to know what experts are. Invariants: both ends take pieces in the order of the trainer rank's rows; what
arrives is of the step that is trained, of the length that rank 0 said, and as it was sent, or there is an error.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from spmd_rl.rollouts.routes import pieces_of
from spmd_rl.rollouts.types import Row
from spmd_rl.world.messages import SendRoutes

HEAD = 4  # int64: step, bytes that follow, bytes of an index, checksum


class RoutesError(RuntimeError):
    """Routed experts are not where they should be, or not what they should be."""


@dataclass(frozen=True)
class _Block:
    """What a leader keeps of a request: [positions, layers, top_k] from position `first` of its sequence on."""

    first: int
    experts: np.ndarray  # uint8 or uint16


class RouteStore:
    """What a leader keeps, by request. All of it is called by the engine's thread."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}

    @property
    def kept(self) -> int:
        """Bytes of blocks that are kept."""
        return sum(block.experts.nbytes for block in self._blocks.values())

    def put(self, request: int, first: int, experts: np.ndarray) -> None:
        """Keep what a request took: [positions, layers, top_k], from position `first` on."""
        self._blocks[request] = _Block(first, experts)

    def forget(self, requests: Sequence[int]) -> None:
        """Nobody will ask for these."""
        for request in requests:
            self._blocks.pop(request, None)

    def cut(self, pieces: np.ndarray) -> np.ndarray:
        """The pieces [n, (request, first position, one past the last)] of a trainer rank, end to end.

        RoutesError for a request or positions that are not here.
        """
        parts = []
        for request, first, stop in pieces.tolist():
            block = self._blocks.get(request)
            if block is None:
                raise RoutesError(f"the routed experts of request {request} are not kept here (any more)")
            part = block.experts[first - block.first : stop - block.first]
            if first < block.first or len(part) != stop - first:
                raise RoutesError(
                    f"request {request} has routed experts of positions {block.first} to "
                    f"{block.first + len(block.experts)}, and {first} to {stop} are asked for"
                )
            parts.append(part)
        return np.ascontiguousarray(np.concatenate(parts)) if parts else np.zeros(0, np.uint8)

    def close(self, deadline_s: float) -> None:
        """Nothing is under way."""


class RouteSender(RouteStore):
    """A leader's end, where others train; sending has a thread of its own.

    Args:
        group: the trainer ranks and all leaders.
        trainers: the trainer ranks' places in it.
        fail: called on the sending thread with the error that ended it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        trainers: Sequence[int],
        fail: Callable[[BaseException], None],
        span: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self._group, self._trainers, self._fail, self._span = group, list(trainers), fail, span
        self._queue: queue.SimpleQueue[tuple[int, list[np.ndarray]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="routes", daemon=True)
        self._thread.start()

    def send(self, order: SendRoutes) -> None:
        """Begin to send what each trainer rank gets. RoutesError for a request that is not here."""
        self._queue.put((order.step, [self.cut(pieces) for pieces in order.pieces]))

    def close(self, deadline_s: float) -> None:
        """End the thread, when all is sent."""
        self._queue.put(None)
        self._thread.join(deadline_s)

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                step, shares = item
                with self._span("send routes"):
                    self._send(step, shares)
        except BaseException as error:
            self._fail(error)

    def _send(self, step: int, shares: list[np.ndarray]) -> None:
        works, alive = [], []  # a buffer must live until its send is done
        for place, share in zip(self._trainers, shares, strict=True):
            if not share.size:
                continue
            for tensor in message(step, share):
                alive.append(tensor)
                works.append(dist.isend(tensor, group=self._group, group_dst=place))
        for work in works:
            work.wait()


class RouteReceiver:
    """A trainer rank's end.

    Args:
        leaders: their places in the group, in the order of their replicas.
        layers, top_k, experts: of the model.
    """

    def __init__(self, group: dist.ProcessGroup, leaders: Sequence[int], layers: int, top_k: int, experts: int) -> None:
        self._group, self._leaders = group, list(leaders)
        self._layers, self._top_k, self._experts = layers, top_k, experts
        self.bytes = 0  # received so far

    def fill(self, step: int, rows: Sequence[Row]) -> list[Row]:
        """The rows of this rank with the routed experts that `Row.routes` names; -1 where no engine has said any."""
        wanted = [replica for row in rows if row.routes is not None for replica in row.routes[:, 0].tolist()]
        blocks = {replica: self._receive(step, replica, rows) for replica in sorted(set(wanted))}
        return [replace(row, routes=None, routed_experts=self._assemble(row, blocks)) for row in rows]

    def _receive(self, step: int, replica: int, rows: Sequence[Row]) -> np.ndarray:
        """All that one leader sends for these rows, [positions, layers, top_k], as an array to take from the front."""
        place, name = self._leaders[replica], f"replica {replica}"
        pieces = pieces_of(rows, replica)
        positions = int((pieces[:, 3] - pieces[:, 2]).sum())
        of_step, size, itemsize, expected = self._head(place)
        right = positions * self._layers * self._top_k
        if of_step != step or itemsize not in (1, 2) or size != right * itemsize:
            raise RoutesError(
                f"{name} sends {size} bytes of routed experts for step {of_step}; step {step} needs {positions} "
                f"positions × {self._layers} layers × {self._top_k} experts of one or two bytes"
            )
        body = self._body(place, size)
        self.bytes += size
        if digest(body) != expected:
            raise RoutesError(f"the routed experts of step {step} from {name} arrived damaged: their checksum differs")
        experts = body.numpy().view(np.uint8 if itemsize == 1 else np.uint16)
        if experts.max(initial=0) >= self._experts:
            raise RoutesError(f"{name} took expert {experts.max()}, and the model has {self._experts}")
        return experts.reshape(-1, self._layers, self._top_k)

    def _head(self, place: int) -> list[int]:
        head = torch.zeros(HEAD, dtype=torch.int64)
        dist.recv(head, group=self._group, group_src=place)
        return head.tolist()

    def _body(self, place: int, size: int) -> torch.Tensor:
        body = torch.empty(size, dtype=torch.uint8)
        dist.recv(body, group=self._group, group_src=place)
        return body

    def _assemble(self, row: Row, blocks: dict[int, np.ndarray]) -> np.ndarray | None:
        """int16[L, layers, top_k] of a row; takes its pieces off the fronts of `blocks`."""
        if row.routes is None:
            return None
        found = np.full((len(row.tokens), self._layers, self._top_k), -1, np.int16)
        for replica, _, first, stop, place in row.routes.tolist():
            count = stop - first
            found[place : place + count] = blocks[replica][:count]
            blocks[replica] = blocks[replica][count:]
        return found


def message(step: int, share: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Head and body of what goes to one trainer rank."""
    body = torch.from_numpy(share.reshape(-1).view(np.uint8))
    return torch.tensor([step, body.numel(), share.itemsize, digest(body)], dtype=torch.int64), body


def digest(body: torch.Tensor) -> int:
    """Of some bytes on the host."""
    return xxhash.xxh3_64_intdigest(memoryview(body.numpy())) >> 1
