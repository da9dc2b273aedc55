"""Whatever a client sends is a request or an error of OpenAI's form; and a message is known in every dress."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.envs.endpoint.errors import ApiError
from spmd_rl.envs.endpoint.messages import Call, Message, read_messages, read_tools, say_the_same, tool_names
from spmd_rl.envs.endpoint.requests import Wishes, chat_request, completion_request
from tests.envs.endpoint.talking import ADD

HI = [{"role": "user", "content": "hi"}]
CALLS = (Call("1", "add", '{"a": 1, "b": [2]}'),)


def chat(**given: Any) -> Any:
    return chat_request(json.dumps({"messages": HI} | given).encode())


def refused(**given: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        chat(**given)
    assert raised.value.status == 400
    assert raised.value.body()["error"]["message"] == raised.value.message
    return raised.value


def test_what_a_client_may_wish() -> None:
    wishes = chat(
        n=3, temperature=0.5, top_p=0.9, top_k=-1, seed=-7, stop="x", logprobs=True, stream=True, max_tokens=5.0
    ).wishes
    assert wishes == Wishes(3, 5, 0.5, 0.9, 0, -7, ("x",), True, True, False)
    assert chat(max_tokens=9, max_completion_tokens=5, stop=["a", "b"]).wishes == Wishes(max_tokens=5, stop=("a", "b"))
    assert chat(stream=True, stream_options={"include_usage": True}).wishes.usage
    assert chat(n=None, stop=None, tools=None, temperature=None, whatever=None).wishes == Wishes()


def test_tools_and_who_may_call_them() -> None:
    request = chat(tools=[ADD], tool_choice="auto")
    assert (request.tools, request.calls, request.one_call) == ((ADD,), True, False)
    assert not chat().calls
    assert chat(tools=[ADD], tool_choice="none").tools == (ADD,) and not chat(tools=[ADD], tool_choice="none").calls
    assert chat(tools=[ADD], parallel_tool_calls=False).one_call
    assert refused(tools=[ADD], tool_choice="required").param == "tool_choice"
    assert refused(tools=[ADD], tool_choice={"type": "function", "function": {"name": "add"}}).param == "tool_choice"
    plain = {"type": "function", "function": {"name": "f", "strict": True}}
    want = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert read_tools([plain]) == ({"type": "function", "function": want},)


@pytest.mark.parametrize(
    "harmless",
    [
        {"model": "gpt-4o", "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}},
        {"min_p": 0, "repetition_penalty": 1.0, "top_logprobs": 0, "function_call": "none", "modalities": ["text"]},
    ],
)
def test_what_changes_nothing_is_passed_over(harmless: dict[str, Any]) -> None:
    assert chat(**harmless) == chat()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", False),
        ("repetition_penalty", True),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("top_logprobs", 3),
        ("functions", [{"name": "f"}]),
        ("reasoning_effort", "high"),
        ("guided_json", {}),
        ("n", 0),
        ("n", 129),
        ("n", 1.5),
        ("n", True),
        ("max_tokens", 0),
        ("max_tokens", "7"),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "0.5"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("seed", 0.5),
        ("seed", 2**64),
        ("stop", ""),
        ("stop", ["a", 1]),
        ("stop", ["a"] * 17),
        ("stop", {}),
        ("logprobs", 1),
        ("stream", "yes"),
        ("stream_options", []),
        ("parallel_tool_calls", 0),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.param == name and name in error.message and not error.again


@pytest.mark.parametrize(
    ("where", "messages"),
    [
        ("messages", None),
        ("messages", []),
        ("messages", {"role": "user"}),
        ("messages[0]", ["hi"]),
        ("messages[1].role", [*HI, {"role": "function", "content": ""}]),
        ("messages[0].role", [{"role": ["user"], "content": ""}]),
        ("messages[0].content", [{"role": "user"}]),
        ("messages[0].content", [{"role": "system", "content": 7}]),
        ("messages[0].content[1]", [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]),
        ("messages[0].content[0]", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages[0].content[0]", [{"role": "user", "content": [{"type": [], "text": "a"}]}]),
        ("messages[0].tool_call_id", [{"role": "tool", "content": "3"}]),
        ("messages[0].function_call", [{"role": "assistant", "function_call": {"name": "f"}}]),
        ("messages[0].tool_calls", [{"role": "assistant", "tool_calls": {}}]),
        ("messages[0].tool_calls[0].function.name", [{"role": "assistant", "tool_calls": [{"id": "1"}]}]),
    ],
)
def test_messages_that_are_none_are_refused_by_their_place(where: str, messages: Any) -> None:
    assert refused(messages=messages).param == where


@pytest.mark.parametrize(
    ("where", "tool"),
    [
        ("tools[0]", 7),
        ("tools[0]", {"type": "web_search"}),
        ("tools[0].function.name", {"function": {"name": "a b"}}),
        ("tools[0].function.description", {"function": {"name": "a", "description": 1}}),
        ("tools[0].function.parameters", {"function": {"name": "a", "parameters": []}}),
    ],
)
def test_tools_that_are_none_are_refused_by_their_place(where: str, tool: Any) -> None:
    assert refused(tools=[tool]).param == where


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"a": NaNs}',
        nested(100_000),
        b'{"messages": ' + nested(100_000) + b"}",
        b'{"messages": [{"role": "user", "content": ' + nested(900) + b"}]}",
        b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"name": "f", "parameters": {"a": '
        + nested(900)
        + b"}}}]}",
        b'{"seed": ' + b"9" * 10_000 + b"}",
    ],
)
def test_bodies_that_are_none_are_refused(body: bytes) -> None:
    for read in (chat_request, completion_request):
        with pytest.raises(ApiError) as raised:
            read(body)
        assert raised.value.status == 400 and len(raised.value.message) < 400


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["tool", "auto"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name", "id", "arguments"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
names = st.sampled_from(
    ["messages", "tools", "stop", "n", "prompt", "logprobs", "tool_choice", "stream_options", "top_k", "logit_bias"]
)


@settings(max_examples=300, deadline=None)
@given(body=st.dictionaries(names, values, max_size=5), good=st.booleans())
def test_any_body_is_a_request_or_an_error(body: dict[str, Any], good: bool) -> None:
    data = json.dumps(body | ({"messages": HI, "prompt": "a"} if good else {})).encode()
    for read in (chat_request, completion_request):
        try:
            request = read(data)
        except ApiError as error:
            assert error.status == 400
            json.dumps(error.body())
        else:
            assert 1 <= request.wishes.n <= 128


def test_half_characters_are_replaced_wherever_they_stand() -> None:
    body = b'{"messages": [{"role": "user", "content": "a\\ud800b\\ud83d\\ude00"}]}'
    assert chat_request(body).messages == (Message("user", "a\ufffdb😀"),)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_plain_prompts(prompt: Any, prompts: Any) -> None:
    assert completion_request(json.dumps({"prompt": prompt, "logprobs": 0}).encode()).prompts == prompts


@pytest.mark.parametrize("prompt", [None, [], [[]], [1, "a"], [1.5], [-1], [True], {}, ["a"] * 129])
def test_prompts_that_are_none(prompt: Any) -> None:
    with pytest.raises(ApiError) as raised:
        completion_request(json.dumps({"prompt": prompt}).encode())
    assert raised.value.param == "prompt"


def test_a_role_in_other_words_and_text_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = read_messages([{"role": "developer", "content": parts}, {"role": "assistant", "content": None}])
    assert messages == (Message("system", "ab"), Message("assistant"))


def test_a_result_has_the_name_of_the_call_before_it() -> None:
    messages = (
        Message("tool", "0", call_id="1"),
        Message("assistant", calls=(Call("1", "add", "{}"), Call("2", "sub", "{}"))),
        Message("tool", "3", call_id="2"),
        Message("user", "?"),
        Message("assistant", calls=(Call("2", "mul", "{}"),)),
        Message("tool", "4", call_id="2"),
    )
    assert tool_names(messages) == ["", "", "sub", "", "", "mul"]


def as_sent(**changes: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": '{"a": 1, "b": [2]}'}
    call = {"id": "1", "type": "function", "function": function}
    return {"role": "assistant", "content": "well ", "tool_calls": [call]} | changes


@pytest.mark.parametrize(
    "dress",
    [
        as_sent(),
        dict(reversed(as_sent().items())),
        as_sent(content="well", refusal=None, audio=None, name="me"),
        as_sent(content=[{"type": "text", "text": "well "}]),
        as_sent(content=None),
        as_sent(content="<think>so</think>well "),
        as_sent(reasoning_content="another thought"),
        as_sent(tool_calls=[{"id": "9", "function": {"arguments": '{"b":[2],"a":1}', "name": "add"}}]),
        as_sent(tool_calls=[{"function": {"arguments": {"b": [2], "a": 1}, "name": "add"}}]),
    ],
)
def test_a_reply_is_known_in_every_dress(dress: dict[str, Any]) -> None:
    (theirs,) = read_messages([dress])
    assert say_the_same(Message("assistant", "well ", "so", CALLS), theirs)


@pytest.mark.parametrize(
    "other",
    [
        as_sent(content="Well"),
        as_sent(role="user", tool_calls=None),
        as_sent(tool_calls=None),
        as_sent(tool_calls=as_sent()["tool_calls"] * 2),
        as_sent(tool_calls=[{"function": {"name": "sub", "arguments": '{"a": 1, "b": [2]}'}}]),
        as_sent(tool_calls=[{"function": {"name": "add", "arguments": '{"a": 2, "b": [2]}'}}]),
    ],
)
def test_another_reply_is_told_apart(other: dict[str, Any]) -> None:
    (theirs,) = read_messages([other])
    assert not say_the_same(Message("assistant", "well ", "so", CALLS), theirs)


def test_only_a_reply_with_calls_may_lack_its_text() -> None:
    assert not say_the_same(Message("assistant", "well"), Message("assistant"))
    assert not say_the_same(Message("user", "well"), Message("user", "well "))


def test_a_turn_as_the_policy_would_have_said_it() -> None:
    message = Message("assistant", "well", "so", (*CALLS, Call("2", "f", "junk")))
    assert message.as_said == (
        '<think>so</think>well<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>'
        '<tool_call>{"name": "f", "arguments": "junk"}</tool_call>'
    )
