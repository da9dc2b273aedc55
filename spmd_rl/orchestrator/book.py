"""The book of groups: which are open, what became of them, what the next batch is made of.

Every change is one record (`records.py`), made by one method. The same methods follow the records of an earlier run, so
what a resumed run knows is what the journal says, by the same code. The window decides who may come in and who may be
consumed; this file adds what a group is: its task, its episodes, and why it was closed.

It refuses to know about rollouts in progress, engines and time. Invariants: a group is in one place at a time (open,
finished, handed out, or gone); what `state` gives and `restore` takes is everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from spmd_rl.algorithms import resolve
from spmd_rl.algorithms.lengths import rewards_of, sampled_tokens
from spmd_rl.algorithms.weigh import zero_variance
from spmd_rl.config.tree import Config, OrchestratorConfig
from spmd_rl.orchestrator.curriculum import make_curriculum
from spmd_rl.orchestrator.records import Admitted, Closed, Fate, Log, Record, Released, Rolled, Took
from spmd_rl.orchestrator.window import Window
from spmd_rl.rollouts.plain import episode_from, group_from, plain_episode, plain_group
from spmd_rl.rollouts.routes import without_routes
from spmd_rl.rollouts.types import Episode, Group, Task

REPLACED = ("equal", "gated")  # dropped for what their rewards are


@dataclass
class OpenGroup:
    """A group whose rollouts run."""

    id: int
    version: int  # on the engines when it was admitted
    source: int
    index: int  # of the task in its source
    task: Task
    episodes: dict[int, Episode] = field(default_factory=dict)  # of the rollouts that ended, by sample


@dataclass(frozen=True)
class Taken:
    """What was handed out for one optimizer step."""

    step: int
    groups: list[Group]
    dropped: list[Group]  # of equal rewards, since the last batch; without their tokens


class Book:
    """The groups of one run.

    Args:
        task: the task (source, index) is about.
        log: where records go.
    """

    def __init__(self, config: Config, task: Callable[[int, int], Task], log: Log) -> None:
        o = config.orchestrator
        self.window = Window(o.groups_per_batch, o.max_lag, o.window_fraction, o.order)
        self.log = log
        self.open: dict[int, OpenGroup] = {}
        self.fates: Counter[Fate] = Counter()
        self._config, self._task = o, task
        self._most = config.max_steps * o.groups_per_batch
        self._origins: dict[int, tuple[int, int]] = {}  # of the groups here: source, and number of the task in it
        self._finished: dict[int, Group] = {}
        self._dropped: list[Group] = []
        self._skips_equal = skips_equal(o)
        self._refill_limit = self._refills = int(refill_limit(o))  # left before the next batch
        self._net = 0  # groups admitted and not dropped
        self._groups = self._tokens = 0  # closed so far, and what they sampled
        self._curricula = [make_curriculum(source) for source in o.source]  # the data cursors
        self._sizes = [source.group_size or o.group_size for source in o.source]

    # --- what happens ---------------------------------------------------------------------------------------------

    def admit(self, version: int) -> OpenGroup | None:
        """Open a group with `version` on the engines; None when the window is full or the run needs no more."""
        self._expect()
        if self._net >= self._most or self.window.can_admit() <= 0:
            return None
        source = self._draw()
        return self._admit(Admitted(self.window.next_id, version, source, self._curricula[source].next()))

    def rolled(self, group: int, sample: int, episode: Episode) -> None:
        """A rollout ended."""
        self._write(Rolled(group, sample, plain_episode(episode)))
        self.open[group].episodes[sample] = episode

    def close(self, group: int) -> Fate:
        """All rollouts of the group ended: what becomes of it."""
        whole = self._whole(group)
        fate: Fate = "finished"
        if not any(episode.valid for episode in whole.episodes):
            fate = "invalid"
        elif self._refills > 0 and self._outside(whole):
            fate = "gated"
        elif self._refills > 0 and self._skips_equal and zero_variance(whole):
            fate = "equal"
        self._close(Closed(group, fate))
        return fate

    def give_up(self, group: int, fate: Fate) -> None:
        """Drop a group that no batch holds yet."""
        self._close(Closed(group, fate))

    def take(self, step: int) -> Taken | None:
        """The groups of optimizer step `step`, as soon as the window lets them go."""
        ids = self.window.take(self._enough)
        if ids is None:
            return None
        self._write(Took(step, ids))
        return self._hand_out(step, ids)

    def release(self, groups: list[int], version: int) -> None:
        """The step that used these groups serves as `version` everywhere: their slots are free."""
        self._write(Released(groups, version))
        self.window.release(groups)

    def late(self, after: int) -> list[int]:
        """Groups that no batch holds yet and that were opened under versions above `after`."""
        return [id for id in (*self.open, *self._finished) if self.window.version_of(id) > after]

    def drop_routes(self) -> None:
        """The routed experts of episodes that are not trained yet are not kept any longer."""
        for group in self.open.values():
            group.episodes = {sample: without_routes(episode) for sample, episode in group.episodes.items()}
        for id, whole in self._finished.items():
            self._finished[id] = replace(whole, episodes=tuple(map(without_routes, whole.episodes)))

    # --- what happened ----------------------------------------------------------------------------------------------

    def follow(self, record: Record) -> Taken | None:
        """Do what a record of an earlier run says; the batch, where one was handed out. Nothing is written."""
        match record:
            case Admitted():
                self._expect()
                if record.group != self.window.next_id:
                    raise ValueError(f"the journal admits group {record.group}, and {self.window.next_id} comes next")
                self._admit(record, write=False)
            case Rolled():
                group = self.open[record.group]
                group.episodes[record.sample] = episode_from(record.episode, group.task)
            case Closed():
                self._close(record, write=False)
            case Took():
                self.window.take_again(record.groups)
                return self._hand_out(record.step, record.groups)
            case Released():
                self.window.release(record.groups)
        return None

    def state(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            "window": self.window.state(),
            "open": [
                {
                    "id": group.id,
                    "version": group.version,
                    "source": group.source,
                    "index": group.index,
                    "episodes": [[sample, plain_episode(e)] for sample, e in group.episodes.items()],
                }
                for group in self.open.values()
            ],
            "finished": [[*self._origins[group.id], plain_group(group)] for group in self._finished.values()],
            "dropped": [[*self._origins[group.id], plain_group(group)] for group in self._dropped],
            "counts": [self._refills, self._net, self._groups, self._tokens],
            "curricula": [curriculum.state() for curriculum in self._curricula],
            "fates": dict(self.fates),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Be as the book was that gave this state."""
        self.window.restore(state["window"])
        for plain in state["open"]:
            group = self._opened(plain["id"], plain["version"], plain["source"], plain["index"])
            group.episodes = {sample: episode_from(episode, group.task) for sample, episode in plain["episodes"]}
            self.open[group.id] = group
        finished, self._dropped = ([self._closed(*entry) for entry in state[key]] for key in ("finished", "dropped"))
        self._finished = {group.id: group for group in finished}
        self._refills, self._net, self._groups, self._tokens = state["counts"]
        for curriculum, saved in zip(self._curricula, state["curricula"], strict=True):
            curriculum.restore(saved)
        self.fates = Counter(state["fates"])
        self._expect()

    # --- both -------------------------------------------------------------------------------------------------------

    def _admit(self, record: Admitted, write: bool = True) -> OpenGroup:
        if write:
            self._write(record)
        self._net += 1
        self._curricula[record.source].drew(record.index)
        id = self.window.admit(record.version)
        self.open[id] = self._opened(id, record.version, record.source, record.index)
        return self.open[id]

    def _opened(self, id: int, version: int, source: int, index: int) -> OpenGroup:
        self._origins[id] = (source, index)
        return OpenGroup(id, version, source, index, self._task(source, index))

    def _closed(self, source: int, index: int, plain: dict[str, Any]) -> Group:
        self._origins[plain["id"]] = (source, index)
        return group_from(plain, self._task(source, index))

    def _close(self, record: Closed, write: bool = True) -> None:
        if write:
            self._write(record)
        id, fate = record.group, record.fate
        self.fates[fate] += 1
        if fate in ("finished", "equal", "gated", "invalid"):
            group = self._whole(id)
            if len(rewards := rewards_of(group)):
                self._curricula[group.source].ended(self.open[id].index, float(rewards.mean()))
            self._groups, self._tokens = self._groups + 1, self._tokens + group_tokens(group)
            if fate == "finished":
                self._finished[id] = group
                self.window.finish(id)
            elif fate in REPLACED:
                self._refills -= 1
                self._dropped.append(without_tokens(group))
        self.open.pop(id, None)
        if fate != "finished":
            self._finished.pop(id, None)
            self.window.drop(id)
            self._net -= 1
            if fate not in REPLACED:  # those are handed out, in a way, with the next batch
                del self._origins[id]

    def _hand_out(self, step: int, ids: list[int]) -> Taken:
        dropped, self._dropped = self._dropped, []
        for id in (*ids, *(group.id for group in dropped)):
            del self._origins[id]
        self._refills = self._refill_limit
        return Taken(step, [self._finished.pop(id) for id in ids], dropped)

    def _whole(self, id: int) -> Group:
        group = self.open[id]
        episodes = tuple(group.episodes[sample] for sample in range(self._sizes[group.source]))
        return Group(id, group.task, episodes, group.version, group.source)

    def _outside(self, group: Group) -> bool:
        """Whether the group's mean reward is outside of the gate, where there is one."""
        low, high = self._config.reward_gate
        return low < high and not low <= float(rewards_of(group).mean()) <= high

    def _enough(self, batch: list[int]) -> bool:
        """Batches counted in tokens are complete with fewer groups than the window's number."""
        if self._config.batch_unit != "tokens":
            return False
        return sum(group_tokens(self._finished[id]) for id in batch) >= self._config.batch_size

    def _expect(self) -> None:
        """Tell the window how many groups make a batch counted in tokens, by their mean size so far.

        Before the first one is known, as if every rollout hit its limit: that opens too few groups, not too many.
        """
        if self._config.batch_unit != "tokens":
            return
        size = max(self._sizes) * self._config.sampling.max_tokens
        if self._groups:
            size = max(1, self._tokens // self._groups)
        self.window.expect(-(-self._config.batch_size // size))

    def _draw(self) -> int:
        """The source that is furthest behind its ratio; ties go to the first."""
        sources = self._config.source
        return min(range(len(sources)), key=lambda s: (self._curricula[s].drawn + 1) / sources[s].ratio)

    def _write(self, record: Record) -> None:
        self.log.append(record)


def skips_equal(config: OrchestratorConfig) -> bool:
    """Whether groups of equal rewards are dropped: they teach something, or shall be kept, where not."""
    algorithm = resolve(config.algorithm)
    compares = algorithm.baseline == "group" and algorithm.learns == "advantages"
    return compares and config.algorithm.zero_variance != "keep"


def refill_limit(config: OrchestratorConfig) -> float:
    """How many groups may be dropped per batch for what their rewards are; others take their places."""
    low, high = config.reward_gate
    return config.algorithm.max_refill * config.groups_per_batch if skips_equal(config) or low < high else 0.0


def group_tokens(group: Group) -> int:
    """Sampled tokens that may be trained on."""
    return sum(sampled_tokens(episode) for episode in group.episodes if episode.valid)


def without_tokens(group: Group) -> Group:
    """The group's rewards and statuses alone."""
    return replace(group, episodes=tuple(replace(episode, samples=()) for episode in group.episodes))
