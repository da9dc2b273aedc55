"""Checks that need process groups: that ranks can connect, every group of the mesh, the speed of links, the clocks.

Each step is tried in a thread with a deadline and its outcome told over the store (`party.py`), so that one that hangs
is a finding too. Every rank takes all steps in one order and comes to the same lines. The groups are those of the run,
from `spmd_rl.world`, with a time-out of seconds.

It refuses to know what the links carry later. On NCCL it is written by the book and has never run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.doctor import links, skew
from spmd_rl.doctor.finding import Finding, Line, fail, ok
from spmd_rl.doctor.link_lines import GROUP, judge_sum, link_lines, pairs
from spmd_rl.doctor.links import GroupWire, Wire
from spmd_rl.doctor.party import Member, Party, within
from spmd_rl.doctor.wishes import Asked

COLLECTIVE_S = 10.0  # time-out of every group
SPEED_S = 60.0  # all measurements of one wire
OTHERS_S = 10.0  # ranks begin a step at different moments
MATRIX = 16  # ranks whose links are shown one by one


@dataclass
class Collectives:
    """The steps of one rank.

    `wire` makes the wire over a group of all ranks: a test gives one that is slow. `lines`, `tables` and `figures` grow
    with every step.
    """

    party: Party
    members: Sequence[Member]
    collective_s: float = COLLECTIVE_S
    wire: Callable[[Any, torch.device, Any], Wire] = GroupWire
    clock: Callable[[], float] = time.time
    lines: list[Line] = field(default_factory=list)
    tables: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def me(self) -> Member:
        """This rank."""
        return self.members[self.party.rank]

    def run(self, asked: Asked) -> None:
        """All steps. Absent and StoreLost pass through; whatever was found before them stands in `lines`."""
        if not self.connect():
            return
        devices = self.try_groups(asked)
        self.measure("gloo", dist.group.WORLD, torch.device("cpu"), range(self.party.size))
        self.compare_clocks()
        self.measure_accelerators(devices)

    def connect(self) -> bool:
        """gloo over all ranks: every rank connects to every other one."""
        store = dist.PrefixStore(f"{self.party.prefix}/gloo", self.party.store)
        rank, size, timeout = self.party.rank, self.party.size, timedelta(seconds=self.collective_s)

        def work() -> None:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)

        _, errors = self._together("connect", work, self.collective_s + OTHERS_S)
        if not errors:
            self._say("connections", ok(f"all {size} ranks reach each other"))
            return True
        self._say(
            "connections",
            fail(
                self._named(errors),
                "let the hosts reach each other on all ports; on every host set GLOO_SOCKET_IFNAME to the interface "
                "that leads to the others",
            ),
        )
        return False

    def try_groups(self, asked: Asked) -> list[str]:
        """Make the mesh's groups and take a sum in each. The device of every rank, cpu where that is not known."""
        config, mesh, rank = asked.config, asked.mesh, self.party.rank
        if mesh is None or config is None:
            devices, _ = self._together("devices", lambda: _own_device(self.me.local_rank), SPEED_S, SPEED_S)
            return [device or "cpu" for device in devices]

        def work() -> dict[str, Any]:
            from spmd_rl.world.groups import make_groups
            from spmd_rl.world.world import accelerator_index, pick_device

            device = pick_device(config, mesh.role(rank), accelerator_index(mesh.spare))
            groups = make_groups(mesh, rank, device, self.collective_s)
            on = {spec.name: device if spec.carries == "device" else torch.device("cpu") for spec in mesh.groups()}
            sums = {
                name: within(self.collective_s + 1, partial(_sum, group, on[name])) for name, group in groups.items()
            }
            return {"device": str(device), "sums": sums}

        longest = (len(mesh.groups()) + 1) * self.collective_s
        found, errors = self._together("groups", work, longest, longest)
        if errors:
            to_do = "each rank that trains or infers needs an accelerator of its own, or deployment.device = 'cpu'"
            self._say("groups", fail(self._named(errors), to_do))
            return ["cpu"] * self.party.size
        slowest, bad = 0.0, False
        for spec in mesh.groups():
            said = {rank: found[rank]["sums"][spec.name] for rank in spec.ranks}
            slowest = max([slowest, *(seconds for seconds, _ in said.values() if seconds is not None)])
            if wrong := {rank: error for rank, (_, error) in said.items() if error}:
                to_do = "compare these hosts' interfaces, and GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME there"
                self._say(f"group {spec.name}", fail(self._named(wrong), to_do))
                bad = True
        if not bad:
            names = ", ".join(spec.name for spec in mesh.groups())
            self._say("groups", ok(f"a sum in each of {names}; the slowest took {slowest * 1e3:.1f} ms"))
        return [said["device"] for said in found]

    def measure(self, name: str, group: Any, device: torch.device, ranks: Sequence[int]) -> None:
        """The speed of sums and of links in a group over `ranks`. All ranks call it, others wait."""
        chosen = [ranks[place] for place in links.who_measures([self.members[rank].host for rank in ranks])]
        rounds = links.rounds_of(chosen)
        wires: list[Wire] = []  # of this rank, if it is a member

        def work() -> dict[str, Any]:
            timeout = timedelta(seconds=self.collective_s)
            meeting = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
            if self.party.rank not in ranks:
                return {}
            wires.append(self.wire(group, device, meeting))
            copy = links.copy_speed() if self.me.leads else None
            seconds = links.all_reduce(group, device)
            return {"copy": copy, "sum": seconds, "speeds": links.measure(wires[0], self.party.rank, rounds, device)}

        found, errors = self._together(f"links over {name}", work, SPEED_S)
        if errors:
            self._say(f"links over {name}", fail(self._named(errors), "end other load on these hosts and look again"))
            return
        speeds = pairs(found)
        if again := links.suspects(links.find_slow(speeds, self._hosts())):

            def repeat() -> dict[str, Any]:
                return {"speeds": links.measure(wires[0], self.party.rank, again, device)} if wires else {}

            better, errors = self._together(f"slow links over {name}", repeat, SPEED_S)
            if not errors:
                speeds |= {pair: max(speed, speeds[pair]) for pair, speed in pairs(better).items()}
        copy = min((said["copy"] for said in found if said.get("copy")), default=0.0)
        size, seconds = found[ranks[0]]["sum"]
        self.lines.append(Line(GROUP, f"sum over {name}", judge_sum(size, seconds, len(ranks))))
        self.lines += link_lines(name, speeds, self.members, copy, len(chosen) * (len(chosen) - 1))
        if len(speeds) > 2 and len(chosen) <= MATRIX:
            self.tables[f"GB/s over {name}"] = links.matrix(speeds, chosen)
        self.figures[f"sum over {name}"] = {"bytes": size, "seconds": seconds}
        self.figures[f"links over {name}"] = [[*pair, round(speed, 4)] for pair, speed in sorted(speeds.items())]

    def compare_clocks(self) -> None:
        """Each host's clock against that of rank 0's host."""
        peers = [member.rank for member in self.members if member.leads and member.node != self.members[0].node]
        if not peers:
            self._say("clocks", ok("one host"))
            return
        wire = self.wire(dist.group.WORLD, torch.device("cpu"), dist.group.WORLD)
        found, errors = self._together(
            "clocks", lambda: skew.exchange(wire, self.party.rank, peers, self.clock), self.collective_s + len(peers)
        )
        if errors:
            self._say("clocks", fail(self._named(errors), "look at the links above"))
            return
        for peer in peers:
            self._say("clocks", skew.judge(*found[peer]), (self.members[peer].host,))

    def measure_accelerators(self, devices: Sequence[str]) -> None:
        """The same over NCCL, among the ranks that have an accelerator: `devices` by rank."""
        have = [rank for rank, device in enumerate(devices) if device.startswith("cuda")]
        if len(have) < 2:
            return
        made: list[Any] = []

        def work() -> None:
            timeout = timedelta(seconds=self.collective_s)
            made.append(dist.new_group(have, backend="nccl", timeout=timeout))

        _, errors = self._together("make a group of NCCL", work, self.collective_s)
        if errors:
            self._say("NCCL", fail(self._named(errors), "compare NCCL and the driver on these hosts; NCCL_DEBUG=INFO"))
            return
        self.measure("NCCL", made[0], torch.device(devices[self.party.rank]), have)

    # --- what steps share ---------------------------------------------------------------------------------------

    def _together(
        self, step: str, work: Callable[[], Any], deadline_s: float, apart_s: float = 0.0
    ) -> tuple[list[Any], dict[int, str]]:
        """(what the work of every rank returned, errors by rank), the same on every rank.

        apart_s: how much later than another one a rank may be through; by default one time-out of a collective.
        """
        value, error = within(deadline_s, work)
        said = self.party.gather(step, {"value": value, "error": error}, (apart_s or self.collective_s) + OTHERS_S)
        return [s["value"] for s in said], {rank: s["error"] for rank, s in enumerate(said) if s["error"]}

    def _hosts(self) -> list[str]:
        return [member.host for member in self.members]

    def _named(self, errors: dict[int, str]) -> str:
        """Ranks with one error together."""
        ranks: dict[str, list[str]] = {}
        for rank, error in errors.items():
            ranks.setdefault(error, []).append(str(self.members[rank]))
        return "; ".join(f"{', '.join(names)}: {error}" for error, names in ranks.items())

    def _say(self, what: str, finding: Finding, hosts: tuple[str, ...] = ()) -> None:
        self.lines.append(Line(GROUP, what, finding, hosts))


def _sum(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds of a small sum over the group; ValueError when it is wrong."""
    start, data = time.perf_counter(), torch.ones(1024, device=device)
    dist.all_reduce(data, group=group)
    if not bool((data == group.size()).all()):
        raise ValueError(f"the sum of {group.size()} ones is {data.min().item()} to {data.max().item()}")
    return time.perf_counter() - start


def _own_device(local_rank: int) -> str:
    """Without a config: an accelerator each, where the host has enough."""
    return f"cuda:{local_rank}" if local_rank < torch.cuda.device_count() else "cpu"
