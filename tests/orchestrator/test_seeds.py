"""Seeds: a pure function of names, the same on every machine and in every Python."""

from __future__ import annotations

from itertools import product

from spmd_rl.orchestrator.seeds import seed_of


def test_a_value_that_must_never_change() -> None:
    """Runs are repeated with it: another value would be another run."""
    assert seed_of(0, "rollout", "reverse", 3, 7) == 5535009861454690982
    assert seed_of(1, "shuffle", 2) == 8481275844718237427


def test_distinct_names_give_distinct_seeds_of_63_bits() -> None:
    kinds, sources = ("rollout", "eval", "teacher"), ("a", "ab", "b")
    names = [(run, *name) for run in range(3) for name in product(kinds, sources, range(12), range(12))]
    seeds = {seed_of(*name) for name in names}
    assert len(seeds) == len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


def test_parts_of_a_name_do_not_run_together() -> None:
    assert len({seed_of(0, 1, 23), seed_of(0, 12, 3), seed_of(0, 123), seed_of(0, "1", "2", "3"), seed_of(1, 23)}) == 5
