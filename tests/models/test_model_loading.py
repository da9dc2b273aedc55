"""Models without memory that are filled in place, whole or a shard of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from spmd_rl.models.build import ModelOptions, begin, build_and_load, finish, hf_named_tensors
from spmd_rl.models.conversion import EXPERTS, pieces_of
from spmd_rl.models.hf_model import HFModel
from spmd_rl.models.load import read_box
from spmd_rl.models.tiny import make_tiny
from tests.models.families import row

SHAPE = {"vocab_size": 61, "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "ff": 24}


def tiny(folder: Path, **more: object) -> str:
    return make_tiny(str(folder), seed=0, init_std=0.2, **SHAPE, **more)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe"])
def test_a_model_begins_without_memory_and_ends_as_if_loaded_at_once(tmp_path: Path, family: str, tied: bool) -> None:
    folder = tiny(tmp_path, architecture=family, tied=tied)
    model = begin(folder)
    assert all(parameter.is_meta for parameter in model.parameters())
    finish(model, folder, "cpu")
    expected = build_and_load(folder)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    for (name, mine), (other, theirs) in zip(hf_named_tensors(model), hf_named_tensors(expected), strict=True):
        assert name == other and torch.equal(mine, theirs)
    tokens_T, documents = row([9, 3])
    assert torch.equal(model.logits(tokens_T, documents), expected.logits(tokens_T, documents))


@pytest.mark.parametrize("problem", ["shape", "dtype", "missing", "unexpected"])
def test_a_folder_that_does_not_fit_is_refused_before_there_is_memory(tmp_path: Path, problem: str) -> None:
    folder, name = tiny(tmp_path), "model.norm.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    norm = tensors.pop(name)
    changed = {"shape": {name: norm[:-1].clone()}, "dtype": {name: norm.to(torch.int8)}, "unexpected": {"x": norm}}
    save_file(tensors | changed.get(problem, {}), tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = begin(folder)
    with pytest.raises(ValueError, match="'x'" if problem == "unexpected" else name):
        finish(model, folder, "cpu")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_transformers_models_are_loaded_at_once(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    model = begin(folder, ModelOptions("hf"))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    finish(model, folder, "cpu")
    assert isinstance(model, HFModel) and not any(tensor.is_meta for tensor in before.values())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_an_impossible_back_end_is_refused_before_the_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'flash_attention_2' needs a CUDA device .* device is cpu"):
        begin(tiny(tmp_path), ModelOptions(attn="flash_attention_2"))


@given(st.data())
def test_any_box_of_a_stack_is_read_from_its_parts(data: st.DataObject) -> None:
    """A stand-in for a file counts what is read: no value twice, and none that is not asked for."""
    entry = data.draw(st.sampled_from(EXPERTS))
    shape = tuple(data.draw(st.integers(1, 4)) for _ in range(3))
    shape = (shape[0], shape[1] * len(entry.theirs), shape[2])
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    pairs = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    box = tuple((start, end) for start, end in pairs)
    expected = whole[tuple(slice(start, end) for start, end in box)]
    local, read = torch.full_like(expected, -1), 0
    for piece in pieces_of(f"layers.0.{entry.ours}", shape, EXPERTS):
        found = read_box(piece.of(whole), piece, local, box)
        if found is not None:
            target, value = found
            target.copy_(value)
            read += value.numel()
    assert torch.equal(local, expected) and read == expected.numel()


def test_dtypes_are_converted(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    model = build_and_load(folder, ModelOptions(dtype=torch.bfloat16))
    assert all(torch.equal(tensor, stored[name].bfloat16()) for name, tensor in hf_named_tensors(model))
