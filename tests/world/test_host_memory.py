"""What this process holds, and held at most."""

from __future__ import annotations

from spmd_rl.world.host_memory import forget_peak, peak_resident, resident

BIG = 64 * 2**20


def test_the_peak_outlives_what_it_was_made_of_until_it_is_forgotten():
    before = resident()
    block = b"\1" * BIG
    assert resident() - before > 0.9 * BIG
    del block
    assert peak_resident() - before > 0.9 * BIG
    forget_peak()
    assert peak_resident() < before + 0.5 * BIG
