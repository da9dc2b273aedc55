"""The doctor of a world: one process per rank, under torchrun.

The order is from what must work to what should: the store, the roll-call, what is equal, each host by its first rank,
the output folder, then whatever needs process groups. What ranks tell each other goes over the store, so that the
report comes out also when no collective works. All ranks come to the same lines; rank 0 prints them, or the first that
speaks up when rank 0 is the one that is gone. Invariant: every rank ends in time, with the report's exit code.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from spmd_rl.doctor import agreement, machine
from spmd_rl.doctor.collectives import Collectives
from spmd_rl.doctor.disks import existing
from spmd_rl.doctor.finding import Finding, Line, fail, ok, run_checks, warn
from spmd_rl.doctor.party import Absent, Member, Party, StoreLost, introduce, join, members
from spmd_rl.doctor.place import Place, Wishes, here
from spmd_rl.doctor.report import Report
from spmd_rl.doctor.wishes import Asked, read

GROUP = "world"


@dataclass(frozen=True)
class Means:
    """How long ranks wait for each other, in seconds, and what they look at and through: a test has its own."""

    store_s: float = 20.0  # to reach torchrun's store
    come_s: float = 60.0  # for all to be there: the slowest may still be reading torch from a cold disk
    facts_s: float = 30.0
    machine_s: float = 200.0  # the imports have 150
    place: Callable[[int, int, Wishes], Place] = here
    collectives: Callable[[Party, Sequence[Member]], Collectives] = Collectives


def run_rank(command: str, words: Sequence[str], json_path: str) -> NoReturn:
    """This process is a rank of the doctor; ends it."""
    end(*examine(command, words, Means()), json_path)


def examine(command: str, words: Sequence[str], means: Means) -> tuple[Report, Party | None]:
    """The report, equal on all ranks that are left, and the party: None where there is no store."""
    report, known, party = Report(), [], None
    try:
        party = join(os.environ, means.store_s)
        known += members(party.gather("come", introduce(os.environ, socket.gethostname()), means.come_s))
        _visit(party, known, report, read(command, words, party.size), means)
    except StoreLost as error:
        to_do = "is torchrun still running on the host of rank 0, and can this host reach that address and port?"
        report.lines.append(Line(GROUP, "store", fail(f"{_me(known)}: {error}", to_do)))
    except Absent as error:
        report.lines.append(Line(GROUP, "ranks", _absence(error, known, party.size if party else 0)))
    return report, party


def end(report: Report, party: Party | None, json_path: str) -> NoReturn:
    """Print, leave the reason for torchrun, and end the process with the report's exit code."""
    from spmd_rl.doctor.role import publish
    from spmd_rl.world.error_file import write_error_file

    failed = [line for line in report.lines if line.finding.status == "FAIL" and line.group == GROUP]
    lost = party is None or any(line.what in ("store", "ranks") for line in failed)
    code = report.exit_code
    if party is None or (party.speaks() if lost else party.rank == 0):
        code = publish(report, json_path)
    if code:
        write_error_file(f"doctor: {report.summary()}", first=party is None or party.rank == 0)
    if party is not None and not lost:
        try:
            party.gather("end", None, 5.0)  # nobody takes the store down while others still read from it
        except (Absent, StoreLost) as error:
            print(f"doctor: at the very end {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what hangs in a thread, or in the destructor of a group, must not keep this process


def _visit(party: Party, known: Sequence[Member], report: Report, asked: Asked, means: Means) -> None:
    """Every step, in one order on all ranks; lines are added as they are found."""
    me, leaders = known[party.rank], [member for member in known if member.leads]
    report.figures["ranks"] = [asdict(member) for member in known]
    place = means.place(sum(m.node == me.node for m in known), len(leaders), asked.wishes) if me.leads else None
    report.lines.append(Line(GROUP, "ranks", ok(f"{len(known)} on {len(leaders)} host{'s' * (len(leaders) > 1)}")))
    name = asked.lines[0].finding.value if asked.lines and asked.config is None else _config_name(asked)
    facts = party.gather("facts", agreement.of_rank(os.environ, asked.wishes, name), means.facts_s)
    report.lines += asked.lines
    report.lines += agreement.compare(facts, [str(member) for member in known])
    found = {}
    if place is not None:
        lines = run_checks(machine.CHECKS, place)
        found = {"lines": list(map(_packed, lines)), "facts": agreement.of_host(place.trial("torch").facts)}
    of_hosts = party.gather("machine", found, means.machine_s)
    for member in leaders:
        report.lines += [_unpacked(line, member.host) for line in of_hosts[member.rank]["lines"]]
    differ = agreement.compare([of_hosts[m.rank]["facts"] for m in leaders], [m.host for m in leaders])
    report.lines += differ[1:]
    if len(leaders) > 1:
        report.lines.append(_folder(party, leaders, asked.wishes.output_dir, means))
    alike = len({fact["config"] for fact in facts}) == 1
    collectives = means.collectives(party, known)
    try:
        collectives.run(asked if alike else Asked())
    finally:
        report.lines += collectives.lines
        report.tables |= collectives.tables
        report.figures |= collectives.figures


def _folder(party: Party, leaders: Sequence[Member], output_dir: str, means: Means) -> Line:
    """Whether the output folder is one for all hosts: rank 0 puts a file there, and every host looks for it."""
    base, error = existing(Path(output_dir)), ""
    marker = f".doctor-{secrets.token_hex(8)}" if party.rank == 0 else ""
    if marker:
        try:
            (base / marker).touch()
        except OSError as reason:
            error = reason.strerror or "can't write there"
    try:
        marker, error = party.gather("marker", [marker, error], means.facts_s)[0]
        there = party.gather("look", bool(marker) and (base / marker).exists(), means.facts_s)
    finally:
        if party.rank == 0:
            (base / marker).unlink(missing_ok=True)
    see = [member.host for member in leaders if there[member.rank]]
    return Line(GROUP, "output folder", judge_folder(output_dir, see, [m.host for m in leaders], error))


def judge_folder(output_dir: str, see: Sequence[str], hosts: Sequence[str], error: str = "") -> Finding:
    """`see`: the hosts on which a file of the first host's folder is there."""
    if error:
        return warn(f"{output_dir}: not tried ({error})", "see the line 'output folder' of that host")
    if len(see) == len(hosts):
        return ok(f"{output_dir}: one folder for all {len(hosts)} hosts")
    apart = [host for host in hosts if host not in see]
    if len(see) <= 1:
        return warn(
            f"{output_dir}: every host has its own",
            "a checkpoint then needs ckpt.per_node = true; or mount a common folder, and set output_dir to one there",
        )
    return fail(f"{output_dir}: one folder for {', '.join(see)}, not for {', '.join(apart)}", "mount it there as well")


def _config_name(asked: Asked) -> str:
    if asked.config is None:
        return "none given"
    from spmd_rl.config import config_hash

    return config_hash(asked.config)[:12]


def _absence(error: Absent, known: Sequence[Member], size: int) -> Finding:
    if not known:
        missing = ", ".join(map(str, error.ranks))
        return fail(
            f"of {size} ranks these never came: {missing}",
            "is torchrun running on every host, with the same number of hosts and the same address? Read its screen "
            "on the hosts of these ranks",
        )
    names = ", ".join(f"{known[rank]}, process {known[rank].pid}" for rank in error.ranks)
    return fail(
        f"lost at the step '{error.step}': {names}",
        "read its screen and the host's kernel log (dmesg: killed for memory?); or it hangs: py-spy dump --pid",
    )


def _me(known: Sequence[Member]) -> str:
    rank = int(os.environ["RANK"])
    return str(known[rank]) if known else f"rank {rank} ({socket.gethostname()})"


def _packed(line: Line) -> list[str]:
    return [line.group, line.what, line.finding.status, line.finding.value, line.finding.to_do]


def _unpacked(packed: Sequence[Any], host: str) -> Line:
    group, what, *finding = packed
    return Line(group, what, Finding(*finding), (host,))
