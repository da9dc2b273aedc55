"""Chat messages to token ids, and replies back to text and tool calls: by the tokenizer's template, or by `renderers`.

Both ways only append: what stands behind a sampled reply is rendered alone, and the reply's own ids are never decoded
and encoded again. The template's way is that of every chat in this program (`spmd_rl.envs.chat_template`), with tool
calls in Hermes' form. The package `renderers` knows the forms of many model families, GLM's or DeepSeek's tool calls
for instance; it is taken for tokenizers whose name it knows, and on request.

It refuses to know about policies, tasks and rewards. Invariant: junk from the model is never an exception here; at
worst a reply is heard as plain text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from pydantic import TypeAdapter, ValidationError
from renderers import Renderer, create_renderer
from renderers.base import MODEL_RENDERER_MAP
from renderers.configs import RendererConfig

from spmd_rl.envs.chat_template import template_of
from spmd_rl.envs.protocol import Generation
from spmd_rl.envs.tool_calls import CLOSE, OPEN, THINK, THOUGHT, parse

Message = dict[str, Any]  # role and content (text), and what else the chat format has: tool_calls, tool_call_id, name
Tool = dict[str, Any]  # {"type": "function", "function": {"name": …, "description": …, "parameters": …}}
Choice = str | dict[str, Any]  # "auto", "template", a renderer's name, or {"name": …} with the renderer's own settings


@dataclass(frozen=True)
class Call:
    """A tool call as the model wrote it. With an `error` it can't be made, and the error is for the model to read."""

    name: str
    arguments: str  # JSON
    id: str = ""  # where the model's format has one
    error: str = ""


@dataclass(frozen=True)
class Heard:
    """A reply."""

    text: str  # without thoughts and tool calls
    thought: str | None
    calls: list[Call]


class Rendering(Protocol):
    """How one tokenizer's conversations are written."""

    def first(self, messages: list[Message], tools: list[Tool]) -> list[int]:
        """Ids of the messages that begin a conversation, and of the header that asks for a reply."""
        ...

    def behind(
        self, prompt: np.ndarray, reply: Generation, messages: list[Message], tools: list[Tool]
    ) -> list[int] | None:
        """Ids of what stands behind a reply: its end where it lacks one, the messages, the header of the next reply.

        `prompt`, int32[T]: everything before the reply. None where this model's format can't go on from there: then
        everything is rendered anew, as another history.
        """
        ...

    def hear(self, prompt: np.ndarray, reply: Generation, tools: list[Tool]) -> Heard:
        """What was said. Where no tools were shown, no tool is called, whatever was written."""
        ...


def rendering(tokenizer: Any, choice: Choice) -> Rendering:
    """How to render. ValueError for a choice that there is not, or that does not fit the tokenizer."""
    if choice == "auto":
        known = MODEL_RENDERER_MAP.get(getattr(tokenizer, "name_or_path", ""))
        return ByRenderer(tokenizer, {"name": known}) if known else ByTemplate(tokenizer)
    if choice == "template":
        return ByTemplate(tokenizer)
    return ByRenderer(tokenizer, {"name": choice} if isinstance(choice, str) else choice)


class ByTemplate:
    """By the tokenizer's own chat template. TemplateError (a ValueError) for one that won't do."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._template = tokenizer, template_of(tokenizer)

    def first(self, messages: list[Message], tools: list[Tool]) -> list[int]:
        return self._template.first([self._plain(m) for m in messages], tools)

    def behind(
        self, prompt: np.ndarray, reply: Generation, messages: list[Message], tools: list[Tool]
    ) -> list[int] | None:
        ids = self._template.behind_reply([self._plain(m) for m in messages])
        return ids[1:] if self._template.ended(reply.tokens, reply.stop_reason) else ids

    def hear(self, prompt: np.ndarray, reply: Generation, tools: list[Tool]) -> Heard:
        ended = self._template.ended(reply.tokens, reply.stop_reason)
        text = self._tokenizer.decode(reply.tokens[: len(reply.tokens) - ended].tolist())
        if self._template.opens_thought:
            text = THINK + text
        found = parse(text) if tools else []
        calls = [Call(c.name, json.dumps(c.arguments) if not c.error else c.text, error=c.error) for c in found]
        thought = None
        if (begun := text.lstrip()).startswith(THINK):
            thought, _, text = begun[len(THINK) :].partition(THOUGHT)
        return Heard(text.partition(OPEN)[0].strip() if calls else text.strip(), thought, calls)

    def _plain(self, message: Message) -> dict[str, str]:
        """A message of texts alone, which can't forge a turn."""
        role, content = message["role"], message["content"] or ""
        plain = {"role": role, "content": self._template.clean(content, markup=role in ("user", "tool"))}
        for call in message.get("tool_calls") or []:  # of an example in the prompt
            made = call["function"]
            written = f'{{"name": {json.dumps(made["name"])}, "arguments": {made["arguments"]}}}'
            plain["content"] += f"{OPEN}{written}{CLOSE}"
        if role == "tool":
            plain |= {"tool_call_id": "000000000"} | ({"name": message["name"]} if message.get("name") else {})
        return plain


class ByRenderer:
    """By the package `renderers`. `config`: {"name": …} and the renderer's settings.

    Thoughts of earlier turns are kept unless the settings say otherwise: a history that drops them is another one
    after every turn.
    """

    def __init__(self, tokenizer: Any, config: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._renderer = _renderer(tokenizer, config)
        specials = {*getattr(tokenizer, "all_special_tokens", [])}
        self._forbidden = sorted((s for s in specials if len(s) > 1 and not s.isspace()), key=len, reverse=True)

    def first(self, messages: list[Message], tools: list[Tool]) -> list[int]:
        cleaned = [self._clean(m) for m in messages]
        return self._renderer.render(cleaned, tools=tools or None, add_generation_prompt=True).token_ids

    def behind(
        self, prompt: np.ndarray, reply: Generation, messages: list[Message], tools: list[Tool]
    ) -> list[int] | None:
        said = reply.tokens.tolist()
        cleaned = [self._clean(m) for m in messages]
        whole = self._renderer.bridge_to_next_turn(prompt.tolist(), said, cleaned, tools=tools or None)
        before = len(prompt) + len(said)
        if whole is None or whole.token_ids[len(prompt) : before] != said:  # it may cut what stands behind an end token
            return None
        return whole.token_ids[before:]

    def hear(self, prompt: np.ndarray, reply: Generation, tools: list[Tool]) -> Heard:
        ids = reply.tokens.tolist()
        try:
            parsed = self._renderer.parse_response(ids, prompt_ids=prompt.tolist(), tools=tools or None)
        except Exception:  # JSON nested too deeply, a number of thousands of digits
            return Heard(_whole(self._tokenizer.decode(ids)), None, [])
        calls = [_call(c) for c in parsed.tool_calls] if tools else []
        thought = parsed.reasoning_content
        return Heard(_whole(parsed.content or ""), None if thought is None else _whole(thought), calls)

    def _clean(self, message: Message) -> Message:
        """The message with the names of control tokens taken apart, so that no content forges a turn."""
        text = _whole(message["content"] or "")
        for name in self._forbidden:
            text = text.replace(name, f"{name[0]} {name[1:]}")
        return {**message, "content": text}


def _renderer(tokenizer: Any, config: dict[str, Any]) -> Renderer:
    known = {*MODEL_RENDERER_MAP.values(), "default"}
    if config.get("name") not in known:
        raise ValueError(
            f"there is no renderer {config.get('name')!r}; say 'auto', 'template', or one of "
            f'{", ".join(sorted(known))}, with its settings as a table {{name = "…"}}'
        )
    try:
        typed = TypeAdapter(RendererConfig).validate_python(config)
        if typed.thinking_retention is None and config["name"] != "default":
            typed = typed.model_copy(update={"thinking_retention": "all"})
        return create_renderer(tokenizer, typed)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ValueError(f"renderer = {config!r}: {wrong['loc'][-1]}: {wrong['msg']}") from None
    except Exception as error:  # asserts about tokens that the tokenizer lacks
        raise ValueError(
            f"the renderer {config['name']!r} does not fit this tokenizer: {error or type(error).__name__}; set "
            "renderer = 'template' to use the tokenizer's own chat template"
        ) from error


def _call(parsed: Any) -> Call:
    name, arguments = parsed.name, parsed.arguments
    if not isinstance(name, str) or not name:
        error = f"malformed tool call ({parsed.status.value}): write it in the form you were shown"
        return Call("", _whole(parsed.raw), error=error)
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments)
    return Call(_whole(name), _whole(arguments), parsed.id or "")


def _whole(text: str) -> str:
    """The text with U+FFFD for half characters, which no tokenizer takes."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
