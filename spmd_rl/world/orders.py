"""Rank 0's end of the `data` group: orders to trainer ranks, each rank just its rows.

One thread owns the group; orders leave in the order they were given, so every trainer rank carries out the same
sequence.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch.distributed as dist

from spmd_rl.world.messages import Order, Stop
from spmd_rl.world.pipe import Loopback, pipes_to
from spmd_rl.world.wire import encode


class Dispatcher(threading.Thread):
    """Sends orders.

    Args:
        group: `data`; this rank is its member 0.
        names: who each other member of the group is, in group order.
        fail: called on this thread with the error that ended it.
        own: to the first member, where that is this rank itself.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        names: list[str],
        fail: Callable[[BaseException], None],
        own: Loopback | None = None,
    ) -> None:
        super().__init__(name="data", daemon=True)
        self._pipes = pipes_to(group, names, own)
        self._fail = fail
        self._queue: queue.SimpleQueue[list[Order]] = queue.SimpleQueue()

    def give(self, orders: list[Order]) -> None:
        """Queue one order per trainer rank, all of the same kind."""
        if len(orders) != len(self._pipes):
            raise ValueError(f"{len(orders)} orders for {len(self._pipes)} trainer ranks")
        self._queue.put(orders)

    def run(self) -> None:
        try:
            while True:
                orders = self._queue.get()
                sends = [pipe.send_start(encode(order)) for pipe, order in zip(self._pipes, orders, strict=True)]
                for pipe, works in zip(self._pipes, sends, strict=True):
                    pipe.wait(works)
                if isinstance(orders[0], Stop):
                    return
        except BaseException as error:
            self._fail(error)
