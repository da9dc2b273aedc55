"""Which rows a rank makes of the data in supervised training."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np

from spmd_rl.config.tree import Config, ModelConfig
from spmd_rl.rollouts.cost import TrainingCost
from spmd_rl.trainer.sft import own_orders
from spmd_rl.world.messages import Train


def test_data_ranks_divide_a_batch_by_its_cost(tmp_path):
    """One long document costs as much as short ones with fifteen times its tokens."""
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}
    config = shape | {"intermediate_size": 8, "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    lengths = [1000, *[10] * 1500]
    batch = [(np.arange(n, dtype=np.int32) % 10, np.ones(n, np.uint8)) for n in lengths]
    sequences = SimpleNamespace(validation=list, batch=lambda step: batch)
    given = Config(model=ModelConfig(str(tmp_path)), max_steps=1, seq_len=16384, output_dir=str(tmp_path))
    loads, tokens, flops = [], [], TrainingCost.of(config).flops
    for index in range(2):
        order = next(order for order in own_orders(given, sequences, 0, index, 2) if isinstance(order, Train))
        cuts = [np.diff(row["cu_seqlens"]) for row in order.rows[0]]
        loads.append(sum(float(flops(cut).sum()) for cut in cuts))
        tokens.append(sum(int(cut.sum()) for cut in cuts))
    assert sum(tokens) == sum(lengths)
    assert abs(loads[0] - loads[1]) < 0.02 * sum(loads) and max(tokens) > 1.5 * min(tokens)
