"""All checks of one machine, in the order of the report."""

from __future__ import annotations

from spmd_rl.doctor import accelerators, backends, disks, leftovers, limits, network, versions

CHECKS = (
    *versions.CHECKS,
    *accelerators.CHECKS,
    *limits.CHECKS,
    *leftovers.CHECKS,
    *disks.CHECKS,
    *network.CHECKS,
    *backends.CHECKS,
)
