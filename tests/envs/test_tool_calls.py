"""Tool calls: found in order, never an exception, in linear time, with errors that a model can learn from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmd_rl.envs import tool_calls
from spmd_rl.envs.tool_calls import ToolCall, parse

PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": "f"',
    '"arguments": ',
    "{",
    "}",
    "[",
    '"',
    "\\",
]
junk = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=12).map("".join)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
strings = st.sampled_from([*PIECES, "x</tool_call>y"]) | st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(scalars | strings, lambda v: st.lists(v) | st.dictionaries(strings, v), max_leaves=5)


def block(name: Any, arguments: Any, **more: Any) -> str:
    return (
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments, **more}, ensure_ascii=False)}\n</tool_call>"
    )


@given(calls=st.lists(st.tuples(names, st.dictionaries(strings, values, max_size=3)), max_size=4))
def test_what_was_called_is_found_in_order(calls: list[tuple[str, dict[str, Any]]]) -> None:
    text = "Let me see.\n" + " then ".join(block(*call) for call in calls) + " done."
    found = parse(text)
    assert [(call.name, call.arguments, call.error) for call in found] == [(*call, "") for call in calls]


@settings(deadline=None)
@given(text=junk)
@example("<tool_call>" + "[" * 100_000)
@example('<tool_call>{"a":' * 500)
def test_junk_is_never_an_exception(text: str) -> None:
    for call in parse(text):
        assert (call.name == "") == bool(call.error)
        assert "<tool_call>" not in call.error


MALFORMED = {
    "no json": ("add(1, 2)", "no JSON (Expecting value at character 0)"),
    "nothing": ("", "no JSON (Expecting value"),
    "half": ('{"name": "add", "arguments": {', "no JSON (Expecting property name"),
    "an open string": ('{"name": "add', "no JSON (Unterminated string"),
    "two objects": ('{"name": "a"} {"name": "b"}', "something stands behind its JSON object"),
    "more behind tags": ('{"name": "a</tool_call>"} more', "something stands behind its JSON object"),
    "a list": ('[{"name": "add"}]', "its content is an array, not an object"),
    "null": ("null", "its content is null"),
    "a number": ("1", "its content is a number"),
    "no name": ('{"arguments": {}}', 'it names no tool: "name" must be a string'),
    "an empty name": ('{"name": "", "arguments": {}}', "names no tool"),
    "a name of another type": ('{"name": ["add"], "arguments": {}}', "names no tool"),
    "arguments in a list": ('{"name": "add", "arguments": [1, 2]}', '"arguments" is an array, not an object'),
    "arguments in words": ('{"name": "add", "arguments": "a = 1"}', '"arguments" is a string, not an object'),
    "a list in a string": ('{"name": "add", "arguments": "[1]"}', '"arguments" is an array, not an object'),
    "not a number": ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no JSON value"),
    "infinity": ('{"name": "add", "arguments": {"a": -Infinity}}', "-Infinity is no JSON value"),
    "a large float": ('{"name": "add", "arguments": {"a": 1e999}}', "1e999 is too large"),
    "a large integer": ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "4300 digits"),
    "a deep nest": ('{"name": "add", "arguments": ' + "[" * 5000 + "]" * 5000 + "}", "nested too deeply"),
    "a deep nest in a string": (
        json.dumps({"name": "add", "arguments": "[" * 5000 + "]" * 5000}),
        '"arguments" is a string, not an object',
    ),
    "not a number in a string": ('{"name": "add", "arguments": "{\\"a\\": NaN}"}', '"arguments" is a string'),
}


@pytest.mark.parametrize(("content", "says"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_call_says_what_is_wrong(content: str, says: str) -> None:
    first, second = parse(f'<tool_call>{content}</tool_call> and <tool_call>{{"name": "next"}}</tool_call>')
    assert first == ToolCall("", {}, content.strip(), first.error)
    assert first.error.startswith("malformed tool call: ") and says in first.error
    assert '{"name": "…", "arguments": {…}}' in first.error
    assert second == ToolCall("next", {}, '{"name": "next"}')


@pytest.mark.parametrize("arguments", [None, "", " ", "{}", {}])
def test_a_call_may_have_no_arguments(arguments: Any) -> None:
    assert parse(block("now", arguments))[0].arguments == {}
    assert parse('<tool_call>{"name": "now"}</tool_call>')[0].error == ""


def test_arguments_may_be_an_object_in_a_string() -> None:
    (call,) = parse(block("add", json.dumps({"a": 1, "b": [2]})))
    assert (call.arguments, call.error) == ({"a": 1, "b": [2]}, "")


@pytest.mark.parametrize("end", ["", "  ", "<tool_call>"])
def test_a_block_that_is_not_closed_is_an_error(end: str) -> None:
    first, *others = parse('<tool_call>{"name": "add", "arguments": {}}' + end)
    assert "isn't closed" in first.error and first.name == ""
    assert len(others) == (end == "<tool_call>")


def test_a_call_behind_one_that_is_not_closed_is_found() -> None:
    first, second = parse('<tool_call>{"name": <tool_call>{"name": "add"}</tool_call>')
    assert "isn't closed" in first.error
    assert (second.name, second.error) == ("add", "")


def test_tags_in_strings_are_content() -> None:
    code = 'print("</tool_call><tool_call>")'
    (call,) = parse(block("run", {"code": code}))
    assert call.arguments == {"code": code}


def test_half_characters_are_replaced() -> None:
    (call,) = parse('<tool_call>{"name": "\\ud800x", "arguments": {"\\ud83d\\ude00": ["\\udfff"]}}</tool_call>')
    assert (call.name, call.arguments) == ("�x", {"😀": ["�"]})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>{call}</think>{call}", 1),
        ("\n <think>{call}", 0),
        ("<think></think>{call}<think>{call}</think>", 2),  # a thought stands in front
        ("so <think>{call}</think>", 1),
    ],
)
def test_thoughts_call_nothing(text: str, found: int) -> None:
    assert len(parse(text.replace("{call}", '<tool_call>{"name": "f"}</tool_call>'))) == found


@pytest.mark.parametrize(
    "unit", ["<tool_call>", '<tool_call>["', "<tool_call>x\n", '<tool_call>["</tool_call>', '<tool_call>{"']
)
def test_the_work_is_linear(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the characters that the decoder is shown: behind a failed block it looks through all before it."""
    shown = [0]
    decode = tool_calls._decode

    def counted(text: str, start: int) -> Any:
        shown[0] += len(text)
        return decode(text, start)

    monkeypatch.setattr(tool_calls, "_decode", counted)
    counts = []
    for times in (1000, 2000):
        shown[0] = 0
        assert parse(unit * times)
        counts.append(shown[0] / len(unit * times))
    assert counts[1] <= counts[0] * 1.1 + 1
