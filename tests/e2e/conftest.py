from __future__ import annotations

import pytest

from spmd_rl.models.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, make_byte_tokenizer
from spmd_rl.models.tiny import make_tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The quickstart's model folder."""
    folder = str(tmp_path_factory.mktemp("model"))
    make_byte_tokenizer(folder)
    sizes = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ff": 384}
    return make_tiny(folder, seed=0, vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID, pad_token_id=PAD_ID, **sizes)
