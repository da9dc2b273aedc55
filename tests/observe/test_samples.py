"""Readable rollouts: what a person needs is in the line, and no text fails a run."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_tokens_have_columns_beside_their_pieces(tmp_path):
    turns = sample("qé:".encode() + b"ab", [0, 0, 0, 0, 1, 1], [-1, -1, -1, -1, 3, 4], advantage=-0.25)
    turns = replace(turns, agent="white", reward=0.75, logprobs=np.array([0, 0, 0, 0, -0.123456, -2], np.float32))
    (row,) = read(write_samples(tmp_path, 0, [episode(turns, data={"word": "é"})], decode))
    assert row["pieces"] == ["q", "", "é", ":", "a", "b"]
    assert row["mask"] == [0, 0, 0, 0, 1, 1]
    assert row["versions"] == [-1, -1, -1, -1, 3, 4]
    assert row["logprobs"] == [0, 0, 0, 0, -0.1235, -2]
    assert (row["advantages"], row["agent"], row["sample_reward"], row["temperature"]) == (-0.25, "white", 0.75, 1)
    assert (row["episode"], row["data"]) == (0, {"word": "é"})


@pytest.mark.parametrize(
    ("advantages", "written"),
    [
        (None, None),
        (0.5, 0.5),
        (np.array([9, 0.5, 0.5], np.float32), 0.5),  # what tokens of the prompt have is not seen
        (np.array([0, 0.1234567, -1], np.float32), [0, 0.123457, -1]),
        (np.array([0, math.nan, 1], np.float32), [0, None, 1]),
    ],
)
def test_advantages_are_one_number_or_one_per_token(tmp_path, advantages, written):
    one = replace(sample(b"qab", [0, 1, 1], [-1, 0, 0]), advantages=advantages)
    (row,) = read(write_samples(tmp_path, 0, [episode(one)], decode))
    assert row["advantages"] == written


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_becomes_null_and_is_said(tmp_path, value):
    broken = replace(sample(b"ab", [0, 1], [-1, 0]), logprobs=np.array([0, value], np.float32), reward=value)
    path = write_samples(tmp_path, 0, [episode(broken, reward=Reward(value, {"exact": value, "ok": 1.0}))], decode)
    (line,) = path.read_text("utf-8").splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (row["reward"], row["reward_error"]) == (None, f"the reward is {value}")
    assert (row["reward_parts"], row["sample_reward"]) == ({"exact": None, "ok": 1.0}, None)
    assert row["logprobs"] == [0, None]


def test_a_rollout_without_tokens_is_a_line_too(tmp_path):
    lost = replace(episode(reward=RewardError("sandbox gone")), status="failed")
    (row,) = read(write_samples(tmp_path, 0, [lost], decode))
    assert (row["status"], row["reward_error"]) == ("failed", "sandbox gone")
    assert (row["pieces"], row["prompt"], row["version_min"], row["temperature"]) == ([], "", None, None)


def test_data_of_a_task_is_shown_as_well_as_it_can_be(tmp_path):
    circle: dict = {}
    circle["again"] = circle
    deep: list = []
    for _ in range(3000):
        deep = [deep]
    one = sample(b"ab", [0, 1], [-1, 0])
    kinds = [{"set": {1}}, {("a", "tuple"): 1}, {"nan": math.nan}, circle, {"deep": deep}, {"long": "é" * 100_000}]
    rows = read(write_samples(tmp_path, 0, [episode(one, data=data) for data in kinds], decode, limit=9))
    assert rows[0]["data"] == {"set": "{1}"}
    assert all(row["data"].startswith("<not JSON: ") for row in rows[1:5])
    assert len(rows[5]["data"]) < 9000 and rows[5]["data"].endswith("(100012 characters)")


@given(st.binary(min_size=1, max_size=40), st.data())
def test_any_bytes_become_a_line_whose_columns_fit(tmp_path_factory, text, drawn):
    mask = drawn.draw(st.lists(st.integers(0, 1), min_size=len(text), max_size=len(text)))
    one = sample(text, mask, [said - 1 for said in mask], advantage=0.5)
    (row,) = read(write_samples(tmp_path_factory.getbasetemp(), 0, [episode(one)], decode))
    assert {len(row[name]) for name in ("pieces", "mask", "logprobs", "versions")} == {len(text)}
    assert "".join(row["pieces"]) == decode(list(text))


def test_weird_text_and_data_never_fail(tmp_path):
    broken = sample(b"\xff\x00\n:\xe2\x82", [0, 0, 0, 0, 1, 1], [-1, -1, -1, -1, 0, 0])

    def refuse(ids: list[int]) -> str:
        raise IndexError("no such id")

    first = write_samples(tmp_path, 1, [episode(broken, data={"set": {1}})], decode)
    assert len(first.read_bytes().splitlines()) == 1
    assert json.loads(first.read_bytes())["prompt"] == "\udcff\x00\n:"
    (row,) = read(write_samples(tmp_path, 2, [episode(broken)], refuse))
    assert "no such id" in row["prompt"] and "255" in row["prompt"]
    assert row["pieces"] == ["<255>", "<0>", "<10>", "<58>", "<226>", "<130>"]


def test_full_disk_is_explained(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000003.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="disk is full") as caught:
        write_samples(tmp_path, 3, [episode(sample(b"ab", [0, 1], [-1, 0]))], decode)
    assert caught.value.errno == errno.ENOSPC
