"""How many accelerators a host has, and whether its processes are more than these, without torch.

It refuses to know what they are used for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def accelerators_here(env: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that this process may use: CUDA_VISIBLE_DEVICES, or what the system has."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    found = sum(bool(re.fullmatch("nvidia[0-9]+", path.name)) for path in devices.glob("nvidia*"))
    if visible is None or not found:
        return found
    return min(found, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def spare_process(device: str, env: Mapping[str, str], devices: Path = Path("/dev")) -> bool:
    """Whether the first host starts one process more than it has accelerators, as far as this rank can tell.

    device: `deployment.device`; env: what torchrun sets. Ranks of other hosts see the numbers alone: with one process
    more on one host, the world is a multiple of the hosts and one. True where there are no accelerators to idle.
    """
    here = accelerators_here(env, devices)
    if device == "cpu" or not here:
        return True
    hosts = int(env.get("GROUP_WORLD_SIZE", "1"))
    if hosts > 1:
        return int(env["WORLD_SIZE"]) % hosts == 1
    return int(env.get("LOCAL_WORLD_SIZE", "0")) > here
