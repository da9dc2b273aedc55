"""How far are the hosts' clocks apart?

The exchange of NTP: a peer notes when it asks and when the answer comes, rank 0 notes when it heard and when it
answered. The quickest of several rounds bounds the error by half of its way. It refuses to set a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from spmd_rl.doctor.finding import Finding, ok, warn
from spmd_rl.doctor.links import Wire

ROUNDS = 8
BOUND_S = 0.5  # torchrun takes the earliest failure for the root cause, by the hosts' clocks


def exchange(
    wire: Wire, rank: int, peers: Sequence[int], clock: Callable[[], float] = time.time
) -> tuple[float, float] | None:
    """(seconds that rank 0's clock is ahead of this rank's, bound of the error) on each of `peers`; None elsewhere."""
    if rank == 0:
        for peer in peers:
            _answer(wire, peer, clock)
    return _ask(wire, clock) if rank in peers else None


def _ask(wire: Wire, clock: Callable[[], float]) -> tuple[float, float]:
    offset, bound = 0.0, float("inf")
    times = torch.zeros(2, dtype=torch.float64)
    for _ in range(ROUNDS):
        asked = clock()
        wire.send(torch.zeros(1), 0)
        wire.receive(times, 0)
        answered = clock()
        heard, replied = times.tolist()
        half = ((answered - asked) - (replied - heard)) / 2
        if half < bound:
            offset, bound = ((heard - asked) + (replied - answered)) / 2, half
    return offset, bound


def _answer(wire: Wire, peer: int, clock: Callable[[], float]) -> None:
    question = torch.zeros(1)
    for _ in range(ROUNDS):
        wire.receive(question, peer)
        heard = clock()
        wire.send(torch.tensor([heard, clock()], dtype=torch.float64), peer)


def judge(offset: float, bound: float) -> Finding:
    """Of one host against rank 0's."""
    value = f"{'behind' if offset > 0 else 'ahead'} by {abs(offset) * 1e3:.1f} ms (± {bound * 1e3:.1f} ms)"
    if abs(offset) - bound > BOUND_S:
        return warn(value, "let chrony or another NTP client set the clocks: the order of failures is read off them")
    return ok(value)
