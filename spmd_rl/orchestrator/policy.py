"""The policy as an environment sees it: tokens in, a generation out. Behind it, a router, a tick and an engine.

One `RolloutPolicy` belongs to one rollout: its seed and the number of a call decide all sampling noise, and its
KV-cache salt stays that of the version it began with, so later turns reuse its own cached prefix and nobody else's
older one.

It remembers its calls. A run that is taken up again runs its open rollouts from their beginning: the policy gives the
answers of then, and what had no answer goes on behind its tokens. So an environment needs no state that can be saved,
as long as it does the same when it hears the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.protocol import Generation, PromptTooLong
from spmd_rl.orchestrator.gate import Gate
from spmd_rl.orchestrator.link import Link
from spmd_rl.orchestrator.records import checksum
from spmd_rl.orchestrator.router import Router
from spmd_rl.orchestrator.seeds import seed_of
from spmd_rl.world.messages import Generated, Partial


class ChangedCourse(RuntimeError):
    """A rollout that was taken up again asked for something else than the first time."""


@dataclass
class Call:
    """One generation that a rollout asked for."""

    prompt: int  # checksum of its tokens
    request: int = -1  # id
    replica: int = -1
    answer: Generated | None = None
    partial: Partial | None = None  # of a request that was in flight when its engine was asked
    routes_from: int = -1  # the first position whose routed experts its replica keeps; -1: it keeps none
    length: int = 0  # of prompt and answer
    whole: int = 0  # checksum of prompt and answer

    @property
    def kept(self) -> bool:
        """Whether its replica keeps routed experts of it."""
        return self.routes_from >= 0 and self.answer is not None

    def plain(self) -> dict[str, Any]:
        """For a snapshot."""
        return {
            "prompt": self.prompt,
            "request": self.request,
            "replica": self.replica,
            "answer": _columns(self.answer),
            "partial": _columns(self.partial),
            "routes_from": self.routes_from,
        }

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Call:
        """What was in the snapshot."""
        answer, partial = plain["answer"], plain["partial"]
        call = cls(plain["prompt"], plain["request"], plain["replica"], routes_from=plain.get("routes_from", -1))
        call.answer = Generated(**answer) if answer else None
        call.partial = Partial(**partial) if partial else None
        return call


class RolloutPolicy:
    """Generates for one rollout.

    Args:
        group: id of the rollout's group; its members share a prompt, so they like the same replica.
        rollout: id that no other rollout of the run has.
        first_replica: what the router calls replica 0.
        seq_len: longest sequence, in tokens, that engine and trainer hold.
        past: its calls in an earlier life of the run; those without an answer and a partial are not among them.
        routed: called with replica and id of each request that was answered, whose routed experts the replica keeps
            now; None: it keeps none.
    """

    def __init__(
        self,
        link: Link,
        router: Router,
        gate: Gate,
        sampling: SamplingConfig,
        stop_token_ids: list[int],
        seq_len: int,
        *,
        first_replica: int = 0,
        group: int,
        rollout: int,
        seed: int,
        past: list[Call] | None = None,
        routed: Callable[[int, int], None] | None = None,
    ) -> None:
        self.sampling, self._routed = sampling, routed
        self.calls: list[Call] = []
        self.changed_course = False
        self._link, self._router, self._gate = link, router, gate
        self._stops, self._seq_len = stop_token_ids, seq_len
        self._group, self._rollout, self._seed = group, rollout, seed
        self._salt, self._first_replica = "", first_replica
        self._past = past or []

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[None]:
        """Around the rollout: what it does between its calls, and its end, happen when the gate lets them."""
        self._gate.enter(self._rollout)
        try:
            yield
            await self._gate.land(self._rollout)
        finally:
            self._gate.leave(self._rollout)
            self._router.forget_rollout(self._group, self._rollout)

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        """Sample a continuation of `tokens` (int32[T]). PromptTooLong when T leaves no room below `seq_len`."""
        room = self._seq_len - len(tokens)
        if room < 1:
            raise PromptTooLong(
                f"a prompt of {len(tokens)} tokens leaves no room in seq_len = {self._seq_len}: "
                "raise seq_len, or make the environment's prompts shorter"
            )
        call, number = self._next_call(tokens), len(self.calls) - 1
        if call.answer is None:
            call.answer = await self._ask(call, number, tokens, sampling, room)
        self._salt = call.answer.salt
        done = call.answer
        return Generation(done.tokens, done.logprobs, done.versions, done.stop_reason)

    def _next_call(self, tokens: np.ndarray) -> Call:
        number, prompt = len(self.calls), checksum(tokens)
        again = number < len(self._past)
        if again and self._past[number].prompt != prompt:
            self.changed_course = True
            raise ChangedCourse(
                f"call {number} of this rollout asks for other tokens than before the run was taken up again: the "
                "environment is not the same when it hears the same"
            )
        self.calls.append(self._past[number] if again else Call(prompt))
        return self.calls[-1]

    async def _ask(self, call: Call, number: int, tokens: np.ndarray, sampling: SamplingConfig, room: int) -> Generated:
        """Ask an engine, or ask it again for what was in flight; `call` learns which one it is."""
        if call.partial is None or call.replica < 0:
            if call.partial is None:
                await self._gate.land(self._rollout)
            call.replica = self._router.place(self._group, self._rollout, len(tokens))
        call.request = self._link.new_id() if call.request < 0 else call.request
        if self._routed is None:
            call.routes_from = -1
        elif call.partial is None:
            call.routes_from = self._routes_from(tokens)
        length = 0
        try:
            with self._gate.away(self._rollout):
                done = await self._link.generate(
                    self._first_replica + call.replica,
                    id=call.request,
                    rollout=self._rollout,
                    tokens=tokens.astype(np.int32),
                    max_tokens=min(sampling.max_tokens, room),
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    # Calls of one prompt (drafts, sub-agents) must not hear one noise.
                    seed=seed_of(self._seed, number) if number else self._seed,
                    stop_token_ids=[] if sampling.ignore_eos else self._stops,
                    salt=call.partial.salt if call.partial else self._salt,
                    begun=call.partial,
                    routes_from=call.routes_from,
                )
            length = call.length = len(tokens) + len(done.tokens)
            if self._routed is not None:
                call.whole = checksum(tokens.astype(np.int32), done.tokens)
                self._routed(call.replica, call.request)
        finally:
            self._router.done(call.replica, self._group, self._rollout, length)
        return done

    def _routes_from(self, tokens: np.ndarray) -> int:
        """Behind what the call before this one has routed, where this one goes on with its tokens."""
        before = self.calls[-2] if len(self.calls) > 1 else None
        if before is None or not before.kept or before.length > len(tokens):
            return 0
        goes_on = checksum(tokens[: before.length].astype(np.int32)) == before.whole
        return before.length - 1 if goes_on else 0


def _columns(message: Generated | Partial | None) -> dict[str, Any] | None:
    return None if message is None else {name: getattr(message, name) for name in message.__struct_fields__}
