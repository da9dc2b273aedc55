"""How fast is the link between two ranks? Which ones are slow?

Every pair is measured in both directions, by the quickest of some parcels that are each answered. Up to `ALONE` ranks
one pair at a time, so that no pair takes another one's share of a wire; beyond, in rounds of disjoint pairs; in large
worlds the first rank of each host stands for it. Links that look slow are measured again, alone, and the better figure
counts, because a busy machine makes any link look slow once.

It refuses to know what sends: a `Wire` does. Invariants: all ranks derive the same rounds and the same suspects from
the same data; on a slow link a pair takes little longer than one parcel.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch
import torch.distributed as dist

Pair = tuple[int, int]

ALONE, ALL = 8, 64  # members: up to the first one pair at a time, up to the second all ranks
MAX_ROUNDS = 64
PROBE, MAX_PARCELS = 2**18, 8  # bytes, parcels
PARCEL = {"cpu": 2**22, "cuda": 2**26}  # bytes: so many that the answer takes little of the time
PUSH_S = 0.05  # for all parcels of one direction
SLOW, BROKEN = 0.5, 0.1  # shares of the median of their kind, below which a link is named
FEW = 3  # fewer links of a kind have no median to speak of
CRAWLING = 0.1  # GB/s: less than a wire of 1 Gbit/s
MAX_SUSPECTS = 16
ALL_REDUCE = (2**20, 2**24)  # bytes: first a small one, and a large one where that was fast


class Wire(Protocol):
    """Point-to-point messages in one group, and a place where all its members meet."""

    def send(self, data: torch.Tensor, peer: int) -> None:
        """Blocks until it may be reused."""

    def receive(self, data: torch.Tensor, peer: int) -> None:
        """Blocks until it is there."""

    def meet(self) -> None:
        """All members wait for each other."""


@dataclass(frozen=True)
class GroupWire:
    """The wire of a process group over all ranks.

    meeting: the same ranks, on gloo. Under TORCH_DISTRIBUTED_DEBUG=DETAIL a collective checks that all its ranks have
    used their group equally often, which they have not where pairs of them talk.
    """

    group: dist.ProcessGroup
    device: torch.device
    meeting: dist.ProcessGroup

    def send(self, data: torch.Tensor, peer: int) -> None:
        """See `Wire`."""
        dist.send(data, peer, group=self.group)

    def receive(self, data: torch.Tensor, peer: int) -> None:
        """See `Wire`."""
        dist.recv(data, peer, group=self.group)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """See `Wire`."""
        dist.all_reduce(torch.zeros(1), group=self.meeting)


@dataclass(frozen=True)
class Slow:
    """A link that is far below others of its kind."""

    pair: Pair  # sender, receiver
    speed: float  # GB/s
    typical: float  # GB/s, the median of its kind; 0: too few to compare
    broken: bool


def who_measures(hosts: Sequence[str]) -> list[int]:
    """The ranks whose links are measured, given the host of every rank."""
    if len(hosts) <= ALL:
        return list(range(len(hosts)))
    return sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())


def rounds_of(members: Sequence[int]) -> list[list[Pair]]:
    """Every pair once; the pairs of a round are disjoint. Of very many rounds the first `MAX_ROUNDS`."""
    if len(members) <= ALONE:
        return [[(a, b)] for i, a in enumerate(members) for b in members[i + 1 :]]
    ring: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    rounds = []
    for _ in range(min(len(ring) - 1, MAX_ROUNDS)):  # the circle method: one stays, all others move on
        halves = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in halves if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def measure(wire: Wire, rank: int, rounds: Iterable[Iterable[Pair]], device: torch.device) -> dict[int, float]:
    """GB/s of what this rank sent, by receiver. Every rank of the wire calls it with the same rounds."""
    speeds: dict[int, float] = {}
    for pairs in rounds:
        wire.meet()
        mine = next((pair for pair in pairs if rank in pair), None)
        for sender, receiver in (mine, mine[::-1]) if mine else ():
            if rank == sender:
                speeds[receiver] = _push(wire, receiver, device)
            else:
                _take(wire, sender, device)
    return speeds


def _push(wire: Wire, peer: int, device: torch.device) -> float:
    """GB/s from here to `peer`, which runs `_take`."""
    probe, answer = torch.zeros(PROBE, dtype=torch.uint8, device=device), torch.zeros(1, device=device)

    def seconds(data: torch.Tensor) -> float:
        start = time.perf_counter()
        wire.send(data, peer)
        wire.receive(answer, peer)
        return time.perf_counter() - start

    seconds(probe)  # the first one opens the connection
    parcel = torch.zeros(PARCEL[device.type], dtype=torch.uint8, device=device)
    fit = PUSH_S / seconds(probe) * PROBE / parcel.numel()
    count = int(max(1, min(MAX_PARCELS, fit)))
    wire.send(torch.tensor([float(count)], device=device), peer)
    return parcel.numel() / min(seconds(parcel) for _ in range(count)) / 1e9


def _take(wire: Wire, peer: int, device: torch.device) -> None:
    probe, answer = torch.zeros(PROBE, dtype=torch.uint8, device=device), torch.zeros(1, device=device)
    parcel, count = torch.zeros(PARCEL[device.type], dtype=torch.uint8, device=device), torch.zeros(1, device=device)
    for _ in range(2):
        wire.receive(probe, peer)
        wire.send(answer, peer)
    wire.receive(count, peer)
    for _ in range(int(count.item())):
        wire.receive(parcel, peer)
        wire.send(answer, peer)


def find_slow(speeds: Mapping[Pair, float], hosts: Sequence[str]) -> list[Slow]:
    """Links far below the median of their kind (within a host, between hosts), and those that crawl; worst first."""
    found = []
    for kind in (True, False):
        links = {pair: speed for pair, speed in speeds.items() if (hosts[pair[0]] == hosts[pair[1]]) is kind}
        typical = median(links.values()) if len(links) >= FEW else 0.0
        for pair, speed in links.items():
            if speed < max(SLOW * typical, CRAWLING):
                found.append(Slow(pair, speed, typical, speed < BROKEN * typical))
    return sorted(found, key=lambda slow: slow.speed)


def suspects(slow: Sequence[Slow]) -> list[list[Pair]]:
    """Rounds, of one pair each, in which slow links are measured again."""
    pairs = dict.fromkeys((min(link.pair), max(link.pair)) for link in slow)
    return [[pair] for pair in list(pairs)[:MAX_SUSPECTS]]


def all_reduce(group: dist.ProcessGroup, device: torch.device) -> tuple[int, float]:
    """(bytes, seconds) of the best of three sums over the group; ValueError when a sum is wrong."""
    result = (0, 0.0)
    for size in ALL_REDUCE:
        best = torch.tensor([float("inf")], device=device)
        for _ in range(3):
            data = torch.ones(size // 4, device=device)
            start = time.perf_counter()
            dist.all_reduce(data, group=group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best.clamp_(max=time.perf_counter() - start)
            if not bool((data == group.size()).all()):
                raise ValueError(f"the sum of {group.size()} ones is {data.min().item()} to {data.max().item()}")
        dist.all_reduce(best, dist.ReduceOp.MAX, group=group)  # also so that all go on, or none
        result = (size, best.item())
        if result[1] > 1.0:
            break
    return result


def copy_speed() -> float:
    """GB/s of a copy in this host's memory: what no link within it can pass."""
    source = torch.zeros(2**25, dtype=torch.uint8)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return source.numel() / min(seconds) / 1e9


def matrix(speeds: Mapping[Pair, float], members: Sequence[int]) -> str:
    """Senders down, receivers across, in GB/s."""
    head = "  from\\to" + "".join(f"{rank:>7}" for rank in members)
    rows = [
        f"  {sender:<7}"
        + "".join(f"{speeds[sender, to]:>7.2f}" if (sender, to) in speeds else f"{'–':>7}" for to in members)
        for sender in members
    ]
    return "\n".join([head, *rows])
