"""The window: how many groups may be open, and which finished groups a batch may be filled from.

It bounds staleness: how many optimizer steps old the policy is that a group was admitted under, when the group is
consumed. It refuses to know about time, tasks, rewards and what is inside a group; it is a function of the calls.

With P groups per batch, max_lag S and fraction f:

- a group is *open* from its admission until the step that used it is released, or it is dropped; at most
  B = (S + 1)·P groups are open;
- the *line* is all groups in order of admission, without dropped ones. Consumed groups keep their place in it;
- the *window* is W consecutive places of the line, the first being the oldest group that is not yet consumed. W is
  max(1, ⌊f·B⌋) in order "window", 1 in order "fifo", unbounded in order "completion";
- a batch is filled from finished groups inside the window, and keeps what it took while it waits for the rest.

Claim. A group admitted at version a is consumed by a batch k (which trains at version k) with
k − a ≤ S + ⌈(W − 1) / P⌉.

Proof. Versions count completed steps from 0. (1) When g is admitted, at most B − 1 others are open, and the other
groups ever admitted and not dropped were released: at most a·P, for only completed steps are released. So at most
a·P + (S + 1)·P − 1 groups stand before g in the line; later drops only lower that. (2) While g is not consumed, the
window starts at g or before it, so a younger group that is consumed before g stands at most W − 1 places behind g:
there are at most W − 1 of them. (3) So at most (a + S + 1)·P − 1 + (W − 1) groups are consumed before g, and the index
of its batch is at most ⌊((a + S + 1)·P − 1 + W − 1) / P⌋ = a + S + ⌈(W − 1) / P⌉. ∎
Batches of fewer than P groups (counted in tokens) consume the line in more steps than that: then the number of groups
that a batch is expected to hold stands for P, and the claim holds as far as batches keep to it.
This is why consumed groups must keep their places: were the window the W oldest *unconsumed* groups, any number of
younger groups could overtake g. For S = 0 the bound is 0 in every order: a batch without g would hold P slots beside
g's, and there are only P.

No deadlock. If neither a group is running nor a batch in training, then either an unconsumed group exists: the oldest
is finished and inside the window, so it can be taken; or all open groups are in the batch under construction, fewer
than P ≤ B, so one can be admitted.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Literal

Order = Literal["fifo", "window", "completion"]


class Window:
    """Admission and consumption of groups. Every method raises ValueError when called out of turn."""

    def __init__(
        self, groups_per_batch: int, max_lag: int, fraction: float = 0.3, order: Order = "window", version: int = 0
    ) -> None:
        """`fraction` of all slots is the window's size (order "window" only); `version`: where this run starts."""
        if groups_per_batch < 1 or max_lag < 0 or not 0 < fraction <= 1:
            raise ValueError(
                f"window: groups per batch {groups_per_batch} must be ≥ 1, max_lag {max_lag} ≥ 0 and the fraction "
                f"{fraction} in (0, 1]"
            )
        self.groups_per_batch, self.max_lag, self.order, self._start = groups_per_batch, max_lag, order, version
        self._fraction = fraction
        self.expect(groups_per_batch)
        self._next_id = 0
        self._admitted: dict[int, int] = {}  # every open group → the version it was admitted at
        self._line: dict[int, None] = {}  # from the oldest unconsumed group on, consumed groups included
        self._running: set[int] = set()
        self._finished: dict[int, None] = {}  # not yet consumed, in order of completion
        self._batch: list[int] = []  # consumed, in the batch under construction
        self._training: set[int] = set()  # consumed, in batches that were handed out and are not released
        self._batches = 0  # handed out
        self._released = 0  # groups
        self._dropped = 0
        self._last_lags: list[int] = []

    @property
    def bound(self) -> int | None:
        """The largest possible lag of a consumed group, in versions; None: order "completion" has none."""
        if self.max_lag == 0:
            return 0
        if self.order == "completion":
            return None
        return self.max_lag + -(-(self.size - 1) // self.groups_per_batch)

    def expect(self, groups: int) -> None:
        """From now on batches are complete with about so many groups, P at most: slots and window are sized for it."""
        self.slots = (self.max_lag + 1) * min(groups, self.groups_per_batch)
        self.size = 1 if self.order == "fifo" else max(1, int(self._fraction * self.slots + 1e-9))

    def can_admit(self) -> int:
        """Free slots; one more where the batch under construction holds all open groups and fewer than it may."""
        wanting = len(self._batch) == len(self._admitted) < self.groups_per_batch
        return max(int(wanting), self.slots - len(self._admitted))

    def admit(self, version: int) -> int:
        """Open a group while `version` is on the engines; its id. Ids count up in order of admission."""
        if not self.can_admit():
            raise ValueError(f"window: all {self.slots} slots are taken; ask can_admit() first")
        if self._released > (version - self._start) * self.groups_per_batch:
            raise ValueError(
                f"window: admission at version {version}, but {self._released} groups were released since version "
                f"{self._start}: release a step's groups once its weights are on the engines, not before"
            )
        group_id, self._next_id = self._next_id, self._next_id + 1
        self._admitted[group_id] = version
        self._running.add(group_id)
        if self.order != "completion":  # which knows no places, and whose line might grow for ever behind a straggler
            self._line[group_id] = None
        return group_id

    @property
    def next_id(self) -> int:
        """The id that the next admitted group gets."""
        return self._next_id

    def version_of(self, group_id: int) -> int:
        """The version that an open group was admitted at."""
        return self._admitted[group_id]

    def finish(self, group_id: int) -> None:
        """All episodes of the group are complete: it may be consumed."""
        if group_id not in self._running:
            raise ValueError(f"window: group {group_id} is not running, so it can't finish")
        self._running.remove(group_id)
        self._finished[group_id] = None

    def drop(self, group_id: int) -> None:
        """Give up a group that was not yet consumed, running or finished; its slot is free at once."""
        if group_id not in self._running and group_id not in self._finished:
            raise ValueError(f"window: group {group_id} is neither running nor finished, so it can't be dropped")
        self._running.discard(group_id)
        self._finished.pop(group_id, None)
        self._line.pop(group_id, None)
        del self._admitted[group_id]
        self._dropped += 1
        self._trim()

    def take(self, enough: Callable[[list[int]], bool] = lambda batch: False) -> list[int] | None:
        """Fill the batch from the window; its P groups in order of consumption, or None while some are missing.

        A batch for which `enough` is true is complete with fewer. Groups taken in vain stay in the batch under
        construction. A batch that is handed out must be released.
        """
        while len(self._batch) < self.groups_per_batch and not enough(self._batch):
            group_id = self._first_in_window()
            if group_id is None:
                return None
            del self._finished[group_id]
            self._batch.append(group_id)
            self._trim()
        batch, self._batch = self._batch, []
        self._last_lags = [self._start + self._batches - self._admitted[i] for i in batch]
        self._training.update(batch)
        self._batches += 1
        return batch

    def take_again(self, group_ids: list[int]) -> None:
        """Hand out the batch that a run before this one, whose records are followed, handed out here."""
        for group_id in group_ids:
            if group_id in self._finished:
                del self._finished[group_id]
            elif group_id in self._batch:
                self._batch.remove(group_id)
            else:
                raise ValueError(f"window: group {group_id} is not finished, so no batch can have held it")
        self._trim()
        self._training.update(group_ids)
        self._batches += 1

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs, as plain data."""
        return {
            "next_id": self._next_id,
            "admitted": list(self._admitted.items()),
            "line": list(self._line),
            "running": sorted(self._running),
            "finished": list(self._finished),
            "batch": list(self._batch),
            "training": sorted(self._training),
            "counts": [self._batches, self._released, self._dropped],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Be as the window was that gave this state; it was made with the same arguments."""
        self._next_id = state["next_id"]
        self._admitted = {group: version for group, version in state["admitted"]}
        self._line = dict.fromkeys(state["line"])
        self._running = set(state["running"])
        self._finished = dict.fromkeys(state["finished"])
        self._batch = list(state["batch"])
        self._training = set(state["training"])
        self._batches, self._released, self._dropped = state["counts"]

    def in_training(self) -> list[int]:
        """Groups of batches that were handed out and are not released."""
        return sorted(self._training)

    def release(self, group_ids: list[int]) -> None:
        """Free the slots of a batch, once the weights of the step that used it are on the engines."""
        if strangers := [i for i in group_ids if i not in self._training]:
            raise ValueError(f"window: groups {strangers} are in no batch in training; was their batch released twice?")
        for group_id in group_ids:
            self._training.remove(group_id)
            del self._admitted[group_id]
        self._released += len(group_ids)

    def stats(self) -> dict[str, float]:
        """Counts of groups by state, and the lag in versions of the batch handed out last (absent before the first)."""
        stats: dict[str, float] = {
            "window/free": self.can_admit(),
            "window/running": len(self._running),
            "window/finished": len(self._finished),
            "window/in_batch": len(self._batch),
            "window/in_training": len(self._training),
            "window/dropped_total": self._dropped,
        }
        if self._last_lags:
            stats["window/lag_max"] = max(self._last_lags)
            stats["window/lag_mean"] = sum(self._last_lags) / len(self._last_lags)
        return stats

    def _first_in_window(self) -> int | None:
        """The finished group to consume next: the oldest in the window, or the one that finished first."""
        if self.order == "completion":
            return next(iter(self._finished), None)
        return next((i for i in islice(self._line, self.size) if i in self._finished), None)

    def _trim(self) -> None:
        """Let the line begin at the oldest group that is not consumed."""
        while self._line:
            first = next(iter(self._line))
            if first in self._running or first in self._finished:
                return
            del self._line[first]
