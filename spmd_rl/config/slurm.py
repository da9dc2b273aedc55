"""The `[slurm]` table: how a command of `main.py` becomes a job of a cluster, and what can't work about it.

A part of the tree (`tree.py`), with the same rules. The script is made from it, and submitted, by
`spmd_rl.world.slurm`; which numbers of ranks fit is `spmd_rl.world.mesh`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

MAX_SIGNAL_S = 65535  # what sbatch takes
ONE_WORD = ("partition", "account", "qos", "time", "memory", "nodelist", "exclude", "job_name")
TIME_FORMS = {
    r"(?P<m>\d+)": "minutes",
    r"(?P<m>\d+):(?P<s>\d+)": "minutes:seconds",
    r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)": "hours:minutes:seconds",
    r"(?P<d>\d+)-(?P<h>\d+)(:(?P<m>\d+)(:(?P<s>\d+))?)?": "days-hours[:minutes[:seconds]]",
}
UNIT_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}


@dataclass(frozen=True)
class SlurmConfig:
    """A job in place of processes of this machine. An empty word leaves the choice to the cluster."""

    nodes: int = 0  # machines of the job; 0 = no job, run here
    processes: int = 0  # per node; 0 = one per GPU, and one more on the first for the orchestrator
    gpus: int = 0  # per node, asked of Slurm; 0 = none are asked for
    cpus: int = 0  # cores per node; 0 = whole nodes, shared with nobody
    memory: str = ""  # per node, such as 64G; empty: all that whole nodes have
    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""  # limit: minutes, hours:minutes:seconds or days-hours
    nodelist: str = ""  # only these nodes
    exclude: str = ""  # none of these nodes
    job_name: str = ""  # empty: the name of the output folder
    options: str = ""  # further ones of sbatch, such as "--constraint=a100 --mail-type=END"
    pre_run: str = ""  # shell commands on the first node; what they export all nodes get, as with "module load cuda"
    requeue: bool = False  # the job starts again after pre-emption or its time limit, from the last checkpoint
    signal_s: int = 300  # seconds before the time limit at which the run is told to save and end; 0 = never
    template_path: str = ""  # one's own template in place of launch/slurm.sbatch.j2


def check_slurm(s: SlurmConfig, interval: int, saves: bool) -> Iterator[str]:
    """What can't work about the table. interval: ckpt.interval; saves: the command writes checkpoints."""
    if not s.nodes:
        return
    for name in ONE_WORD:
        if not re.fullmatch(r"[!-~]*", value := getattr(s, name)):
            yield f"slurm.{name} = {value!r}: holds spaces or characters that sbatch does not take; write one word"
    try:
        shlex.split(s.options)
    except ValueError as error:
        yield f"slurm.options = {s.options!r}: is no list of options ({error}); quote it as in a shell"
    if "\n" in s.options:
        yield "slurm.options holds several lines: write all options into one"
    if s.nodes > 1 and not s.processes and not s.gpus:
        yield (
            f"slurm.nodes = {s.nodes} with slurm.processes = 0 and slurm.gpus = 0: say how many processes run on a node"
        )
    if s.signal_s > MAX_SIGNAL_S:
        yield f"slurm.signal_s = {s.signal_s}: must be {MAX_SIGNAL_S} or less"
    limit_s = time_limit_s(s.time)
    if limit_s is None:
        forms = ", ".join(TIME_FORMS.values())
        yield f"slurm.time = {s.time!r}: is no time of Slurm; write {forms} or UNLIMITED"
    elif s.signal_s >= limit_s:
        yield (
            f"slurm.signal_s = {s.signal_s} is not below slurm.time = {s.time}: the run would be told to end before it "
            "begins; lower the first or raise the second"
        )
    if s.requeue and saves and not interval:
        yield (
            "slurm.requeue is on with ckpt.interval = 0: a job that is pre-empted without warning would begin anew; "
            "set ckpt.interval, for example to 20"
        )


def time_limit_s(text: str) -> float | None:
    """Seconds of a time limit as Slurm reads it; infinite when there is none, None when it can't be read."""
    if text.upper() in ("", "UNLIMITED", "INFINITE"):
        return float("inf")
    for form in TIME_FORMS:
        if match := re.fullmatch(form, text, re.ASCII):
            return float(sum(int(value) * UNIT_S[unit] for unit, value in match.groupdict().items() if value))
    return None
