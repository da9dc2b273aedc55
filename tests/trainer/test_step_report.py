"""What a trainer rank says of a step is what the orchestrator's tests let their fake trainer say."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from spmd_rl.config.tree import Config, ModelConfig, OptimConfig, TrainerConfig
from spmd_rl.models.tiny import make_tiny
from spmd_rl.trainer.learner import Learner
from spmd_rl.trainer.role import TrainerRank
from spmd_rl.world.messages import Train, Trained
from tests.orchestrator.fake_cluster import TRAINER_METRICS
from tests.trainer.rows import VOCAB, make_document, make_row


def test_a_real_step_reports_at_least_what_the_fake_one_does(tmp_path):
    make_tiny(tmp_path, seed=0, vocab_size=VOCAB, layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, ff=16)
    config = Config(model=ModelConfig(name=str(tmp_path)), trainer=TrainerConfig(optim=OptimConfig(lr=1e-3)))
    told = []
    world = SimpleNamespace(config=config, groups={"ckpt": None})
    learner = Learner(config, None, torch.device("cpu"), None)
    trainer = TrainerRank(world, learner, told.append)
    trainer._train(Train(4, "rl", [[vars(make_row(make_document(5, 0), make_document(6, 1)))]]), waited_s=0.5)
    (event,) = told
    assert isinstance(event, Trained)
    assert (event.step, event.phase) == (4, "rl")
    assert set(TRAINER_METRICS) <= set(event.metrics)
    assert event.metrics["time/wait_s"] == 0.5
    assert event.metrics["time/train_s"] > 0
    assert all(isinstance(value, float) for value in event.metrics.values())
