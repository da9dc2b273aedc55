"""The policy as an environment sees it: tokens in, a generation out. Behind it, a router, a tick and an engine.

One `RolloutPolicy` belongs to one rollout: its seed decides all of its sampling noise, and its KV-cache salt stays
that of the version it began with, so later turns reuse its own cached prefix and nobody else's older one.
"""

from __future__ import annotations

import numpy as np

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.protocol import Generation
from spmd_rl.orchestrator.link import Link
from spmd_rl.orchestrator.router import Router


class PromptTooLong(ValueError):
    """No room is left for a single new token."""


class RolloutPolicy:
    """Generates for one rollout.

    Args:
        group: id of the rollout's group; its members share a prompt, so they like the same replica.
        rollout: id that no other rollout of the run has.
        first_replica: what the router calls replica 0.
        seq_len: longest sequence, in tokens, that engine and trainer hold.
    """

    def __init__(
        self,
        link: Link,
        router: Router,
        sampling: SamplingConfig,
        stop_token_ids: list[int],
        seq_len: int,
        *,
        first_replica: int = 0,
        group: int,
        rollout: int,
        seed: int,
    ) -> None:
        self.sampling = sampling
        self._link, self._router, self._stops, self._seq_len = link, router, stop_token_ids, seq_len
        self._group, self._rollout, self._seed = group, rollout, seed
        self._salt, self._first_replica = "", first_replica

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        """Sample a continuation of `tokens` (int32[T]). PromptTooLong when T leaves no room below `seq_len`."""
        room = self._seq_len - len(tokens)
        if room < 1:
            raise PromptTooLong(
                f"a prompt of {len(tokens)} tokens leaves no room in seq_len = {self._seq_len}: "
                "raise seq_len, or make the environment's prompts shorter"
            )
        replica = self._router.place(self._group, self._rollout, len(tokens))
        try:
            done = await self._link.generate(
                self._first_replica + replica,
                tokens=tokens.astype(np.int32),
                max_tokens=min(sampling.max_tokens, room),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=self._seed,
                stop_token_ids=[] if sampling.ignore_eos else self._stops,
                salt=self._salt,
            )
        except BaseException:
            self._router.done(replica, self._group, self._rollout, 0)
            raise
        self._router.done(replica, self._group, self._rollout, len(tokens) + len(done.tokens))
        self._salt = done.salt
        return Generation(done.tokens, done.logprobs, done.versions, done.stop_reason)
