"""Which replica serves a request: the one that has most of its prefix in the KV cache, unless its queue is too deep.

It refuses to know how caches evict: it remembers what was sent where, which is a guess that costs time when wrong and
never correctness. Every decision is a function of the calls before it.

Invariants: queue depths are never negative, and all zero when nothing is in flight; memory is bounded by
`max_groups` groups and their rollouts, the group used longest ago being forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any


class _Seen:
    """Tokens that one group sent to each replica: as a common prompt, and by rollout."""

    def __init__(self) -> None:
        self.prompt: dict[int, int] = {}  # replica → tokens
        self.rollouts: defaultdict[int, dict[int, int]] = defaultdict(dict)  # rollout → replica → tokens
        self.prompt_length = 0  # tokens of the first request: what all rollouts of the group have in common


class Router:
    """Places requests on replicas 0 … n−1 and counts their queues."""

    def __init__(self, replicas: int, slack: int, block: int = 1, max_groups: int = 10_000) -> None:
        """`slack`: requests that the best replica's queue may be deeper than the shallowest one; `block`: tokens of
        a KV block (a shorter prefix is never cached, so it attracts nothing)."""
        if replicas < 1 or slack < 0 or block < 1:
            raise ValueError(f"router: replicas {replicas} and block {block} must be ≥ 1, slack {slack} ≥ 0")
        self.depth = [0] * replicas  # requests in flight
        self._slack, self._block, self._max_groups = slack, block, max_groups
        self._groups: OrderedDict[int, _Seen] = OrderedDict()

    def place(self, group_id: int, rollout_id: int, prompt_length: int) -> int:
        """The replica for a request of `prompt_length` tokens, counted as in flight there until `done`.

        Longest cached prefix first, then the shallowest queue, then the lowest number.
        """
        seen = self._touch(group_id)
        seen.prompt_length = seen.prompt_length or prompt_length
        limit = min(self.depth) + self._slack
        replica = min(
            (r for r, depth in enumerate(self.depth) if depth <= limit),
            key=lambda r: (-self._cached(seen, rollout_id, prompt_length, r), self.depth[r], r),
        )
        self.depth[replica] += 1
        seen.prompt[replica] = seen.prompt_length
        seen.rollouts[rollout_id][replica] = prompt_length
        return replica

    def done(self, replica: int, group_id: int, rollout_id: int, length: int) -> None:
        """A request ended (aborted ones too) with `length` tokens, prompt and generation, now cached there."""
        if self.depth[replica] == 0:
            raise ValueError(f"router: replica {replica} has no request in flight; was one reported done twice?")
        self.depth[replica] -= 1
        if group_id in self._groups and rollout_id in self._groups[group_id].rollouts:  # else forgotten meanwhile
            self._groups[group_id].rollouts[rollout_id][replica] = length

    def forget_rollout(self, group_id: int, rollout_id: int) -> None:
        """The rollout is over; its group's prompt stays known."""
        if group_id in self._groups:
            self._groups[group_id].rollouts.pop(rollout_id, None)

    def forget_group(self, group_id: int) -> None:
        """The group and all its rollouts are over."""
        self._groups.pop(group_id, None)

    def state(self) -> dict[str, Any]:
        """What was sent where, for a snapshot."""
        groups = [
            [
                id,
                seen.prompt_length,
                list(seen.prompt.items()),
                [[r, list(t.items())] for r, t in seen.rollouts.items()],
            ]
            for id, seen in self._groups.items()
        ]
        return {"depth": self.depth, "groups": groups}

    def restore(self, state: dict[str, Any]) -> None:
        """Remember what was sent where, requests in flight included."""
        self.depth = list(state["depth"])
        for id, prompt_length, prompt, rollouts in state["groups"]:
            seen = self._groups[id] = _Seen()
            seen.prompt_length, seen.prompt = prompt_length, dict(prompt)
            seen.rollouts.update({rollout: dict(tokens) for rollout, tokens in rollouts})

    def _touch(self, group_id: int) -> _Seen:
        seen = self._groups.setdefault(group_id, _Seen())
        self._groups.move_to_end(group_id)
        if len(self._groups) > self._max_groups:
            self._groups.popitem(last=False)
        return seen

    def _cached(self, seen: _Seen, rollout_id: int, prompt_length: int, replica: int) -> int:
        """Tokens of this request that the replica's cache should hold, in whole blocks."""
        own = seen.rollouts.get(rollout_id, {}).get(replica, 0)
        tokens = min(prompt_length, max(own, seen.prompt.get(replica, 0)))
        return tokens // self._block * self._block


def _pairs(tokens: dict[int, int]) -> list[tuple[int, int]]:
    return list(tokens.items())
