"""Built-in rewards: is this completion the right answer to this row?

Each is a class called with its arguments once and with (completion, row) for every rollout; it returns a number. They
refuse to know about tokens, rollouts and processes. Invariant: a row that can't be graded (no such column) raises; a
completion that can't is worth 0.
"""

from __future__ import annotations

import json
import re
from typing import Any

Row = dict[str, Any]


def _answer(row: Row, column: str) -> str:
    if row[column] is None:
        raise ValueError(f"the row has null in column {column!r}")
    return str(row[column])


class Exact:
    """1 for exactly the answer, else 0."""

    def __init__(self, answer: str, strip: bool = True, casefold: bool = False) -> None:
        """`strip`: white space around either does not count; `casefold`: nor does case."""
        self.answer, self.strip, self.casefold = answer, strip, casefold

    def __call__(self, completion: str, row: Row) -> float:
        return float(self._plain(completion) == self._plain(_answer(row, self.answer)))

    def _plain(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.casefold else text


class Regex:
    """1 where the pattern is found and its group equals the answer; without an answer, where it is found."""

    def __init__(self, answer: str, pattern: str, group: int = 1) -> None:
        """The last match counts: models reason before they answer."""
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from None
        if answer and not 0 <= group <= self.pattern.groups:
            raise ValueError(f"pattern {pattern!r} has {self.pattern.groups} groups, and group = {group}")
        self.answer, self.group = answer, group

    def __call__(self, completion: str, row: Row) -> float:
        found = list(self.pattern.finditer(completion))
        if not found or not self.answer:
            return float(bool(found))
        return float((found[-1].group(self.group) or "").strip() == _answer(row, self.answer).strip())


class JsonSchema:
    """1 for JSON that fits the schema, `parses` for JSON that does not, else 0."""

    def __init__(self, answer: str, schema: dict[str, Any] | None = None, parses: float = 0.0) -> None:
        """`schema`: for all rows; without it the row's answer column holds one (an object, or its text)."""
        from jsonschema import validators

        if schema is None and not answer:
            raise ValueError("json_schema needs reward_args.schema, or an answer column that holds a schema")
        if schema is not None:
            validators.validator_for(schema).check_schema(schema)
        self.answer, self.schema, self.parses = answer, schema, parses

    def __call__(self, completion: str, row: Row) -> float:
        from jsonschema import validators

        schema = row[self.answer] if self.schema is None else self.schema
        schema = json.loads(schema) if isinstance(schema, str) else schema
        text = completion.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
        try:
            value = json.loads(text)
        except ValueError:
            return 0.0
        return 1.0 if validators.validator_for(schema)(schema).is_valid(value) else self.parses


class Math:
    """1 where math-verify finds the completion's last expression equal to the answer.

    Runs in a process (`in_process`): math-verify bounds its time by an alarm signal, which Python delivers on a main
    thread only; on any other thread every answer would silently count as wrong.
    """

    in_process = True

    def __init__(self, answer: str) -> None:
        self.answer = answer

    def __call__(self, completion: str, row: Row) -> float:
        from math_verify import parse, verify

        gold = _answer(row, self.answer)
        expected = parse(gold if "\\boxed" in gold or "$" in gold else f"${gold}$")
        if not expected:
            raise ValueError(f"the answer {gold!r} of the row is no mathematical expression")
        return float(verify(expected, parse(completion)))


GRADERS = {"exact": Exact, "regex": Regex, "json_schema": JsonSchema, "math": Math}
