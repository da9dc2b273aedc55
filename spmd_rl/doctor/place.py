"""What the checks of one machine may look at, so that a test can show them another machine.

It refuses to judge. Invariant: nothing is looked up before a check asks for it, and nothing is written here.
"""

from __future__ import annotations

import importlib.metadata
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spmd_rl.doctor.imports import Imports, Trial
from spmd_rl.world.fingerprint import installed

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@dataclass(frozen=True)
class Wishes:
    """What a config asks of a machine; the defaults are those of no config."""

    output_dir: str = "outputs/run"
    model: str = ""  # folder or Hub id
    engine: bool = True  # whether any rank samples
    device: str = "auto"
    threads: int = 1  # CPU threads of a rank at most
    back_ends: Mapping[str, str] = field(default_factory=dict)  # name of a back end → the key that asks for it


@dataclass(frozen=True)
class Place:
    """One machine, as one of its processes sees it."""

    trial: Callable[[str], Trial]
    ranks: int = 1  # processes of the run on this machine
    hosts: int = 1
    wishes: Wishes = field(default_factory=Wishes)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")  # what /proc, /sys and /dev are below
    version: Callable[[str], str] = installed
    requires: Callable[[str], list[str]] = lambda name: required(name)

    def gpus(self) -> list[dict]:
        """The accelerators that torch sees."""
        return self.trial("torch").facts.get("gpus", [])


def here(ranks: int, hosts: int, wishes: Wishes) -> Place:
    """This machine; its imports begin to be tried."""
    return Place(Imports().of, ranks, hosts, wishes)


def required(name: str) -> list[str]:
    """What a distribution asks for, as its metadata has it; of this project what its pyproject.toml says.

    `spmd_rl[EXTRA]` is what that extra asks for, nothing where there is no such extra.
    """
    project, _, extra = name.rstrip("]").partition("[")
    if project == "spmd_rl" and PYPROJECT.exists():
        table = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
        return table["optional-dependencies"].get(extra, []) if extra else table["dependencies"]
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
