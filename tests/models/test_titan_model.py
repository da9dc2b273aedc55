"""Models of torchtitan: equal to transformers', exact in both directions, and refused by the name of a field."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd_rl.models.build import ModelOptions, begin, build, build_and_load, export, finish, hf_named_tensors, is_ours
from spmd_rl.models.titan_model import TitanModel
from tests.models.families import row, unpacked_logits
from tests.models.titan_cases import OF_FAMILY, PLAIN, YARN, by_checkpoint_name, folder_of, hugging_face

pytest.importorskip("torchtitan", reason="torchtitan is not installed; launch/setup.sh dev installs it")

TITAN = ModelOptions("titan", lm_head_chunk=8)
LENGTHS = [20, 3, 1, 17, 9]
SAME_SCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {}),
    "queries without a latent": ("deepseek_v3", {"q_lora_rank": None}),
    "one group of experts": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "halves instead of pairs": ("deepseek_v3", {"rope_interleave": False}),
    "values wider than keys": ("deepseek_v3", {"v_head_dim": 32, "n_shared_experts": 1}),
    "latent yarn": ("deepseek_v3", {"rope_parameters": YARN | SAME_SCALE}),
    "gpt_oss": ("gpt_oss", {}),
    "another window": ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
    "sinks without yarn": ("gpt_oss", {"rope_parameters": PLAIN, "swiglu_limit": 0.5}),
    "qwen3": ("qwen3", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_packed_logits_and_gradients_equal_transformers(tmp_path: Path, case: str) -> None:
    family, settings = CASES[case]
    hf = hugging_face(family, **settings)
    model = build_and_load(folder_of(hf, tmp_path), TITAN)
    assert isinstance(model, TitanModel)
    tokens_T, documents = row(LENGTHS)
    expected_TV = unpacked_logits(hf, tokens_T, LENGTHS)
    logits_TV = model.logits(tokens_T, documents)
    assert (logits_TV - expected_TV).norm() <= 1e-5 * expected_TV.norm()

    targets_T, temperatures_T = tokens_T.roll(-1).long(), torch.linspace(0.6, 1.4, len(tokens_T))
    logp_T, entropy_T = model(tokens_T, documents, targets_T, temperatures_T)
    logp_TV = torch.log_softmax(expected_TV / temperatures_T[:, None], -1)
    wanted_T = logp_TV.gather(1, targets_T[:, None])[:, 0]
    torch.testing.assert_close(logp_T, wanted_T, atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_T, -(logp_TV.exp() * logp_TV).sum(-1), atol=5e-5, rtol=1e-4)
    logp_T.sum().backward()
    wanted_T.sum().backward()
    wanted = by_checkpoint_name(hf, {name: parameter.grad for name, parameter in hf.named_parameters()})
    pieces = [(piece, wire) for wire in model.wires() if wire.trained for piece in wire.pieces]
    assert {piece.name for piece, _ in pieces} == set(wanted)
    for piece, wire in pieces:
        gradient = piece.of(wire.parameter.grad)
        assert (gradient - wanted[piece.name]).norm() <= 1e-4 * (wanted[piece.name].norm() + 1e-3), piece.name


@torch.no_grad()
def test_windows_and_sinks_hold_in_documents_of_several_chunks(tmp_path: Path) -> None:
    from spmd_rl.models.titan_layers import QUERIES

    lengths = [2 * QUERIES + 3, 5]
    hf = hugging_face("gpt_oss", max_position_embeddings=1024, sliding_window=QUERIES // 2 + 1)
    tokens_T, documents = row(lengths)
    expected_TV = unpacked_logits(hf, tokens_T, lengths)
    logits_TV = build_and_load(folder_of(hf, tmp_path), TITAN).logits(tokens_T, documents)
    assert (logits_TV - expected_TV).norm() <= 1e-5 * expected_TV.norm()


@pytest.mark.parametrize("family", OF_FAMILY)
def test_round_trip_is_bit_exact(tmp_path: Path, family: str) -> None:
    source, target = folder_of(hugging_face(family), tmp_path / "source"), tmp_path / "target"
    export(hf_named_tensors(build_and_load(source, TITAN)), source, str(target), torch.float32)
    original, written = (load_file(Path(folder) / "model.safetensors") for folder in (source, target))
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)
    again = dict(hf_named_tensors(build_and_load(str(target), TITAN)))
    assert all(torch.equal(again[name], original[name]) for name in original)


@pytest.mark.parametrize("family", OF_FAMILY)
def test_a_model_begins_without_memory_and_ends_as_if_loaded_at_once(tmp_path: Path, family: str) -> None:
    folder = folder_of(hugging_face(family), tmp_path)
    model = begin(folder, TITAN)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    finish(model, folder, "cpu")
    expected = build_and_load(folder, TITAN)
    for (name, mine), (other, theirs) in zip(hf_named_tensors(model), hf_named_tensors(expected), strict=True):
        assert name == other and torch.equal(mine, theirs)
    tokens_T, documents = row([9, 3])
    assert torch.equal(model.logits(tokens_T, documents), expected.logits(tokens_T, documents))


@pytest.mark.parametrize(("family", "adapter"), [("deepseek_v3", "DeepSeekV3"), ("qwen3", "Qwen3")])
def test_names_are_those_of_torchtitans_own_adapter(tmp_path: Path, family: str, adapter: str) -> None:
    """gpt_oss's adapter of 0.3.0 leaves the experts out."""
    module = pytest.importorskip(f"torchtitan.models.{family}.state_dict_adapter")
    model = build_and_load(folder_of(hugging_face(family), tmp_path), TITAN)
    state = {name.removeprefix("decoder."): tensor for name, tensor in model.state_dict().items()}
    theirs = getattr(module, f"{adapter}StateDictAdapter")(model.decoder.config, None).to_hf(state)
    ours = dict(hf_named_tensors(model))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_a_selection_bias_keeps_its_dtype_and_never_moves(tmp_path: Path) -> None:
    folder = folder_of(hugging_face("deepseek_v3"), tmp_path)
    model = build_and_load(folder, ModelOptions("titan", dtype=torch.bfloat16)).train()
    kept = {wire.name: wire for wire in model.wires() if not wire.trained}
    assert sorted(kept) == [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)]
    tokens_T, documents = row(LENGTHS)
    model.logits(tokens_T, documents).sum().backward()
    stored = load_file(tmp_path / "model.safetensors")
    for name, wire in kept.items():
        assert wire.dtype(torch.bfloat16) == torch.float32 and torch.equal(wire.parameter, stored[name])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    folder = folder_of(hugging_face("deepseek_v3", num_nextn_predict_layers=1), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert dict(hf_named_tensors(build_and_load(folder, TITAN))).keys() == tensors.keys()
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected tensor 'model.layers.4.eh_proj.weight', deepseek_v3 has none"):
        build_and_load(folder, TITAN)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("deepseek_v3", {"attention_bias": True}, r"attention_bias = True \(it has False\)"),
        ("deepseek_v3", {"topk_method": "greedy"}, r"topk_method = 'greedy' \(it has 'noaux_tc'\)"),
        ("deepseek_v3", {"num_key_value_heads": 2}, r"num_key_value_heads = 2"),
        ("deepseek_v3", {"rope_parameters": YARN}, "rope_parameters.mscale = None, "),
        ("deepseek_v3", {"rope_parameters": YARN | {"rope_type": "linear"}}, "rope_parameters.rope_type = 'linear'"),
        ("deepseek_v3", {"n_group": 8}, "n_group = 8 with n_routed_experts = 8"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \(dequantise"),
        ("gpt_oss", {"attention_bias": False}, r"attention_bias = False \(it has True\)"),
        ("gpt_oss", {"rope_parameters": YARN | {"attention_factor": 2.0}}, "rope_parameters.attention_factor = 2.0"),
        ("qwen3", {"tie_word_embeddings": True}, r"tie_word_embeddings = True \(it has False\)"),
        ("qwen3", {"rope_parameters": YARN}, r"rope_parameters.rope_type = 'yarn' \(it has default\)"),
        ("qwen3", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types with sliding"),
    ],
)
def test_what_torchtitan_cannot_express_is_refused_by_field(
    tmp_path: Path, family: str, changes: dict[str, Any], says: str
) -> None:
    folder = folder_of(hugging_face(family), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=f"torchtitan's {family} can't express {says}") as caught:
        build(folder, TITAN)
    assert str(tmp_path) in str(caught.value) and "use impl = auto" in str(caught.value)


def test_a_family_that_is_not_here_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"no model type 'llama' \(it has deepseek_v3, gpt_oss, qwen3\)"):
        build(str(tmp_path), TITAN)


def test_torchtitan_is_taken_only_when_it_is_asked_for(tmp_path: Path) -> None:
    folder = folder_of(hugging_face("qwen3"), tmp_path)
    assert not is_ours(folder, "titan") and is_ours(folder, "auto")
    imports = "import spmd_rl.models.build, spmd_rl.trainer.learner, spmd_rl.inference.build, sys"
    check = f"{imports}; assert not any(name.startswith('torchtitan') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=120)


def test_without_the_extra_the_way_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    for name in [name for name in sys.modules if name.startswith("torchtitan")] + ["torchtitan"]:
        monkeypatch.setitem(sys.modules, name, None)
    for module in ("titan_families", "titan_layers"):
        monkeypatch.delitem(sys.modules, f"spmd_rl.models.{module}", raising=False)
    with pytest.raises(ValueError, match=r"needs torchtitan .*pip install --no-deps torchtitan==0.3.0") as caught:
        build(str(tmp_path), TITAN)
    assert str(tmp_path) in str(caught.value)
