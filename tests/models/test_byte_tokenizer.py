"""The byte tokenizer: ids are bytes, nothing is lost, the chat template keeps earlier turns unchanged."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spmd_rl.models.byte_tokenizer import EOS_ID, PAD_ID, SPECIAL_TOKENS, VOCAB_SIZE, make_byte_tokenizer

# Any text Python can encode: lone surrogates are no Unicode text.
TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "<think>easy</think>", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "2"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_vocabulary_is_the_bytes_then_the_special_tokens(tokenizer):
    assert len(tokenizer) == VOCAB_SIZE == 265
    assert [tokenizer.convert_tokens_to_ids(t) for t in SPECIAL_TOKENS] == list(range(256, 265))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS_ID, PAD_ID)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@settings(max_examples=100, deadline=None)
@given(text=TEXT)
def test_ids_are_the_utf8_bytes_and_decode_to_the_text(tokenizer, text):
    assume(not any(token in text for token in SPECIAL_TOKENS))  # hypothesis does find them
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.one_of(TEXT, st.sampled_from(SPECIAL_TOKENS)), max_size=6))
def test_text_with_special_tokens_survives_the_round_trip(tokenizer, parts):
    text = "".join(parts)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=40))
def test_broken_utf8_decodes_to_replacement_characters(tokenizer, raw):
    assert tokenizer.decode(list(raw)) == raw.decode("utf-8", errors="replace")


def test_markup_is_kept_when_control_tokens_are_left_out(tokenizer):
    ids = tokenizer.encode("<think>a</think><|im_end|><|endoftext|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>"


def test_loads_beside_a_model_config(folder, tokenizer, tmp_path):
    """AutoTokenizer must not pick the model family's own tokenizer class instead."""
    from transformers import AutoTokenizer

    make_byte_tokenizer(tmp_path)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCAB_SIZE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert AutoTokenizer.from_pretrained(tmp_path).encode("a b<think>") == [97, 32, 98, 263]


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_longer_conversation_extends_a_shorter_one(tokenizer, tools):
    def render(messages, generate):
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=generate)

    whole = render(CONVERSATION, False)
    for n in range(2, len(CONVERSATION)):
        prompt = render(CONVERSATION[:n], CONVERSATION[n]["role"] == "assistant")
        assert whole.startswith(prompt)
        assert len(prompt) < len(whole)


def test_chat_template_renders_chatml(tokenizer):
    text = tokenizer.apply_chat_template(CONVERSATION[:4], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n"
        '<|im_start|>assistant\n<think>easy</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>tool\n<tool_response>2</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_chat_template_lists_tools_in_one_system_message(tokenizer):
    text = tokenizer.apply_chat_template(CONVERSATION[:2], tools=[TOOL], tokenize=False)
    assert text.count("<|im_start|>system") == 1
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.dumps(TOOL) in text


def test_vllm_loads_it(folder):
    from vllm.tokenizers import get_tokenizer

    assert get_tokenizer(str(folder)).encode("hi<|im_end|>") == [104, 105, EOS_ID]
