"""A session behind a real socket, and a client that knows HTTP and nothing else: what tests of the endpoint share."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from spmd_rl.envs.endpoint.endpoint import Access, Endpoint
from spmd_rl.envs.endpoint.session import Session
from tests.envs.fakes import ScriptedPolicy, byte_tokenizer

ADD = {"type": "function", "function": {"name": "add", "description": "a + b", "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class Heard:
    """A response."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def message(self) -> dict[str, Any]:
        """Of the first choice."""
        assert self.status == 200, self.data
        return self.json["choices"][0]["message"]

    @property
    def error(self) -> dict[str, Any]:
        assert self.status >= 400, self.data
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Of a stream; its end is None."""
        blocks = self.data.decode().split("\n\n")
        assert blocks.pop() == "" and all(block.startswith("data: ") for block in blocks)
        return [None if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


@asynccontextmanager
async def opened(session: Session) -> AsyncIterator[Access]:
    """The session, where it can be reached."""
    async with Endpoint().open(session) as access:
        yield access
        await session.close()


async def ask(
    access: Access, body: Any, path: str = "/chat/completions", method: str = "POST", key: str | None = None
) -> Heard:
    """One request. `body`: JSON, or bytes as they are."""
    url = urlsplit(access.url)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {access.key if key is None else key}", "Content-Type": "application/json"}

    def send() -> Heard:
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
        try:
            connection.request(method, path if path.startswith("//") else url.path + path, data, headers)
            response = connection.getresponse()
            return Heard(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    return await asyncio.to_thread(send)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(*texts: str) -> dict[str, Any]:
    """A request of users' messages."""
    return {"messages": [user(text) for text in texts]}


def session_of(lines: Any, **options: Any) -> Session:
    return Session(byte_tokenizer(), ScriptedPolicy(byte_tokenizer(), lines, **options))
