"""Where tasks come from: a list of all contents, or a function that draws one; and who is held out.

A content is the data of a task, plain JSON. What identifies it is a text: its `key`, by default its JSON. An
environment whose contents are alike in what matters (`3+5` and `5+3`) gives them one key, and they stay together.

Invariants: which side a content is on depends on its key alone (in a list that all keys of one side would leave empty:
on the list too), never on the seed, the process or Python's hash; training and held-out tasks share no key; task
`index` is the same for the same seed, and held-out tasks are the same for every seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np

from spmd_rl.envs.builtin.arguments import check_share
from spmd_rl.envs.protocol import Split
from spmd_rl.rollouts.types import Task

Content = dict[str, Any]
Key = Callable[[Content], str]


def canonical(content: Content) -> str:
    """The content as JSON, with its keys in order."""
    return json.dumps(content, sort_keys=True)


def fraction(key: str) -> float:
    """A number in [0, 1) that depends on the key alone."""
    return int.from_bytes(blake2b(key.encode(), digest_size=6).digest(), "big") / 2**48


class Listed:
    """All contents are known. Training tasks come in a new order every time all were seen, held-out ones in one order.

    Where the share is neither 0 nor 1, both sides have a key, or a single one is for training.
    """

    def __init__(self, source: str, seed: int, heldout: float, contents: list[Content], key: Key = canonical) -> None:
        """`heldout`: share of the contents, about. ValueError for what is no share."""
        check_share(source, "heldout", heldout)
        self._source, self._seed = source, seed
        keys = sorted({key(c) for c in contents}, key=fraction)
        count = sum(fraction(k) < heldout for k in keys)
        if 0 < heldout < 1:
            count = min(max(count, 1), len(keys) - 1)
        kept = set(keys[:count])
        ordered = sorted(contents, key=lambda c: (fraction(key(c)), canonical(c)))
        self.contents: dict[Split, list[Content]] = {
            "train": [c for c in ordered if key(c) not in kept],
            "heldout": [c for c in ordered if key(c) in kept],
        }

    def task(self, index: int, split: Split) -> Task:
        """Task number `index` ≥ 0. ValueError where no content is on that side."""
        contents = self.contents[split]
        if not contents:
            raise _empty(self._source, split, f"of its {sum(map(len, self.contents.values()))} tasks none is")
        epoch, place = divmod(index, len(contents))
        if split == "train":
            place = int(np.random.default_rng([self._seed, epoch]).permutation(len(contents))[place])
        return Task(self._source, index, dict(contents[place]))


class Drawn:
    """Contents are drawn at random, again and again until one is on the right side. The same one may come twice."""

    def __init__(
        self,
        source: str,
        seed: int,
        heldout: float,
        draw: Callable[[np.random.Generator], Content],
        key: Key = canonical,
    ) -> None:
        """`heldout`: share of the keys, about. ValueError for what is no share."""
        check_share(source, "heldout", heldout)
        self._source, self._seed, self._heldout = source, seed, heldout
        self._draw, self._key = draw, key

    def side(self, content: Content) -> Split:
        """Where a content belongs."""
        return "heldout" if fraction(self._key(content)) < self._heldout else "train"

    def task(self, index: int, split: Split) -> Task:
        """Task number `index` ≥ 0. ValueError where no content seems to be on that side."""
        share = self._heldout if split == "heldout" else 1 - self._heldout
        rng = np.random.default_rng([1, self._seed, index] if split == "train" else [2, index])
        # So many draws miss a side of this share, where it is not empty, less than once in 10^17.
        for _ in range(math.ceil(40 / share) if share else 0):
            content = self._draw(rng)
            if self.side(content) == split:
                return Task(self._source, index, content)
        raise _empty(self._source, split, f"heldout = {self._heldout:g}, and no task that was drawn is")


def _empty(source: str, split: Split, what: str) -> ValueError:
    side = "in training" if split == "train" else "held out"
    way_out = "or set orchestrator.eval.tasks = 0 to evaluate nothing" if split == "heldout" else "or lower that share"
    return ValueError(
        f"{source}: {what} {side}; make the tasks more various, give a share heldout that leaves some on both sides, "
        f"{way_out}"
    )
