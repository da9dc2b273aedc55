from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from spmd_rl.models.tiny import make_tiny
from tests.inference.engines import VOCAB, drain, load, make_engine, make_learner


def tiny(folder, **changes) -> str:
    sizes = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ff": 96}
    return make_tiny(str(folder), vocab_size=VOCAB, init_std=0.1, **sizes, **changes)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The same model with two sets of weights that have nothing in common."""
    return [tiny(tmp_path_factory.mktemp(f"weights{seed}"), seed=seed) for seed in range(2)]


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory):
    """The LM head is the embedding."""
    return tiny(tmp_path_factory.mktemp("tied"), seed=0, tied=True)


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory):
    """A mixture of 8 experts."""
    folder = str(tmp_path_factory.mktemp("experts"))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = Qwen3MoeConfig(vocab_size=VOCAB, initializer_range=0.1, **sizes, **heads, **experts)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def moe_engine(moe_folder, group):
    """Built before all others: vLLM makes its group of experts for the first model of a process or never."""
    return make_engine(moe_folder, group)


@pytest.fixture(scope="session")
def learner(folders):
    """The trainer with the weights that engines start with."""
    return make_learner(folders[0])


@pytest.fixture(scope="session")
def stranger(folders):
    """The trainer with the other weights."""
    return make_learner(folders[1])


@pytest.fixture(scope="session")
def built(folders, group, moe_engine):
    return make_engine(folders[0], group)


@pytest.fixture
def engine(built, learner):
    """An idle engine with the learner's weights, under a version of its own: nothing cached is of use."""
    drain(built)  # of a test that failed half-way
    load(built, built.version + 1, learner)
    return built


@pytest.fixture(scope="session")
def piecewise(folders, group, moe_engine):
    """An engine that takes in 16 prompt tokens a step at most, and runs 8 requests at a time."""
    return make_engine(folders[0], group, max_num_batched_tokens=16, max_num_seqs=8)
