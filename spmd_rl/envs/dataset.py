"""Rows of a dataset as tasks: one prompt, one completion, one reward. What `source.data` makes.

A prompt is a format string over the row's columns, plain or as a chat message, or a column of chat messages. Training
rows come in a new order every epoch; held-out rows always in the same one.

It refuses to know how rewards are computed and rows are stored. Invariants: training and held-out rows are disjoint (by
place in the table: a row that the table holds twice may be on both sides); which rows are held out depends on their
number alone; task `index` is the same for the same seed; a column that a row lacks, or null, is never part of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import numpy as np

from spmd_rl.config.tree import SourceConfig
from spmd_rl.data.tables import DataError, Table, open_beside, open_table
from spmd_rl.envs.deadline import TooSlow
from spmd_rl.envs.prompts import Prompts, Row, check_rows
from spmd_rl.envs.protocol import Policy, Split, single_turn
from spmd_rl.envs.rewards import BadReward, RewardFunction
from spmd_rl.rollouts.types import Episode, Task


class Dataset:
    """One source of rows. `tokenizer` is a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, seed: int, source: SourceConfig) -> None:
        """Raises DataError, or what `RewardFunction` raises, for a source that can't work."""
        self.tokenizer, self.seed, self.source = tokenizer, seed, source
        self.tables, self.rows = _split(source)
        self.reward = RewardFunction(source)
        self._epoch, self._order = -1, np.empty(0, np.int64)  # the training rows' order in the epoch asked for last
        self.prompts = Prompts(tokenizer, source.prompt, source.chat, source.system, source.messages, source.data)
        self.hints = Prompts(tokenizer, source.hint, source.chat, source.system, name=source.data, key="hint")
        self._check_rows()
        if not source.hint:
            self.hint = None  # nothing to offer: whoever asks for hints sees that there are none
        if not source.answer:
            self.teacher = None

    def task(self, index: int, split: Split) -> Task:
        """The row as a task. DataError where no row is on that side."""
        rows = self.rows[split]
        if not len(rows):
            raise DataError(
                f"{self.source.data} has no {split} row ({len(self.tables['train'])} rows, heldout_share = "
                f"{self.source.heldout_share:g}): give more rows or a dataset in `heldout`, or set "
                "orchestrator.eval.tasks = 0 to evaluate nothing"
            )
        epoch, place = divmod(index, len(rows))
        if split == "train":
            if epoch != self._epoch:
                self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(rows))
            place = int(self._order[place])
        number = int(rows[place])
        return Task(self.source.data, index, {"row": self.tables[split][number], "number": number, "split": split})

    def prompt(self, task: Task) -> np.ndarray:
        """int32[T]."""
        return self.prompts.ids(task.data["row"], self._where(task))

    def hint(self, task: Task) -> np.ndarray:
        """int32[H]: the prompt that gives the answer away."""
        return self.hints.ids(task.data["row"], self._where(task))

    def teacher(self, task: Task, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(prompt, the row's right answer with the end token)."""
        answer = self.tokenizer.encode(str(self._cell(task, self.source.answer)), add_special_tokens=False)
        return self.prompt(task), np.asarray([*answer, self.tokenizer.eos_token_id], dtype=np.int32)

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """One prompt, one completion."""
        prompt = self.prompt(task)
        generation = await policy.generate(prompt, policy.sampling)
        ids = generation.tokens.tolist()
        reward = await self.reward(
            completion=self.tokenizer.decode(ids[:-1] if generation.stop_reason == "stop" else ids),
            tokens=ids,
            row=task.data["row"],
            prompt=self.tokenizer.decode(prompt.tolist()),
        )
        return single_turn(task, prompt, generation, policy.sampling.temperature, reward)

    async def check_reward(self, tasks: int) -> None:
        """Try the reward on the first training rows, before anything starts: with the right answer and without any.

        DataError when it returns what is no reward, or raises or hangs whatever it is given.
        """
        failed: list[Exception] = []
        fine = 0
        for task, completion in self._tries(tasks):
            given = {
                "completion": completion,
                "tokens": self.tokenizer.encode(completion, add_special_tokens=False),
                "row": task.data["row"],
                "prompt": self.tokenizer.decode(self.prompt(task).tolist()),
            }
            try:
                self.reward.as_reward(await self.reward.call(given))
                fine += 1
            except BadReward as error:
                raise DataError(f"{self._where(task)}, completion {completion!r}: {error}") from error
            except Exception as error:  # legal for one completion, but not for all
                failed.append(error)
                if isinstance(error, TooSlow):
                    break  # a start-up of many deadlines would look like a hang of its own
        if not fine:
            raise DataError(f"no completion tried got a reward, of {len(failed)}: {self.reward.explain(failed[0])}")

    def _tries(self, tasks: int) -> Iterator[tuple[Task, str]]:
        for index in range(tasks):
            task = self.task(index, "train")
            if self.source.answer:
                yield task, str(self._cell(task, self.source.answer))
            yield task, ""

    def _cell(self, task: Task, column: str) -> Any:
        return Row(task.data["row"], self._where(task))[column]

    def _where(self, task: Task) -> str:
        return self.tables[task.data["split"]].where(task.data["number"])

    def _check_rows(self) -> None:
        """What the config names must be a column, of the table and of its rows."""
        wanted = (
            self.prompts.columns | self.hints.columns | ({self.source.answer: "answer"} if self.source.answer else {})
        )
        for table in self.tables.values():
            check_rows(table, wanted)


def _split(source: SourceConfig) -> tuple[dict[Split, Table], dict[Split, np.ndarray]]:
    """(table, numbers of its rows int64[n]) of each side."""
    table = open_table(source.data, source.split)
    everything = np.arange(len(table))
    if source.heldout:
        heldout = open_beside(source.heldout, source.data, source.split)
        return {"train": table, "heldout": heldout}, {"train": everything, "heldout": np.arange(len(heldout))}
    # At least one row on each side where there are two: a share of 0.1 of eight rows must not mean no evaluation.
    count = min(int(np.ceil(source.heldout_share * len(table))), len(table) - 1)
    by_hash = sorted(everything.tolist(), key=lambda row: blake2b(str(row).encode(), digest_size=8).digest())
    rows = {"train": np.sort(by_hash[count:]), "heldout": np.asarray(by_hash[:count], dtype=np.int64)}
    return {"train": table, "heldout": table}, rows
