"""Operations of training, against counting them in a real model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spmd_rl.models.build import ModelOptions, build_and_load
from spmd_rl.models.packed import Documents
from spmd_rl.models.tiny import make_tiny
from spmd_rl.rollouts.cost import TrainingCost
from spmd_rl.rollouts.packing import describe, lay_out

SHAPE = {"vocab_size": 101, "layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "ff": 48}


@pytest.mark.parametrize("length", [1, 40])
def test_the_formula_is_what_torch_counts(tmp_path, length):
    """But for the head, which torch does not count whole, and attention, where it counts squares."""
    make_tiny(str(tmp_path), seed=0, **SHAPE)
    config = json.loads((tmp_path / "config.json").read_text())
    model = build_and_load(str(tmp_path), ModelOptions(lm_head_chunk=64))
    tokens_T = torch.arange(length) % 101
    with FlopCounterMode(display=False) as counter:
        model.hidden(tokens_T, Documents.build(np.array([0, length]))).sum().backward()
    cost = TrainingCost.of(config)
    assert cost.attention == 3 * 4 * 16
    counts = counter.get_flop_counts()["Global"]
    matrices = sum(n for op, n in counts.items() if "attention" not in str(op))
    head = 32 * 101
    assert matrices == 6 * (cost.weights - head) * length
    rest = float(cost.flops(np.array([length]))[0]) - matrices - 6 * head * length
    assert rest == 6 * cost.attention * length * (length + 1)


def test_rows_of_equal_cost_wait_less_for_each_other_than_rows_of_equal_tokens():
    """Documents of very different lengths, and a model whose attention costs as much as its matrices at 8,000."""
    cost = TrainingCost(weights=8_000_000, attention=1_000).flops
    lengths = np.clip(np.random.default_rng(0).lognormal(8.5, 0.8, 512).astype(int), 16, 32768)
    by_tokens, by_cost = (describe(lay_out(lengths, 8, 32768, by), lengths, 32768, cost) for by in (None, cost))
    assert by_tokens.micro_imbalance > 1.5 and by_cost.micro_imbalance < 1.2
    assert by_cost.micro_steps == by_tokens.micro_steps


def test_a_config_in_other_words_has_no_known_cost():
    assert TrainingCost.known({"n_embd": 8, "n_layer": 2}) is None
    config = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}
    assert TrainingCost.known(config | {"intermediate_size": 8, "kv_lora_rank": 512}) is None
    flops = TrainingCost.known(config | {"intermediate_size": 8})
    assert flops is not None and flops(np.array([1, 3]))[1] > 3 * flops(np.array([1, 3]))[0]


def test_experts_count_as_many_as_a_token_takes():
    config = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}
    sparse = config | {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    dense = config | {"intermediate_size": 8}
    difference = TrainingCost.of(sparse).weights - TrainingCost.of(dense).weights
    assert difference == 2 * 8 * 16  # the routers
    assert TrainingCost.of({"text_config": dense}) == TrainingCost.of(dense)
    shared = sparse | {"shared_expert_intermediate_size": 3}
    assert TrainingCost.of(shared).weights - TrainingCost.of(sparse).weights == 2 * 3 * 8 * 3
