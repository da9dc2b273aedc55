"""The HTTP of the endpoint: a few addresses, a key in each request, JSON and server-sent events.

The only module that knows an HTTP library; it is not imported before a socket is to be opened. It refuses to know what
is answered. Invariants: whatever arrives is answered with a status and OpenAI's JSON, and ends nothing but itself; a
client that goes away takes its request with it; nothing is logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.endpoint.errors import ApiError
from spmd_rl.envs.endpoint.requests import ChatRequest, CompletionRequest, chat_request, completion_request
from spmd_rl.envs.endpoint.responses import Response, model, models
from spmd_rl.envs.endpoint.session import Answered

LARGEST = 32 * 2**20  # bytes of a body
READ_S = 60.0  # for a body to arrive
GONE_S = 2.0  # for connections to be closed at the end
BACKLOG = 1024  # connections that wait to be accepted

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Answering(Protocol):
    """Who answers the requests of a key."""

    async def chat(self, request: ChatRequest) -> Answered:
        """`n` answers. ApiError."""
        ...

    async def complete(self, request: CompletionRequest) -> Answered:
        """`n` answers to each prompt, prompt by prompt. ApiError."""
        ...


class Server:
    """Serves on a bound socket, until `stop`.

    Args:
        find: who answers the requests with this value of the Authorization header. ApiError for nobody.
        model: the name of the one model there is.
    """

    def __init__(self, listener: socket.socket, find: Callable[[str], Answering], model: str) -> None:
        self._find, self._model = find, model
        app = web.Application(middlewares=[_in_json], client_max_size=LARGEST)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._models),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._complete),
            ]
        )
        quiet = logging.Logger("endpoint", logging.CRITICAL + 1)  # what it would say may hold keys
        self._runner = web.AppRunner(
            app, access_log=None, logger=quiet, handler_cancellation=True, shutdown_timeout=GONE_S
        )
        self._listener = listener

    async def start(self) -> None:
        """Listen."""
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener, backlog=BACKLOG).start()

    async def stop(self) -> None:
        """Listen no more, and close all connections."""
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return _json({"status": "ok"})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._answering(request)
        name = request.match_info.get("name")
        if name not in (None, self._model):
            raise ApiError(404, f"there is no model of that name; there is {self._model}", code="model_not_found")
        return _json(model(self._model) if name else models(self._model))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        answering = self._answering(request)
        asked = chat_request(await _body(request))
        return await self._respond(request, asked, await answering.chat(asked))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        answering = self._answering(request)
        asked = completion_request(await _body(request))
        return await self._respond(request, asked, await answering.complete(asked))

    def _answering(self, request: web.Request) -> Answering:
        return self._find(request.headers.get("Authorization", ""))

    async def _respond(
        self, request: web.Request, asked: ChatRequest | CompletionRequest, answered: Answered
    ) -> web.StreamResponse:
        response = Response(asked, answered.answers, self._model, answered.decode)
        headers = {"X-Sampling": _described(answered.sampling)}
        if not asked.wishes.stream:
            return _json(response.body(), headers=headers)
        stream = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for chunk in response.chunks():
            await stream.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
        await stream.write_eof()
        return stream


@web.middleware
async def _in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as OpenAI's JSON."""
    try:
        return await handler(request)
    except ApiError as error:
        headers = {} if error.again else {"X-Should-Retry": "false"}  # OpenAI's clients heed it
        return _json(error.body(), error.status, headers)
    except web.HTTPException as error:  # no such address, another method, a body too large
        return _json(
            ApiError(error.status, f"{request.method} {request.path[:200]}: {error.reason}").body(), error.status
        )
    except ConnectionError:
        raise  # there is nobody to tell
    except Exception as error:
        return _json(ApiError(500, f"the endpoint failed: {type(error).__name__}").body(), 500)


async def _body(request: web.Request) -> bytes:
    if (request.content_length or 0) > LARGEST:
        raise ApiError(413, f"the body has {request.content_length} bytes, and {LARGEST} are the most")
    try:
        async with asyncio.timeout(READ_S):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {READ_S:g} s", again=True) from None


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(body, status=status, headers=headers)


def _described(sampling: SamplingConfig) -> str:
    return f"temperature={sampling.temperature:g}, top_p={sampling.top_p:g}, top_k={sampling.top_k}"
