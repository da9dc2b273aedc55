"""Rows of a dataset as tasks: one prompt, one completion, one reward. What `source.data` makes.

A prompt is a format string over the row's columns, plain or as a chat message, or a column of chat messages. Training
rows come in a new order every epoch; held-out rows always in the same one.

It refuses to know how rewards are computed and rows are stored. Invariants: training and held-out rows are disjoint (by
place in the table: a row that the table holds twice may be on both sides); which rows are held out depends on their
number alone; task `index` is the same for the same seed; a column that a row lacks, or null, is never part of a prompt.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np

from spmd_rl.config.tree import SourceConfig
from spmd_rl.data.tables import DataError, Table, open_beside, open_table
from spmd_rl.envs.deadline import TooSlow
from spmd_rl.envs.protocol import Policy, Split, single_turn
from spmd_rl.envs.rewards import BadReward, RewardFunction
from spmd_rl.rollouts.types import Episode, Task

ROWS_LOOKED_AT = 20_000  # of each table, for the columns that the config names: about a quarter of a second


class Dataset:
    """One source of rows. `tokenizer` is a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, seed: int, source: SourceConfig) -> None:
        """Raises DataError, or what `RewardFunction` raises, for a source that can't work."""
        self.tokenizer, self.seed, self.source = tokenizer, seed, source
        self.tables, self.rows = _split(source)
        self.reward = RewardFunction(source)
        self._epoch, self._order = -1, np.empty(0, np.int64)  # the training rows' order in the epoch asked for last
        self._check_template()
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
        return self._ids(self._messages(task, self.source.prompt))

    def hint(self, task: Task) -> np.ndarray:
        """int32[H]: the prompt that gives the answer away."""
        return self._ids(self._messages(task, self.source.hint))

    def teacher(self, task: Task, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(prompt, the row's right answer with the end token)."""
        answer = self.tokenizer.encode(str(self._cell(task, self.source.answer)), add_special_tokens=False)
        return self.prompt(task), np.asarray([*answer, self.tokenizer.eos_token_id], dtype=np.int32)

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """One prompt, one completion."""
        limit = self.source.max_tokens or policy.sampling.max_tokens
        sampling = replace(policy.sampling, max_tokens=min(limit, policy.sampling.max_tokens))
        prompt = self.prompt(task)
        generation = await policy.generate(prompt, sampling)
        ids = generation.tokens.tolist()
        reward = await self.reward(
            completion=self.tokenizer.decode(ids[:-1] if generation.stop_reason == "stop" else ids),
            tokens=ids,
            row=task.data["row"],
            prompt=self.tokenizer.decode(prompt.tolist()),
        )
        return single_turn(task, prompt, generation, sampling.temperature, reward)

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

    def _messages(self, task: Task, template: str) -> str | list[dict[str, Any]]:
        """Text, or chat messages: the column's, or the template as what the user says."""
        if self.source.messages and template == self.source.prompt:
            return _chat(
                self._cell(task, self.source.messages), f"{self._where(task)}: column {self.source.messages!r}"
            )
        text = string.Formatter().vformat(template, (), _Row(task.data["row"], self._where(task)))
        if not self.source.chat:
            return text
        system = [{"role": "system", "content": self.source.system}] if self.source.system else []
        return [*system, {"role": "user", "content": text}]

    def _ids(self, prompt: str | list[dict[str, Any]]) -> np.ndarray:
        if isinstance(prompt, str):
            return np.asarray(self.tokenizer.encode(prompt), dtype=np.int32)
        ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        return np.asarray(ids, dtype=np.int32)

    def _cell(self, task: Task, column: str) -> Any:
        return _Row(task.data["row"], self._where(task))[column]

    def _where(self, task: Task) -> str:
        return self.tables[task.data["split"]].where(task.data["number"])

    def _check_template(self) -> None:
        """Chat messages need one."""
        source = self.source
        if (source.chat or source.messages) and not getattr(self.tokenizer, "chat_template", None):
            raise DataError(
                f"{source.data}: chat messages need a chat template, and the tokenizer has none; set chat = false "
                "and write the whole prompt, or set model.tokenizer to one that has a template"
            )

    def _check_rows(self) -> None:
        """What the config names must be a column, of the table and of its rows."""
        source = self.source
        named = {"messages": [source.messages]} if source.messages else {"prompt": _columns("prompt", source.prompt)}
        named |= {"hint": _columns("hint", source.hint), "answer": [source.answer]}
        wanted = {column: key for key, columns in named.items() for column in columns if column}
        for table in self.tables.values():
            for column, key in wanted.items():
                if column not in table.columns:
                    brace = "" if column.isidentifier() else " (a brace itself is written {{ or }})"
                    has = ", ".join(table.columns)
                    raise DataError(f"{table.name} has no column {column!r}, which {key} names{brace}; it has {has}")
            for number in range(min(len(table), ROWS_LOOKED_AT)):
                row = _Row(table[number], table.where(number))
                for column in wanted:
                    row[column]


class _Row(dict[str, Any]):
    """A row that says where it is when it lacks a column."""

    def __init__(self, row: dict[str, Any], where: str) -> None:
        super().__init__(row)
        self._where = where

    def __getitem__(self, column: str) -> Any:
        value = self.get(column)
        if value is None:
            lacks = f"has null in column {column!r}" if column in self else f"has no column {column!r}"
            raise DataError(f"{self._where} {lacks}; it has {', '.join(self) or 'none'}: mend the row or leave it out")
        return value


def _columns(key: str, template: str) -> list[str]:
    """The columns that a format string names. DataError for what is none over columns."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise DataError(
            f"{key} = {template!r} is no format string: {error} (a brace itself is written {{{{ or }}}})"
        ) from None
    columns = [field.split(".")[0].split("[")[0] for field in fields]
    if any(not column or column.isdigit() for column in columns):
        raise DataError(f"{key} = {template!r}: name a column between the braces, as in {{question}}")
    return columns


def _chat(messages: Any, where: str) -> list[dict[str, Any]]:
    """A cell as the messages of a prompt. DataError for what is none."""
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise DataError(f"{where} holds no list of messages, as in [{{'role': 'user', 'content': '…'}}]")
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where} ends with the assistant's turn, which is the policy's to write: leave it out")
    return messages


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
