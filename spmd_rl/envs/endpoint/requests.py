"""What a client may ask for: the bodies of `/v1/chat/completions` and `/v1/completions`, checked.

Parameters that change nothing here are passed over (`user`, `metadata`, …); those that would change the result and
can't be honoured (penalties, a response format, a forced tool call) are refused unless they say what is done anyway; so
are names that nobody here knows. `null` always means: not given.

It refuses to know about policies and answers. Invariant: any bytes come to a request or an ApiError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from spmd_rl.envs.endpoint.errors import ApiError, shown, wrong
from spmd_rl.envs.endpoint.messages import Message, read_messages, read_tools

R = TypeVar("R")

MOST = 128  # choices of one request, and prompts of one completion
STOPS = 16  # stop strings
PASSED_OVER = {
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
}
# What else may be said, as it is done anyway.
ONLY: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
}
ONLY_IN_CHATS: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
ONLY_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {"echo": (False,), "suffix": ("",), "best_of": (1,)}
SAMPLING = {"n", "temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "stream", "stream_options", "logprobs"}
OF_CHATS = {"messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens"}


@dataclass(frozen=True)
class Wishes:
    """How a client wants to be answered; None and 0: it does not say."""

    n: int = 1  # answers to one prompt
    max_tokens: int = 0  # new tokens of one answer at most
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 = off
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    usage: bool = False  # a last chunk of a stream that counts tokens


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to go on with."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()  # that the prompt shows
    calls: bool = False  # whether calls in the reply are told apart from its text
    one_call: bool = False  # the first one of a reply alone
    wishes: Wishes = Wishes()


@dataclass(frozen=True)
class CompletionRequest:
    """Plain prompts to go on with: texts, or token ids."""

    prompts: tuple[str | tuple[int, ...], ...]
    wishes: Wishes = Wishes()


def chat_request(body: bytes) -> ChatRequest:
    """The body of `/v1/chat/completions`."""
    return _read(body, _chat)


def completion_request(body: bytes) -> CompletionRequest:
    """The body of `/v1/completions`."""
    return _read(body, _completion)


def _read(body: bytes, read: Callable[[dict[str, Any]], R]) -> R:
    try:
        return read(_object(body))
    except RecursionError:
        raise ApiError(400, "the body is JSON that is nested too deeply") from None


def _object(body: bytes) -> dict[str, Any]:
    """The object in a request's body, with U+FFFD for half characters: no tokenizer takes those."""
    try:
        value = json.loads(body)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    if b"\\u" in body:
        text = json.dumps(value, ensure_ascii=False)
        value = json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return {name: item for name, item in value.items() if item is not None}


def _chat(given: dict[str, Any]) -> ChatRequest:
    _check_names(given, SAMPLING | OF_CHATS, ONLY | ONLY_IN_CHATS)
    tools = read_tools(given.get("tools", []))
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise wrong("tool_choice", f"{shown(choice)} would force what is sampled; only auto and none can be had")
    logprobs = _flag(given, "logprobs", False)
    return ChatRequest(
        read_messages(given.get("messages")),
        tools,
        bool(tools) and choice == "auto",
        not _flag(given, "parallel_tool_calls", True),
        _wishes(given, logprobs, given.get("max_completion_tokens", given.get("max_tokens", 0))),
    )


def _completion(given: dict[str, Any]) -> CompletionRequest:
    _check_names(given, SAMPLING | {"prompt"}, ONLY | ONLY_IN_COMPLETIONS)
    logprobs = given.get("logprobs", False)
    if logprobs is not False and (type(logprobs) is not int or logprobs != 0):
        raise wrong("logprobs", f"{shown(logprobs)}: only 0, the sampled tokens' own, can be had")
    wishes = _wishes(given, logprobs is not False, given.get("max_tokens", 0))
    return CompletionRequest(_prompts(given.get("prompt")), wishes)


def _wishes(given: dict[str, Any], logprobs: bool, max_tokens: Any) -> Wishes:
    if "max_tokens" in given or "max_completion_tokens" in given:
        max_tokens = _whole({"max_tokens": max_tokens}, "max_tokens", 1, 2**31)
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise wrong("stream_options", f"must be an object, not {shown(options)}")
    return Wishes(
        n=_whole(given, "n", 1, MOST) or 1,
        max_tokens=max_tokens,
        temperature=_number(given, "temperature", 0, 2),
        top_p=_number(given, "top_p", 1e-6, 1),
        top_k=max(0, top_k) if (top_k := _whole(given, "top_k", -1, 2**31)) is not None else None,
        seed=_whole(given, "seed", -(2**63), 2**63),
        stop=_stops(given.get("stop", [])),
        logprobs=logprobs,
        stream=_flag(given, "stream", False),
        usage=options.get("include_usage") is True,
    )


def _check_names(given: dict[str, Any], known: set[str], only: dict[str, tuple[Any, ...]]) -> None:
    for name, value in given.items():
        if name in known or name in PASSED_OVER:
            continue
        if name not in only:
            raise wrong(name[:60], "is no parameter that this endpoint knows, so it can't be honoured: leave it out")
        if not any(value == fine and type(value) in (type(fine), float) for fine in only[name]):
            raise wrong(name, f"{shown(value)} can't be honoured here: leave it out")


def _flag(given: dict[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise wrong(name, f"must be true or false, not {shown(value)}")
    return value


def _number(given: dict[str, Any], name: str, low: float, high: float) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not low <= value <= high:
        raise wrong(name, f"must be a number from {low} to {high}, not {shown(value)}")
    return float(value)


def _whole(given: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if type(value) is float and math.isfinite(value) and value.is_integer():
        value = int(value)
    if type(value) is not int or not low <= value <= high:
        raise wrong(name, f"must be a whole number from {low} to {high}, not {shown(value)}")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > STOPS or not all(isinstance(s, str) and s for s in stops):
        raise wrong("stop", f"must be a text, or {STOPS} texts at most, and none of them empty; not {shown(value)}")
    return tuple(stops)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    many = value if isinstance(value, list) and value and not _is_id(value[0]) else [value]
    if len(many) > MOST:
        raise wrong("prompt", f"holds {len(many)} prompts; {MOST} at most")
    return tuple(_prompt(prompt) for prompt in many)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(map(_is_id, value)):
        return tuple(value)
    raise wrong("prompt", f"must be a text, a list of token ids, or a list of those; not {shown(value)}")


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31
