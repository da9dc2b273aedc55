"""Engines and trainers that live by ticks: what lockstep's `exchange` and `give` talk to, without processes.

Everything takes a random real time, so that whatever depends on time is different in every run; what engines sample is
a function of the request, the position and the policy version. Engines know fences: a request that is begun anew goes
on behind its tokens.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np

from spmd_rl.orchestrator.records import checksum
from spmd_rl.world.messages import (
    Cancel,
    Event,
    Export,
    Exported,
    Fence,
    Fenced,
    Generate,
    Generated,
    Partial,
    Probed,
    Pull,
    Pulled,
    Ready,
    Save,
    Saved,
    Send,
    Sent,
    Tick,
    Train,
    Trained,
)
from tests.orchestrator.fake_cluster import TRAINER_METRICS, score, write_checkpoint


class Death(BaseException):
    """The process is gone."""


class FakeRanks:
    """All ranks but rank 0.

    Args:
        dies_at: number of the exchange with engines at which everything ends; 0 = never.
        jitter_s: upper bound of the random time that anything takes.
    """

    def __init__(self, engines: int, dies_at: int = 0, jitter_s: float = 0.002) -> None:
        self._engines = [FakeEngine(2 + i) for i in range(engines)]
        # (when the trainer is through, what it says, which version all engines hold by then)
        self._said: list[tuple[float, Event, int]] = [(0.0, Ready(1, {}), -1)]
        self._sent = -1
        self._jitter_s, self._dies_at, self.exchanges = jitter_s, dies_at, 0
        self._random = random.Random()
        self._weights = 0  # a checksum of all that was trained on
        self.trained: list[tuple[int, int]] = []

    def exchange(self, down: dict[int, list[Any]]) -> list[tuple[int, Event]]:
        """One tick, as `Metronome.exchange`; runs on a thread."""
        time.sleep(self._random.random() * self._jitter_s)
        if len(down) > 1 or 0 not in down:
            self.exchanges += 1
            if self.exchanges == self._dies_at:
                raise Death
        events: list[tuple[int, Event]] = []
        for member in sorted(down):
            said = self._trainer() if member == 0 else self._engines[member - 1].take(down[member])
            events += [(member, event) for event in said]
        return events

    def give(self, orders: list[Any]) -> None:
        """Orders to one trainer rank or more; the first one answers."""
        slow_s = 8 * self._jitter_s  # an optimizer step takes several ticks, or none
        through = max([time.monotonic(), *(at for at, _, _ in self._said)]) + self._random.random() * slow_s
        order = orders[0]
        match order:
            case Train():
                columns = [row[name] for rows in order.rows for row in rows for name in sorted(row)]
                self._weights = checksum(np.asarray([self._weights]), *columns)
                self.trained.append((order.step, self._weights))
                metrics = TRAINER_METRICS | {"loss": float(self._weights), "time/train_s": self._random.random()}
                self._say(through, Trained(order.step, order.phase, metrics | {"time/wait_s": 0.0}))
            case Send():
                # As where engines stage bucket by bucket: the version before leaves the trainer with its swap.
                self._say(through, Sent(order.version, 0.1, score(order.probe, order.version)), self._sent)
                self._sent = order.version
            case Save():
                order.state["weights"] = self._weights
                write_checkpoint(order)
                self._say(through, Saved(order.folder))
            case Export():
                self._say(through, Exported(order.folder))

    def restore(self, weights: int) -> None:
        """What a Restore order would bring; the fake is told by the test."""
        self._weights = weights

    def _say(self, at: float, event: Event, needs: int = -1) -> None:
        self._said.append((at, event, needs))

    def _trainer(self) -> list[Event]:
        """What it has to say by now: one thing after the other."""
        now, held = time.monotonic(), min(engine.version for engine in self._engines)
        through = list(itertools.takewhile(lambda said: said[0] <= now and said[2] <= held, self._said))
        self._said = self._said[len(through) :]
        return [event for _, event, _ in through]


class FakeEngine:
    """One replica: every request gets a token per step."""

    def __init__(self, rank: int) -> None:
        self.rank, self.version = rank, -1
        self._live: dict[int, tuple[Generate, list[int], list[int], str]] = {}  # request, tokens, versions, salt
        self._pulls: list[Pull] = []
        self._told = False

    def take(self, decisions: list[Any]) -> list[Event]:
        """Decisions in order, and the steps of the tick."""
        events: list[Event] = [] if self._told else [Ready(self.rank, {})]
        self._told = True
        for decision in decisions:
            match decision:
                case Generate():
                    self._add(decision)
                case Cancel(id=id):
                    self._live.pop(id, None)
                case Pull():
                    self._pulls.append(decision)
                case Fence():
                    events.append(Fenced(self.rank, [self._partial(id) for id in self._live]))
                case Tick():
                    events += self._swap(decision.number)
                    for _ in range(decision.steps):
                        events += self._step()
        return events

    def _add(self, request: Generate) -> None:
        begun = request.begun
        salt = begun.salt if begun else request.salt or f"v{self.version}"
        tokens, versions = (begun.tokens.tolist(), begun.versions.tolist()) if begun else ([], [])
        self._live[request.id] = (request, tokens, versions, salt)

    def _swap(self, tick: int) -> list[Event]:
        events: list[Event] = []
        while self._pulls and self._pulls[0].tick <= tick:
            pull = self._pulls.pop(0)
            assert pull.version > self.version
            self.version = pull.version
            events.append(Pulled(self.rank, pull.version, 4, time.monotonic(), 0.1, 4))
            if pull.probe:
                events.append(Probed(self.rank, pull.version, score(pull.probe, pull.version)))
        return events

    def _step(self) -> list[Event]:
        done = []
        for id, (request, tokens, versions, salt) in list(self._live.items()):
            position = len(request.tokens) + len(tokens)
            tokens.append(number(request.seed, position, self.version, salt) % 1000)
            versions.append(self.version)
            if len(tokens) >= min(request.max_tokens, 1 + number(request.seed, len(request.tokens)) % 9):
                partial = self._partial(id)
                done.append(Generated(id, partial.tokens, partial.logprobs, partial.versions, "stop", salt))
                del self._live[id]
        return done

    def _partial(self, id: int) -> Partial:
        _, tokens, versions, salt = self._live[id]
        ids = np.asarray(tokens, np.int32)
        return Partial(id, ids, -(ids % 7).astype(np.float32), np.asarray(versions, np.int32), salt)


def number(*what: Any) -> int:
    """A large number that is a function of all this."""
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=6).digest(), "big")


Wait = Callable[[], float]
