"""`main.py serve` on rank 0: a model behind an OpenAI-compatible endpoint, until somebody asks for the end.

Every request stands for itself: its conversation is rendered anew, sampled as its client wishes (where it does not say,
as `orchestrator.sampling` says), and forgotten. A client's `seed` repeats an answer; requests without one have seeds of
their own.

It refuses to know HTTP. Invariants: what one client asks is never part of what another one gets; when the program ends,
nobody waits for an answer that does not come.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.endpoint.endpoint import Endpoint, check_installed
from spmd_rl.envs.endpoint.errors import ApiError
from spmd_rl.envs.endpoint.requests import ChatRequest, CompletionRequest, Wishes
from spmd_rl.envs.endpoint.session import AT_ONCE, Answered, Session
from spmd_rl.models.hf_config import read_config, resolve
from spmd_rl.observe.logs import RankOutput
from spmd_rl.orchestrator import preflight
from spmd_rl.orchestrator.asked import ask
from spmd_rl.orchestrator.sampler import Services
from spmd_rl.orchestrator.seeds import seed_of
from spmd_rl.orchestrator.steering import Steering
from spmd_rl.world.launcher import STOP_FILE

if TYPE_CHECKING:
    from spmd_rl.world.world import World

LOOK_S = 1.0


def run(world: World, output: RankOutput) -> None:
    """Serve until SIGTERM, SIGUSR1 or a stop file."""
    config = world.config
    with world.watchdog.stage("preflight", config.deadlines.start_s):
        check_installed()
        folder = resolve(config.model.name)
        preflight.check_disk(config)
        tokenizer = preflight.load_tokenizer(config)
        preflight.check_vocabulary(tokenizer, read_config(folder), config)
        stops = preflight.stop_tokens(tokenizer, folder)
        endpoint = Endpoint(config.serve.host, config.serve.port, config.model.name)
        endpoint.hold()  # a port that is taken is known before the engine is built

    async def work(services: Services, steering: Steering) -> int:
        served = Served(services, tokenizer)
        async with endpoint.open(served, config.serve.key) as access:
            key = "the one in serve.key" if config.serve.key else access.key
            print(f"serving {config.model.name}\n  OPENAI_BASE_URL  {access.url}\n  OPENAI_API_KEY   {key}", flush=True)
            print(f"to end it: SIGTERM, or touch {Path(config.output_dir) / STOP_FILE}", flush=True)
            await until_stopped(services, steering)
            await served.close()
        return served.answered

    answered = ask(world, stops, work, print)
    print(f"stopped: {answered} requests were answered")


async def until_stopped(services: Services, steering: Steering) -> None:
    """Wait for somebody who asks for the end. That nobody asks for anything else is no stall."""
    while not steering.stopping:
        services.link.heard += not services.link.waiting
        await steering.changed(LOOK_S)


class Served:
    """Answers requests, each with a policy of its own."""

    def __init__(self, services: Services, tokenizer: Any) -> None:
        self.answered = 0
        self._services, self._tokenizer = services, tokenizer
        self._numbers = itertools.count()
        self._sessions: set[Session] = set()

    async def chat(self, request: ChatRequest) -> Answered:
        """`n` answers. ApiError."""
        return await self._answer(request.wishes, lambda session: session.chat(request))

    async def complete(self, request: CompletionRequest) -> Answered:
        """`n` answers to each prompt, prompt by prompt. ApiError."""
        return await self._answer(request.wishes, lambda session: session.complete(request))

    async def close(self) -> None:
        """Whoever waits is told that there will be no answer."""
        for session in list(self._sessions):
            await session.close()

    async def _answer(self, wishes: Wishes, ask: Callable[[Session], Awaitable[Answered]]) -> Answered:
        if len(self._sessions) >= AT_ONCE:
            raise ApiError(429, f"more than {AT_ONCE} requests at once", code="rate_limit_exceeded", again=True)
        number, config = next(self._numbers), self._services.config
        name = (number,) if wishes.seed is None else ("asked", wishes.seed)
        sampling, seed = self._sampling(wishes), seed_of(config.seed, "serve", *name)
        policy = self._services.policy(sampling, group=number, rollout=number, seed=seed)
        session = Session(self._tokenizer, policy)
        self._sessions.add(session)
        try:
            async with policy.attempt():
                answered = await ask(session)
        finally:
            self._sessions.discard(session)
            self._services.router.forget_group(number)
            if session.error is not None:
                print(f"request {number} failed: {type(session.error).__name__}: {session.error}")
        self.answered += 1
        return answered

    def _sampling(self, wishes: Wishes) -> SamplingConfig:
        usual = self._services.config.orchestrator.sampling
        return replace(
            usual,
            temperature=usual.temperature if wishes.temperature is None else wishes.temperature,
            top_p=usual.top_p if wishes.top_p is None else wishes.top_p,
            top_k=usual.top_k if wishes.top_k is None else wishes.top_k,
            max_tokens=wishes.max_tokens or usual.max_tokens,
        )
