"""Chat messages to token ids, and which of them the assistant said.

Where the tokenizer's template marks the assistant's words (`{% generation %}`), its marks are taken. Else every
conversation is rendered once more up to each assistant turn, and what the turn adds is its own: that is right for
templates under which a longer conversation extends a shorter one, and this is checked, message by message.

It refuses to know about losses beyond the mask. Invariants: the mask covers what the model would have to sample (the
words, tool calls and the token that ends the turn), never the header that asks for it; ids are those of one rendering
of the whole conversation.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from spmd_rl.data.tables import DataError

LossOn = Literal["assistant", "last_assistant", "all"]
Messages = list[dict[str, Any]]


def render(
    tokenizer: Any, messages: Messages, tools: list[Any] | None = None, loss_on: LossOn = "assistant"
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32[T], mask uint8[T]) of one conversation. DataError for one that can't be rendered or learned."""
    _check(messages)
    tokens = _ids(tokenizer, messages, tools)
    if loss_on == "all":
        return tokens, np.ones(len(tokens), np.uint8)
    spans = _marked(tokenizer, messages, tools) or _spans(tokenizer, messages, tools, tokens)
    mask = np.zeros(len(tokens), np.uint8)
    for start, end in spans[-1:] if loss_on == "last_assistant" else spans:
        mask[start:end] = 1
    if not mask.any():
        raise DataError("the chat template drops the assistant's turns: none of their tokens is in the rendered text")
    return tokens, mask


def _check(messages: Any) -> None:
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise DataError(f"messages must be a list of objects with a role, not {str(messages)[:60]!r}")
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError("the conversation has no assistant turn, so there is nothing to learn")


def _ids(tokenizer: Any, messages: Messages, tools: list[Any] | None, prompt: bool = False) -> np.ndarray:
    try:
        ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, return_dict=False)
    except Exception as error:  # jinja's own errors, and what templates raise about roles
        raise DataError(f"the chat template does not render it: {type(error).__name__}: {error}") from error
    return np.asarray(ids, dtype=np.int32)


def _marked(tokenizer: Any, messages: Messages, tools: list[Any] | None) -> list[tuple[int, int]]:
    """Spans that the template itself marks; none when it has no marks."""
    if "{% generation" not in (template := str(tokenizer.chat_template)) and "{%- generation" not in template:
        return []
    made = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    mask = np.asarray(made["assistant_masks"], dtype=np.int8)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _spans(tokenizer: Any, messages: Messages, tools: list[Any] | None, tokens: np.ndarray) -> list[tuple[int, int]]:
    """Of every assistant turn: what it adds to the conversation so far with the header that asks for it."""
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _ids(tokenizer, messages[:number], tools, prompt=True) if number else np.empty(0, np.int32)
        through = _ids(tokenizer, messages[: number + 1], tools)
        for what, ids in (("the messages before", before), ("everything up to", through)):
            if not np.array_equal(ids, tokens[: len(ids)]):
                raise DataError(
                    f"{what} assistant turn {number} render to other tokens alone than inside the whole conversation, "
                    "so its own tokens can't be told: use a chat template that marks them with {% generation %}, or "
                    "data.loss_on = all"
                )
        if len(through) <= len(before):
            raise DataError(f"the chat template drops assistant turn {number}: it adds no token")
        spans.append((len(before), _end(tokenizer, tokens, len(before), len(through))))
    return spans


def _end(tokenizer: Any, tokens: np.ndarray, start: int, end: int) -> int:
    """Behind the last end token of the turn: what follows it (a newline) is the template's, not the model's."""
    ends = np.flatnonzero(tokens[start:end] == tokenizer.eos_token_id)
    return start + int(ends[-1]) + 1 if len(ends) else end
