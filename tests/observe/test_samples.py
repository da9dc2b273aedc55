"""Readable rollouts: what a person needs is in the line, and no text fails a run."""

from __future__ import annotations

import errno
import json

import numpy as np
import pytest

from spmd_rl.observe.samples import write_samples
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Sample, Task


def decode(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", "surrogateescape")


def sample(text: bytes, mask: list[int], versions: list[int], advantage: float | None = None) -> Sample:
    size = len(text)
    zeros = np.zeros(size, np.float32)
    return Sample(
        tokens=np.frombuffer(text, np.uint8).astype(np.int32),
        mask=np.array(mask, np.uint8),
        logprobs=zeros,
        versions=np.array(versions, np.int32),
        temperatures=zeros + 1,
        advantages=None if advantage is None else np.where(np.array(mask) == 1, advantage, 0).astype(np.float32),
    )


def episode(*samples: Sample, reward=None, data=None) -> Episode:
    return Episode(Task("reverse", 7, data or {}), samples, reward or Reward(0.5, {"exact": 0.5}), seconds=1.25)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_line_tells_prompt_completion_reward_versions_and_advantage(tmp_path):
    one = sample("añ:bc".encode(), [0, 0, 0, 0, 1, 1], [-1, -1, -1, -1, 3, 4], advantage=-0.25)
    path = write_samples(tmp_path, 12, [episode(one)], decode)
    assert path == tmp_path / "rollouts" / "step_000012.jsonl"
    (row,) = read(path)
    assert (row["prompt"], row["completion"]) == ("añ:", "bc")
    assert (row["reward"], row["reward_parts"], row["status"]) == (0.5, {"exact": 0.5}, "ok")
    assert (row["version_min"], row["version_max"], row["advantage"]) == (3, 4, -0.25)
    assert (row["step"], row["source"], row["task"], row["sampled_tokens"]) == (12, "reverse", 7, 2)
    assert "añ" in path.read_text("utf-8")  # readable, not escaped


def test_tool_answers_belong_to_the_completion(tmp_path):
    turns = sample(b"q:aTOOLb", [0, 0, 1, 0, 0, 0, 0, 1], [-1, -1, 0, -1, -1, -1, -1, 1])
    (row,) = read(write_samples(tmp_path, 0, [episode(turns)], decode))
    assert (row["prompt"], row["completion"], row["advantage"]) == ("q:", "aTOOLb", None)


def test_every_sample_of_the_first_episodes_gets_a_line(tmp_path):
    two = episode(sample(b"ab", [0, 1], [-1, 0]), sample(b"cd", [0, 1], [-1, 0]))
    rows = read(write_samples(tmp_path, 0, [two, two, two], decode, limit=2))
    assert [(row["sample"], row["prompt"]) for row in rows] == [(0, "a"), (1, "c")] * 2


def test_failures_have_no_reward_but_a_reason(tmp_path):
    (row,) = read(
        write_samples(tmp_path, 0, [episode(sample(b"ab", [0, 0], [-1, -1]), reward=RewardError("x"))], decode)
    )
    assert (row["reward"], row["reward_error"]) == (None, "x")
    assert (row["prompt"], row["completion"], row["version_min"]) == ("ab", "", None)


def test_weird_text_and_data_never_fail(tmp_path):
    broken = sample(b"\xff\x00\n:\xe2\x82", [0, 0, 0, 0, 1, 1], [-1, -1, -1, -1, 0, 0])

    def refuse(ids: list[int]) -> str:
        raise IndexError("no such id")

    first = write_samples(tmp_path, 1, [episode(broken, data={"set": {1}})], decode)
    assert len(first.read_bytes().splitlines()) == 1
    assert json.loads(first.read_bytes())["prompt"] == "\udcff\x00\n:"
    (row,) = read(write_samples(tmp_path, 2, [episode(broken)], refuse))
    assert "no such id" in row["prompt"] and "255" in row["prompt"]


def test_full_disk_is_explained(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000003.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="disk is full") as caught:
        write_samples(tmp_path, 3, [episode(sample(b"ab", [0, 1], [-1, 0]))], decode)
    assert caught.value.errno == errno.ENOSPC
