"""A session without a socket: what is asked of it, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from spmd_rl.envs.endpoint.errors import ApiError
from spmd_rl.envs.endpoint.messages import Message
from spmd_rl.envs.endpoint.requests import ChatRequest
from spmd_rl.envs.endpoint.session import Session
from tests.envs.fakes import ScriptedPolicy, byte_tokenizer

END = 258
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def run(main: Coroutine[Any, Any, Any]) -> Any:
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def asked(*texts: str, after: tuple[Message, ...] = (), **changes: Any) -> ChatRequest:
    return ChatRequest((*after, *(Message("user", text) for text in texts)), **changes)


async def heard(session: Session, request: ChatRequest) -> Message:
    return (await session.chat(request)).answers[0].said


async def refusal(work: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await work
    return raised.value


def talk(lines: list[Any], work: Callable[[Session], Coroutine[Any, Any, Any]], **options: Any) -> tuple[Any, Any, Any]:
    """(what `work` comes to, the session, the policy)."""
    policy = ScriptedPolicy(byte_tokenizer(), lines, **options)
    session = Session(byte_tokenizer(), policy)
    return run(work(session)), session, policy
