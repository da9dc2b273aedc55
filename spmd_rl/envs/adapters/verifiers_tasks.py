"""The tasks of a verifiers taskset by number, of training and held out.

A finite taskset is read once, and its training tasks come in a new order every time all were seen. An infinite one is
a stream: training task i is the i-th of its tasks that are not held out, whatever the seed, so an infinite taskset is
seeded by its own options.

A task of this program holds the number in the taskset's order and its row as plain JSON; the row is compared with the
taskset's when the task is played, so a run that is taken up again plays what it asked for, or says that it can't.

It refuses to know how tasks are played. Invariant: which side a task is on depends on its row alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from spmd_rl.envs.builtin.splits import Content, Listed, canonical, fraction
from spmd_rl.envs.protocol import Split
from spmd_rl.rollouts.types import Task

KEPT = 4096  # tasks of an infinite taskset; an older one is found by reading the stream anew
LOOKED_AT = 100_000  # tasks of a stream in a row that may all be on the other side


def tasks_of(source: str, taskset: vf.Taskset, seed: int, heldout: float) -> Finite | Endless:
    """The taskset's tasks. ValueError for one that has none, or can't be read."""
    return Finite(source, taskset, seed, heldout) if taskset.bounded else Endless(source, taskset, heldout)


class Finite:
    """All tasks are known."""

    def __init__(self, source: str, taskset: vf.Taskset, seed: int, heldout: float) -> None:
        self._source = source
        self._tasks = list(_read(source, taskset))
        if not self._tasks:
            raise ValueError(f"{source}: the taskset has no tasks")
        contents = [_content(number, task) for number, task in enumerate(self._tasks)]
        self._sides = Listed(source, seed, heldout, contents, _key)

    def task(self, index: int, split: Split) -> Task:
        """Task number `index` ≥ 0 of a side. ValueError where no task is on it."""
        return self._sides.task(index, split)

    def of(self, task: Task) -> vf.Task:
        """The taskset's own task."""
        number = task.data["number"]
        return _same(self._source, task, self._tasks[number] if number < len(self._tasks) else None)


class Endless:
    """Tasks are read one after the other as far as they are asked for."""

    def __init__(self, source: str, taskset: vf.Taskset, heldout: float) -> None:
        if not 0 <= heldout < 1:
            raise ValueError(f"{source}: heldout = {heldout} is a share; it must lie in 0..1, and leave some to train")
        self._source, self._taskset, self._heldout = source, taskset, heldout
        self._numbers: dict[Split, list[int]] = {"train": [], "heldout": []}  # in the stream's order
        self._kept: OrderedDict[int, vf.Task] = OrderedDict()
        self._stream: Iterator[vf.Task] = _read(source, taskset)
        self._next, self._sorted = 0, 0  # numbers: of the stream's next task, of the next that has no side yet

    def task(self, index: int, split: Split) -> Task:
        """Task number `index` ≥ 0 of a side. ValueError where the stream has no more."""
        numbers, looked_at = self._numbers[split], 0
        while len(numbers) <= index:
            looked_at += 1
            if looked_at > LOOKED_AT or (split == "heldout" and not self._heldout):
                raise ValueError(
                    f"{self._source}: heldout = {self._heldout:g}, and of the next {looked_at - 1:,} tasks none is in "
                    f"{split}; set a share that leaves some on both sides, or orchestrator.eval.tasks = 0"
                )
            number = self._sorted
            content = _content(number, self._at(number))
            side: Split = "heldout" if fraction(_key(content)) < self._heldout else "train"
            self._numbers[side].append(number)
            self._sorted += 1
            looked_at *= side != split
        return Task(self._source, index, _content(numbers[index], self._at(numbers[index])))

    def of(self, task: Task) -> vf.Task:
        """The taskset's own task."""
        return _same(self._source, task, self._at(task.data["number"]))

    def _at(self, number: int) -> vf.Task:
        if number in self._kept:
            return self._kept[number]
        if number < self._next:
            self._stream, self._next = _read(self._source, self._taskset), 0
        while self._next <= number:
            task = next(self._stream, None)
            if task is None:
                raise ValueError(
                    f"{self._source}: the taskset calls itself infinite and ended after {self._next} tasks; set "
                    "`tasks` to their number"
                )
            self._kept[self._next] = task
            self._next += 1
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return self._kept[number]


def _read(source: str, taskset: vf.Taskset) -> Iterator[vf.Task]:
    try:
        yield from taskset
    except Exception as error:  # of the taskset's own code: a file that is missing, a hub that does not answer
        raise ValueError(f"{source}: load() of the taskset raised {type(error).__name__}: {error}") from error


def _content(number: int, task: vf.Task) -> Content:
    return {"number": number, "row": task.data.model_dump(mode="json", exclude_defaults=True, exclude={"idx"})}


def _key(content: dict[str, Any]) -> str:
    return canonical(content["row"])


def _same(source: str, task: Task, found: vf.Task | None) -> vf.Task:
    if found is None or _content(task.data["number"], found)["row"] != task.data["row"]:
        raise ValueError(
            f"{source}: task {task.data['number']} of the taskset is not what it was when it was asked for: its load() "
            "must yield the same tasks at each start; seed what it draws"
        )
    return found
