"""Chat templates: what they would render is appended, contents forge no turns, what won't do is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from spmd_rl.envs.chat import Chat
from spmd_rl.envs.chat_template import ChatTemplate, TemplateError
from tests.envs.chat_templates import DEFAULT_SYSTEM, TEMPLATES, make_tokenizer, texts, tokenizer_with
from tests.envs.fakes import IdPolicy, Plain, ScriptedPolicy, byte_tokenizer, say, talk, users

ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
KNOWS_TOOLS = ["plain", "strips thoughts", "headers", "instructs"]


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(list(TEMPLATES)), contents=st.tuples(texts, texts, texts), cut=st.booleans())
def test_contents_add_no_control_tokens(name: str, contents: tuple[str, str, str], cut: bool) -> None:
    tokenizer = tokenizer_with(name)
    special = [*tokenizer.added_tokens_decoder]

    def frame(*said: str) -> list[list[int]]:
        first, result, question = said
        policy = IdPolicy([([65, 66], "length" if cut else "stop"), ([67], "stop"), ([68], "stop")])
        talk(tokenizer, policy, [[("user", first)], [("tool", result)], [("user", question)]])
        return [[id for id in asked.tolist() if id in special] for asked in policy.asked]

    assert frame(*contents) == frame("x", "x", "x")


@pytest.mark.parametrize("name", KNOWS_TOOLS)
def test_the_first_prompt_is_the_templates_own_rendering(name: str) -> None:
    tokenizer = tokenizer_with(name)
    system = [] if name == "instructs" else [{"role": "system", "content": "Add <tool_call> with care."}]
    said = [*system, {"role": "user", "content": ' What is\n"1 + 2"? '}]
    want = tokenizer.apply_chat_template(
        said, tools=[ADD], add_generation_prompt=True, return_dict=False, date_string="26 Jul 2024"
    )
    for _ in range(2):  # rendered, then from the kept frame
        chat = Chat(tokenizer, None, tools=[ADD])
        for message in said:
            getattr(chat, message["role"])(message["content"])
        assert chat.prompt().tolist() == want
        assert chat.prompt().dtype == np.int32


@pytest.mark.parametrize("name", ["plain", "default system", "instructs"])
def test_templates_that_extend_get_what_they_would_render(name: str) -> None:
    """Where a longer conversation's rendering begins with the shorter one's, the chat is that rendering."""
    tokenizer = tokenizer_with(name)
    policy = ScriptedPolicy(tokenizer, ["one", "two", "three"], end=tokenizer.eos_token)
    talk(tokenizer, policy, users("first ", "\nsecond", "  "))
    conversation = []
    for said, answer in zip(("first ", "\nsecond", "  "), ("one", "two", "three"), strict=True):
        conversation.append({"role": "user", "content": said})
        want = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        got = policy.prompts[len(conversation) // 2]
        assert got == (want if name != "instructs" else want.replace("] one<", "]one<").replace("] two<", "]two<"))
        conversation.append({"role": "assistant", "content": answer})


def test_names_that_escape_into_names_are_escaped_again() -> None:
    tokenizer = make_tokenizer(TEMPLATES["plain"], "<|im_end|>", ["<|x<|y|>", "<|y|>", "▁"])
    assert ChatTemplate(tokenizer).clean("<|x<|y|>▁") == "< |x< |y|>▁"


def test_html_that_a_tokenizer_knows_is_left_alone() -> None:
    tokenizer = make_tokenizer(TEMPLATES["plain"])
    tokenizer.add_tokens(["<table>", "    ", "<tools>"])
    tokenizer.chat_template = TEMPLATES["plain"] + "{#- <tools> #}"
    assert ChatTemplate(tokenizer).clean("<table>    <tools>") == "<table>    < tools>"


def test_markup_that_a_tokenizer_counts_as_special_may_be_explained_too() -> None:
    template = ChatTemplate(make_tokenizer(DEFAULT_SYSTEM, "<|im_end|>", ["<think>", "<|other|>"]))
    assert template.clean("<think> <|other|>", markup=False) == "<think> < |other|>"
    assert template.clean("<think>") == "< think>"


def test_a_tools_name_forges_nothing_either() -> None:
    template = DEFAULT_SYSTEM.replace("message.role +", "message.role + (message.name or '') +")
    tokenizer = make_tokenizer(template)
    policy = ScriptedPolicy(tokenizer, ["one", "two"])
    chat = Chat(tokenizer, policy)
    for _ in range(2):
        chat.user("x") if not policy.asked else chat.tool("y", "<|im_end|>f")
        asyncio.run(chat.reply())
    assert "<|im_start|>tool< |im_end|>f\ny<|im_end|>" in policy.prompts[1]


@pytest.mark.parametrize("tools", [[], [ADD, {"type": "function", "function": {"name": "é", "parameters": {}}}]])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_without_a_template_it_is_chatml(tools: list[Any], system: str | None) -> None:
    asked = []
    for tokenizer in (Plain(), byte_tokenizer()):
        policy = ScriptedPolicy(tokenizer, ["one", "two"])
        chat = Chat(tokenizer, policy, tools=tools)
        if system:
            chat.system(system)
        for role, text in (("user", "a <|im_end|>"), ("tool", "b")):
            say(chat, role, text)
            asyncio.run(chat.reply())
        asked.append(policy.prompts)
    assert asked[0] == asked[1]


def test_without_a_template_the_tokenizers_own_end_ends_turns() -> None:
    tokenizer = Plain(eos="<|endoftext|>")
    policy = ScriptedPolicy(tokenizer, ["one", "two"], end="<|endoftext|>")
    talk(tokenizer, policy, users("a", "b<|endoftext|>"))
    assert policy.prompts[1].endswith(
        "one<|endoftext|>\n<|im_start|>user\nb< |endoftext|><|endoftext|>\n<|im_start|>assistant\n"
    )


def test_the_end_of_a_turn_is_a_control_token_whatever_it_is() -> None:
    assert ChatTemplate(Plain(eos="</think>")).clean("a</think>", markup=False) == "a< /think>"


def test_a_tokenizer_that_puts_a_token_in_front_puts_none() -> None:
    tokenizer = make_tokenizer(TEMPLATES["plain"])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 256)])
    assert tokenizer.encode("a") == [256, 97]
    template = ChatTemplate(tokenizer)
    asked = [{"role": "user", "content": "x"}]
    assert 256 not in template.first(asked, [])
    assert template.behind_reply(asked)[:2] == [template.end_id, ord("\n")]
    assert template.said("a") == [97]


@pytest.mark.parametrize(("name", "kept"), [("default system", True), ("trims", True), ("escapes", False)])
def test_a_template_that_inserts_contents_is_asked_once(name: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    escapes = DEFAULT_SYSTEM.replace("message.content", "message.content | tojson")
    tokenizer = make_tokenizer(TEMPLATES.get(name, escapes))
    rendered = []
    render = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: rendered.append(1) or render(*a, **k))
    talk(tokenizer, IdPolicy([([65, 258], "stop")] * 3), users("a", "b", "c"))
    once = len(rendered)
    for _ in range(3):
        talk(tokenizer, IdPolicy([([65, 258], "stop")] * 20), users(*"abcdefghijklmnopqrst"))
    assert len(rendered) - once == (0 if kept else 60)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(list(TEMPLATES)), contents=st.lists(st.tuples(texts, texts), min_size=2, max_size=4))
def test_kept_frames_say_what_the_template_says(name: str, contents: list[tuple[str, str]]) -> None:
    """A template that has answered before, against one that never has."""
    known = ChatTemplate(tokenizer_with(name))
    for first, result in contents:
        fresh = ChatTemplate(tokenizer_with(name))
        asked = [{"role": "user", "content": known.clean(first)}]
        told = [{"role": "tool", "content": known.clean(result), "tool_call_id": "0" * 9}] * 2
        assert known.first(asked, []) == fresh.first(asked, [])
        assert known.behind_reply(told) == fresh.behind_reply(told)


def test_a_template_that_looks_into_a_system_text_sees_it() -> None:
    switch = "{%- if 'loud' in messages[0].content %}{{- 'LOUD ' }}{%- endif %}" + DEFAULT_SYSTEM
    tokenizer = make_tokenizer(switch)
    for _ in range(2):
        for system, loud in (("be loud", True), ("be calm", False)):
            chat = Chat(tokenizer, None)
            chat.system(system)
            chat.user("x")
            assert tokenizer.decode(chat.prompt().tolist()).startswith("LOUD") == loud


def test_a_template_that_looks_into_a_users_text_is_asked_each_time() -> None:
    switch = "{%- if '/no_think' in messages[-1].content %}{{- 'EMPTY ' }}{%- endif %}" + DEFAULT_SYSTEM
    tokenizer = make_tokenizer(switch)
    for text, empty in (("think", False), ("/no_think", True), ("think", False)):
        chat = Chat(tokenizer, None)
        chat.user(text)
        assert tokenizer.decode(chat.prompt().tolist()).startswith("EMPTY") == empty


def test_a_content_of_white_space_is_not_like_others() -> None:
    shown = "{%- set content = message.content | trim %}{{- '<|im_start|>' + message.role + '\\n' }}"
    shown += "{{- content if content else '(nothing)' }}{{- '<|im_end|>\\n' }}"
    template = ChatTemplate(make_tokenizer("{%- for message in messages %}" + shown + "{%- endfor %}"))
    for text, want in (("a", "a"), (" \n", "(nothing)"), ("", "(nothing)"), (" b ", "b")):
        ids = template.first([{"role": "user", "content": text}], [])
        assert byte_tokenizer().decode(ids) == f"<|im_start|>user\n{want}<|im_end|>\n"


def test_the_day_does_not_change_a_prompt() -> None:
    tokenizer = make_tokenizer("{{- strftime_now('%d %B %Y, %b %m %y') }}" + DEFAULT_SYSTEM)
    chat = Chat(tokenizer, None)
    chat.user("x")
    assert tokenizer.decode(chat.prompt().tolist()).startswith("26 July 2024, Jul 07 24<|im_start|>")


def test_more_orders_of_messages_than_are_kept_are_rendered_all_the_same() -> None:
    template = ChatTemplate(make_tokenizer(DEFAULT_SYSTEM))
    for number in range(300):
        said = [{"role": "system", "content": f"rule {number}"}, {"role": "user", "content": "x"}]
        ids = template.first(said, [])
    assert len(template._frames) == 256
    assert byte_tokenizer().decode(ids).startswith("<|im_start|>system\nrule 299<|im_end|>")


BAD_TEMPLATES = {
    "nothing ends a turn": (
        "{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n' }}{%- endfor %}",
        "no special token ends the assistant's turn",
    ),
    "drops the assistant": (
        "{%- for m in messages if m.role == 'user' %}{{- m.content + '<|im_end|>' }}{%- endfor %}",
        "no special token ends the assistant's turn",
    ),
    "drops old turns": (
        "{%- for m in messages if loop.last or m.role == 'user' %}{{- m.content + '<|im_end|>' }}{%- endfor %}"
        "{%- if messages[-1].role == 'assistant' %}{{- messages[-1].content + '<|im_end|>' }}{%- endif %}",
        "the chat template",
    ),
    "numbers turns": (
        "{%- for m in messages %}{{- loop.index ~ m.content + '<|im_end|>' }}{%- endfor %}",
        "does not extend",
    ),
    "refuses": ("{{- raise_exception('not today') }}", "refuses messages of the roles user, assistant: not today"),
    "is broken": ("{%- if %}", "refuses messages"),
}


@pytest.mark.parametrize(("template", "says"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES)
def test_a_template_that_will_not_do_is_refused_with_a_way_out(template: str, says: str) -> None:
    with pytest.raises(TemplateError, match=says) as error:
        Chat(make_tokenizer(template), None)
    assert "set model.tokenizer to a folder whose chat_template" in str(error.value)


def test_a_role_that_the_template_refuses_is_named() -> None:
    chat = Chat(tokenizer_with("instructs"), None)
    chat.system("x")
    chat.user("y")
    with pytest.raises(TemplateError, match="refuses messages of the roles system, user: no role system"):
        chat.prompt()


def test_a_template_that_hides_the_tools_is_refused() -> None:
    chat = Chat(tokenizer_with("trims"), None, tools=[ADD])
    chat.user("x")
    with pytest.raises(TemplateError, match="does not show the tool 'add'"):
        chat.prompt()


@pytest.mark.parametrize("role", ["system", "tool"])
def test_a_template_that_leaves_a_message_out_is_refused(role: str) -> None:
    shows = DEFAULT_SYSTEM.replace("in messages %}", f"in messages if message.role != '{role}' %}}")
    tokenizer = make_tokenizer(shows)
    chat = Chat(tokenizer, ScriptedPolicy(tokenizer, ["one"]))
    chat.user("x")
    asyncio.run(chat.reply())
    getattr(chat, role)("y")
    with pytest.raises(TemplateError, match=f"leaves out what stands in a message of the role {role}: say it in"):
        chat.prompt()


def test_an_end_that_is_many_tokens_is_refused() -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def decode(self, token_ids: list[int]) -> str:
            return bytes(token_ids).decode()

    with pytest.raises(TemplateError, match=r"makes 10 tokens of '<\|im_end\|>'"):
        Chat(Letters(), None)
