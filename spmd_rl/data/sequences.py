"""What supervised training reads: batch after batch of (tokens, mask), each a pure function of its step.

Rows come in a new order every epoch, by the seed; sequence number n of the run is place n mod rows of epoch n div rows.
So a run that starts at step k reads exactly what it would have read there. It refuses to know about ranks and losses.
Invariant: a row that can't be used is an error that names it, unless the config says to drop or cut it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd_rl.config.tree import Config
from spmd_rl.data.chat import render
from spmd_rl.data.tables import DataError, Table, open_beside, open_table

Sequence = tuple[np.ndarray, np.ndarray]  # tokens int32[T], mask uint8[T]: 1 = learned


class Sequences:
    """Training and validation sequences of a config.

    Args:
        tokenizer: a Hugging Face tokenizer; fake data need only its vocabulary.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        """Raises DataError for data that can't work, as far as columns and the first row show."""
        self._data, self._seq_len, self._seed, self._tokenizer = config.data, config.seq_len, config.seed, tokenizer
        self._epoch, self._order = -1, np.empty(0, np.int64)
        self.dropped = self.truncated = 0  # sequences so far that were too long
        if config.data.type == "fake":
            self._train, self._validation = self._fake, [("fake", i) for i in range(config.data.batch_size)]
            self.rows = 2**31
            return
        self._table, rows, held = _split(config)
        self._rows, self._validation, self.rows = rows, held, len(rows)
        self._check_columns()
        self._train = self._drawn
        self.batch(1)  # what is wrong with the first rows is said before a model is loaded
        self.dropped = self.truncated = 0

    def batch(self, step: int) -> list[Sequence]:
        """The sequences of optimizer step `step` ≥ 1; fewer than batch_size where some were dropped."""
        first = (step - 1) * self._data.batch_size
        drawn = [self._train(first + i) for i in range(self._data.batch_size)]
        batch = [sequence for sequence in drawn if sequence is not None]
        if not any(mask[1:].any() for _, mask in batch):
            raise DataError(f"step {step}: none of its {len(drawn)} sequences has a token to learn")
        return batch

    def validation(self) -> list[Sequence]:
        """All validation sequences; empty when there is no validation."""
        drawn = [self._fake(-1 - i) if table == "fake" else self._sequence(table, i) for table, i in self._validation]
        return [sequence for sequence in drawn if sequence is not None]

    def _drawn(self, number: int) -> Sequence | None:
        epoch, place = divmod(number, len(self._rows))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))
        return self._sequence(self._table, int(self._rows[self._order[place]]))

    def _sequence(self, table: Table, number: int) -> Sequence | None:
        row, where = table[number], table.where(number)
        try:
            tokens, mask = self._completion(row) if self._data.prompt else self._chat(row)
        except KeyError as error:
            has = ", ".join(row) or "none"
            raise DataError(f"{where} has no column {error.args[0]!r}; it has {has}") from None
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        if len(tokens) <= self._seq_len:
            return tokens, mask
        if self._data.too_long == "error":
            raise DataError(
                f"{where} has {len(tokens)} tokens, more than seq_len = {self._seq_len}: raise seq_len, or set "
                "data.too_long to drop or truncate"
            )
        if self._data.too_long == "drop":
            self.dropped += 1
            return None
        self.truncated += 1
        return tokens[: self._seq_len], mask[: self._seq_len]

    def _chat(self, row: dict[str, Any]) -> Sequence:
        tools = row[self._data.tools] if self._data.tools else None
        return render(self._tokenizer, row[self._data.messages], tools, self._data.loss_on)

    def _completion(self, row: dict[str, Any]) -> Sequence:
        for column in (self._data.prompt, self._data.completion):
            if row[column] is None:
                raise DataError(f"has null in column {column!r}: mend the row or leave it out")
        prompt = self._tokenizer.encode(str(row[self._data.prompt]))
        answer = self._tokenizer.encode(str(row[self._data.completion]), add_special_tokens=False)
        tokens = np.asarray([*prompt, *answer, self._tokenizer.eos_token_id], dtype=np.int32)
        learned_from = 0 if self._data.loss_on == "all" else len(prompt)
        return tokens, (np.arange(len(tokens)) >= learned_from).astype(np.uint8)

    def _fake(self, number: int) -> Sequence:
        """Random tokens, of one length or spread from fake_min_length to fake_length."""
        rng = np.random.default_rng([self._seed, 2**40 + number])
        low, high = self._data.fake_min_length or self._data.fake_length, self._data.fake_length
        length = int(rng.integers(max(2, low), high + 1))
        tokens = rng.integers(0, len(self._tokenizer), length).astype(np.int32)
        return tokens, np.ones(length, np.uint8)

    def _check_columns(self) -> None:
        data, columns = self._data, self._table.columns
        named = {"prompt": data.prompt, "completion": data.completion} if data.prompt else {"messages": data.messages}
        for key, column in (named | {"tools": data.tools}).items():
            if column and column not in columns:
                has = ", ".join(columns)
                raise DataError(f"{data.name} has no column {column!r}, which data.{key} names; it has {has}")
        if not data.prompt and not getattr(self._tokenizer, "chat_template", None):
            raise DataError(
                "data.messages needs a chat template, and the tokenizer has none: set model.tokenizer to one that has, "
                "or name data.prompt and data.completion"
            )


def _split(config: Config) -> tuple[Table, np.ndarray, list[tuple[Table, int]]]:
    """(table, its training rows int64[n], validation rows)."""
    data = config.data
    table = open_table(data.name, data.split)
    everything = np.arange(len(table))
    if data.validation:
        other = open_beside(data.validation, data.name, data.split)
        return table, everything, [(other, i) for i in range(len(other))]
    if not data.validation_share:
        return table, everything, []
    if len(table) < 2:
        raise DataError(
            f"{data.name} has one row, and data.validation_share = {data.validation_share:g} would leave nothing to "
            "train on or nothing to validate with: give more rows, or set validation_share = 0"
        )
    count = min(len(table) - 1, max(1, round(data.validation_share * len(table))))
    held = np.random.default_rng(0).permutation(len(table))[:count]
    return table, np.setdiff1d(everything, held), [(table, int(i)) for i in np.sort(held)]
