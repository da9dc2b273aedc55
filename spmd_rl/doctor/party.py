"""How ranks tell each other what they found, without a process group: over torchrun's store.

It has to work while collectives do not, so that a rank that never comes, dies or hangs is named. `gather` is a step
that all ranks take in one order: each brings a value, rank 0 waits for all and publishes them, and all get the same
list; or the same `Absent`, when somebody did not bring one in time.

Invariants: every wait ends; all ranks that are alive see the same outcome of a step.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any

from torch.distributed import TCPStore

RETRY_S = 0.2
GRACE_S = 5.0  # that others give rank 0 to publish


class Absent(RuntimeError):
    """Ranks that did not take a step in time."""

    def __init__(self, step: str, ranks: Sequence[int]) -> None:
        self.step, self.ranks = step, tuple(ranks)
        super().__init__(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} did not take the step '{step}'")


class StoreLost(RuntimeError):
    """torchrun's store can't be reached, or not any more."""


@dataclass(frozen=True)
class Party:
    """This rank among all ranks."""

    rank: int
    size: int
    store: TCPStore
    prefix: str = "spmd_rl/doctor/0"

    def gather(self, step: str, value: Any, patience_s: float) -> list[Any]:
        """The JSON value of every rank, on every rank. Absent names who brought none; StoreLost."""
        try:
            return self._gather(step, value, patience_s)
        except Absent:
            raise
        except Exception as error:  # the store's errors have no type of their own
            raise StoreLost(f"lost torchrun's store at the step '{step}': {error}") from error

    def _gather(self, step: str, value: Any, patience_s: float) -> list[Any]:
        keys = [f"{self.prefix}/{step}/{rank}" for rank in range(self.size)]
        outcome = f"{self.prefix}/{step}/all"
        self.store.set(keys[self.rank], json.dumps(value))
        if self.rank == 0:
            absent = _missing(self.store, keys, patience_s)
            values = [] if absent else [json.loads(self.store.get(key)) for key in keys]
            self.store.set(outcome, json.dumps({"values": values, "absent": absent}))
        elif _missing(self.store, [outcome], 2 * patience_s + GRACE_S):  # rank 0 may begin to wait as late as that
            raise Absent(step, [0])
        said = json.loads(self.store.get(outcome))
        if said["absent"]:
            raise Absent(step, said["absent"])
        return said["values"]

    def speaks(self) -> bool:
        """True on the one rank that reports where rank 0 can't. StoreLost counts as yes: nobody else may hear."""
        try:
            return self.store.compare_set(f"{self.prefix}/speaker", "", str(self.rank)) == str(self.rank).encode()
        except Exception:
            return True


def _missing(store: TCPStore, keys: list[str], patience_s: float) -> list[int]:
    """Which keys are not there when the time is up, by their place."""
    until = time.monotonic() + patience_s
    missing = []
    for place, key in enumerate(keys):
        try:
            store.wait([key], timedelta(seconds=max(0.01, until - time.monotonic())))
        except Exception:
            if not store.check([key]):  # raises when it is the store that is gone
                missing.append(place)
    return missing


def join(environ: Mapping[str, str], patience_s: float) -> Party:
    """Reach the store that torchrun's environment names. StoreLost says where it was looked for."""
    rank, size, address, port = (environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    serves = rank == "0" and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves and (reason := _unreachable(address, int(port), patience_s)):
        raise StoreLost(f"no connection to {address}:{port} within {patience_s:g} s ({reason})")
    timeout = timedelta(seconds=patience_s)
    try:
        store = TCPStore(address, int(port), is_master=serves, timeout=timeout, wait_for_workers=False)
    except Exception as error:
        raise StoreLost(f"what answers at {address}:{port} is no store: {str(error).splitlines()[0]}") from error
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Party(int(rank), int(size), store, f"spmd_rl/doctor/{attempt}")


def _unreachable(address: str, port: int, patience_s: float) -> str:
    """Why nobody accepts a connection there, once the time is up; empty as soon as somebody does."""
    until = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, until - time.monotonic())).close()
            return ""
        except OSError as error:
            if time.monotonic() + RETRY_S > until:
                return str(error)
            time.sleep(RETRY_S)


def within(deadline_s: float, work: Callable[[], Any]) -> tuple[Any, str]:
    """(what it returned, the error): in a thread, because a collective that hangs never gives control back.

    The error is empty when it ended well; the thread of one that hangs is left to the end of the process.
    """
    outcome: queue.Queue[tuple[Any, str]] = queue.Queue()

    def run() -> None:
        try:
            outcome.put((work(), ""))
        except BaseException as error:
            lines = str(error).strip().splitlines()
            outcome.put((None, f"{type(error).__name__}: {lines[0] if lines else 'without a word'}"))

    Thread(target=run, daemon=True, name="doctor's work").start()
    try:
        return outcome.get(timeout=deadline_s)
    except queue.Empty:
        return None, f"not done within {deadline_s:g} s"


@dataclass(frozen=True)
class Member:
    """Who and where a rank is."""

    rank: int
    host: str
    node: int  # torchrun's number of the host
    pid: int
    local_rank: int

    @property
    def leads(self) -> bool:
        """Whether it speaks for its host."""
        return self.local_rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


def introduce(environ: Mapping[str, str], host: str) -> dict[str, Any]:
    """What a rank says first."""
    number = {name: int(environ.get(key, "0")) for name, key in (("node", "GROUP_RANK"), ("local_rank", "LOCAL_RANK"))}
    return {"rank": int(environ["RANK"]), "host": host, "pid": os.getpid(), **number}


def members(introductions: Sequence[Mapping[str, Any]]) -> list[Member]:
    """All ranks; hosts of one name (containers, two agents on one machine) are told apart by torchrun's number."""
    nodes: dict[str, set[int]] = {}
    for said in introductions:
        nodes.setdefault(said["host"], set()).add(said["node"])
    unique = [
        {**said, "host": f"{said['host']}#{said['node']}" if len(nodes[said["host"]]) > 1 else said["host"]}
        for said in introductions
    ]
    return [Member(**said) for said in unique]
