"""A tokenizer's chat template as something that appends: first messages, and what stands behind a sampled reply.

Templates render whole conversations, and many render old turns differently (thoughts are stripped, default prompts
appear), so a history is never rendered again. What follows a reply is cut out of a small conversation of stand-ins:
render it with the new messages behind the assistant's turn; everything from the token that ends that turn on is what
is to be appended. Without a template, ChatML is written by hand.

A template that inserts contents as they are, or trimmed, is asked once for each order of roles; the texts around the
contents are kept. Else it is asked each time.

Contents can't forge a turn: names of control tokens and of tool markup in them get a space behind the first
character. It refuses to know about policies and episodes. Invariants: `first` and `behind_reply` depend on their
arguments alone, also on another day; their ids hold no control tokens but the template's own.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from spmd_rl.envs.protocol import StopReason
from spmd_rl.models.byte_tokenizer import CONTROL_TOKENS, IM_END, IM_START, MARKUP_TOKENS

Message = dict[str, str]  # role, content, and of a tool's result its name
Tool = dict[str, Any]  # {"type": "function", "function": {"name": …, "description": …, "parameters": …}}
Render = Callable[[list[Message], list[Tool]], str]

FRAMES = 256  # orders of roles (with system texts and tools) that are kept; others are rendered each time
ASKED, SAID = "0a1b2c-asked", "0a1b2c-said"  # stand-ins for what was said before: no template changes them
_SPOKEN = ({"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID})
# A template that trims, escapes, capitalises or obeys its users changes it, or what stands around it.
_CONTENT = "\n \t0a1b2c \"'\\ &<{{%}}> é ß\u00a0\u2028 {} /think /no_think \t \n"
_WAY_OUT = "set model.tokenizer to a folder whose chat_template renders plain turns, each with an end token, as ChatML"
# The day that a template may print: a run that is taken up again must say what it said before.
_SOME_DAY = (
    "{%- macro strftime_now(format) -%}{{- format | replace('%d', '26') | replace('%m', '07') | replace('%b', 'Jul')"
    " | replace('%B', 'July') | replace('%Y', '2024') | replace('%y', '24') -}}{%- endmacro %}{{- '' }}"
)


class TemplateError(ValueError):
    """The tokenizer's chat template can't do what is asked of it."""


def template_of(tokenizer: Any) -> ChatTemplate:
    """The tokenizer's template; made and checked once per tokenizer. TemplateError for one that won't do."""
    if not isinstance(tokenizer, Hashable):
        return ChatTemplate(tokenizer)
    return _kept(tokenizer, str(getattr(tokenizer, "chat_template", None)))


class ChatTemplate:
    """Renders messages to token ids. `end` is the token that ends a turn, `end_id` its id."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        takes = inspect.signature(tokenizer.encode).parameters
        self._plainly = {"add_special_tokens": False} if "add_special_tokens" in takes else {}
        self._by_hand = not getattr(tokenizer, "chat_template", None)
        self._frames: dict[Hashable, _Frame | None] = {}  # None: not to be had
        control, markup = _names(tokenizer)
        self.end = self._find_end(control)
        self._control, self._any = _finder({*control, self.end}), _finder({*control, *markup, self.end})
        ids = self._encode(self.end)
        if len(ids) != 1:
            raise TemplateError(
                f"the tokenizer makes {len(ids)} tokens of {self.end!r}, which ends a turn: add it as a special token, "
                "or set eos_token"
            )
        self.end_id: int = ids[0]
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._stops = {id for id, token in added.items() if token.special}
        if not self._by_hand:
            self._check_extends()
        header = self._render([{"role": "user", "content": ASKED}], None, True)
        self.opens_thought = header.rstrip().endswith("<think>")  # a reply begins inside of one

    def clean(self, text: str | bytes, markup: bool = True) -> str:
        """The text as a content: never a control token, nor tool or thought markup (unless that is to stay)."""
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        if not isinstance(text, str):
            raise TypeError(f"a message's text must be a string, not {type(text).__name__}")
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # half characters
        text = text.replace("\0", "\ufffd")
        finder = self._any if markup else self._control
        while True:  # a name may stand inside of another one
            text, found = finder.subn(lambda name: f"{name[0][0]} {name[0][1:]}", text)
            if not found:
                return text

    def first(self, messages: list[Message], tools: list[Tool]) -> list[int]:
        """Ids of the messages that begin a conversation, and the header that asks for a reply."""
        return self._encode(self._text(messages, tools, self._render_first))

    def behind_reply(self, messages: list[Message]) -> list[int]:
        """Ids of what stands behind a reply's text: the end token, the messages, the header of the next reply."""
        return self._encode(self.end + self._text(messages, [], self._render_behind))

    def said(self, text: str) -> list[int]:
        """Ids of a reply that somebody else wrote, without an end token; markup in it is markup."""
        return self._encode(self.clean(text, markup=False))

    def ended(self, reply: np.ndarray, stop_reason: StopReason) -> bool:
        """Whether the last of the sampled tokens (int32[n]) ends the turn."""
        last = int(reply[-1]) if len(reply) else -1
        return last == self.end_id or (stop_reason == "stop" and last in self._stops)

    def _text(self, messages: list[Message], tools: list[Tool], render: Render) -> str:
        # What a template may look into is part of the key: a system prompt's switches, an empty content.
        free = [m["role"] != "system" and bool(m["content"]) and not m["content"].isspace() for m in messages]
        order = [(m["role"], m.get("name"), f or m["content"]) for m, f in zip(messages, free, strict=True)]
        key = (render.__name__, json.dumps(tools) if tools else "", *order)
        frame = self._frames.get(key)
        if frame:
            return frame.filled([m["content"] for m, f in zip(messages, free, strict=True) if f])
        text = render(messages, tools)
        if key not in self._frames and len(self._frames) < FRAMES:
            self._frames[key] = _frame(messages, free, lambda asked: render(asked, tools), text)
        return text

    def _render_first(self, messages: list[Message], tools: list[Tool]) -> str:
        text = self._render(messages, tools or None, True)
        for tool in tools:
            if (name := tool["function"]["name"]) not in text:
                raise TemplateError(
                    f"the chat template does not show the tool {name!r}: use a tokenizer whose template knows tools, "
                    "or describe them in the system message and pass tools = []"
                )
        return text

    def _render_behind(self, messages: list[Message], tools: list[Tool]) -> str:
        return self._behind(self._render([*_SPOKEN, *messages], None, True))

    def _behind(self, text: str) -> str:
        """What stands behind the end of the turn in which the assistant said SAID."""
        _, said, behind = text.partition(SAID)
        _, ended, behind = behind.partition(self.end)
        if not said or not ended:
            raise TemplateError(f"the chat template drops the assistant's turn before other messages; {_WAY_OUT}")
        return behind

    def _render(self, messages: list[Message], tools: list[Tool] | None, header: bool) -> str:
        if self._by_hand:
            return _chatml(messages, tools, header, self.end)
        try:
            source = self._tokenizer.get_chat_template(tools=tools)
            dated = _SOME_DAY + source if "strftime_now" in source else source
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=header, tokenize=False, chat_template=dated
            )
        except Exception as error:  # jinja's own errors, and what templates raise about roles
            roles = ", ".join(m["role"] for m in messages)
            raise TemplateError(
                f"the chat template refuses messages of the roles {roles}: {error}. Leave such a message out, or "
                f"{_WAY_OUT}"
            ) from error

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, **self._plainly)

    def _find_end(self, control: set[str]) -> str:
        if self._by_hand:
            return getattr(self._tokenizer, "eos_token", None) or IM_END
        _, said, behind = self._render([*_SPOKEN], None, False).partition(SAID)
        ends = _finder(control).search(behind)
        if not said or not ends:
            raise TemplateError(f"no special token ends the assistant's turn in the chat template; {_WAY_OUT}")
        return ends[0]

    def _check_extends(self) -> None:
        """TemplateError unless what stands behind a reply is the same whatever was said before."""
        before = [{"role": "user", "content": "0a1b2c"}, {"role": "assistant", "content": "2c1b0a"}]
        asked = {"role": "user", "content": "0a1b2c?"}
        short = self._behind(self._render([*_SPOKEN, asked], None, True))
        long = self._behind(self._render([*before, *_SPOKEN, asked], None, True))
        if short != long:
            raise TemplateError(
                "the chat template does not extend: what it writes behind an assistant's turn depends on what was said "
                f"before, so that a conversation can't grow token by token; {_WAY_OUT}"
            )


@lru_cache(maxsize=16)
def _kept(tokenizer: Any, chat_template: str) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def _names(tokenizer: Any) -> tuple[set[str], set[str]]:
    """(names of control tokens, names of other tokens that are markup)."""
    control, markup = {*CONTROL_TOKENS}, {*MARKUP_TOKENS}
    source = str(getattr(tokenizer, "chat_template", None))
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        if token.special:
            control.add(token.content)
        elif token.content in source:
            markup.add(token.content)
    control.update(getattr(tokenizer, "all_special_tokens", []))
    control -= {*MARKUP_TOKENS}  # some tokenizers count them among the special ones
    # A token of white space or of one character is no markup, and has no place for a space.
    one, other = ({n for n in names if len(n) > 1 and not n.isspace()} for names in (control, markup))
    return one, other


@dataclass(frozen=True)
class _Frame:
    """What a template writes around contents, in one order of roles."""

    parts: list[str]  # one more than contents
    trims: bool  # whether white space around contents is left out

    def filled(self, contents: list[str]) -> str:
        """The text with these contents."""
        texts = [""] * (2 * len(self.parts) - 1)
        texts[::2], texts[1::2] = self.parts, [text.strip() for text in contents] if self.trims else contents
        return "".join(texts)


def _frame(
    messages: list[Message], free: list[bool], render: Callable[[list[Message]], str], text: str
) -> _Frame | None:
    """The frame around the contents that are free; None for a template that does more than to trim them.

    `text`: the messages as the template renders them. TemplateError for one that leaves a content out.
    """
    marks = [f"content {number} of it" for number in range(len(messages))]
    stand_ins = [_CONTENT.format(mark) for mark in marks]
    shown = render([{**m, "content": stand_in} for m, stand_in in zip(messages, stand_ins, strict=True)])
    for message, mark in zip(messages, marks, strict=True):
        if mark not in shown:
            raise TemplateError(
                f"the chat template leaves out what stands in a message of the role {message['role']}: say it in "
                "another one (user, for what a tool answered), or use a tokenizer whose template shows it"
            )
    asked = [{**m, "content": s if f else m["content"]} for m, s, f in zip(messages, stand_ins, free, strict=True)]
    contents = [m["content"] for m, f in zip(messages, free, strict=True) if f]
    for trims in (False, True):
        rest, parts = render(asked), []
        for stand_in in (s for s, f in zip(stand_ins, free, strict=True) if f):
            before, _, rest = rest.partition(stand_in.strip() if trims else stand_in)
            parts.append(before)
        frame = _Frame([*parts, rest], trims)
        if frame.filled(contents) == text:
            return frame
    return None


def _finder(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def _chatml(messages: list[Message], tools: list[Tool] | None, header: bool, end: str) -> str:
    """The template of `byte_tokenizer`, by hand."""
    parts = []
    if tools:
        system = messages[0]["content"] + "\n\n" if messages and messages[0]["role"] == "system" else ""
        lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
        parts.append(
            f"{IM_START}system\n{system}Tools you may call, one JSON schema per line:\n{lines}"
            f'To call one, write <tool_call>{{"name": its name, "arguments": {{...}}}}</tool_call>.{end}\n'
        )
        messages = messages[1:] if system else messages
    for message in messages:
        content = message["content"]
        content = f"<tool_response>{content}</tool_response>" if message["role"] == "tool" else content
        parts.append(f"{IM_START}{message['role']}\n{content}{end}\n")
    return "".join([*parts, f"{IM_START}assistant\n" if header else ""])
