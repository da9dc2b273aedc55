"""A wire without ranks: hands a `Receiver` what senders would broadcast, message by message, or an error instead."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
import torch

from spmd_rl.world import weights
from spmd_rl.world.buckets import EVERYONE, Plan
from spmd_rl.world.weights import Receiver

CPU = torch.device("cpu")
Named = Iterable[tuple[str, torch.Tensor]]


class Wire:
    """Stands where `torch.distributed` stands for the receiver.

    Its groups are the numbers of senders, and behind these once more, for what rank `taker` of a replica takes alone.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plan: Plan, senders: int = 1, taker: int = EVERYONE) -> None:
        monkeypatch.setattr(weights, "dist", SimpleNamespace(broadcast=self._broadcast))
        self.plan, self.errors, self.arrived = plan, [], []
        self._senders, self._taker = senders, taker
        self._messages = [queue.SimpleQueue() for _ in range(2 * senders)]
        for sender in range(senders):
            encoded = torch.frombuffer(bytearray(plan.encode()), dtype=torch.uint8)
            self._put(sender, torch.tensor([encoded.numel()]))
            self._put(sender, encoded)

    def receiver(self, staging: str, arrived: Callable[[int], None] = lambda version: None) -> Receiver:
        groups, experts = list(range(self._senders)), list(range(self._senders, 2 * self._senders))
        more = {} if self._taker == EVERYONE else {"experts": experts, "taker": self._taker}
        return Receiver(groups, CPU, arrived, self.errors.append, staging=staging, **more)

    def send(self, version: int, tensors: Named, damaged: int = -1, stops_at: int = -1, dies: str = "") -> None:
        """A version; bucket `damaged` with a flipped bit; at bucket `stops_at` nothing more, or the death of a peer."""
        given = dict(tensors)
        for sender in range(self._senders):
            self._put(sender, torch.tensor([version]))
        for bucket in self.plan.buckets:
            group = bucket.sender + self._senders * (bucket.taker != EVERYONE)
            if bucket.index == stops_at:
                if dies:
                    self._put(group, RuntimeError(dies))
                return
            if bucket.taker not in (EVERYONE, self._taker):
                continue
            buffer = bucket.allocate(CPU)
            for piece in bucket.pieces:
                piece.view(buffer).copy_(given[piece.name])
            bucket.seal(buffer, version)
            buffer[0] ^= bucket.index == damaged
            self._put(group, buffer)

    def _put(self, sender: int, message: torch.Tensor | BaseException) -> None:
        self._messages[sender].put(message)

    def _broadcast(self, tensor: torch.Tensor, group_src: int, group: int) -> None:
        message = self._messages[group].get()
        if isinstance(message, BaseException):
            raise message
        assert message.shape == tensor.shape
        tensor.copy_(message)
