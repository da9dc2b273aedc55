"""What a request says: all of the sampling, the rollout's own seed, where to stop."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.protocol import PromptTooLong
from spmd_rl.world.messages import Generate
from tests.orchestrator.fake_run import make_config, prepare
from tests.orchestrator.virtual_time import run


def requested(sampling: SamplingConfig, prompt: int = 10, seq_len: int = 64) -> Generate:
    """The request that a rollout with seed 77 makes of a prompt of so many tokens."""

    async def main() -> Generate:
        made = await prepare(make_config(seq_len=seq_len))
        made.loop.versions.publish(0)
        policy = made.services.policy(sampling, group=3, rollout=4, seed=77)
        try:
            await policy.generate(np.arange(prompt), policy.sampling)
        finally:
            await made.cluster.close()
        return made.cluster.requests[0]

    return run(main())


def test_everything_that_was_asked_for_reaches_the_engine() -> None:
    request = requested(SamplingConfig(temperature=0.7, max_tokens=9, top_p=0.5, top_k=3))
    assert (request.temperature, request.max_tokens, request.top_p, request.top_k) == (0.7, 9, 0.5, 3)
    assert (request.seed, request.stop_token_ids, request.salt) == (77, [2], "")
    assert request.tokens.tolist() == list(range(10))
    assert request.tokens.dtype == np.int32


def test_a_generation_may_go_on_whatever_is_sampled() -> None:
    assert requested(SamplingConfig(ignore_eos=True)).stop_token_ids == []


@pytest.mark.parametrize(("prompt", "room"), [(10, 54), (60, 4), (63, 1)])
def test_new_tokens_end_with_the_sequence(prompt: int, room: int) -> None:
    assert requested(SamplingConfig(max_tokens=1000), prompt).max_tokens == room
    assert requested(SamplingConfig(max_tokens=1), prompt).max_tokens == 1


@pytest.mark.parametrize("prompt", [64, 65, 1000])
def test_a_prompt_without_room_is_refused_before_it_is_placed(prompt: int) -> None:
    with pytest.raises(PromptTooLong, match=f"{prompt} tokens leaves no room in seq_len = 64"):
        requested(SamplingConfig(), prompt)


def test_a_cancelled_request_is_no_longer_in_the_queue_of_its_replica() -> None:
    async def main() -> list[list[int]]:
        made = await prepare(make_config(), replicas=2)
        policy = made.services.policy(SamplingConfig(), group=0, rollout=0, seed=0)
        task = asyncio.create_task(policy.generate(np.arange(3), policy.sampling))
        await asyncio.sleep(0)
        depths = [list(made.services.router.depth)]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await made.cluster.close()
        return [*depths, made.services.router.depth]

    assert run(main()) == [[1, 0], [0, 0]]
