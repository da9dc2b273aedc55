"""A model that is served: every request by itself, as its client wishes, and no wait without an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.envs.endpoint.errors import ApiError
from spmd_rl.envs.endpoint.messages import Message
from spmd_rl.envs.endpoint.requests import ChatRequest, CompletionRequest, Wishes
from spmd_rl.orchestrator import serve_role
from spmd_rl.orchestrator.serve_role import Served, until_stopped
from spmd_rl.orchestrator.stall import watch_progress
from spmd_rl.orchestrator.steering import Steering
from tests.envs.fakes import byte_tokenizer
from tests.orchestrator.fake_run import Run, make_config, prepare
from tests.orchestrator.virtual_time import run


def served(work: Callable[[Served, Run], Coroutine[Any, Any, Any]], **config: Any) -> tuple[Any, Any, Served]:
    """(what `work` comes to, the cluster, who served)."""

    async def main() -> tuple[Any, Any, Served]:
        made = await prepare(make_config(**{"seq_len": 128, "max_tokens": 6} | config), replicas=2)
        made.loop.versions.publish(0)
        who = Served(made.services, byte_tokenizer())
        try:
            return await work(who, made), made.cluster, who
        finally:
            await made.cluster.close()
            assert made.services.router.depth == [0, 0]

    return run(main())


def asked(text: str = "a", **wishes: Any) -> ChatRequest:
    return ChatRequest((Message("user", text),), wishes=Wishes(**wishes))


def test_a_request_is_sampled_as_its_client_wishes_or_as_the_config_says() -> None:
    async def work(who: Served, made: Run) -> list[Any]:
        wishes = [{}, {"temperature": 0.0, "top_p": 0.5, "top_k": 7, "max_tokens": 50}, {"max_tokens": 1}]
        return [(await who.chat(asked(**w))).sampling for w in wishes]

    sampled, cluster, who = served(work)
    said = [(r.temperature, r.top_p, r.top_k, r.max_tokens) for r in cluster.requests.values()]
    assert said == [(1.0, 1.0, 0, 6), (0.0, 0.5, 7, 50), (1.0, 1.0, 0, 1)]
    assert [(s.temperature, s.top_p, s.top_k, s.max_tokens) for s in sampled] == said
    assert who.answered == 3


def test_only_a_seed_of_the_clients_repeats_an_answer() -> None:
    async def work(who: Served, made: Run) -> None:
        for wishes in ({}, {}, {"seed": 5}, {"seed": 5}, {"seed": 6}):
            await who.chat(asked(**wishes))
        await who.complete(CompletionRequest(("a",), Wishes(seed=5)))

    _, cluster, _ = served(work)
    seeds = [request.seed for request in cluster.requests.values()]
    assert seeds[2] == seeds[3] == seeds[5] and len(set(seeds)) == 4


def test_nothing_is_kept_of_a_conversation() -> None:
    async def work(who: Served, made: Run) -> None:
        first = (await who.chat(asked())).answers[0].said
        going_on = (Message("user", "a"), first, Message("user", "b"))
        for _ in range(2):
            await who.chat(ChatRequest(going_on))

    _, cluster, _ = served(work)
    one, two, three = (request.tokens.tolist() for request in cluster.requests.values())
    assert two == three != one


def test_a_conversation_without_room_is_the_clients_error() -> None:
    async def work(who: Served, made: Run) -> None:
        with pytest.raises(ApiError) as raised:
            await who.chat(asked("x" * 200))
        assert raised.value.code == "context_length_exceeded"
        await who.chat(asked())

    assert served(work)[2].answered == 1


def test_what_an_engine_refuses_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    class Deaf:
        async def generate(self, *args: Any, **more: Any) -> None:
            raise RuntimeError("no such engine")

        def __getattr__(self, name: str) -> Any:
            return lambda *args: 1

    async def work(who: Served, made: Run) -> None:
        object.__setattr__(made.services, "link", Deaf())
        with pytest.raises(ApiError) as raised:
            await who.chat(asked())
        assert raised.value.status == 500

    assert served(work)[2].answered == 0
    assert "request 0 failed: RuntimeError: no such engine" in capsys.readouterr().out


def test_there_are_only_so_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_role, "AT_ONCE", 2)

    async def work(who: Served, made: Run) -> list[Any]:
        return await asyncio.gather(*(who.chat(asked()) for _ in range(3)), return_exceptions=True)

    answers, _, who = served(work)
    assert [getattr(answer, "status", 200) for answer in answers] == [200, 200, 429] and who.answered == 2


def test_whoever_waits_at_the_end_is_told(tmp_path: Path) -> None:
    async def work(who: Served, made: Run) -> None:
        steering = Steering(tmp_path, print)
        ending = asyncio.create_task(until_stopped(made.services, steering))
        waiting = asyncio.create_task(who.chat(asked(n=2)))
        await asyncio.sleep(0)
        steering.stop()
        await ending
        await who.close()
        with pytest.raises(ApiError) as raised:
            await waiting
        assert raised.value.status == 503

    assert served(work)[2].answered == 0


def test_a_server_that_nobody_asks_is_not_stalled(tmp_path: Path) -> None:
    async def work(who: Served, made: Run) -> float:
        steering = Steering(tmp_path, print)
        watching = asyncio.create_task(watch_progress(made.services.link, 60.0, lambda: None))
        serving = asyncio.create_task(until_stopped(made.services, steering))
        await asyncio.sleep(100_000)
        assert not watching.done()
        steering.stop()
        await serving
        watching.cancel()
        return asyncio.get_running_loop().time()

    assert served(work)[0] < 100_002
