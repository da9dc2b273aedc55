"""A checkpoint whose parts lie on several hosts that share no folder.

With torch's distributed checkpoint every rank writes its shards into a folder of that name on its own host. What the
first rank alone writes (torch's metadata, the state, the snapshot) is sent to one rank of every other host, so that
each host holds all that its own ranks need. Loading asks for the ranks in their old places, unless all parts were
copied together, which makes an ordinary checkpoint.

It refuses to know when a part is complete (`checkpoint.py`). Invariants: what can't be loaded is refused on all ranks
alike, before anything is loaded; a value that several ranks hold alike is in the first rank's file.
"""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmd_rl.world.checkpoints import PART, SNAPSHOT, STATE, CheckpointError
from spmd_rl.world.hosts import lowest_sharer
from spmd_rl.world.pipe import Pipe
from spmd_rl.world.wire import decode, encode

METADATA = ".metadata"  # torch's own name


def find_keepers(group: dist.ProcessGroup, folder: Path) -> list[int]:
    """For every member of the group, the lowest one that sees the same folder. Collective; makes the folder."""
    me, size = group.rank(), group.size()
    found = gather(group, uuid.uuid4().hex[:8])
    keeper = lowest_sharer(folder, me, range(size), lambda about: dist.barrier(group=group), mark=found[0])
    return [int(number) for number in gather(group, keeper)]


def gather(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    """What all members say, by rank. Collective."""
    said: list[Any] = [None] * group.size()
    dist.all_gather_object(said, mine, group=group)
    return said


def agree(group: dist.ProcessGroup, problem: str) -> None:
    """All members are well (an empty `problem`), or all raise CheckpointError with what they say. Collective."""
    problems = [text for text in gather(group, problem) if text]
    if problems:
        raise CheckpointError("; ".join(dict.fromkeys(problems)))


def spread_small_files(group: dist.ProcessGroup, keepers: Sequence[int], folder: Path) -> None:
    """Write what belongs to every part into the folders of all keepers, from the first rank's. Collective."""
    me = group.rank()
    if me == 0:
        (folder / PART).write_text(json.dumps({"save": uuid.uuid4().hex, "ranks": group.size()}))
        names = [name for name in (METADATA, STATE, SNAPSHOT, PART) if (folder / name).exists()]
        payload = encode({name: (folder / name).read_bytes() for name in names})
        for keeper in sorted({*keepers} - {0}):
            Pipe(group, keeper, f"trainer rank {keeper}").send(payload)
    problem = ""
    if me and keepers[me] == me:
        received = decode(Pipe(group, 0, "the first trainer rank").receive())
        try:
            for name, content in received.items():
                (folder / name).write_bytes(content)
        except OSError as error:
            problem = f"no checkpoint on {socket.gethostname()}: {error}"
    agree(group, problem)


def load(group: dist.ProcessGroup, folder: Path, tensors: dict[str, Tensor], ranks: int) -> None:
    """Fill `tensors` from parts that `ranks` ranks have written. Collective. CheckpointError on all ranks alike."""
    me, size = group.rank(), group.size()
    metadata = dcp.FileSystemReader(folder).read_metadata()
    files = {info.relative_path for info in metadata.storage_data.values()}
    missing = sorted(name for name in files if not (folder / name).exists())
    if not any(gather(group, missing)):
        dcp.load(tensors, checkpoint_id=folder, process_group=group)
        return
    own = [name for name in missing if name.startswith(f"__{me}_")]
    problem = f"{own[0]} is not on {socket.gethostname()}, which trainer rank {me} needs" if own else ""
    if size != ranks:
        problem = f"it was written by {ranks} trainer ranks, and {size} can't find their values in it"
    if problem:
        problem = (
            f"{folder} has its parts on several hosts: {problem}. Start as many trainer ranks on the same hosts in the "
            "same order as before, or copy all parts together into this folder on every host, which any layout can load"
        )
    agree(group, problem)
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    alike = {name: tensor for name, tensor in tensors.items() if name not in sharded}
    dcp.load(sharded, checkpoint_id=folder, process_group=group)
    if me == 0:
        dcp.load(alike, checkpoint_id=folder, no_dist=True)
    for tensor in alike.values():
        on_host = tensor.cpu()
        dist.broadcast(on_host, group=group, group_src=0)
        tensor.copy_(on_host)
