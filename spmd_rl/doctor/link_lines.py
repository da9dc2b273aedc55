"""From measured links to lines of the report: which are slow, against what, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmd_rl.doctor.finding import Finding, Line, fail, ok, warn
from spmd_rl.doctor.links import Pair, Slow, find_slow
from spmd_rl.doctor.party import Member

GROUP = "links"
SLOW_SUM_S = 1.0  # of 1 MiB


def pairs(found: Sequence[Mapping[str, Any]]) -> dict[Pair, float]:
    """GB/s by (sender, receiver), from what every rank said of its own sending."""
    return {
        (sender, int(receiver)): speed
        for sender, said in enumerate(found)
        for receiver, speed in said.get("speeds", {}).items()
    }


def judge_sum(size: int, seconds: float, ranks: int) -> Finding:
    """An all-reduce of so many bytes over so many ranks."""
    value = f"{size / 2**20:g} MiB over {ranks} ranks in {seconds * 1e3:.1f} ms, {size / seconds / 1e9:.2f} GB/s"
    if size / 2**20 <= SLOW_SUM_S and seconds > SLOW_SUM_S:
        return warn(value, "the links below say between whom; on one host: end other load there")
    return ok(value)


def link_lines(
    name: str, speeds: Mapping[Pair, float], members: Sequence[Member], copy: float, wanted: int
) -> list[Line]:
    """One line for all links, of `wanted` ones, and one for each that is slow; `copy`: a copy in memory, in GB/s."""
    if not speeds:
        return []
    hosts = [member.host for member in members]
    within = [speed for (a, b), speed in speeds.items() if hosts[a] == hosts[b]]
    between = [speed for (a, b), speed in speeds.items() if hosts[a] != hosts[b]]
    parts = [f"{len(speeds)} of {wanted}"]
    parts += [f"{_span(within)} GB/s within a host (a copy in memory: {copy:.1f})"] if within else []
    parts += [f"{_span(between)} GB/s between hosts"] if between else []
    lines = [Line(GROUP, f"links over {name}", ok(", ".join(parts)))]
    return lines + [Line(GROUP, "slow link", _judge(slow, members)) for slow in find_slow(speeds, hosts)]


def _judge(slow: Slow, members: Sequence[Member]) -> Finding:
    sender, receiver = (members[rank] for rank in slow.pair)
    usual = f", where {slow.typical:.2f} is usual" if slow.typical else ""
    value = f"{sender} → {receiver}: {slow.speed:.3f} GB/s{usual}"
    if sender.host == receiver.host:
        to_do = "look for other load on that host, for pinned cores and for OMP_NUM_THREADS above 1"
    else:
        to_do = "compare both hosts' interface, cable and speed (ethtool, ip -s link), or leave one of them out"
    return fail(value, to_do) if slow.broken else warn(value, to_do)


def _span(speeds: Sequence[float]) -> str:
    return f"{min(speeds):.2f} to {max(speeds):.2f}"
