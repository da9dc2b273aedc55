"""Where the endpoint listens: an address that is taken, held, used again, and nothing open before it is asked for."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from spmd_rl.envs.endpoint import endpoint as endpoint_module
from spmd_rl.envs.endpoint.endpoint import Endpoint, EndpointError
from tests.envs.endpoint.talking import ask, said, session_of

ROOT = Path(__file__).parents[3]


def test_an_address_that_is_taken_is_named() -> None:
    async def main(port: int) -> None:
        endpoint = Endpoint(port=port)
        for _ in range(2):
            with pytest.raises(EndpointError, match=f"127.0.0.1, port {port}: .*give another port"):
                async with endpoint.open(session_of([])):
                    pass
        with pytest.raises(EndpointError, match=r"no\.such\.host"):
            Endpoint("no.such.host.invalid").hold()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        asyncio.run(main(taken.getsockname()[1]))


def test_an_address_can_be_held_before_anything_is_served() -> None:
    async def main() -> None:
        endpoint = Endpoint()
        endpoint.hold()
        held = endpoint._held.getsockname()[1]
        async with endpoint.open(session_of([])) as access:
            assert urlsplit(access.url).port == held

    asyncio.run(main())


def test_a_fixed_port_is_opened_again_and_again() -> None:
    async def main(port: int) -> None:
        endpoint = Endpoint(port=port)
        for line in ("1", "2"):
            async with endpoint.open(session_of([line])) as access:
                assert urlsplit(access.url).port == port
                assert (await ask(access, said("a"))).message["content"] == line

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asyncio.run(main(port))


def test_an_opening_that_is_cancelled_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    bound = endpoint_module.bound
    monkeypatch.setattr(endpoint_module, "bound", lambda *address: made.append(bound(*address)) or made[-1])

    async def use(endpoint: Endpoint) -> None:
        async with endpoint.open(session_of([])):
            await asyncio.Event().wait()

    async def main(turns: int) -> None:
        task = asyncio.create_task(use(Endpoint()))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for turns in range(8):
        asyncio.run(main(turns))
    assert made and all(listener.fileno() == -1 for listener in made)


AUDIT = """
import asyncio, json, pkgutil, importlib, sys
bound = []
sys.addaudithook(lambda event, args: bound.append(str(args[1])) if event == "socket.bind" else None)
import spmd_rl.envs.endpoint as package
for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
    if module.name.rpartition(".")[2] != "server":
        importlib.import_module(module.name)
import spmd_rl.envs.load, spmd_rl.envs.builtin.command, spmd_rl.orchestrator.role
from tests.envs.fakes import ScriptedPolicy, byte_tokenizer
env = spmd_rl.envs.builtin.command.Command(byte_tokenizer(), command=["true"], tasks=sys.argv[1], exit_rewards={"0": 1})
task = env.task(0, "train")
env.prompt(task)
unused = [list(bound), "aiohttp" in sys.modules]
asyncio.run(env.rollout(task, ScriptedPolicy(byte_tokenizer(), [])))
print(json.dumps([*unused, bound]))
"""


def test_no_socket_is_opened_and_no_server_is_imported_before_a_rollout_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    process = subprocess.run(
        [sys.executable, "-c", AUDIT, str(tmp_path / "tasks.jsonl")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == [[], False, ["('127.0.0.1', 0)"]]
