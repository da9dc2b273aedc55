"""Tools: schemas from what Python functions say of themselves, and an answer in text whatever is asked for."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any, Literal, Optional, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.envs.tool_calls import ToolCall
from spmd_rl.envs.tool_types import WrongType, converted, schema
from spmd_rl.envs.tools import Tools


class Shelf:
    """Some tools with a state."""

    def __init__(self) -> None:
        self.books: list[str] = []

    @property
    def size(self) -> int:
        """Not a tool."""
        raise AssertionError("asked for")

    def put(self, title: str, copies: int = 1, *, kind: Literal["novel", "poem"] = "novel") -> str:
        """Put a book on the shelf.

        It stays there.

        Args:
            title: what stands
                on its back
            copies (int): how many
            kind: what it is

        Returns:
            title: how many books there are
        """
        self.books += [title] * copies
        return f"{len(self.books)} books"

    async def find(self, words: list[str], limit: Optional[int] = None, weights: dict[str, float] = None) -> list[str]:  # noqa: UP045, RUF013
        """Books with all of the words."""
        await asyncio.sleep(0)
        return [book for book in self.books if all(word in book for word in words)][:limit]

    @staticmethod
    def ping() -> None:
        """Does nothing."""

    def hidden(self) -> None:
        pass

    def _private(self) -> None:
        """Not a tool."""


class Annexe(Shelf):
    """Inherits tools, and hides one."""

    def ping(self) -> None:
        pass

    def burn(self) -> str:
        """Burns everything."""
        raise RuntimeError("no matches")


def use(tools: Tools, name: str, **arguments: Any) -> str:
    return asyncio.run(tools.call(ToolCall(name, arguments, "")))


def test_public_methods_with_docstrings_become_schemas() -> None:
    put, find, ping = Tools(Shelf()).schemas
    assert put == {
        "type": "function",
        "function": {
            "name": "put",
            "description": "Put a book on the shelf.\n\nIt stays there.",
            "parameters": {
                "type": "object",
                "properties": {
                    "title": {"type": "string", "description": "what stands on its back"},
                    "copies": {"type": "integer", "description": "how many"},
                    "kind": {"enum": ["novel", "poem"], "description": "what it is"},
                },
                "required": ["title"],
            },
        },
    }
    assert find["function"]["parameters"]["properties"] == {
        "words": {"type": "array", "items": {"type": "string"}},
        "limit": {"type": "integer"},
        "weights": {"type": "object", "additionalProperties": {"type": "number"}},
    }
    assert ping["function"] == {
        "name": "ping",
        "description": "Does nothing.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    }
    assert json.loads(json.dumps([put, find, ping])) == [put, find, ping]


def test_inherited_methods_are_tools_unless_overridden_without_a_docstring() -> None:
    assert [schema["function"]["name"] for schema in Tools(Annexe()).schemas] == ["put", "find", "burn"]


def test_functions_are_tools() -> None:
    def double(x) -> Any:
        """Twice x."""
        return x * 2

    shelf = Shelf()
    tools = Tools([double, shelf.put])
    assert [schema["function"]["name"] for schema in tools.schemas] == ["double", "put"]
    assert tools.schemas[0]["function"]["parameters"]["properties"] == {"x": {}}
    assert use(tools, "double", x="ab") == "abab"
    assert use(Tools(double), "double", x=[1]) == "[1, 1]"


def test_state_and_defaults_and_async() -> None:
    tools = Tools(Shelf())
    assert use(tools, "put", title="Emma") == "1 books"
    assert use(tools, "put", title="Ode", copies=2.0, kind="poem") == "3 books"
    assert use(tools, "find", words=["d"]) == '["Ode", "Ode"]'
    assert use(tools, "find", words=["d"], limit=1, weights=None) == '["Ode"]'
    assert use(tools, "ping") == "done"


WRONG = {
    "unknown tool": ("burn", {}, "there is no tool 'burn'; the tools are put, find, ping"),
    "private": ("_private", {}, "there is no tool '_private'"),
    "a dunder": ("__init__", {}, "there is no tool '__init__'"),
    "missing": ("put", {}, "put needs the argument 'title'; it takes title, copies, kind"),
    "unknown argument": ("ping", {"x": 1}, "there is no argument 'x'; ping takes no arguments"),
    "self": ("put", {"title": "a", "self": 1}, "there is no argument 'self'"),
    "a number as text": ("put", {"title": 5}, "argument title must be a string, not 5"),
    "text as a number": ("put", {"title": "a", "copies": "2"}, "copies must be an integer, not the string '2'"),
    "a superscript": ("put", {"title": "a", "copies": "²"}, "copies must be an integer"),
    "a bool as a number": ("put", {"title": "a", "copies": True}, "copies must be an integer, not True"),
    "half a book": ("put", {"title": "a", "copies": 1.5}, "copies must be an integer, not 1.5"),
    "no choice": ("put", {"title": "a", "kind": "x"}, "kind must be one of 'novel', 'poem', not the string 'x'"),
    "null": ("put", {"title": None}, "title must be a string, not null"),
    "an item": ("find", {"words": ["a", 1]}, "argument words[1] must be a string, not 1"),
    "a value": ("find", {"words": [], "weights": {"a": "b"}}, "weights must be an object or null"),
    "long": ("put", {"title": ["x" * 100]}, "not the list ['xxx"),
}


@pytest.mark.parametrize(("name", "arguments", "says"), WRONG.values(), ids=WRONG)
def test_what_can_not_be_called_is_said(name: str, arguments: dict[str, Any], says: str) -> None:
    shelf = Shelf()
    tools = Tools(shelf)
    answer = use(tools, name, **arguments) if "self" not in arguments else ""
    call = ToolCall(name, arguments, "")
    assert says in tools.problem(call) and len(tools.problem(call)) < 200
    assert asyncio.run(tools.call(call)) == f"error: {tools.problem(call)}"
    assert answer in ("", f"error: {tools.problem(call)}")
    assert shelf.books == []


def test_a_malformed_call_is_answered_with_its_error() -> None:
    call = ToolCall("", {}, "junk", "malformed tool call: junk")
    tools = Tools(Shelf())
    assert tools.problem(call) == call.error
    assert asyncio.run(tools.call(call)) == "error: malformed tool call: junk"


class Nasty:
    """Tools that do what tools do."""

    def fail(self) -> str:
        """Raises."""
        raise KeyError("no such key")

    def leave(self) -> str:
        """Ends the program."""
        raise SystemExit(3)

    def mute(self) -> str:
        """Raises what can't be shown."""

        class Mute(Exception):
            def __str__(self) -> str:
                raise ValueError

        raise Mute

    def data(self) -> bytes:
        """Not UTF-8."""
        return b"ab\xff"

    def circle(self) -> list[Any]:
        """Not JSON."""
        circle: list[Any] = []
        circle.append(circle)
        return circle

    def odd(self) -> dict[str, Any]:
        """Not JSON either."""
        return {"x": {1}}

    def text(self) -> dict[str, Any]:
        """JSON."""
        return {"é": [1, 2.5, None, True]}

    def cancel(self) -> None:
        """What asyncio does."""
        raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("fail", "error: KeyError: 'no such key'"),
        ("leave", "error: SystemExit: 3"),
        ("mute", "error: Mute"),
        ("data", "ab�"),
        ("circle", "[[...]]"),
        ("odd", "{'x': {1}}"),
        ("text", '{"é": [1, 2.5, null, true]}'),
    ],
)
def test_whatever_a_tool_does_has_an_answer(name: str, answer: str) -> None:
    assert use(Tools(Nasty()), name) == answer
    assert answer in use(Tools(Nasty(), deadline_s=60), name) or name == "leave"


def test_a_cancellation_passes() -> None:
    with pytest.raises(asyncio.CancelledError):
        use(Tools(Nasty()), "cancel")


@given(length=st.integers(0, 60), limit=st.integers(1, 40))
def test_a_long_answer_loses_its_middle(length: int, limit: int) -> None:
    text = "".join(chr(0x100 + i) for i in range(length))

    def say() -> str:
        """Says it."""
        return text

    answer = use(Tools(say, max_chars=limit), "say")
    if length <= limit:
        assert answer == text
        return
    head, note, tail = answer.partition(f"\n[… {length - limit} characters left out …]\n")
    assert note and len(head) + len(tail) == limit
    assert text.startswith(head) and text.endswith(tail) and len(tail) == limit // 4


def test_a_long_error_is_cut_too() -> None:
    def fail() -> str:
        """Fails at length."""
        raise ValueError("x" * 5000)

    answer = use(Tools(fail, max_chars=100), "fail")
    assert answer.startswith("error: ValueError: xxx") and "4,919 characters left out" in answer


def test_a_deadline_ends_async_and_blocking_tools() -> None:
    release = threading.Event()

    async def wait() -> str:
        """Never comes back."""
        await asyncio.Event().wait()
        return ""

    def block() -> str:
        """Comes back late."""
        release.wait(60)
        return "late"

    async def quick() -> str:
        """Comes back."""
        return "here"

    tools = Tools([wait, block, quick], deadline_s=0.05)
    try:
        assert use(tools, "wait") == "error: TooSlow: no result after 0.05 s"
        assert use(tools, "block") == "error: TooSlow: no result after 0.05 s"
        assert use(tools, "quick") == "here"
    finally:
        release.set()


def test_a_tools_own_timeout_is_its_error() -> None:
    def late() -> str:
        """Times out."""
        raise TimeoutError("the server")

    assert use(Tools(late, deadline_s=60), "late") == "error: TimeoutError: the server"


def test_what_can_not_be_a_tool_is_refused() -> None:
    def bare() -> None:
        pass

    def star(*numbers: int) -> None:
        """Takes any."""

    def odd(x: bytes) -> None:
        """Takes bytes."""

    def keyed(x: dict[int, str]) -> None:
        """Takes numbers as keys."""

    def unknown(x: "Nowhere") -> None:  # noqa: F821, UP037
        """Takes what is nowhere."""

    def choice(x: Literal[b"a"]) -> None:
        """Takes a choice of bytes."""

    cases = [
        (bare, "tool bare has no docstring"),
        (star, "tool star: a model can't fill the parameter numbers by its name"),
        (odd, "tool odd, parameter x: a model can't write a <class 'bytes'>"),
        (keyed, "tool keyed, parameter x: a model can't write"),
        (unknown, "tool unknown: its signature can't be read"),
        (choice, "can't write b'a'"),
        ([Shelf(), Shelf()], "two tools have the name 'put'"),
        (object(), "has no tools"),
        (Shelf, "is a class: pass an instance of it"),
        ([], "has no tools"),
        ("put", "has no tools"),
        (max, "tool max: its signature can't be read"),
        (len, "can't fill the parameter obj by its name"),
        (lambda: 1, "has no name to be called by"),
    ]
    for source, says in cases:
        with pytest.raises(TypeError, match=says):
            Tools(source)


@pytest.mark.parametrize(
    ("hint", "want"),
    [
        (int | None, {"type": "integer"}),
        (Union[int, str], {"anyOf": [{"type": "integer"}, {"type": "string"}]}),  # noqa: UP007
        (list, {"type": "array"}),
        (list[Any], {"type": "array"}),
        (
            dict[str, list[bool]],
            {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "boolean"}}},
        ),
        (Literal[1, "a", None, True], {"enum": [1, "a", None, True]}),
    ],
)
def test_schemas_of_type_hints(hint: Any, want: dict[str, Any]) -> None:
    assert schema(hint) == want


@pytest.mark.parametrize(
    ("value", "hint", "want"),
    [
        (3, float, 3.0),
        (3.0, int, 3),
        (None, int | None, None),
        ("a", int | str, "a"),
        ({"a": [1, 2]}, dict[str, list[float]], {"a": [1.0, 2.0]}),
        (True, Literal[1, True], True),
        ([1, "a"], list, [1, "a"]),
    ],
)
def test_values_are_taken_in_their_type(value: Any, hint: Any, want: Any) -> None:
    got = converted(value, hint, "x")
    assert (got, type(got)) == (want, type(want))


@pytest.mark.parametrize(
    ("value", "hint", "says"),
    [
        (1, bool, "x must be true or false, not 1"),
        (1, Literal[True], "one of True"),
        (10**400, float, "too large"),
        (float("nan"), float, "too large"),
        ([[1], ["a"]], list[list[int]], r"x\[1\]\[0\] must be an integer"),
        ({"a": 1}, dict[str, str], r"x\['a'\] must be a string"),
        ("a", list[str], "x must be a list, not the string 'a'"),
    ],
)
def test_values_of_other_types_are_refused(value: Any, hint: Any, says: str) -> None:
    with pytest.raises(WrongType, match=says):
        converted(value, hint, "x")
