"""Episodes built from generations have the columns that training relies on."""

from __future__ import annotations

import numpy as np
import pytest

from spmd_rl.envs.protocol import Generation, single_turn, turns_to_sample
from spmd_rl.rollouts.types import Reward, RewardError, Task

TASK = Task("x", 0, {})


def generation(tokens: list[int], version: int = 3, stop_reason: str = "stop") -> Generation:
    n = len(tokens)
    return Generation(np.asarray(tokens, np.int32), np.full(n, -0.5, np.float32), np.full(n, version), stop_reason)


def test_columns_of_a_single_turn() -> None:
    episode = single_turn(TASK, np.asarray([7, 8], np.int32), generation([4, 5, 6]), 0.7, Reward(1.0))
    (sample,) = episode.samples
    assert sample.tokens.tolist() == [7, 8, 4, 5, 6]
    assert sample.mask.tolist() == [0, 0, 1, 1, 1]
    assert sample.logprobs.tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert sample.versions.tolist() == [-1, -1, 3, 3, 3]
    assert sample.temperatures.tolist() == pytest.approx([1, 1, 0.7, 0.7, 0.7])
    kinds = [sample.tokens, sample.mask, sample.logprobs, sample.versions, sample.temperatures]
    assert [k.dtype.name for k in kinds] == ["int32", "uint8", "float32", "int32", "float32"]
    assert sample.advantages is None


@pytest.mark.parametrize(
    ("stop_reason", "status", "valid"),
    [("stop", "ok", True), ("length", "truncated", True), ("aborted", "failed", False)],
)
def test_status_follows_the_stop_reason(stop_reason: str, status: str, valid: bool) -> None:
    episode = single_turn(TASK, np.asarray([7]), generation([4], stop_reason=stop_reason), 1.0, Reward(0.0))
    assert (episode.status, episode.valid) == (status, valid)


def test_an_error_is_not_a_reward() -> None:
    assert not single_turn(TASK, np.asarray([7]), generation([4]), 1.0, RewardError("judge is down")).valid


def test_turns_are_laid_end_to_end() -> None:
    sample = turns_to_sample(
        [(np.asarray([1, 2]), generation([3], version=4)), (np.asarray([5]), generation([6, 7], version=5))], 1.0
    )
    assert sample.tokens.tolist() == [1, 2, 3, 5, 6, 7]
    assert sample.mask.tolist() == [0, 0, 1, 0, 1, 1]
    assert sample.versions.tolist() == [-1, -1, 4, -1, 5, 5]
