"""Model folders in Hugging Face format: reading and writing their weights.

What it refuses to know: modules, architectures, ranks. A folder is `config.json`, safetensors (one file, or shards with
an index) and small files beside them. Invariants: values are never changed except by the asked-for dtype; a written
folder is complete or absent; every error names the folder and what is wrong with it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from spmd_rl.models.hf_config import HELP, read_config, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = ("F64", "F32", "F16", "BF16")  # as safetensors names them
SHARD_BYTES = 4 * 1024**3
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json", ".md")


def stored_tensors(folder: str) -> Iterator[tuple[str, Any]]:
    """(name, slice of safetensors) of everything in the folder, file by file; nothing is read until it is indexed.

    Raises FileNotFoundError for missing files, ValueError for damaged ones or a name that an index places wrongly.
    """
    return ((name, shard.get_slice(name)) for name, shard in _open_shards(folder))


def tensor_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor; raises what `stored_tensors` raises, without reading values."""
    return {name: tuple(stored.get_shape()) for name, stored in stored_tensors(folder)}


def check_dtype(folder: str, name: str, stored: Any) -> None:
    """ValueError for values that are no weights by themselves: integers, or floats of 8 bits, which need scales."""
    if (dtype := stored.get_dtype()) not in WEIGHTS:
        raise ValueError(
            f"model folder {folder!r}: {name!r} has dtype {dtype}, weights are read from {', '.join(WEIGHTS)}: a "
            "quantised model has to be converted first, for example by transformers"
        )


def _open_shards(folder: str) -> Iterator[tuple[str, Any]]:
    root = Path(folder)
    shards: dict[str, set[str] | None]
    if (root / INDEX).is_file():
        weight_map = read_json(root / INDEX).get("weight_map", {})
        shards = {file: {name for name in weight_map if weight_map[name] == file} for file in weight_map.values()}
    elif (root / SINGLE).is_file():
        shards = {SINGLE: None}
    else:
        raise FileNotFoundError(f"model folder {folder!r} has neither {SINGLE} nor {INDEX}; {HELP}, with safetensors")
    for file, listed in sorted(shards.items()):
        if not (root / file).is_file():
            raise FileNotFoundError(f"model folder {folder!r}: {INDEX} names {file!r}, which is missing")
        try:
            with safe_open(root / file, framework="pt") as shard:
                names = list(shard.keys())
                if listed is not None and listed != set(names):
                    raise ValueError(f"{root / file}: {INDEX} disagrees about {sorted(listed ^ set(names))[:5]}")
                for name in names:
                    yield name, shard
        except SafetensorError as error:
            raise ValueError(f"{root / file} is damaged or truncated ({error}); download or export it again") from error


def export(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    source_folder: str,
    target_folder: str,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    kept: Collection[str] = (),
) -> None:
    """Write a Hugging Face folder: the tensors cast to `dtype`; the source's config, tokenizer and other small files.

    `kept`: names of tensors that keep their own dtype.
    The folder appears complete, by a rename, or not at all; an older one of the same name is replaced. Tensors are
    consumed one shard at a time, so host memory holds at most one shard.
    """
    target = Path(target_folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        _write_tensors(named_tensors, scratch, dtype, shard_bytes, kept)
        _copy_small_files(Path(source_folder), scratch, dtype)
        for path in scratch.iterdir():
            _sync(path)
        _sync(scratch)
        old = target.parent / f".{target.name}.{os.getpid()}.old"
        if target.exists():
            target.rename(old)
        scratch.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_tensors(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    kept: Collection[str],
) -> None:
    shards: list[dict[str, torch.Size]] = []
    pending: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        save_file(pending, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append({name: tensor.shape for name, tensor in pending.items()})
        pending.clear()

    for name, tensor in named_tensors:
        to = tensor.dtype if name in kept else dtype
        value = tensor.detach().to("cpu", to, copy=True).contiguous()  # a copy: nothing may alias the live weights
        if pending and size + value.nbytes > shard_bytes:
            flush()
            size = 0
        pending[name] = value
        size, total = size + value.nbytes, total + value.nbytes
    flush()
    if len(shards) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{i}").rename(folder / file)
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _copy_small_files(source: Path, target: Path, dtype: torch.dtype) -> None:
    config = read_config(str(source))
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)  # the key's older name
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in source.iterdir():
        if path.is_file() and path.name != "config.json" and not path.name.endswith(NOT_COPIED):
            shutil.copyfile(path, target / path.name)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
