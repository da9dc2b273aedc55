"""Every chance event of a run gets its own seed, as a pure function of the run's seed and a name."""

from __future__ import annotations

from hashlib import blake2b


def seed_of(run_seed: int, *name: object) -> int:
    """63 bits, a function of the run's seed and the name alone, e.g. (`"rollout"`, source, task index, sample)."""
    text = "\x1f".join(map(str, (run_seed, *name)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
