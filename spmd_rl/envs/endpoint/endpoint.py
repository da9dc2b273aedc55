"""An OpenAI-compatible endpoint: one socket for as long as somebody uses it, one key for each who does.

Nothing is opened before the first `open`, and everything is closed behind the last one. Keys are random, known to this
process and to whom they are given, and compared in constant time. The socket is a loopback one unless asked otherwise:
there is no encryption here, so keys and texts are readable wherever packets pass.

It refuses to know HTTP (`server.py`) and what is answered (`session.py`). Invariants: a key opens what it was made for
and nothing else; a key that is over is told so, until the socket is closed; no key is written anywhere.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from typing import TYPE_CHECKING

from spmd_rl.envs.endpoint.errors import ApiError, over

if TYPE_CHECKING:
    from spmd_rl.envs.endpoint.server import Answering, Server

MODEL = "policy"  # what the model is called, where nobody says
OVER = 4096  # keys that are remembered to be over


class EndpointError(RuntimeError):
    """The endpoint can't be opened."""


@dataclass(frozen=True)
class Access:
    """How to reach the policy."""

    url: str  # what OpenAI's clients call base_url
    key: str = field(repr=False)
    model: str


class Endpoint:
    """Opens and closes the socket, and knows the keys.

    Args:
        host: an address of this machine; others than loopback ones can be reached from outside.
        port: 0: any that is free, another one each time the socket is opened.
        model: the model's name.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, model: str = MODEL) -> None:
        self._host, self._port, self._model = host, port, model
        self._keys: dict[bytes, tuple[str, Answering]] = {}  # by hash
        self._over: OrderedDict[bytes, None] = OrderedDict()  # hashes
        self._held: socket.socket | None = None
        self._users = 0
        self._serving: asyncio.Task[tuple[Server, str]] | None = None

    def hold(self) -> None:
        """Hold the address from now on, without listening. EndpointError when it can't be had."""
        self._held = bound(self._host, self._port)

    @asynccontextmanager
    async def open(self, answering: Answering, key: str = "") -> AsyncIterator[Access]:
        """Inside, requests with the key (empty: a random one) are answered.

        EndpointError when the address can't be had.
        """
        key = key or secrets.token_urlsafe(32)
        self._users += 1
        try:
            if self._serving is None:
                self._serving = asyncio.create_task(self._serve())
            _, url = await asyncio.shield(self._serving)
            self._keys[_hashed(key)] = key, answering
            yield Access(url, key, self._model)
        finally:
            self._users -= 1
            if self._keys.pop(_hashed(key), None):
                self._over[_hashed(key)] = None
            while len(self._over) > OVER:
                self._over.popitem(last=False)
            if not self._users:
                await self._close()

    async def _serve(self) -> tuple[Server, str]:
        from spmd_rl.envs.endpoint.server import Server

        listener, self._held = self._held or bound(self._host, self._port), None
        server = Server(listener, self._find, self._model)
        await server.start()
        return server, f"http://{_authority(listener)}/v1"

    async def _close(self) -> None:
        serving, self._serving = self._serving, None
        self._over.clear()
        if serving is None:
            return
        if not serving.done():  # who opened it was cancelled
            await asyncio.wait([serving])
        if serving.exception() is None:
            server, _ = serving.result()
            await server.stop()

    def _find(self, authorization: str) -> Answering:
        """Who answers to the key in a header. ApiError for a wrong one."""
        scheme, _, key = authorization.partition(" ")
        hashed = _hashed(key.strip())
        known, answering = self._keys.get(hashed, ("", None))
        if hashed in self._over:
            raise over()
        if scheme.lower() != "bearer" or answering is None or not secrets.compare_digest(_hashed(known), hashed):
            raise ApiError(401, "no such key: send the header Authorization: Bearer KEY", code="invalid_api_key")
        return answering


def bound(host: str, port: int) -> socket.socket:
    """A socket that holds the address, and does not listen yet. EndpointError when the address can't be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise EndpointError(
            f"the endpoint can't have the address {host}, port {port}: {error.strerror or error}; give another port "
            "(0: any that is free), or an address of this machine"
        ) from error
    return listener


def check_installed() -> None:
    """ImportError where the HTTP library is missing."""
    if find_spec("aiohttp") is None:
        raise ImportError("the endpoint needs aiohttp, which vLLM installs too: pip install 'aiohttp>=3.13.3,<4'")


def _authority(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _hashed(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
