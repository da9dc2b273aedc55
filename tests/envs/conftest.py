"""Environments in two real worker processes, one pair for each test file."""

from __future__ import annotations

import pytest

from spmd_rl.envs.pool.environment import PooledEnvironment
from spmd_rl.envs.pool.pool import Pool
from tests.envs.pool_envs import obedient


@pytest.fixture(scope="module")
def log() -> list[str]:
    return []


@pytest.fixture(scope="module")
def pool(log):
    with Pool(2, 0, grace_s=0.3, hang_s=2.0, memory_mb=1024, log=log.append) as pool:
        yield pool


@pytest.fixture(scope="module")
def env(pool) -> PooledEnvironment:
    return obedient(pool)
