"""Folders of families with stacked parameters: both layouts read, one layout written, exact to the bit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from spmd_rl.models.build import ModelOptions, build, build_and_load, export, hf_named_tensors
from spmd_rl.models.conversion import EXPERTS, pieces_of
from tests.models.families import OF_FAMILY, checkpoint, hugging_face, row, unpacked_logits


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from(EXPERTS))
def test_pieces_are_disjoint_and_cover_a_stack(experts: int, hidden: int, width: int, entry: Any) -> None:
    parts = len(entry.theirs)
    shape = (experts, parts * hidden, width)
    seen = torch.zeros(shape)
    pieces = pieces_of(f"model.layers.3.{entry.ours}", shape, EXPERTS)
    assert len({piece.name for piece in pieces}) == len(pieces) == parts * experts
    for piece in pieces:
        assert piece.name.startswith("model.layers.3.mlp.experts.")
        part = piece.of(seen)
        assert part.shape == piece.shape == (hidden, width)
        part += 1
    assert torch.equal(seen, torch.ones(shape))


def folder_of(hf: Any, folder: Path, layout: str) -> str:
    """A checkpoint of Hugging Face's own making, expert by expert or stacked."""
    hf.save_pretrained(folder)  # writes expert by expert
    if layout == "stacked":
        tensors = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
        if hf.config.tie_word_embeddings:
            tensors.pop("lm_head.weight")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("layout", ["by expert", "stacked"])
@pytest.mark.parametrize(("family", "tied"), [*((family, False) for family in OF_FAMILY), ("qwen3_moe", True)])
def test_round_trip_through_hugging_face_is_bit_exact(tmp_path: Path, family: str, tied: bool, layout: str) -> None:
    settings = {"mlp_only_layers": [0]} if family == "qwen2_moe" else {}
    hf = hugging_face(family, tie_word_embeddings=tied, **settings)
    source, target = folder_of(hf, tmp_path / "source", layout), tmp_path / "target"
    model = build_and_load(source, ModelOptions("custom"))
    export(hf_named_tensors(model), source, str(target), torch.float32)
    written, expected = load_file(target / "model.safetensors"), checkpoint(hf)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    again = AutoModelForCausalLM.from_pretrained(target)
    for name, tensor in hf.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    tokens_T, documents = row([9, 3])
    with torch.no_grad():
        error = (model.logits(tokens_T, documents) - unpacked_logits(again, tokens_T, [9, 3])).abs().max()
    assert error <= 2e-4  # of logits up to 100


def change(folder: str, **tensors: torch.Tensor | None) -> None:
    path = Path(folder) / "model.safetensors"
    stored = load_file(path) | {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file({n: t for n, t in stored.items() if tensors.get(n, t) is not None}, path, metadata={"format": "pt"})


def test_a_stack_and_its_parts_may_both_be_there_if_they_are_equal(tmp_path: Path) -> None:
    """In either order, which is that of the files."""
    hf = hugging_face("qwen3_moe")
    folder, parts = Path(folder_of(hf, tmp_path, "by expert")), checkpoint(hf)
    for first, spoilt in itertools.product(("stack", "parts"), (False, True)):
        stack = hf.state_dict()[STACK].clone()
        stack[2, 3, 4] += spoilt
        files = {"a.safetensors": {STACK: stack}, "b.safetensors": parts}
        if first == "parts":
            files = {"a.safetensors": parts, "b.safetensors": {STACK: stack}}
        for file, tensors in files.items():
            save_file(tensors, folder / file)
        weight_map = {name: file for file, tensors in files.items() for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        if spoilt:
            with pytest.raises(ValueError, match="but differs"):
                build_and_load(str(folder))
        else:
            written = dict(hf_named_tensors(build_and_load(str(folder))))
            assert all(torch.equal(written[name], tensor) for name, tensor in parts.items())


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
STACK = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({EXPERT: None}, f"lacks 1 tensors: {EXPERT}"),
        ({EXPERT: torch.ones(12, 17)}, r"'.*experts.3.up_proj.weight' has shape \[12, 17\], .* asks for \[12, 16\]"),
        ({EXPERT.replace("3", "5"): torch.ones(12, 16)}, "unexpected tensor '.*experts.5.up_proj.weight', qwen3_moe"),
        ({STACK: torch.ones(5, 24, 16)}, "is tied to .* but differs"),
    ],
    ids=["missing", "wrong shape", "too many", "both layouts"],
)
def test_a_folder_with_wrong_experts_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    folder = folder_of(hugging_face("qwen3_moe"), tmp_path, "by expert")
    change(folder, **changes)
    with pytest.raises(ValueError, match=says):
        build_and_load(folder)


def test_transformers_own_model_reads_the_same_folders(tmp_path: Path) -> None:
    hf = hugging_face("qwen3_moe")
    tokens_T, documents = row([9, 3])
    for layout in ("by expert", "stacked"):
        folder = folder_of(hf, tmp_path / layout, layout)
        with torch.no_grad():
            logits = [
                build_and_load(folder, ModelOptions(impl)).logits(tokens_T, documents) for impl in ("custom", "hf")
            ]
        torch.testing.assert_close(*logits, atol=2e-4, rtol=1e-5)
    names = [{name for name, _ in hf_named_tensors(build(folder, ModelOptions(impl)))} for impl in ("custom", "hf")]
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in names[0]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names[1]
