"""Folders: read bit-exactly, written so that plain transformers reads them, and refused with the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from spmd_rl.models.build import (
    ModelOptions,
    build,
    build_and_load,
    export,
    hf_named_tensors,
    load_weights,
    resolve,
)
from spmd_rl.models.decoder import Decoder
from spmd_rl.models.hf_model import HFModel
from spmd_rl.models.packed import Documents
from spmd_rl.models.tiny import make_tiny


def tiny(folder: Path, tied: bool = False, seed: int = 0) -> str:
    shape = {"vocab_size": 61, "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "ff": 24}
    return make_tiny(str(folder), seed=seed, tied=tied, init_std=0.2, eos_token_id=2, bos_token_id=1, **shape)


def mistral(folder: Path) -> str:
    config = AutoConfig.for_model(
        "mistral",
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("impl", ["custom", "hf"])
@pytest.mark.parametrize("shard_bytes", [4 * 1024**3, 6000])
def test_round_trip_is_bit_exact(tmp_path: Path, impl: str, tied: bool, shard_bytes: int) -> None:
    source, target = tiny(tmp_path / "source", tied), str(tmp_path / "target")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    model = build_and_load(source, ModelOptions(impl))
    assert isinstance(model, Decoder if impl == "custom" else HFModel)
    export(hf_named_tensors(model), source, target, torch.float32, shard_bytes)

    shards = sorted(Path(target).glob("*.safetensors"))
    assert (len(shards) > 1) == (shard_bytes == 6000)
    written = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    original = load_file(Path(source) / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)
    assert (Path(target) / "tokenizer.json").read_text() == "{}"
    assert (Path(target) / "generation_config.json").exists()
    again = build(target, ModelOptions("custom"))
    load_weights(again, target)
    for (name, mine), (other, theirs) in zip(hf_named_tensors(again), hf_named_tensors(model), strict=True):
        assert name == other
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_transformers_reads_an_export(tmp_path: Path, dtype: torch.dtype) -> None:
    source, target = tiny(tmp_path / "source"), str(tmp_path / "target")
    model = build_and_load(source)
    export(hf_named_tensors(model), source, target, dtype)
    hf = AutoModelForCausalLM.from_pretrained(target)
    assert hf.dtype == dtype
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    tokens_T = torch.arange(20)
    with torch.no_grad():
        logits_TV = hf(input_ids=tokens_T[None]).logits[0]
        assert torch.equal(logits_TV, reference(input_ids=tokens_T[None]).logits[0])
        if dtype == torch.float32:
            mine_TV = model.logits(tokens_T, Documents.build(np.array([0, 20])))
            torch.testing.assert_close(mine_TV, logits_TV, atol=1e-5, rtol=1e-5)


def test_an_export_that_fails_leaves_the_older_one(tmp_path: Path) -> None:
    source, target = tiny(tmp_path / "source"), tmp_path / "export" / "step_1"
    export([("a", torch.ones(2))], source, str(target), torch.float32)

    def broken():
        yield "a", torch.zeros(2)
        raise RuntimeError("the power is gone")

    with pytest.raises(RuntimeError, match="power"):
        export(broken(), source, str(target), torch.float32)
    assert torch.equal(load_file(target / "model.safetensors")["a"], torch.ones(2))
    assert [path.name for path in target.parent.iterdir()] == ["step_1"]
    export([("a", torch.zeros(2))], source, str(target), torch.float32)
    assert torch.equal(load_file(target / "model.safetensors")["a"], torch.zeros(2))


def test_names_and_order_are_those_of_the_state_dict(tmp_path: Path) -> None:
    for tied in (False, True):
        folder = tiny(tmp_path / f"tied_{tied}", tied)
        names = [[name for name, _ in hf_named_tensors(build(folder, ModelOptions(impl)))] for impl in ("custom", "hf")]
        assert names[0] == names[1]
        assert ("lm_head.weight" in names[0]) == (not tied)
        assert sorted(names[0]) == sorted(load_file(Path(folder) / "model.safetensors"))


def test_auto_falls_back_to_transformers(tmp_path: Path) -> None:
    folder = mistral(tmp_path / "mistral")
    assert isinstance(build_and_load(folder, ModelOptions("auto")), HFModel)
    with pytest.raises(ValueError, match=r"no model type 'mistral' \(it has qwen3, llama, .*\); use impl = hf"):
        build(folder, ModelOptions("custom"))


def test_tied_weights_under_both_names_must_agree(tmp_path: Path) -> None:
    folder = tiny(tmp_path, tied=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    build_and_load(folder)
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tied to .* but differs"):
        build_and_load(folder)


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


NORM = "model.norm.weight"
BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json; pass a folder in Hugging Face format"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object"),
    "no model_type": (lambda f: edit_config(f, model_type=None), "no model_type"),
    "unknown model_type": (lambda f: edit_config(f, model_type="qwen99"), "not a config that transformers understands"),
    "hidden_size is text": (lambda f: edit_config(f, hidden_size="big"), "not a config that transformers understands"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "truncated": (truncate, "damaged or truncated"),
    "missing": (lambda f: edit_tensors(f, lambda t: t.pop(NORM)), NORM),
    "unexpected": (lambda f: edit_tensors(f, lambda t: t.update(extra=torch.ones(1))), "unexpected.*extra"),
    "wrong shape": (lambda f: edit_tensors(f, lambda t: t.update({NORM: torch.ones(3)})), NORM),
    "integers": (lambda f: edit_tensors(f, lambda t: t.update({NORM: t[NORM].to(torch.int8)})), f"{NORM}.*dtype I8"),
    "8 bits": (lambda f: edit_tensors(f, lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})), "quantised"),
    "shard gone": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}'),
        "names 'model-2.safetensors', which is missing",
    ),
    "index disagrees": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}'),
        "disagrees about",
    ),
}


@pytest.mark.parametrize("impl", ["custom", "hf"])
@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folders_are_refused_by_name(tmp_path: Path, case: str, impl: str) -> None:
    spoil, message = BAD_FOLDERS[case]
    folder = tiny(tmp_path)
    spoil(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        build_and_load(folder, ModelOptions(impl))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["", "/no/such/folder", "./gone", "just_a_word", "too/many/parts", "outputs/../x"])
def test_a_name_that_is_neither_folder_nor_hub_id(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="pass a folder in Hugging Face format or a Hub id"):
        resolve(name)


def test_a_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="'nobody/nothing-at-all' is no local folder and could not be fetched"):
        resolve("nobody/nothing-at-all")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        resolve(str(tmp_path / "file"))
    assert resolve(str(tmp_path)) == str(tmp_path)


def test_tiny_depends_on_the_seed_alone(tmp_path: Path) -> None:
    first, again, other = (
        load_file(Path(tiny(tmp_path / n, seed=s)) / "model.safetensors") for n, s in (("a", 0), ("b", 0), ("c", 1))
    )
    name = "model.layers.1.mlp.up_proj.weight"
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[name], other[name])
    assert abs(first[name].std().item() - 0.2) < 0.03
    assert torch.equal(first[NORM], torch.ones(16))
