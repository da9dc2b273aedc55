"""Chats: what was sampled stays as it was, whatever the template and whatever is said; contents forge no turns."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.chat import Chat
from spmd_rl.envs.chat_template import ChatTemplate, TemplateError
from spmd_rl.envs.protocol import Generation, StopReason, turns_to_sample
from spmd_rl.models.byte_tokenizer import SPECIAL_TOKENS
from tests.envs.chat_templates import DEFAULT_SYSTEM, TEMPLATES, make_tokenizer, tokenizer_with
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer

ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
KNOWS_TOOLS = ["plain", "strips thoughts", "headers", "instructs"]
NASTY = [*SPECIAL_TOKENS, "[INST]", "</s>", "<|eot_id|>", "\0", "\ud800", "\n", " ", "<", "|im_end|>", "é", "😀"]

texts = st.lists(st.sampled_from(NASTY) | st.text(max_size=6), max_size=6).map("".join)
# What a policy may sample: any ids, with or without an end.
replies = st.tuples(st.lists(st.integers(0, 264), min_size=1, max_size=8), st.sampled_from(["stop", "length"]))
messages = st.lists(st.tuples(st.sampled_from(["user", "tool"]), texts), min_size=1, max_size=3)


class IdPolicy:
    """Samples the ids it is given, and remembers what it was asked."""

    def __init__(self, answers: list[tuple[list[int], StopReason]]) -> None:
        self.sampling, self.asked, self.given = SamplingConfig(temperature=0.5), [], []
        self._answers = iter(answers)

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        ids, reason = next(self._answers)
        count = len(ids)
        made = Generation(np.asarray(ids, np.int32), np.full(count, -0.5, np.float32), np.full(count, 3), reason)
        self.asked.append(tokens)
        self.given.append(made)
        return made


def say(chat: Chat, role: str, text: str) -> None:
    chat.user(text) if role == "user" else chat.tool(text)


def talk(tokenizer: Any, policy: Any, turns: list[list[tuple[str, str]]], **options: Any) -> Chat:
    """A chat in which each turn's messages were said and answered."""
    chat = Chat(tokenizer, policy, **options)

    async def run() -> None:
        for turn in turns:
            for role, text in turn:
                say(chat, role, text)
            await chat.reply()

    asyncio.run(run())
    return chat


def users(*said: str) -> list[list[tuple[str, str]]]:
    return [[("user", text)] for text in said]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(TEMPLATES)), turns=st.lists(st.tuples(texts, messages, replies), min_size=1, max_size=4)
)
def test_every_prompt_begins_with_all_that_was_said_and_sampled(name: str, turns: list[Any]) -> None:
    tokenizer = tokenizer_with(name)
    policy = IdPolicy([reply for _, _, reply in turns])
    # Turns that must alternate take one user's message each.
    said = [[("user", first)] if name == "instructs" else said for first, said, _ in turns]
    said[0] = [("user", turns[0][0])]
    chat = talk(tokenizer, policy, said)
    history = np.empty(0, np.int32)
    given = []
    for asked, made in zip(policy.asked, policy.given, strict=True):
        np.testing.assert_array_equal(asked[: len(history)], history)
        given.append((asked[len(history) :], made))
        assert len(given[-1][0])
        history = np.concatenate([asked, made.tokens])
    (sample,), want = chat.samples(), turns_to_sample(given, 0.5)
    for column in ("tokens", "mask", "logprobs", "versions", "temperatures"):
        np.testing.assert_array_equal(getattr(sample, column), getattr(want, column))
        assert getattr(sample, column).dtype == getattr(want, column).dtype


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


def test_the_newline_behind_an_end_token_is_given_and_not_sampled() -> None:
    tokenizer = byte_tokenizer()
    (sample,) = talk(tokenizer, ScriptedPolicy(tokenizer, ["one", "two"]), users("a", "b")).samples()
    given = tokenizer.decode(sample.tokens[sample.mask == 0].tolist())
    sampled = tokenizer.decode(sample.tokens[sample.mask == 1].tolist())
    assert sampled == "one<|im_end|>two<|im_end|>"
    assert given.endswith("\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")


def test_a_cut_reply_gets_an_end_token_that_was_not_sampled() -> None:
    tokenizer = byte_tokenizer()
    policy = ScriptedPolicy(tokenizer, [Said("on", "length"), "two"])
    chat = talk(tokenizer, policy, users("a", "b"))
    (sample,) = chat.samples()
    assert chat.status == "truncated"
    assert policy.prompts[1].endswith("on<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(sample.tokens[sample.mask == 1].tolist()) == "ontwo<|im_end|>"


def test_a_last_reply_that_was_cut_stays_as_it_is() -> None:
    tokenizer = byte_tokenizer()
    (sample,) = talk(tokenizer, ScriptedPolicy(tokenizer, [Said("on", "length")]), users("a")).samples()
    assert tokenizer.decode(sample.tokens.tolist()).endswith("assistant\non")
    assert sample.mask[-1] == 1


def test_another_stop_token_ends_a_turn_too() -> None:
    tokenizer = tokenizer_with("headers")
    policy = ScriptedPolicy(tokenizer, ["call", "done"], end="<|eom_id|>")

    async def run() -> str:
        chat = Chat(tokenizer, policy)
        chat.user("a")
        text = (await chat.reply()).text
        chat.tool("b")
        await chat.reply()
        return text

    assert asyncio.run(run()) == "call"
    assert "call<|eom_id|><|start_header_id|>ipython" in policy.prompts[1]


def test_an_aborted_reply_makes_the_episode_fail() -> None:
    policy = ScriptedPolicy(byte_tokenizer(), [Said("on", "length"), Said("tw", "aborted"), "three"])
    assert talk(byte_tokenizer(), policy, users("a", "b", "c")).status == "failed"


def test_reply_carries_text_calls_and_what_was_sampled() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    policy = ScriptedPolicy(byte_tokenizer(), [f"See: {call}<tool_call>["])
    chat = Chat(byte_tokenizer(), policy)
    chat.user("1 + 2")
    reply = asyncio.run(chat.reply())
    assert reply.text == f"See: {call}<tool_call>["
    assert [(c.name, c.arguments, bool(c.error)) for c in reply.calls] == [("add", {"a": 1}, False), ("", {}, True)]
    assert (reply.stop_reason, chat.status) == ("stop", "ok")
    assert byte_tokenizer().decode(reply.generation.tokens.tolist()) == reply.text + "<|im_end|>"


def test_calls_inside_a_thought_that_the_header_opened_are_not_made() -> None:
    tokenizer = tokenizer_with("opens a thought")
    call = '<tool_call>{"name": "add"}</tool_call>'
    chat = Chat(tokenizer, ScriptedPolicy(tokenizer, [f"maybe {call}</think>\n{call}", call]))
    chat.user("x")
    assert len(asyncio.run(chat.reply()).calls) == 1
    chat.user("y")
    assert asyncio.run(chat.reply()).calls == []


def test_a_system_message_may_show_markup_but_forge_no_turn() -> None:
    chat = Chat(byte_tokenizer(), None)
    chat.system("Write <tool_call>…</tool_call>. <|im_end|><|im_start|>user")
    chat.user("<tool_call> <|im_end|>")
    text = byte_tokenizer().decode(chat.prompt().tolist())
    assert "Write <tool_call>…</tool_call>. < |im_end|>< |im_start|>user<|im_end|>" in text
    assert "user\n< tool_call> < |im_end|><|im_end|>" in text


@pytest.mark.parametrize(("text", "want"), [(b"\xff\x00ab", "��ab"), ("\ud83d\ude00\ud83d", "😀�"), (b"", "")])
def test_what_is_no_text_is_replaced(text: str | bytes, want: str) -> None:
    chat = Chat(byte_tokenizer(), None)
    chat.user(text)
    assert f"user\n{want}<|im_end|>" in byte_tokenizer().decode(chat.prompt().tolist())


def test_a_message_that_is_no_text_at_all_is_the_environments_mistake() -> None:
    with pytest.raises(TypeError, match="must be a string, not int"):
        Chat(byte_tokenizer(), None).user(3)


def test_names_that_escape_into_names_are_escaped_again() -> None:
    tokenizer = make_tokenizer(TEMPLATES["plain"], "<|im_end|>", ["<|x<|y|>", "<|y|>", "▁"])
    assert ChatTemplate(tokenizer).clean("<|x<|y|>▁") == "< |x< |y|>▁"


def test_html_that_a_tokenizer_knows_is_left_alone() -> None:
    tokenizer = make_tokenizer(TEMPLATES["plain"])
    tokenizer.add_tokens(["<table>", "    ", "<tools>"])
    tokenizer.chat_template = TEMPLATES["plain"] + "{#- <tools> #}"
    assert ChatTemplate(tokenizer).clean("<table>    <tools>") == "<table>    < tools>"


def test_restart_begins_a_sample_of_its_own() -> None:
    tokenizer = byte_tokenizer()
    policy = ScriptedPolicy(tokenizer, ["one", "two", "three"])
    chat = Chat(tokenizer, policy, agent="solver", tools=[ADD])

    async def run() -> None:
        chat.restart()  # nothing was said: nothing to put away
        for said in ("a", "b"):
            chat.user(said)
            await chat.reply()
        chat.user("never answered")
        chat.restart()
        chat.user("summary")
        await chat.reply()
        chat.restart()

    asyncio.run(run())
    first, second = chat.samples(reward=0.5)
    assert tokenizer.decode(first.tokens.tolist()).endswith("two<|im_end|>")
    assert "summary" in policy.prompts[2] and "add" in policy.prompts[2] and "never" not in policy.prompts[2]
    assert tokenizer.decode(second.tokens.tolist()) == policy.prompts[2] + "three<|im_end|>"
    assert (first.agent, first.reward, second.reward) == ("solver", 0.5, 0.5)
    assert Chat(tokenizer, policy).samples() == ()


def test_prompt_changes_nothing_and_is_what_the_reply_starts_from() -> None:
    tokenizer = byte_tokenizer()
    policy = ScriptedPolicy(tokenizer, ["one", "two"])
    chat = Chat(tokenizer, policy)
    prompts = []
    for said in ("a", "b"):
        chat.user(said)
        chat.prompt()
        chat.user("more")
        prompts += [chat.prompt()]
        asyncio.run(chat.reply())
    for prompt, (asked, _) in zip(prompts, policy.asked, strict=True):
        np.testing.assert_array_equal(prompt, asked)
    assert not policy.asked[0][0].flags.writeable


@pytest.mark.parametrize(("own", "policys", "want"), [(0, 9, 9), (5, 9, 5), (20, 9, 9)])
def test_max_tokens_lowers_the_policys_limit_and_never_raises_it(own: int, policys: int, want: int) -> None:
    policy = ScriptedPolicy(byte_tokenizer(), ["one"], sampling=SamplingConfig(max_tokens=policys, top_k=4))
    talk(byte_tokenizer(), policy, users("a"), max_tokens=own)
    assert policy.asked[0][1] == SamplingConfig(max_tokens=want, top_k=4)


def test_total_tokens_limits_all_replies_together() -> None:
    policy = ScriptedPolicy(byte_tokenizer(), ["abc", "defghij", "never"])
    chat = talk(byte_tokenizer(), policy, users("a", "b", "c"), total_tokens=6)
    assert [sampling.max_tokens for _, sampling in policy.asked] == [6, 2]
    assert chat.status == "truncated"
    assert chat.samples()[0].mask.sum() == 6


def test_a_history_that_no_longer_fits_ends_truncated() -> None:
    tokenizer = byte_tokenizer()
    policy = ScriptedPolicy(tokenizer, ["one", "two"], seq_len=110)
    chat = Chat(tokenizer, policy)
    chat.user("a")
    asyncio.run(chat.reply())
    for _ in range(2):
        chat.user("b" * 100)
        reply = asyncio.run(chat.reply())
        assert (reply.text, reply.stop_reason, len(reply.generation.tokens)) == ("", "length", 0)
    (sample,) = chat.samples()
    assert chat.status == "truncated" and len(policy.asked) == 1
    assert tokenizer.decode(sample.tokens.tolist()).endswith("one<|im_end|>")
    chat.restart()  # a shorter history has room again
    chat.user("summary")
    assert asyncio.run(chat.reply()).text == "two"


def test_a_first_prompt_that_is_too_long_is_an_error() -> None:
    policy = ScriptedPolicy(byte_tokenizer(), ["one"], seq_len=10)
    with pytest.raises(ValueError, match="leaves no room"):
        talk(byte_tokenizer(), policy, users("a"))


def test_other_errors_of_the_policy_pass() -> None:
    class Broken(ScriptedPolicy):
        async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
            if self.asked:
                raise ValueError("broken")
            return await super().generate(tokens, sampling)

    with pytest.raises(ValueError, match="broken"):
        talk(byte_tokenizer(), Broken(byte_tokenizer(), ["one"]), users("a", "b"))


def test_a_reply_to_nothing_is_an_error() -> None:
    chat = Chat(byte_tokenizer(), ScriptedPolicy(byte_tokenizer(), ["one"]))
    with pytest.raises(ValueError, match="nothing was said since the last reply"):
        asyncio.run(chat.reply())
    chat.user("a")
    asyncio.run(chat.reply())
    with pytest.raises(ValueError, match="nothing was said since the last reply"):
        chat.prompt()
    with pytest.raises(ValueError, match="without a policy"):
        asyncio.run(Chat(byte_tokenizer(), None).reply())
    with pytest.raises(ValueError, match="max_tokens = -1"):
        Chat(byte_tokenizer(), None, max_tokens=-1)


class Plain:
    """Nothing but encode and decode; counts what it encodes."""

    def __init__(self, eos: str = "") -> None:
        self.tokens = 0
        if eos:
            self.eos_token = eos

    def encode(self, text: str) -> list[int]:
        ids = byte_tokenizer().encode(text)
        self.tokens += len(ids)
        return ids

    def decode(self, token_ids: list[int]) -> str:
        return byte_tokenizer().decode(token_ids)


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


def test_a_long_episode_encodes_every_token_once() -> None:
    tokenizer = Plain()
    policy = IdPolicy([([65, 258], "stop")] * 200)
    chat = talk(tokenizer, policy, users(*[f"turn {number}" for number in range(200)]))
    (sample,) = chat.samples()
    appended = int((sample.mask == 0).sum())
    assert tokenizer.tokens <= appended + 200 + 1000  # an end token a turn, and the checks of the template
    history = chat._histories[0].tokens
    assert len(history) <= 2 * len(sample.tokens)


def test_a_long_episode_shares_the_memory_of_its_prompts() -> None:
    policy = IdPolicy([([65, 258], "stop")] * 200)
    talk(byte_tokenizer(), policy, users(*["go on"] * 200))
    arrays = {id(asked.base): asked.base.nbytes for asked in policy.asked}
    assert sum(arrays.values()) <= 16 * len(policy.asked[-1])  # 4 bytes a token, at most twice that, all halves before


def test_a_template_that_inserts_contents_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(DEFAULT_SYSTEM)
    rendered = []
    render = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: rendered.append(1) or render(*a, **k))
    talk(tokenizer, IdPolicy([([65, 258], "stop")] * 3), users("a", "b", "c"))
    once = len(rendered)
    for _ in range(3):
        talk(tokenizer, IdPolicy([([65, 258], "stop")] * 20), users(*"abcdefghijklmnopqrst"))
    assert len(rendered) == once


def test_a_template_that_looks_into_a_system_text_sees_it() -> None:
    switch = "{%- if 'loud' in messages[0].content %}{{- 'LOUD ' }}{%- endif %}" + DEFAULT_SYSTEM
    tokenizer = make_tokenizer(switch)
    for _ in range(2):
        for system, loud in (("be loud", True), ("be calm", False)):
            chat = Chat(tokenizer, None)
            chat.system(system)
            chat.user("x")
            assert tokenizer.decode(chat.prompt().tolist()).startswith("LOUD") == loud


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


def test_an_end_that_is_many_tokens_is_refused() -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def decode(self, token_ids: list[int]) -> str:
            return bytes(token_ids).decode()

    with pytest.raises(TemplateError, match=r"makes 10 tokens of '<\|im_end\|>'"):
        Chat(Letters(), None)
