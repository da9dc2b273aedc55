"""Which tokens of a conversation the assistant said, under templates of all kinds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from spmd_rl.data.chat import render
from spmd_rl.data.tables import DataError
from spmd_rl.models.byte_tokenizer import make_byte_tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (  # keeps the thoughts of the last turn alone, as some families' templates do
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MUTE = "{% for m in messages if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture
def tokenizer(folder):
    return make_byte_tokenizer(folder)


def learned(tokenizer, messages, **options) -> list[str]:
    """The texts of the spans that are learned."""
    tokens, mask = render(tokenizer, messages, **options)
    assert tokens.dtype == np.int32 and mask.dtype == np.uint8 and len(tokens) == len(mask)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [tokenizer.decode(tokens[a:b].tolist()) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("template", ["own", "marked"])
def test_the_assistants_turns_with_their_ends(tokenizer, template):
    if template == "marked":
        tokenizer.chat_template = MARKED
    assert learned(tokenizer, TALK) == ["2<|im_end|>", "Yes.<|im_end|>"]
    assert learned(tokenizer, TALK, loss_on="last_assistant") == ["Yes.<|im_end|>"]


def test_all_tokens(tokenizer):
    (everything,) = learned(tokenizer, TALK, loss_on="all")
    assert everything.startswith("<|im_start|>system") and "Sure?" in everything


def test_tool_calls_are_learned_and_tools_answers_are_not(tokenizer):
    talk = [
        TALK[1],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    call, answer = learned(tokenizer, talk, tools=TOOLS)
    assert json.loads(call.removesuffix("<|im_end|>").split("<tool_call>")[1].split("</tool_call>")[0])["name"] == "add"
    assert answer == "It is 2.<|im_end|>"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "must be a list of objects with a role"),
        ([{"content": "x"}], "must be a list of objects with a role"),
        ([{"role": "user", "content": "x"}], "no assistant turn"),
    ],
)
def test_bad_conversations(tokenizer, messages, message):
    with pytest.raises(DataError, match=message):
        render(tokenizer, messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (FORGETFUL, "assistant turn 2 render to other tokens alone.*generation"),
        (MUTE, "drops (the assistant|assistant turn 2)"),
        ("{{ raise_exception('no system') }}", "does not render it: TemplateError: no system"),
    ],
)
def test_bad_templates(tokenizer, template, message):
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=message):
        render(tokenizer, TALK)


def test_a_forgetful_template_can_still_teach_its_only_turn(tokenizer):
    tokenizer.chat_template = FORGETFUL
    assert learned(tokenizer, TALK[:3]) == ["<think></think>2<|im_end|>"]
