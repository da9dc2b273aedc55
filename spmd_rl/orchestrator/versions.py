"""Policy versions: who holds which, and whether both sides agree about what a version says.

`publish(v)` orders the trainer ranks to send and decides that every replica pulls; nothing waits. When all replicas
have swapped `v` in, it is everywhere. Every pull ends with the same-version probe: each replica scores the probe set
with the weights it received, the trainer with the weights it sent.

Invariant: `mismatch/*` compares one version with itself, on a token count that is reported; off-policy drift is another
metric and never enters here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from spmd_rl.config.tree import Config
from spmd_rl.orchestrator.link import Link
from spmd_rl.world.messages import Probed, Pull, Pulled, Send, Sent

K3_LIMIT = {"float32": 1e-8, "bfloat16": 1e-2}


class MismatchError(RuntimeError):
    """Engine and trainer disagree about the same policy version."""


def k3(trainer: np.ndarray, engine: np.ndarray) -> np.ndarray:
    """Per-token k3 estimate of KL(engine ‖ trainer), float64[T]: exp(d) − 1 − d with d = trainer − engine logprob.

    Source: J. Schulman, Approximating KL Divergence (2020); never negative.
    """
    d = trainer.astype(np.float64) - engine.astype(np.float64)
    return np.expm1(d) - d


@dataclass
class _Version:
    """What is known of one version."""

    pulled: dict[int, Pulled] = field(default_factory=dict)
    probed: dict[int, Probed] = field(default_factory=dict)
    sent: Sent | None = None
    everywhere: asyncio.Event = field(default_factory=asyncio.Event)
    checked: asyncio.Event = field(default_factory=asyncio.Event)


class Versions:
    """The book of versions on rank 0.

    Args:
        probe: sequences int32[T] that both sides score; empty = no check.
    """

    def __init__(self, config: Config, link: Link, probe: list[np.ndarray]) -> None:
        self._link, self._probe = link, probe
        self._limit = config.weights.max_k3 or K3_LIMIT[config.trainer.model.dtype]
        self._strict = config.weights.strict
        self._books: dict[int, _Version] = {}
        self.everywhere = -1  # newest version that all replicas serve
        link.listen(Pulled, self._on_pulled)
        link.listen(Probed, self._on_probed)
        link.listen(Sent, self._on_sent)

    def publish(self, version: int) -> None:
        """Send `version` from the trainer ranks to all replicas, beside everything else."""
        self._books[version] = _Version()
        self._link.order_all(Send(version, self._probe))
        if not self._link.colocated:  # there the same ranks carry out both: what is sent is what is served
            self._link.decide_all(Pull(version, self._probe))

    async def wait_everywhere(self, version: int) -> None:
        """Until all replicas serve `version`."""
        await self._books[version].everywhere.wait()

    async def report(self, version: int) -> dict[str, float]:
        """Wait until `version` is everywhere and checked; its metrics.

        MismatchError when the limit is strict and passed.
        """
        book = self._books[version]
        await book.everywhere.wait()
        await book.checked.wait()
        del self._books[version]
        pulls = list(book.pulled.values())
        metrics = {
            "weights/bytes": float(pulls[0].bytes),
            "weights/staging_bytes": float(pulls[0].staging_bytes),
            "weights/pull_s": max(pull.receive_s for pull in pulls),
            "weights/stall_s": max(pull.stall_s for pull in pulls),
            "weights/gather_s": book.sent.gather_s,
        }
        return metrics | self._mismatch(version, book)

    def _mismatch(self, version: int, book: _Version) -> dict[str, float]:
        if not self._probe:
            return {}
        trainer = np.concatenate(book.sent.logprobs)
        by_rank = {rank: k3(trainer, np.concatenate(probed.logprobs)) for rank, probed in book.probed.items()}
        values = np.concatenate(list(by_rank.values()))
        # Each replica by itself, for many good ones must not hide a bad one; and NaN is above every limit.
        above = [rank for rank, values_T in by_rank.items() if not values_T.mean() <= self._limit]
        metrics = {
            "mismatch/k3_mean": float(values.mean()),
            "mismatch/k3_max": float(values.max()),
            "mismatch/tokens": float(values.size),
            "mismatch/above_limit": float(bool(above)),
        }
        if above and self._strict:
            rank = max(above, key=lambda r: np.nan_to_num(by_rank[r].mean(), nan=np.inf))
            raise MismatchError(
                f"policy version {version}: the engine on rank {rank} and the trainer disagree about the same weights, "
                f"k3 {by_rank[rank].mean():.2e} over {trainer.size} tokens (limit {self._limit:g}). Either not all "
                "weights arrived as they were sent, or the two implementations differ; weights.max_k3 and "
                "weights.strict set the limit"
            )
        return metrics

    def _on_pulled(self, event: Pulled) -> None:
        book = self._books[event.version]
        book.pulled[event.rank] = event
        if len(book.pulled) == self._link.replicas:
            self.everywhere = event.version
            book.everywhere.set()
        self._check(book)

    def _on_probed(self, event: Probed) -> None:
        book = self._books[event.version]
        book.probed[event.rank] = event
        self._check(book)

    def _on_sent(self, event: Sent) -> None:
        book = self._books[event.version]
        book.sent = event
        self._check(book)

    def _check(self, book: _Version) -> None:
        probed = not self._probe or len(book.probed) == self._link.replicas
        if book.sent is not None and probed:
            book.checked.set()


def probe_set(prompts: list[np.ndarray], length: int) -> list[np.ndarray]:
    """Sequences of `length` tokens made of real prompts: each is repeated until it is long enough, then cut."""
    return [np.resize(prompt, length).astype(np.int32) for prompt in prompts]
