"""From a command line to what it asks of the machines, or to why it can't be read.

The config is read as every other command reads it. Invariant: whatever is wrong with it, or with the packages that read
it, is a finding.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spmd_rl.doctor.finding import Finding, Line, fail, ok
from spmd_rl.doctor.place import Wishes

if TYPE_CHECKING:
    from spmd_rl.config.tree import Config
    from spmd_rl.world.mesh import Mesh

GROUP = "config"
ENVIRONMENTS = {"verifiers": "verifiers", "reasoning_gym": "reasoning-gym", "gym:gymnasium": "gymnasium"}
FLASH = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn 3",
    "flash_attention_4": "flash-attn 4",
}  # by trainer.model.attn
BOXED = ("python", "repo_fix")  # built-in environments whose programs run in a sandbox
BOXES = {"auto": "bubblewrap", "bwrap": "bubblewrap", "docker": "docker"}


@dataclass(frozen=True)
class Asked:
    """What one command line comes to; without a config all is empty."""

    wishes: Wishes = field(default_factory=Wishes)
    config: Config | None = None
    mesh: Mesh | None = None
    lines: tuple[Line, ...] = ()


def read(command: str, words: Sequence[str], world_size: int) -> Asked:
    """The config of `main.py COMMAND WORDS`, and its mesh over `world_size` ranks (0: the fewest)."""
    if not words:
        return Asked()
    try:
        from spmd_rl.algorithms.check import check_algorithm
        from spmd_rl.config import config_for
        from spmd_rl.world.accelerators import spare_process
        from spmd_rl.world.mesh import Mesh, MeshError
        from spmd_rl.world.placement import processes_by_host

        config = config_for(command, words)
        if command == "rl":
            check_algorithm(config)
    except ImportError as error:
        return Asked(lines=(_line("config", fail(f"can't be read: {error}", "see the line 'packages'")),))
    except Exception as error:
        return Asked(lines=(_line("config", fail(_said(error), "put it right; main.py … --dry-run shows the result")),))
    good = _line("config", ok(f"fits main.py {command}"))
    try:
        spare = spare_process(config.deployment.device, os.environ) if world_size else True
        processes = processes_by_host(os.environ) if world_size else ()
        mesh = Mesh.of(command, config, world_size, spare, processes)
    except MeshError as error:
        bad = _line("mesh", fail(str(error), "start as many processes as it says, or change these keys"))
        return Asked(wishes_of(command, config), config, None, (good, bad))
    value = f"{mesh.world_size} ranks" + ("" if world_size else ", the fewest that it runs on")
    return Asked(wishes_of(command, config), config, mesh, (good, _line("mesh", ok(value))))


def wishes_of(command: str, config: Config) -> Wishes:
    """What `main.py COMMAND` needs of a machine."""
    asked: dict[str, str] = {}
    if config.trainer.model.attn in FLASH:
        asked[FLASH[config.trainer.model.attn]] = "trainer.model.attn"
    if config.log.wandb:
        asked["wandb"] = "log.wandb"
    for index, source in enumerate(config.orchestrator.source if command in ("rl", "eval") else ()):
        key = f"orchestrator.source.{index}"
        asked |= {name: f"{key}.env" for prefix, name in ENVIRONMENTS.items() if source.env.startswith(f"{prefix}:")}
        if source.env in BOXED and (box := BOXES.get(str(source.args.get("sandbox", "auto")))):
            asked[box] = key
    return Wishes(
        output_dir=config.output_dir,
        model=config.model.name,
        engine=command != "sft",
        device=config.deployment.device,
        threads=max(config.trainer.threads, config.inference.threads),
        back_ends=asked,
    )


def _line(what: str, finding: Finding) -> Line:
    return Line(GROUP, what, finding)


def _said(error: Exception) -> str:
    name = type(error).__name__
    return str(error) if name in ("ConfigError", "AlgorithmError") else f"can't be read: {name}: {error}"
