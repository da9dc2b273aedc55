"""Batches of supervised training: exact to the step, and what becomes of rows that do not fit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import Config, DataConfig
from spmd_rl.data.sequences import Sequences
from spmd_rl.data.tables import DataError
from spmd_rl.models.byte_tokenizer import make_byte_tokenizer

ROWS = [{"q": f"{i}?", "a": "y" * (i + 1), "messages": [{"role": "user", "content": "?"}]} for i in range(10)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def make(tmp_path, tokenizer):
    def make(rows=ROWS, tokenizer=tokenizer, seq_len=64, seed=0, **data):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        defaults = {"name": str(path), "prompt": "q", "completion": "a", "batch_size": 4}
        return Sequences(Config(seq_len=seq_len, seed=seed, data=DataConfig(**(defaults | data))), tokenizer)

    return make


def texts(tokenizer, batch) -> list[str]:
    return [tokenizer.decode(tokens[mask == 1].tolist()) for tokens, mask in batch]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_a_batch_depends_on_its_step_alone(make, steps):
    one, other = make(), make()
    for step in steps:
        other.batch(step + 3)
        for (a, am), (b, bm) in zip(one.batch(step), other.batch(step), strict=True):
            assert a.tolist() == b.tolist() and am.tolist() == bm.tolist()


def test_every_epoch_has_every_row_once_in_another_order(make, tokenizer):
    sequences = make(batch_size=5)
    epochs = [[t for step in (e, e + 1) for t in texts(tokenizer, sequences.batch(step))] for e in (1, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"{row['a']}<|im_end|>" for row in ROWS)
    assert epochs[0] != epochs[1] and epochs[0] != texts(tokenizer, make(batch_size=10, seed=1).batch(1))


def test_prompts_are_learned_only_when_all_is(make, tokenizer):
    (first, *_) = make(loss_on="all").batch(1)
    assert first[1].all() and len(first[0]) > 4


def test_validation_rows_are_not_trained_on(make, tokenizer):
    sequences = make(validation_share=0.3, batch_size=7)
    held = set(texts(tokenizer, sequences.validation()))
    assert len(held) == 3 and not held & set(texts(tokenizer, sequences.batch(1)))
    assert make().validation() == []


def test_a_validation_set_of_its_own(make, tokenizer, tmp_path):
    (tmp_path / "held.jsonl").write_text(json.dumps({"q": "x", "a": "z"}))
    assert texts(tokenizer, make(validation=str(tmp_path / "held.jsonl")).validation()) == ["z<|im_end|>"]


def test_too_long_sequences(make):
    with pytest.raises(DataError, match=r"rows.jsonl, line \d has 1\d tokens, more than seq_len = 9: raise seq_len"):
        [make(seq_len=9, batch_size=10)]
    dropping = make(seq_len=9, too_long="drop", batch_size=10)
    kept = dropping.batch(1)
    assert all(len(tokens) <= 9 for tokens, _ in kept)
    assert 0 < dropping.dropped == 10 - len(kept)
    cutting = make(seq_len=9, too_long="truncate", batch_size=10)
    assert sorted(len(tokens) for tokens, _ in cutting.batch(1))[-1] == 9 and cutting.truncated > 0


@pytest.mark.parametrize("shortest", [0, 5])
def test_fake_data(make, tokenizer, shortest):
    fake = make(type="fake", fake_length=20, fake_min_length=shortest, batch_size=50)
    lengths = [len(tokens) for tokens, _ in fake.batch(1)]
    assert (set(lengths) == {20}) == (shortest == 0) and min(lengths) >= (shortest or 20)
    again = make(type="fake", fake_length=20, fake_min_length=shortest, batch_size=50)
    again.batch(7)
    assert all(np.array_equal(a, b) for (a, _), (b, _) in zip(fake.batch(2), again.batch(2), strict=True))
    assert not np.array_equal(fake.batch(2)[0][0][:4], fake.batch(3)[0][0][:4])
    assert max(int(tokens.max()) for tokens, _ in fake.batch(1)) < len(tokenizer)


BAD = {
    "prompt column": ({"prompt": "question"}, "no column 'question', which data.prompt names; it has q, a"),
    "completion column": ({"completion": "b"}, "no column 'b', which data.completion names"),
    "no messages": (
        {"prompt": "", "completion": "", "messages": "talk"},
        "no column 'talk', which data.messages names",
    ),
    "no assistant": ({"prompt": "", "completion": ""}, r"line \d: the conversation has no assistant turn"),
    "tools": ({"tools": "tools"}, "no column 'tools', which data.tools names"),
    "one row": ({"rows": ROWS[:1], "validation_share": 0.5}, "has one row, and data.validation_share"),
    "null": ({"rows": [{"q": "x", "a": None}] * 3}, r"line \d: has null in column 'a'"),
    "a cell": ({"rows": [*ROWS[:3], {"q": "x"}], "batch_size": 8}, "line 4 has no column 'a'; it has q"),
}


@pytest.mark.parametrize(("data", "message"), BAD.values(), ids=BAD)
def test_bad_data(make, data, message):
    with pytest.raises(DataError, match=message):
        make(**data)


def test_messages_need_a_template(make, tokenizer):
    class Bare:
        chat_template = None

    with pytest.raises(DataError, match="needs a chat template, and the tokenizer has none"):
        make(prompt="", completion="", tokenizer=Bare())
