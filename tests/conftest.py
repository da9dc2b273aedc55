from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings


@pytest.fixture(scope="session")
def group() -> Iterator[dist.ProcessGroup]:
    """A world of this process alone, described as torchrun would. The only one of a session: a process has one
    default group, and an engine that was built over it never lets go."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", "0")  # nobody connects: the store is this process's own
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield dist.group.WORLD
        dist.destroy_process_group()


# Machines are shared: how long an example takes says nothing about the code.
settings.register_profile("shared machines", deadline=None)
settings.load_profile("shared machines")
