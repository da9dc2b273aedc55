"""Limits as arguments of `prlimit`, which sets them and becomes the program.

Not a function between fork and exec: that can deadlock a process with threads. It refuses to know in which kind of box
the program runs. Invariant: hard limits are set too, so that a program can't raise them again.
"""

from __future__ import annotations

from spmd_rl.envs.sandbox.interface import Limits

MB = 2**20


def prlimit(limits: Limits, *, processes: int | None) -> list[str]:
    """The arguments to put before a program; `processes` counts all of its user's, None leaves that as it is."""
    resources = {
        "as": limits.memory_mb * MB,
        "fsize": limits.file_mb * MB,
        "nofile": limits.open_files,
        "core": 0,
        **({} if processes is None else {"nproc": processes}),
    }
    # The soft limit comes a second earlier: its signal says what happened, and the hard one kills.
    cpu = f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}"
    return ["prlimit", cpu, *(f"--{name}={value}" for name, value in resources.items()), "--"]
