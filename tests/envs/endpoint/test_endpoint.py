"""The endpoint over a real socket: who may ask, and what is answered."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.endpoint import server
from spmd_rl.envs.endpoint.endpoint import Access, Endpoint
from spmd_rl.envs.endpoint.session import Session
from spmd_rl.envs.protocol import Generation
from tests.envs.endpoint.talking import ADD, Heard, ask, opened, said, session_of, user
from tests.envs.fakes import ScriptedPolicy, byte_tokenizer

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "²"}}</tool_call>'


def conversation(lines: Any, work: Any, **options: Any) -> tuple[Any, Session]:
    """(what `work(access)` comes to, the session)."""
    session = session_of(lines, **options)

    async def main() -> Any:
        async with opened(session) as access:
            return await work(access)

    return asyncio.run(main()), session


def test_a_client_goes_on_with_what_it_got_back() -> None:
    async def work(access: Access) -> list[Heard]:
        messages = [{"role": "system", "content": "s"}, user("a")]
        first = await ask(access, {"messages": messages, "tools": [ADD], "model": "any"})
        (call,) = first.message["tool_calls"]
        messages += [first.message, {"role": "tool", "content": "3", "tool_call_id": call["id"]}]
        return [first, await ask(access, {"messages": messages, "tools": [ADD], "logprobs": True})]

    (first, second), session = conversation([f"<think>hm</think>{CALL}", "three"], work)
    message, choice = first.message, first.json["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["logprobs"] is None
    assert message["content"] is None and message["reasoning_content"] == "hm"
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": "\\u00b2"}'}
    assert first.headers["x-sampling"] == "temperature=0.9, top_p=1, top_k=0"
    assert first.json["model"] == "policy" and first.json["object"] == "chat.completion"
    choice, usage = second.json["choices"][0], second.json["usage"]
    assert choice["message"]["content"] == "three" and choice["finish_reason"] == "stop"
    tokens = choice["logprobs"]["content"]
    assert [token["token"] for token in tokens] == ["t", "h", "r", "e", "e", "<|im_end|>"]
    assert [token["logprob"] for token in tokens] == [-n / 8 for n in range(1, 7)]
    (sample,) = session.samples()
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6 == len(sample.tokens)


def test_a_stream_is_the_whole_answer_and_its_end() -> None:
    async def work(access: Access) -> list[Heard]:
        body = said("a") | {"stream": True, "n": 2, "tools": [ADD], "stream_options": {"include_usage": True}}
        plain = {"prompt": "ab", "stream": True, "max_tokens": 2}
        return [await ask(access, body), await ask(access, plain, "/completions")]

    (chat, plain), _ = conversation(["x", CALL, "123"], work)
    assert chat.headers["content-type"] == "text/event-stream"
    *chunks, usage, end = chat.events
    assert end is None and usage["choices"] == [] and usage["usage"]["completion_tokens"] > 2
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["index"] for choice in choices] == [0, 0, 1, 1]
    assert [choice["finish_reason"] for choice in choices] == [None, "stop", None, "tool_calls"]
    assert choices[0]["delta"]["content"] == "x" and choices[1]["delta"] == {}
    assert choices[2]["delta"]["tool_calls"][0]["index"] == 0
    assert len({chunk["id"] for chunk in chunks}) == 1
    first, last, end = plain.events
    assert (first["choices"][0]["text"], last["choices"][0]["finish_reason"], end) == ("12", "length", None)
    assert first["object"] == "text_completion"


def test_plain_prompts() -> None:
    async def work(access: Access) -> Heard:
        return await ask(access, {"prompt": ["ab", [99]], "logprobs": 0, "n": 2, "max_tokens": 9}, "/completions")

    heard, _ = conversation(["1", "23", "4", "5"], work)
    choices = heard.json["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "1"), (1, "23"), (2, "4"), (3, "5")]
    assert choices[1]["logprobs"]["text_offset"] == [0, 1, 2]
    assert choices[1]["logprobs"]["token_logprobs"] == [-0.125, -0.25, -0.375]
    assert heard.json["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}


def test_models_and_health() -> None:
    async def work(access: Access) -> list[Heard]:
        named = await ask(access, b"", "/models/policy", "GET")
        return [await ask(access, b"", "/models", "GET"), named, await ask(access, b"", "/models/other", "GET")]

    (listed, named, other), _ = conversation([], work)
    assert listed.json["data"] == [named.json] and named.json["id"] == "policy"
    assert other.status == 404 and other.error["code"] == "model_not_found"


async def health(access: Access) -> int:
    reader, writer = await asyncio.open_connection(urlsplit(access.url).hostname, urlsplit(access.url).port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    head = await reader.readline()
    writer.close()
    return int(head.split()[1])


def test_keys_open_what_they_were_made_for() -> None:
    async def main() -> None:
        endpoint = Endpoint()
        one, two = session_of(["1"]), session_of(["2"])
        async with endpoint.open(one) as first:
            async with endpoint.open(two) as second:
                assert first.url == second.url and first.key != second.key and len(first.key) >= 40
                assert first.key not in repr(first)
                assert (await ask(second, said("a"))).message["content"] == "2"
                assert (await ask(first, said("a"))).message["content"] == "1"
                for wrong in ("", "x", first.key[:-1], first.key + second.key, "²", f"{first.key} {first.key}"):
                    denied = await ask(first, said("a"), key=wrong.encode().decode("latin-1"))
                    assert denied.status == 401 and denied.error["code"] == "invalid_api_key"
                    assert denied.headers["x-should-retry"] == "false"
                assert await health(first) == 200
            over = await ask(second, said("a"))
            assert over.status == 503 and over.error["code"] == "rollout_over"
            assert (await ask(first, b"", "/models", "GET")).status == 200
        with pytest.raises(OSError):
            await ask(first, said("a"))
        async with endpoint.open(one, key="mine") as again:
            assert again.key == "mine" and (await ask(again, b"", "/models", "GET")).status == 200

    asyncio.run(main())


def test_other_schemes_and_addresses_and_methods() -> None:
    async def main() -> None:
        async with opened(session_of([])) as access:
            url = urlsplit(access.url)
            for head, status in [
                (f"GET /v1/models HTTP/1.1\r\nAuthorization: Basic {access.key}", 401),
                ("GET /v1/models HTTP/1.1", 401),
                (f"GET /v1/models HTTP/1.1\r\nauthorization: bearer  {access.key} ", 200),
                ("GET /v1/chat/completions HTTP/1.1", 405),
                ("GET /v2 HTTP/1.1", 404),
                ("nonsense", 400),
                ("GET / HTTP/9.9\r\nA: \x00", 400),
            ]:
                reader, writer = await asyncio.open_connection(url.hostname, url.port)
                writer.write(f"{head}\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
                first = await reader.readline()
                assert int(first.split()[1]) == status, head
                writer.close()
            assert (await ask(access, b"", "/models", "GET")).status == 200

    asyncio.run(main())


def test_a_body_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LARGEST", 2000)

    async def work(access: Access) -> list[int]:
        url = urlsplit(access.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {access.key}\r\n"
        writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\nfa0\r\n".encode() + b" " * 4000 + b"\r\n0\r\n\r\n")
        chunked = int((await reader.readline()).split()[1])
        writer.close()
        long, fine = await ask(access, said("a" * 2001)), await ask(access, said("a"))
        assert long.error["message"].startswith("the body has")
        return [chunked, long.status, fine.status]

    assert conversation(["x"], work)[0] == [413, 413, 200]


def test_a_body_must_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READ_S", 0.05)

    async def work(access: Access) -> int:
        url = urlsplit(access.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {access.key}\r\n"
        writer.write(f"{head}Content-Length: 9\r\n\r\n".encode())
        status = int((await reader.readline()).split()[1])
        writer.close()
        return status

    assert conversation([], work)[0] == 408


@settings(max_examples=25, deadline=None)
@given(bodies=st.lists(st.binary(max_size=40) | st.sampled_from([b"{}", b"[" * 99999, b'{"messages": 1}']), max_size=8))
def test_junk_is_refused_and_harms_nothing(bodies: list[bytes]) -> None:
    async def work(access: Access) -> list[Heard]:
        heard = []
        for body in bodies:
            heard += [await ask(access, body), await ask(access, body, "/completions")]
        heard.append(await ask(access, said("a")))
        return heard

    (*junk, last), session = conversation(["x"], work)
    assert all(heard.status == 400 and heard.error["message"] for heard in junk)
    assert last.message["content"] == "x" and session.error is None and session.status == "ok"


def test_errors_of_the_session_reach_the_client() -> None:
    async def work(access: Access) -> list[Heard]:
        return [await ask(access, said("y" * 200)), await ask(access, said("a")), await ask(access, said("a"))]

    class Breaks(ScriptedPolicy):
        async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
            if self.asked:
                raise RuntimeError("secret")
            return await super().generate(tokens, sampling)

    session = Session(byte_tokenizer(), Breaks(byte_tokenizer(), ["x"], seq_len=100))

    async def main() -> list[Heard]:
        async with opened(session) as access:
            return await work(access)

    long, fine, broken = asyncio.run(main())
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")
    assert long.error["param"] == "messages" and long.error["type"] == "invalid_request_error"
    assert fine.status == 200
    assert (broken.status, broken.error["type"]) == (500, "server_error") and b"secret" not in broken.data
    assert isinstance(session.error, RuntimeError)


def test_what_goes_wrong_in_here_is_told_without_details() -> None:
    class Broken:
        async def chat(self, request: Any) -> Any:
            raise RuntimeError("secret")

    async def main() -> Heard:
        async with Endpoint().open(Broken()) as access:
            return await ask(access, said("a"))

    heard = asyncio.run(main())
    assert heard.status == 500 and "RuntimeError" in heard.error["message"] and b"secret" not in heard.data


class Waiting(ScriptedPolicy):
    """Never answers."""

    def __init__(self) -> None:
        super().__init__(byte_tokenizer(), [])
        self.begun, self.given_up = asyncio.Event(), asyncio.Event()

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up.set()
        raise AssertionError("unreachable")


def test_a_client_that_goes_away_takes_its_request_with_it() -> None:
    async def main() -> None:
        policy = Waiting()
        session = Session(byte_tokenizer(), policy)
        async with opened(session) as access:
            url, body = urlsplit(access.url), json.dumps(said("a")).encode()
            _, writer = await asyncio.open_connection(url.hostname, url.port)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {access.key}\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await policy.begun.wait()
            writer.close()
            async with asyncio.timeout(60):
                await policy.given_up.wait()
        assert session.samples() == () and session.error is None and session.status == "ok"

    asyncio.run(main())


def test_who_waits_is_told_when_the_rollout_is_over() -> None:
    async def main() -> Heard:
        policy = Waiting()
        async with opened(Session(byte_tokenizer(), policy)) as access:
            waiting = asyncio.create_task(ask(access, said("a")))
            await policy.begun.wait()
        return await waiting

    heard = asyncio.run(main())
    assert heard.status == 503 and heard.error["code"] == "rollout_over"


def test_nothing_is_logged(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    async def work(access: Access) -> str:
        await ask(access, said("a"))
        await ask(access, b"junk")
        await ask(access, b"", "/models", "GET", key="wrong")
        url = urlsplit(access.url)
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(f"GET / HTTP/1.1\r\nAuthorization: {access.key}\x00\r\n\r\n".encode())
        await asyncio.sleep(0.05)
        writer.close()
        return access.key

    with caplog.at_level(logging.DEBUG):
        key, _ = conversation(["x"], work)
    printed = capfd.readouterr()
    assert key not in caplog.text + printed.out + printed.err
    assert not [record for record in caplog.records if record.name.startswith("aiohttp")]
