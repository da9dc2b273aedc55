"""Chat messages as OpenAI's wire has them, checked and made plain; and when two of them say the same.

A client gives back what it was told in a form of its own: keys in another order, null for what is missing, text as a
list of parts, arguments written anew, thoughts left out, space around a reply gone. So messages are compared by what
they say.

It refuses to know about tokens. Invariants: `read_messages` and `read_tools` take any JSON and raise nothing but
ApiError; what comes out holds text and plain JSON only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, cast

from spmd_rl.envs.endpoint.errors import shown, wrong
from spmd_rl.envs.tool_calls import CLOSE, OPEN, THINK, THOUGHT

Role = Literal["system", "user", "assistant", "tool"]
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
DEEPEST = 64  # levels of a tool's schema
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # type of a part → where its text is
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True)
class Call:
    """One tool call of an assistant's message."""

    id: str
    name: str
    arguments: str  # JSON of an object, as it was written

    @property
    def meaning(self) -> tuple[str, str]:
        """What two calls are compared by."""
        return self.name, _canonical(self.arguments)


@dataclass(frozen=True)
class Message:
    """One message."""

    role: Role
    content: str = ""
    thought: str = ""  # of the assistant; never compared, as clients drop it
    calls: tuple[Call, ...] = ()  # of the assistant
    call_id: str = ""  # of a tool's result: the call it answers

    @property
    def as_said(self) -> str:
        """An assistant's message as the text that says it: thought, content, calls in Hermes' form."""
        thought = f"{THINK}{self.thought}{THOUGHT}" if self.thought else ""
        calls = (f'{{"name": {json.dumps(c.name)}, "arguments": {_json_of(c.arguments)}}}' for c in self.calls)
        return "".join([thought, self.content, *(f"{OPEN}{call}{CLOSE}" for call in calls)])


def say_the_same(mine: Message, theirs: Message) -> bool:
    """Whether `theirs` is what a client makes of `mine`, which it heard or said before."""
    if mine.role != theirs.role:
        return False
    if mine.role != "assistant":
        return mine == theirs
    if [call.meaning for call in mine.calls] != [call.meaning for call in theirs.calls]:
        return False
    content = theirs.content.strip()
    return content == mine.content.strip() or (bool(mine.calls) and not content)  # some keep the calls alone


def split_thought(text: str) -> tuple[str, str]:
    """(the thought that a reply begins with, what stands behind it)."""
    if not text.lstrip().startswith(THINK):
        return "", text
    thought, _, content = text.lstrip()[len(THINK) :].partition(THOUGHT)
    return thought, content


def read_messages(value: Any) -> tuple[Message, ...]:
    """The messages of a request. ApiError for what are none."""
    if not isinstance(value, list) or not value:
        raise wrong("messages", "must be a list of messages, and hold one at least")
    return tuple(_message(message, f"messages[{place}]") for place, message in enumerate(value))


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """The tools of a request, as chat templates take them. `strict` is left out: nothing here is constrained."""
    if not isinstance(value, list):
        raise wrong("tools", f"must be a list, not {shown(value)}")
    return tuple(_tool(tool, f"tools[{place}]") for place, tool in enumerate(value))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise wrong(where, f"must be an object, not {shown(value)}")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
    content = _text(value.get("content"), f"{where}.content", may_lack=ROLES[role] in ("assistant", "tool"))
    if role == "assistant":
        if value.get("function_call"):
            raise wrong(f"{where}.function_call", "is the old form: send tool_calls")
        thought = value.get("reasoning_content") or value.get("reasoning")
        if not isinstance(thought, str):
            thought, content = split_thought(content)
        return Message("assistant", content, thought, _calls(value.get("tool_calls"), f"{where}.tool_calls"))
    if role == "tool":
        call_id = value.get("tool_call_id")
        if not isinstance(call_id, str):
            raise wrong(f"{where}.tool_call_id", "must name the call that is answered")
        return Message("tool", content, call_id=call_id)
    return Message(ROLES[role], content)


def _text(value: Any, where: str, may_lack: bool) -> str:
    if isinstance(value, str):
        return value
    if value is None and may_lack:
        return ""
    if not isinstance(value, list):
        raise wrong(where, f"must be a string or a list of text parts, not {shown(value)}")
    return "".join(_part(part, f"{where}[{place}]") for place, part in enumerate(value))


def _part(value: Any, where: str) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    text = value.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise wrong(where, f'must be {{"type": "text", "text": "…"}}: there is text only here, not {shown(value)}')
    return text


def _calls(value: Any, where: str) -> tuple[Call, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong(where, f"must be a list, not {shown(value)}")
    return tuple(_call(call, f"{where}[{place}]") for place, call in enumerate(value))


def _call(value: Any, where: str) -> Call:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise wrong(f"{where}.function.name", "must be the name of a tool")
    arguments = cast(dict[str, Any], function).get("arguments")
    if not isinstance(arguments, str):  # some clients give the object itself
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    call_id = value.get("id")
    return Call(call_id if isinstance(call_id, str) else "", name, arguments)


def _tool(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        raise wrong(where, 'must be {"type": "function", "function": {"name": …, "description": …, "parameters": …}}')
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise wrong(f"{where}.function.name", f"must be letters, digits, '_' and '-', not {shown(name)}")
    if not isinstance(description, str | None):
        raise wrong(f"{where}.function.description", f"must be a string, not {shown(description)}")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise wrong(f"{where}.function.parameters", f"must be a JSON schema, not {shown(parameters)}")
    if not _is_flat(parameters, DEEPEST):
        raise wrong(f"{where}.function.parameters", f"is nested deeper than {DEEPEST} levels")
    parameters = parameters or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": name, "description": description or "", "parameters": parameters},
    }


def _is_flat(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    inside = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_flat(item, levels - 1) for item in inside)


def _canonical(arguments: str) -> str:
    """The same text for arguments that mean the same."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _json_of(arguments: str) -> str:
    """The arguments as JSON; what is none becomes a string."""
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return json.dumps(arguments, ensure_ascii=False)
    return arguments


def tool_names(messages: tuple[Message, ...]) -> list[str]:
    """For each message, the name of the tool whose result it is; "" where that is not known."""
    by_id: dict[str, str] = {}
    names = []
    for message in messages:
        by_id.update({call.id: call.name for call in message.calls})
        names.append(by_id.get(message.call_id, "") if message.role == "tool" else "")
    return names
