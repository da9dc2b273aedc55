"""One trainer rank that loads a model in two ways and says what that took: `loading_worker.py OUT MODEL_FOLDER`."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from spmd_rl.models.build import begin, build_and_load, finish
from spmd_rl.trainer.parallel import TrainerMeshes, parallelize
from spmd_rl.world.trainer_mesh import TrainerDims

LAYOUTS = {"fsdp4": TrainerDims(dp_shard=4), "fsdp2 ep2": TrainerDims(dp_shard=4, ep=2)}


def sharded(folder: str, meshes: TrainerMeshes) -> nn.Module:
    """As a learner loads."""
    model = begin(folder)
    parallelize(model, meshes, "float32")
    finish(model, folder, "cpu")
    return model


def whole(folder: str, meshes: TrainerMeshes) -> nn.Module:
    """Every rank has the whole model, for a moment."""
    model = build_and_load(folder)
    parallelize(model, meshes, "float32")
    return model


def peak_growth(load: Callable[[], nn.Module]) -> tuple[int, nn.Module]:
    """Bytes by which this process grew at most, of which pages of the model's file are a part."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    model = load()
    return memory("VmHWM") - before, model


def memory(what: str) -> int:
    return int(re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def main(out: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for layout, dims in LAYOUTS.items():
        meshes = TrainerMeshes.build(dims, "cpu")
        for load in (sharded, sharded, whole):  # the first time counts the libraries' own memory, and is forgotten
            dist.barrier()
            growth, model = peak_growth(lambda load=load, meshes=meshes: load(folder, meshes))
            held = sum(parameter.to_local().nbytes for parameter in model.parameters())
            sums = {name: parameter.full_tensor().double().sum().item() for name, parameter in model.named_parameters()}
            results[layout, load.__name__] = {"growth": growth, "held": held, "sums": sums}
            del model
    torch.save(results, Path(out) / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
