"""Experts in a learner: metrics, selection bias, balance loss, replay; on one rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from spmd_rl.config.tree import Config, ModelConfig, MoeConfig, OptimConfig, TrainerConfig
from spmd_rl.models.moe import Router
from spmd_rl.models.tiny import make_tiny
from spmd_rl.rollouts.types import Row
from spmd_rl.trainer.learner import Learner
from spmd_rl.trainer.row_tensors import RowTensors
from tests.trainer.rows import VOCAB, make_document, make_row, padding_row

LAYERS, EXPERTS, TOP_K = 2, 4, 2
SIZES = {"layers": LAYERS, "hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "ff": 24, "vocab_size": VOCAB}
DOCUMENTS = [make_document(9, 1), make_document(4, 2), make_document(14, 3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    made = {}
    for family in ("qwen3", "qwen3_moe"):
        folder = str(tmp_path_factory.mktemp(family))
        shape = SIZES | {"experts": EXPERTS, "top_k": TOP_K, "expert_ff": 12}
        made[family] = make_tiny(folder, seed=1, init_std=0.3, architecture=family, **shape)
    return made


def learner(folder: str, **moe: float) -> Learner:
    trainer = TrainerConfig(optim=OptimConfig(lr=1e-2, max_norm=0, weight_decay=0), moe=MoeConfig(**moe))
    return Learner(Config(model=ModelConfig(name=folder), trainer=trainer), None, torch.device("cpu"), None)


def router_counts(made: Learner, rows: list[Row]) -> torch.Tensor:
    """int64[layers, experts]: what the routers choose, by their scores alone."""
    counts = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)
    of = {moe.gate: i for i, moe in enumerate(made.model.moe_layers)}

    def count(gate: Router, args: tuple, output: tuple) -> None:
        counts[of[gate]] += output[0].topk(TOP_K).indices.flatten().bincount(minlength=EXPERTS)

    hooks = [gate.register_forward_hook(count) for gate in of]
    with torch.no_grad():
        for row in rows:
            RowTensors.build(row, torch.device("cpu")).logprobs(made.model)
    for hook in hooks:
        hook.remove()
    return counts


def test_the_load_becomes_a_metric_and_moves_the_bias(folders):
    made, rows = learner(folders["qwen3_moe"], bias_rate=0.01), [make_row(*DOCUMENTS[:2]), make_row(DOCUMENTS[2])]
    counts_LE = router_counts(made, rows).double()
    made.score([np.arange(1, 9)])  # without gradients: not counted
    metrics = made.step([[*rows, padding_row(40)]], 1e-3)  # which is nobody's load
    mean_L1 = counts_LE.mean(1, keepdim=True)
    assert metrics["moe/max_violation"] == pytest.approx(float((counts_LE / mean_L1).max()) - 1)
    assert metrics["moe/max_violation"] > 0 and "moe/replay_agreement" not in metrics
    for moe, load_E in zip(made.model.moe_layers, counts_LE, strict=True):
        torch.testing.assert_close(moe.gate.bias_E, 0.01 * (load_E.mean() - load_E).sign().float())
    assert not [name for name, *_ in made.shards.table() if "bias" in name]


def test_the_bias_evens_the_load_out(folders):
    made, rows = learner(folders["qwen3_moe"], bias_rate=0.02), [make_row(*DOCUMENTS)]
    violations = [made.step([rows], 0.0)["moe/max_violation"] for _ in range(40)]
    assert min(violations[-5:]) < 0.6 * violations[0]


def test_the_bias_is_in_the_checkpoint_and_nowhere_without_it(folders):
    made = learner(folders["qwen3_moe"], bias_rate=0.01)
    made.step([[make_row(*DOCUMENTS)]], 1e-3)
    named, optimizer = made.checkpoint_parts()["routers"]
    assert [name for name, _ in named] == ["layers.0.bias", "layers.1.bias"] and optimizer is None
    assert named[0][1].abs().sum() > 0
    assert learner(folders["qwen3_moe"]).checkpoint_parts()["routers"] == ([], None)


def gradients(folder: str, rows: list[Row], **moe: float) -> dict[str, torch.Tensor]:
    made = learner(folder, **moe)
    made.step([rows], 0.0)
    return {name: parameter.grad for name, parameter in made.model.named_parameters()}


def test_the_balance_loss_does_not_depend_on_packing(folders):
    folder, coef = folders["qwen3_moe"], {"sequence_coef": 0.5}
    packed = gradients(folder, [make_row(*DOCUMENTS)], **coef)
    apart = gradients(folder, [make_row(document) for document in DOCUMENTS] + [padding_row(7)], **coef)
    without = gradients(folder, [make_row(*DOCUMENTS)])
    for name in packed:
        torch.testing.assert_close(packed[name], apart[name], atol=1e-5, rtol=1e-4)
    twice = gradients(folder, [make_row(*DOCUMENTS)] * 2, **coef)
    name = "model.layers.1.mlp.gate.weight"
    difference = packed[name] - without[name]
    assert difference.norm() > 1e-3
    torch.testing.assert_close(twice[name] - 2 * without[name], difference, atol=1e-5, rtol=1e-4)  # a mean


def with_routes(row: Row, routes: int | None) -> Row:
    shape = (len(row.tokens), LAYERS, TOP_K)
    block = (
        np.full(shape, -1, np.int16)
        if routes is None
        else np.stack([np.full(shape[:2], routes), np.zeros(shape[:2])], -1)
    )
    return replace(row, routed_experts=block.astype(np.int16))


def test_routes_of_a_row_are_replayed_and_counted(folders):
    row = make_row(*DOCUMENTS)
    made = learner(folders["qwen3_moe"])
    plain = learner(folders["qwen3_moe"]).step([[row]], 0.0)
    unknown = made.step([[with_routes(row, None)]], 0.0)
    assert unknown["loss"] == plain["loss"] and "moe/replay_agreement" not in unknown
    forced = made.step([[with_routes(row, 3)]], 0.0)
    assert forced["loss"] != plain["loss"]
    assert forced["moe/max_violation"] == pytest.approx(EXPERTS / TOP_K - 1)  # two experts have it all
    assert 0 < forced["moe/replay_agreement"] < 1


def test_routes_of_another_length_are_refused(folders):
    row = with_routes(make_row(*DOCUMENTS), 1)
    with pytest.raises(ValueError, match=r"columns of other lengths.*routed_experts"):
        learner(folders["qwen3_moe"]).step([[replace(row, routed_experts=row.routed_experts[:-1])]], 0.0)


def test_balancing_a_dense_model_is_refused(folders):
    for moe in ({"bias_rate": 0.1}, {"sequence_coef": 0.1}):
        with pytest.raises(ValueError, match=r"trainer\.moe balances experts, and Decoder has none"):
            learner(folders["qwen3"], **moe)


def test_a_dense_model_has_no_metrics_of_experts(folders):
    assert not [name for name in learner(folders["qwen3"]).step([[make_row(*DOCUMENTS)]], 1e-3) if "moe" in name]
