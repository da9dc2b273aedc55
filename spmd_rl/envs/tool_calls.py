"""Tool calls in what a model wrote: Hermes' form, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

A call that makes no sense is a call with an error that tells the model what to do, never an exception: a policy that
still learns writes every kind of junk. What stands in a `<think>` block is thought, not called.

It refuses to know which tools there are. Invariants: `parse` takes any text and never raises; its time is linear in
the text's length; calls come in the order of the text, one for each `<tool_call>` outside of thoughts and of the JSON
of other calls.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
FORM = '{"name": "…", "arguments": {…}}'

SPANS = 16  # of the blocks whose JSON may hold tags in its strings: each that fails costs a look at the text before it

_SPACE = re.compile(r"\s*")
_UNTERMINATED = "Unterminated string"  # what the decoder says
_EDGE = re.compile(f"{re.escape(OPEN)}|{re.escape(CLOSE)}")


@dataclass(frozen=True)
class ToolCall:
    """One call, or what was meant to be one. With an `error`, name and arguments are empty."""

    name: str
    arguments: dict[str, Any]
    text: str  # what stood between the tags
    error: str = ""  # for the model to read


def parse(text: str) -> list[ToolCall]:
    """All calls in a reply."""
    at = 0
    if text.lstrip().startswith(THINK):
        thought = text.find(THOUGHT)
        at = len(text) if thought < 0 else thought + len(THOUGHT)
    calls, spans = [], SPANS
    while (start := text.find(OPEN, at)) >= 0:
        call, at, spanned = _call(text, start + len(OPEN), spans > 0)
        spans -= spanned and bool(call.error)
        calls.append(call)
    return calls


def _call(text: str, start: int, may_span: bool) -> tuple[ToolCall, int, bool]:
    """(the call whose content begins at `start`, where to look for the next one, whether tags were read as content)."""
    edge = _EDGE.search(text, start)
    stop = edge.start() if edge else len(text)
    value, end, error = _decode(text[start:stop], 0)
    spanned = may_span and edge is not None and error.startswith(_UNTERMINATED)
    if spanned:  # perhaps the tag is part of a string
        longer, end, problem = _decode(text, start)
        if not problem:
            value, error = longer, ""
            edge = _EDGE.search(text, end)
            stop = edge.start() if edge else len(text)
            end -= start
    closed = edge is not None and edge[0] == CLOSE
    content = text[start:stop]
    after = stop + len(CLOSE) if closed else stop
    if not closed:
        error = "its block isn't closed: end it with the closing tag"
    elif error:
        error = f"its content is no JSON ({error})"
    elif content[end:].strip():
        error = "something stands behind its JSON object: write one object a block"
    content = content.strip()
    return (_malformed(content, error) if error else _checked(value, content)), after, spanned


def _decode(text: str, start: int) -> tuple[Any, int, str]:
    """(the JSON value that begins at `start` or behind white space, where it ends, what is wrong with it)."""
    try:
        space = _SPACE.match(text, start)
        return *_JSON.raw_decode(text, space.end() if space else start), ""
    except RecursionError:
        return None, start, "nested too deeply"
    except json.JSONDecodeError as problem:
        return None, start, f"{problem.msg} at character {max(problem.pos - start, 0)}"
    except ValueError as problem:  # a constant that JSON lacks, a number too large
        return None, start, str(problem)


def _checked(value: Any, content: str) -> ToolCall:
    if not isinstance(value, dict):
        return _malformed(content, f"its content is {_kind(value)}, not an object")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return _malformed(content, 'it names no tool: "name" must be a string')
    if isinstance(arguments, str):  # an object in a string is what some models were taught
        try:
            arguments = _JSON.decode(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return _malformed(content, '"arguments" is a string, not an object')
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return _malformed(content, f'"arguments" is {_kind(arguments)}, not an object')
    if "\\u" in content:
        try:
            name, arguments = _whole((name, arguments))
        except RecursionError:
            return _malformed(content, "its content is no JSON (nested too deeply)")
    return ToolCall(name, arguments, content)


def _malformed(content: str, error: str) -> ToolCall:
    return ToolCall("", {}, content, f"malformed tool call: {error}. Between the tags stands {FORM}")


def _kind(value: Any) -> str:
    """What JSON calls it."""
    kinds = {list: "an array", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def _whole(value: Any) -> Any:
    r"""The value with U+FFFD for half characters: JSON's \ud800 alone is a string that no file or tokenizer takes."""
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON value")


_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)
