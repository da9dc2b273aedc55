"""How much memory each phase of a rank takes that trains and infers in turns: in use at its end, the last time.

On accelerators what is in use on the whole device, whoever uses it; on the CPU the resident set of this process.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch


class Ledger:
    """Phases by name: "infer" (the engine awake), "asleep" (what it does not give back), "train"."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._bytes = device, dict[str, int]()

    def note(self, phase: str) -> None:
        """The phase is at its end."""
        self._bytes[phase] = in_use(self._device)

    def metrics(self) -> dict[str, float]:
        """`memory/<phase>_gb`, in 10^9 bytes."""
        return {f"memory/{phase}_gb": size / 1e9 for phase, size in self._bytes.items()}


def in_use(device: torch.device) -> int:
    """Bytes in use now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
