"""Rows to prompts: a format string over the columns, plain or as what a user says, or a column of chat messages.

It refuses to know what a prompt is for. Invariants: a column that a row lacks, or null, is never part of a prompt, and
every error names the row.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import numpy as np

from spmd_rl.data.tables import DataError, Table

ROWS_LOOKED_AT = 20_000  # of a table, for the columns that are named: about a quarter of a second


class Prompts:
    """One way to make prompts of rows.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: a format string over the columns.
        chat: the template is what a user says, in the tokenizer's chat template.
        system: what stands before it.
        messages: column of chat messages, in place of the template.
        name: of the table, and `key`: of the template, for errors.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        chat: bool = False,
        system: str = "",
        messages: str = "",
        name: str = "",
        key: str = "prompt",
    ) -> None:
        """DataError for a template that is none, and for chats without a chat template."""
        self._tokenizer, self._template, self._system = tokenizer, template, system
        self._chat, self._messages = chat, messages
        columns = [messages] if messages else columns_of(key, template)
        self.columns = dict.fromkeys(columns, "messages" if messages else key)  # column → the key that names it
        if (chat or messages) and not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"{name}: chat messages need a chat template, and the tokenizer has none; set chat = false "
                "and write the whole prompt, or set model.tokenizer to one that has a template"
            )

    def ids(self, row: dict[str, Any], where: str) -> np.ndarray:
        """int32[T]; `where` is the row's place, for errors."""
        prompt = self._text_or_messages(row, where)
        if isinstance(prompt, str):
            return np.asarray(self._tokenizer.encode(prompt), dtype=np.int32)
        ids = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        return np.asarray(ids, dtype=np.int32)

    def _text_or_messages(self, row: dict[str, Any], where: str) -> str | list[dict[str, Any]]:
        if self._messages:
            return _chat(Row(row, where)[self._messages], f"{where}: column {self._messages!r}")
        text = string.Formatter().vformat(self._template, (), Row(row, where))
        if not self._chat:
            return text
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": text}]


def check_rows(table: Table, wanted: Mapping[str, str]) -> None:
    """What is named (column → key) must be a column of the table and of its rows. DataError names what is not."""
    for column, key in wanted.items():
        if column not in table.columns:
            brace = "" if column.isidentifier() else " (a brace itself is written {{ or }})"
            has = ", ".join(table.columns)
            raise DataError(f"{table.name} has no column {column!r}, which {key} names{brace}; it has {has}")
    for number in range(min(len(table), ROWS_LOOKED_AT)):
        row = Row(table[number], table.where(number))
        for column in wanted:
            row[column]


class Row(dict[str, Any]):
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


def columns_of(key: str, template: str) -> list[str]:
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
