"""Model folders that only rank 0's host has: said at start, or sent to the hosts that lack them.

With `model.from_rank_0` one rank of every host that lacks a folder receives its files from rank 0, in pieces and
checked by a digest, and writes them under its own output folder; that host's ranks then find their models there. They
are taken away at the end of a run that went well. Without the key, a folder that a host needs and lacks is an error at
once.

It refuses to know what is in the files. Invariants: which hosts lack what follows from what all ranks have said, so all
ranks agree about who takes part; a folder is complete or not there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from spmd_rl.config.tree import Config
from spmd_rl.world.hosts import Hosts
from spmd_rl.world.mesh import Mesh

FOLDER = "from_rank_0"  # in the output folder
PIECE_BYTES = 16 * 2**20
PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")  # what a model folder is read for
NAME, TOKENIZER, REFERENCE = "model.name", "model.tokenizer", "orchestrator.algorithm.reference"


class CopyError(RuntimeError):
    """A folder did not arrive as it was sent, or has no room."""


def named_folders(config: Config) -> dict[str, str]:
    """What the config names that may be a folder, by key."""
    named = {NAME: config.model.name, TOKENIZER: config.model.tokenizer}
    named[REFERENCE] = config.orchestrator.algorithm.reference
    return {key: name for key, name in named.items() if name}


def folders_here(config: Config) -> list[str]:
    """The keys whose folder is on this host."""
    return [key for key, name in named_folders(config).items() if Path(name).expanduser().is_dir()]


@dataclass(frozen=True)
class Lacks:
    """Of every folder that rank 0's host has: the hosts without it, each by its first rank."""

    hosts: Hosts
    by_key: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, hosts: Hosts, here: list[list[str]]) -> Lacks:
        """here: by rank, what `folders_here` found."""
        firsts = sorted(set(hosts.first))
        return cls(hosts, {key: tuple(rank for rank in firsts if key not in here[rank]) for key in here[0]})

    def takers(self, key: str) -> tuple[int, ...]:
        """One rank for each output folder that hosts without it see."""
        by_keeper: dict[int, int] = {}
        for rank in self.by_key[key]:
            by_keeper.setdefault(self.hosts.keepers[rank], rank)
        return tuple(sorted(by_keeper.values()))

    def problem(self, config: Config, mesh: Mesh) -> str:
        """Which hosts lack what they need, and the way out; empty when none does."""
        for key, firsts in self.by_key.items():
            users = users_of(key, config, mesh)
            hosts = [host for host in firsts if any(self.hosts.first[rank] == host for rank in users)]
            if hosts:
                ranks = [rank for rank in range(mesh.world_size) if self.hosts.first[rank] in hosts]
                return (
                    f"{key} = {named_folders(config)[key]!r} is a folder on {self.hosts.names[0]}, where rank 0 is, "
                    f"and not on {self.hosts.describe(ranks)}: put it there under the same path, or set "
                    "model.from_rank_0 = true, and these hosts get it from rank 0's at every start"
                )
        return ""


def users_of(key: str, config: Config, mesh: Mesh) -> set[int]:
    """The ranks that can't do without it."""
    frozen = {rank for replica in mesh.frozen for rank in replica}
    if key == NAME:
        return set(range(mesh.world_size)) - frozen
    if key == TOKENIZER:  # engines and trainers of RL see token ids only
        return set(range(mesh.world_size)) if not mesh.replicas else {0}
    in_loss = not frozen or config.orchestrator.algorithm.kl.coef
    return frozen | (set(mesh.trainers) if in_loss else set())


def fetch(config: Config, rank: int, lacks: Lacks, beat: Callable[[], object]) -> Config:
    """Send and receive what hosts lack; the config as this host has to read it. Collective over all ranks.

    beat: called for every piece. CopyError when a folder is damaged on the way, or there is no room for it.
    """
    named, here = named_folders(config), Path(config.output_dir).resolve() / FOLDER
    found: dict[str, str] = {}
    for key, firsts in lacks.by_key.items():
        takers = lacks.takers(key)
        if not takers:
            continue
        group = dist.new_group([0, *takers], backend="gloo", group_desc="copy a model")
        if rank == 0:
            _send(Path(named[key]).expanduser(), group, beat)
        elif rank in takers:
            _receive(here / key, group, beat)
        if rank in (0, *takers):
            dist.destroy_process_group(group)
        if lacks.hosts.first[rank] in firsts:
            found[key] = str(here / key)
    return with_folders(config, found)


def with_folders(config: Config, found: dict[str, str]) -> Config:
    """The config with other folders, by key."""
    model = replace(config.model, name=found.get(NAME, config.model.name))
    model = replace(model, tokenizer=found.get(TOKENIZER, config.model.tokenizer))
    algorithm = config.orchestrator.algorithm
    algorithm = replace(algorithm, reference=found.get(REFERENCE, algorithm.reference))
    return replace(config, model=model, orchestrator=replace(config.orchestrator, algorithm=algorithm))


def remove(config: Config) -> None:
    """Take away what was received."""
    shutil.rmtree(Path(config.output_dir) / FOLDER, ignore_errors=True)


def files_of(folder: Path) -> list[str]:
    """The files that make a model, relative to its folder; nothing that is hidden."""
    found = {path.relative_to(folder) for pattern in PATTERNS for path in folder.rglob(pattern) if path.is_file()}
    return sorted(path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts))


def _send(folder: Path, group: dist.ProcessGroup, beat: Callable[[], object]) -> None:
    files = [(name, (folder / name).stat().st_size) for name in files_of(folder)]
    _share(json.dumps(files).encode(), group)
    if _anybody(group, ""):  # whoever has no room says so itself
        return
    for name, size in files:
        digest, sent = hashlib.sha256(), 0
        with open(folder / name, "rb") as file:
            while sent < size:
                piece = file.read(min(PIECE_BYTES, size - sent))
                if not piece:
                    raise CopyError(f"{folder / name} has become shorter while it was sent: leave it alone")
                digest.update(piece)
                _share(piece, group)
                sent += len(piece)
                beat()
        _share(digest.digest(), group)


def _receive(target: Path, group: dist.ProcessGroup, beat: Callable[[], object]) -> None:
    files: list[tuple[str, int]] = json.loads(_share(None, group))
    writing = target.with_name(target.name + ".tmp")
    for old in (target, writing):
        shutil.rmtree(old, ignore_errors=True)
    writing.mkdir(parents=True)
    needed, free = sum(size for _, size in files), shutil.disk_usage(writing).free
    problem = ""
    if free < needed:
        problem = (
            f"{socket.gethostname()} has {free / 2**30:.1f} GiB free for {target}, and the model takes "
            f"{needed / 2**30:.1f}: free some, or set output_dir to another disk"
        )
    if others := _anybody(group, problem):
        raise CopyError(problem or others)
    for name, size in files:
        path = writing / name
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with open(path, "wb") as file:
            for piece in _pieces(size, group):
                digest.update(piece)
                file.write(piece)
                beat()
        if digest.digest() != _share(None, group):
            raise CopyError(f"{name} did not arrive on {socket.gethostname()} as it was sent: start again")
    writing.rename(target)


def _pieces(size: int, group: dist.ProcessGroup) -> Iterator[bytes]:
    while size > 0:
        piece = _share(None, group)
        size -= len(piece)
        yield piece


def _share(data: bytes | None, group: dist.ProcessGroup) -> bytes:
    """The first member's bytes, on all of them."""
    size = torch.tensor([len(data or b"")])
    dist.broadcast(size, group=group, group_src=0)
    content = torch.empty(int(size), dtype=torch.uint8)
    if data:
        content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if len(content):
        dist.broadcast(content, group=group, group_src=0)
    return content.numpy().tobytes() if data is None else data


def _anybody(group: dist.ProcessGroup, problem: str) -> str:
    """What any member says is wrong; empty when all are well."""
    said: list[str] = [""] * group.size()
    dist.all_gather_object(said, problem, group=group)
    return next((text for text in said if text), "")
