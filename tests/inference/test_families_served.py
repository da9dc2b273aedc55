"""Every family of ours in the real engine: its weights arrive under the names that the engine's loader knows."""

from __future__ import annotations

import numpy as np
import pytest

from spmd_rl.models.build import CUSTOM
from spmd_rl.models.tiny import make_tiny
from spmd_rl.orchestrator.versions import k3
from tests.inference.engines import VOCAB, load, make_engine, make_learner, probe, prompts, take_step

SIZES = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ff": 96, "init_std": 0.1}
EXPERTS = {"experts": 8, "top_k": 2, "expert_ff": 32}


@pytest.mark.parametrize("tied", [False, True], ids=["a head of its own", "tied"])
@pytest.mark.parametrize("family", CUSTOM)
def test_the_engine_computes_what_the_trainer_sent(tmp_path, group, moe_engine, family, tied):
    """As it was built, and after two steps at a rate that changes every logprob."""
    more = EXPERTS if "moe" in family else {}
    folder = make_tiny(str(tmp_path), seed=0, vocab_size=VOCAB, architecture=family, tied=tied, **SIZES, **more)
    engine, learner, sequences = make_engine(folder, group), make_learner(folder), prompts(8, 24)
    before = None
    for version in range(3):
        if version:
            take_step(learner, 1e-2)
            load(engine, version, learner)
        now = np.concatenate(learner.score(sequences))
        assert k3(now, np.concatenate(probe(engine, sequences).logprobs)).mean() <= 1e-8
        assert before is None or np.abs(now - before).max() > 0.1
        before = now
