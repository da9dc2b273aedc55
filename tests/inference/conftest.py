from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from spmd_rl.models.byte_tokenizer import make_byte_tokenizer
from spmd_rl.models.tiny import make_tiny
from tests.inference.engines import VOCAB, drain, load, make_engine, make_learner


@pytest.fixture(scope="session")
def group():
    """A world of this process alone, described as torchrun would."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", "0")  # nobody connects: the store is this process's own
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield dist.group.WORLD
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The same model with two sets of weights that have nothing in common."""
    folders = []
    for seed in range(2):
        folder = str(tmp_path_factory.mktemp(f"weights{seed}"))
        make_byte_tokenizer(folder)
        sizes = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ff": 96}
        make_tiny(folder, seed=seed, vocab_size=VOCAB, init_std=0.1, **sizes)
        folders.append(folder)
    return folders


@pytest.fixture(scope="session")
def learner(folders):
    """The trainer with the weights that engines start with."""
    return make_learner(folders[0])


@pytest.fixture(scope="session")
def stranger(folders):
    """The trainer with the other weights."""
    return make_learner(folders[1])


@pytest.fixture(scope="session")
def built(folders, group):
    return make_engine(folders[0], group)


@pytest.fixture
def engine(built, learner):
    """An idle engine with the learner's weights, under a version of its own: nothing cached is of use."""
    drain(built)  # of a test that failed half-way
    load(built, built.version + 1, learner)
    return built


@pytest.fixture(scope="session")
def piecewise(folders, group):
    """An engine that takes in 16 prompt tokens a step at most, and runs 8 requests at a time."""
    return make_engine(folders[0], group, max_num_batched_tokens=16, max_num_seqs=8)
