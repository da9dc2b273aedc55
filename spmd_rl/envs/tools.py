"""Python functions as tools: their schemas for the model to read, and calls that always have an answer in text.

A method with a docstring is a tool. Its type hints say what the arguments may be, its docstring (with a section
`Args:`, as Google writes it) what they mean. Whatever the model asks for, the answer is a text: a tool that does not
exist, arguments of the wrong type, and what a tool raises come back as `error: …`, for the model to read.

It refuses to know about conversations and rewards. Invariants: `call` raises for nothing that the model can do; a tool
is run with arguments of the types it declares; an answer has at most `max_chars` characters of the tool's own and a
note on what was cut.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from spmd_rl.envs.deadline import within
from spmd_rl.envs.threads import Threads
from spmd_rl.envs.tool_calls import ToolCall
from spmd_rl.envs.tool_types import WrongType, converted, schema

MAX_CHARS = 8000
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):[ \t]*$", re.MULTILINE)
_PARAMETER = re.compile(r"^(\w+)(?:[ \t]*\([^)\n]*\))?:[ \t]*")


@dataclass(frozen=True)
class _Declared:
    """What a function says of itself."""

    name: str
    hints: dict[str, Any]  # by parameter
    required: list[str]
    schema: dict[str, Any]

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments in the types that the tool declares. WrongType for what does not fit."""
        takes = ", ".join(self.hints) or "no arguments"
        if unknown := [name for name in given if name not in self.hints]:
            raise WrongType(f"there is no argument {_short(unknown[0])}; {self.name} takes {takes}")
        if missing := [name for name in self.required if name not in given]:
            raise WrongType(f"{self.name} needs the argument {missing[0]!r}; it takes {takes}")
        return {name: converted(value, self.hints[name], name) for name, value in given.items()}


@dataclass(frozen=True)
class _Tool:
    """One function, ready to be called with what a model wrote."""

    declared: _Declared
    function: Callable[..., Any]
    threads: Threads | None  # for a function that blocks, where there is a deadline


class Tools:
    """Tools for one episode, or for many where they keep no state.

    Args:
        source: an object, whose public methods with a docstring become tools; or a function, or several of them.
            Sync or async. Sync ones run on the event loop and hold up everything else, unless there is a deadline.
        max_chars: of an answer; the middle of a longer one is left out.
        deadline_s: seconds that a call may take; 0: no limit but the episode's. A sync tool then runs in a thread,
            which goes on after a missed deadline.

    TypeError for a function that can't be a tool.
    """

    def __init__(self, source: Any, max_chars: int = MAX_CHARS, deadline_s: float = 0.0) -> None:
        self._max_chars, self._deadline_s = max_chars, deadline_s
        self._tools: dict[str, _Tool] = {}
        for function in _functions(source):
            is_method = inspect.ismethod(function)
            declared = _declared(getattr(function, "__func__", function), is_method)
            if declared.name in self._tools:
                raise TypeError(f"two tools have the name {declared.name!r}: rename one")
            blocks = deadline_s > 0 and not inspect.iscoroutinefunction(function)
            self._tools[declared.name] = _Tool(declared, function, Threads(function) if blocks else None)
        if not self._tools:
            raise TypeError(f"{source!r} has no tools: give its public methods docstrings, which the model will read")
        self.schemas = [tool.declared.schema for tool in self._tools.values()]

    def problem(self, call: ToolCall) -> str:
        """What is wrong with a call, for the model to read; empty when it can be made."""
        if call.error:
            return call.error
        tool = self._tools.get(call.name)
        if tool is None:
            return f"there is no tool {_short(call.name)}; the tools are {', '.join(self._tools)}"
        try:
            tool.declared.arguments(call.arguments)
        except (WrongType, RecursionError) as error:
            return str(error)
        return ""

    async def call(self, call: ToolCall) -> str:
        """The tool's answer, or `error: …`."""
        problem = self.problem(call)
        if problem:
            return self._capped(f"error: {problem}")
        tool = self._tools[call.name]
        try:
            text = _as_text(await self._run(tool, tool.declared.arguments(call.arguments)))
        except (Exception, SystemExit) as error:
            text = f"error: {_explained(error)}"
        return self._capped(text)

    async def _run(self, tool: _Tool, arguments: dict[str, Any]) -> Any:
        if tool.threads:
            return await tool.threads.call(arguments, self._deadline_s)
        result = tool.function(**arguments)
        if not inspect.isawaitable(result):
            return result
        return await (within(self._deadline_s, result) if self._deadline_s else result)

    def _capped(self, text: str) -> str:
        """Begin and end of a long text: errors tend to stand at the end."""
        cut = len(text) - self._max_chars
        if cut <= 0:
            return text
        tail = self._max_chars // 4
        head = self._max_chars - tail
        return f"{text[:head]}\n[… {cut:,} characters left out …]\n{text[len(text) - tail :]}"


def _functions(source: Any) -> list[Callable[..., Any]]:
    if inspect.isroutine(source):
        return [source]
    if inspect.isclass(source):
        raise TypeError(f"{source!r} is a class: pass an instance of it")
    if isinstance(source, list | tuple):
        return [function for part in source for function in _functions(part)]
    found: dict[str, Any] = {}
    for cls in reversed(type(source).__mro__[:-1]):  # base classes first, in the order of their source
        for name, member in vars(cls).items():
            if not name.startswith("_"):
                found[name] = member
    methods = [name for name, member in found.items() if _documented(member)]
    return [getattr(source, name) for name in methods]


def _documented(member: Any) -> bool:
    function = getattr(member, "__func__", member)  # of a static or a class method
    return inspect.isfunction(function) and bool((function.__doc__ or "").strip())


@lru_cache(maxsize=256)  # tools with a state are made for every episode
def _declared(function: Callable[..., Any], is_method: bool) -> _Declared:
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise TypeError(f"{function!r} has no name to be called by: write it with def")
    documentation = inspect.cleandoc(function.__doc__ or "")
    if not documentation:
        raise TypeError(f"tool {name} has no docstring: write one, the model reads it")
    try:
        signature, hints = inspect.signature(function), typing.get_type_hints(function)
    except Exception as error:  # what an annotation raises, or a builtin without a signature
        raise TypeError(f"tool {name}: its signature can't be read: {error}") from error
    description, said = _documentation(documentation)
    types, properties, required = {}, {}, []
    for parameter in list(signature.parameters.values())[is_method:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {name}: a model can't fill the parameter {parameter.name} by its name")
        hint = hints.get(parameter.name, Any)
        if parameter.default is None and hint is not Any:
            hint = hint | None
        types[parameter.name] = hint
        try:
            properties[parameter.name] = schema(hint)
        except TypeError as error:
            raise TypeError(f"tool {name}, parameter {parameter.name}: {error}") from None
        if parameter.name in said:
            properties[parameter.name]["description"] = said[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    shown = {"name": name, "description": description, "parameters": parameters}
    return _Declared(name, types, required, {"type": "function", "function": shown})


def _documentation(text: str) -> tuple[str, dict[str, str]]:
    """(what stands before the first section, the text of each parameter in the section of arguments)."""
    parts = _SECTION.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    lines = next((sections[name] for name in ("Args", "Arguments", "Parameters") if name in sections), "")
    said: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(lines).splitlines():
        if found := _PARAMETER.match(line):
            name = found[1]
            said[name] = line[found.end() :].strip()
        elif name and line.strip():
            said[name] += " " + line.strip()
    return parts[0].strip(), said


def _as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    if isinstance(result, bytes | bytearray | memoryview):
        return bytes(result).decode(errors="replace")
    if result is None:
        return "done"
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # no JSON, or a circle
        return str(result)


def _explained(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
