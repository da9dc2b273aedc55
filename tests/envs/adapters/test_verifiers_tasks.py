"""Tasks of a taskset by number: both sides, the same at every start, and finite as well as infinite."""

from __future__ import annotations

import json
from itertools import count

import pytest
import verifiers.v1 as vf
from hypothesis import given, settings
from hypothesis import strategies as st
from offline_taskset import OfflineConfig, OfflineTaskset
from playing import make, play

from spmd_rl.envs.adapters import verifiers_tasks
from spmd_rl.envs.adapters.verifiers_tasks import Endless, tasks_of
from spmd_rl.rollouts.types import Reward, Task

ENDLESS = {"options": {"endless": True}}


def rows(env, split: str, number: int) -> list[str]:
    return [env.task(i, split).data["row"]["prompt"] for i in range(number)]


def test_a_finite_taskset_has_every_task_on_one_side():
    env = make()
    train, heldout = set(rows(env, "train", 200)), set(rows(env, "heldout", 200))
    assert not train & heldout and len(train | heldout) == 40 and heldout
    assert rows(env, "train", 20) == rows(make(), "train", 20) != rows(make(seed=1), "train", 20)
    assert rows(env, "heldout", 20) == rows(make(seed=1), "heldout", 20)


def test_a_task_is_plain_json():
    for task in (make().task(0, "train"), make(**ENDLESS).task(3, "heldout")):
        assert json.loads(json.dumps(task.data)) == task.data
        assert task.source == "verifiers:offline_taskset"


def test_the_first_so_many_tasks():
    env = make(tasks=5)
    assert len({*rows(env, "train", 50), *rows(env, "heldout", 50)}) == 5
    env = make(tasks=5, **ENDLESS)  # which makes an infinite one finite
    assert len({*rows(env, "train", 50), *rows(env, "heldout", 50)}) == 5


@settings(max_examples=30, deadline=None)
@given(asked=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["train", "heldout"])), max_size=12))
def test_an_endless_taskset_has_the_same_tasks_in_whatever_order_they_are_asked_for(asked):
    taskset = OfflineTaskset(OfflineConfig(endless=True))
    tasks = tasks_of("x", taskset, 0, 0.3)
    for index, split in asked:
        task = tasks.task(index, split)
        assert task == tasks_of("x", taskset, 1, 0.3).task(index, split)
        assert tasks.of(task).data.prompt == task.data["row"]["prompt"]


def test_an_endless_taskset_has_two_sides():
    env = make(**ENDLESS)
    train, heldout = rows(env, "train", 300), rows(env, "heldout", 30)
    assert not {*train} & {*heldout}
    first = [env.task(i, "heldout").data["number"] for i in range(30)]
    assert first == sorted(first) and 100 < first[-1] < 900  # about one in ten


def test_a_stream_is_read_anew_for_a_task_that_was_forgotten(monkeypatch):
    monkeypatch.setattr(verifiers_tasks, "KEPT", 3)
    env = make(**ENDLESS)
    first = env.task(0, "train")
    env.task(50, "train")
    episode, _ = play(env, [first.data["row"]["answer"]], first)
    assert episode.reward.value == 2.0


def test_a_resumed_task_is_the_same_or_an_error():
    task = make().task(7, "train")
    episode, _ = play(make(), [task.data["row"]["answer"]], Task(task.source, 7, json.loads(json.dumps(task.data))))
    assert isinstance(episode.reward, Reward) and episode.reward.value == 2.0
    with pytest.raises(ValueError, match="seed what it draws"):
        play(make(options={"seeded": False}), ["x"], task)
    with pytest.raises(ValueError, match="must yield the same tasks"):
        play(make(options={"count": 2}), ["x"], task)


def test_what_can_not_be_had():
    with pytest.raises(ValueError, match="has no tasks"):
        make(options={"count": 0})
    with pytest.raises(ValueError, match=r"load\(\) of the taskset raised"):
        make(options={"length": 99})
    with pytest.raises(ValueError, match="heldout"):
        make(heldout=0.0).task(0, "heldout")
    with pytest.raises(ValueError, match="heldout = 0"):
        make(heldout=0.0, **ENDLESS).task(0, "heldout")
    with pytest.raises(ValueError, match="heldout"):
        make(heldout=1.0, **ENDLESS)
    assert make(heldout=0.0, **ENDLESS).task(5, "train").data["number"] == 5


class Short(OfflineTaskset):
    """Calls itself infinite, and is not."""

    def load(self):
        for _, task in zip(range(3), super().load(), strict=False):
            yield task


class Same(OfflineTaskset):
    """One task, again and again."""

    def load(self):
        first = next(iter(super().load()))
        return (first.with_data() for _ in count())


def test_streams_that_end_or_never_change(monkeypatch):
    config = OfflineConfig(endless=True)
    with pytest.raises(ValueError, match="ended after 3 tasks"):
        Endless("x", Short(config), 0.1).task(9, "train")
    monkeypatch.setattr(verifiers_tasks, "LOOKED_AT", 100)
    with pytest.raises(ValueError, match="none is in heldout"):
        Endless("x", Same(config), 0.1).task(0, "heldout")
    assert Endless("x", OfflineTaskset(config), 0.1).task(30, "heldout").data["number"] > 100  # but not in a row


def test_the_offline_taskset_is_what_verifiers_says_it_is():
    assert vf.taskset_config_type("offline_taskset") is OfflineConfig
