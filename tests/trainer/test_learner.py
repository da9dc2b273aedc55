"""One trainer rank: the Learner against plain transformers and autograd."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from spmd_rl.config.tree import (
    AlgorithmConfig,
    Config,
    CorrectionConfig,
    ModelConfig,
    OptimConfig,
    OrchestratorConfig,
    TrainerConfig,
)
from spmd_rl.models.tiny import make_tiny
from spmd_rl.trainer.learner import Learner
from tests.trainer.rows import VOCAB, make_document, make_row, padding_row

CPU = torch.device("cpu")
LENGTHS = (7, 12, 3, 9)
SEQUENCES = [np.random.default_rng(i).integers(0, VOCAB, n).astype(np.int32) for i, n in enumerate((5, 1, 11))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(
        folder, seed=0, vocab_size=VOCAB, layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ff=48, init_std=0.2
    )
    return folder


def make_learner(folder, **optim):
    optim = {"lr": 1e-3, "max_norm": 0.0} | optim
    config = Config(
        model=ModelConfig(name=str(folder)),
        trainer=TrainerConfig(optim=OptimConfig(**optim)),
        orchestrator=OrchestratorConfig(
            algorithm=AlgorithmConfig(correction=CorrectionConfig(ipo=0.01, ratio_cap=2.0))
        ),
    )
    return Learner(config, None, CPU, None)


def documents():
    return [make_document(length, seed) for seed, length in enumerate(LENGTHS)]


def gradients(learner):
    return {name: parameter.grad for name, parameter in learner.model.named_parameters()}


def weights(learner):
    return {name: tensor.clone() for name, tensor in learner.full_tensors()}


def assert_close(left, right, tolerance=1e-5):
    """Each tensor within `tolerance` of the other, relative to its norm."""
    assert left.keys() == right.keys()
    for name in left:
        assert (left[name] - right[name]).norm() <= tolerance * right[name].norm(), name


@pytest.mark.parametrize("layout", [[[0], [1], [2], [3]], [[3, 1], [2, 0]], [[1, 0, 2], [3], "padding"]])
def test_packing_and_micro_batches_change_neither_loss_nor_gradient(folder, layout):
    docs = documents()
    rows = [padding_row(6) if group == "padding" else make_row(*(docs[i] for i in group)) for group in layout]
    learner, one_row = make_learner(folder), make_learner(folder)
    metrics, expected = learner.step([rows], lr=0.0), one_row.step([[make_row(*docs)]], lr=0.0)
    for name in set(expected) - {"time/forward_s", "time/backward_s", "time/optim_s", "time/reduce_s"}:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5), name
    assert_close(gradients(learner), gradients(one_row))


def test_step_equals_transformers_and_autograd(folder):
    learner = make_learner(folder)
    metrics = learner.step([[make_row(*documents())]], lr=0.0)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss, masked, trained, entropy = 0.0, 0, 0, []
    for doc in documents():
        column = {name: torch.tensor(values) for name, values in doc.items()}
        logits_TV = peer(column["tokens"][None].long()).logits[0] / column["temperatures"][:, None]
        logp_TV = logits_TV.log_softmax(-1)
        logp_T = logp_TV.gather(1, column["targets"][:, None].long())[:, 0]
        keep_T = (logp_T.exp() - column["logprobs"].exp()).abs() <= 0.01
        ratio_T = (logp_T - column["logprobs"]).exp().clamp(max=2.0).detach()
        weight_T = column["pg_weight"] * keep_T * ratio_T + column["ce_weight"]
        loss = loss - (weight_T * logp_T).sum()
        trained += int((column["pg_weight"] != 0).sum())
        masked += int(((column["pg_weight"] != 0) & ~keep_T).sum())
        entropy.append(-(logp_TV.exp() * logp_TV).sum(-1)[(column["mask"] != 0) | (column["ce_weight"] != 0)])
    loss.backward()
    assert 0 < masked < trained  # the comparison covers both sides of the mask
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["tokens/trained"] == trained
    assert metrics["masked_fraction"] == pytest.approx(masked / trained)
    assert metrics["entropy"] == pytest.approx(torch.cat(entropy).mean().item(), rel=1e-5)
    expected = {name: parameter.grad for name, parameter in peer.named_parameters()}
    assert_close(gradients(learner), expected)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_score_equals_transformers(folder):
    scores = make_learner(folder).score(SEQUENCES)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for tokens, score in zip(SEQUENCES, scores, strict=True):
        ids = torch.tensor(tokens).long()
        expected = peer(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        assert score.dtype == np.float32 and score.shape == (len(tokens) - 1,)
        np.testing.assert_allclose(score, expected.detach().numpy(), rtol=0, atol=2e-5)


def test_steps_lower_the_loss_and_the_export_is_what_was_trained(folder, tmp_path):
    learner = make_learner(folder, max_norm=1.0)
    row = make_row(*documents())
    row = replace(row, ce_weight=np.where(row.targets > 0, 1 / 27, 0).astype(np.float32), pg_weight=row.pg_weight * 0)
    losses = [learner.step([[row]], lr=3e-3)["loss"] for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0]
    learner.export(tmp_path / "export")
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    ids = torch.tensor(SEQUENCES[2]).long()
    expected = peer(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    np.testing.assert_allclose(learner.score(SEQUENCES)[2], expected.detach().numpy(), rtol=0, atol=2e-5)


def test_full_tensors_follow_the_table_and_equal_the_folder(folder):
    learner = make_learner(folder)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    table = learner.shards.table()
    tensors = list(learner.full_tensors())
    assert [(name, tuple(t.shape), "float32") for name, t in tensors] == table
    assert {name for name, _ in tensors} == set(peer)
    assert all(torch.equal(tensor, peer[name]) for name, tensor in tensors)


def test_reset_optimizer_forgets_the_moments(folder, tmp_path):
    warm = make_learner(folder)
    warm.step([[make_row(*documents())]], lr=1e-2)
    warm.export(tmp_path / "warm")
    warm.reset_optimizer(OptimConfig(weight_decay=0.1, max_norm=0.5))
    fresh = make_learner(tmp_path / "warm", weight_decay=0.1, max_norm=0.5)
    row = make_row(make_document(10, seed=99))
    assert warm.step([[row]], lr=1e-3)["loss"] == fresh.step([[row]], lr=1e-3)["loss"]
    assert_close(weights(warm), weights(fresh), tolerance=0)


def test_clipping_bounds_what_the_optimizer_sees(folder):
    learner = make_learner(folder, max_norm=1e-3)
    metrics = learner.step([[make_row(*documents())]], lr=0.0)
    assert metrics["grad_norm"] > 1e-2  # reported as it was
    assert torch.stack([g.norm() for g in gradients(learner).values()]).norm().item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [("logprobs", np.nan, "the loss is nan"), ("ce_weight", 3e38, "the gradient norm is (nan|inf), first bad")],
)
def test_non_finite_numbers_stop_before_the_weights_change(folder, column, value, message):
    learner = make_learner(folder)
    before, row = weights(learner), make_row(*documents())
    getattr(row, column)[np.flatnonzero(row.pg_weight)[0]] = value
    with pytest.raises(FloatingPointError, match=message):
        learner.step([[row]], lr=1e-3)
    assert_close(weights(learner), before, tolerance=0)


def test_phases_are_announced_and_timed(folder):
    learner = make_learner(folder)
    stages = []
    learner.beat = stages.append
    metrics = learner.step([[make_row(*documents()), padding_row(4)]], lr=2e-4)
    assert stages == ["forward", "backward", "forward", "backward", "reduce", "optim"]
    assert metrics["lr"] == 2e-4
    assert all(metrics[f"time/{name}_s"] > 0 for name in ("forward", "backward", "optim"))


def test_bad_input_is_named(folder):
    learner, row = make_learner(folder), make_row(*documents())
    for nothing in ([], [[]], [[row], []]):
        with pytest.raises(ValueError, match="at least one row"):
            learner.step(nothing, lr=0.0)
    with pytest.raises(ValueError, match=r"31 tokens .* \{'pg_weight': 30\}"):
        learner.step([[replace(row, pg_weight=row.pg_weight[:-1])]], lr=0.0)
    with pytest.raises(ValueError, match="must end with 31"):
        learner.step([[replace(row, cu_seqlens=row.cu_seqlens[:-1])]], lr=0.0)
    with pytest.raises(ValueError, match="at least one token"):
        learner.score([SEQUENCES[0], np.zeros(0, np.int32)])
