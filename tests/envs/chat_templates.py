"""Chat templates in the manner of well-known models, tokenizers of bytes, and nasty contents: for tests of chats."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from typing import Any

from hypothesis import strategies as st

from spmd_rl.models.byte_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, make_byte_tokenizer

NASTY = [*SPECIAL_TOKENS, "[INST]", "</s>", "<|eot_id|>", "\0", "\ud800", "\n", " ", "<", "|im_end|>", "é", "😀"]

# Contents as tests of chats want them.
texts = st.lists(st.sampled_from(NASTY) | st.text(max_size=6), max_size=6).map("".join)

# Thoughts are taken out of old turns, results of tools stand together in a user's turn.
STRIPS_THOUGHTS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n{...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(found=false, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.found = true %}{%- set ns.last = messages | length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought != message.content) %}
            {{- '<think>\\n' + (thought if thought != message.content else '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TRIMS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' }}
    {%- if not loop.last or add_generation_prompt %}{{- '\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Headers with tokens of their own, trimmed contents, results of tools as JSON, today's date.
HEADERS = """\
{{- '<|begin_of_text|>' }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '\\n\\n' + system + '<|eot_id|>' }}
{%- if tools %}
    {%- set first = messages[0].content | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}{{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

DEFAULT_SYSTEM = """\
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are a model.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# No header, turns that must alternate, tools before the last user's turn.
INSTRUCTS = """\
{{- '<s>' }}
{%- set ns = namespace(user=true, last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
    {%- if message.role in ('user', 'assistant') %}
        {%- if (message.role == 'user') != ns.user %}{{- raise_exception('roles must alternate') }}{%- endif %}
        {%- set ns.user = not ns.user %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content + '</s>' }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + '}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('no role ' + message.role) }}
    {%- endif %}
{%- endfor %}
"""

# The header of a reply opens a thought.
OPENS_THOUGHT = DEFAULT_SYSTEM.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")

TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "strips thoughts": STRIPS_THOUGHTS,
    "trims": TRIMS,
    "headers": HEADERS,
    "default system": DEFAULT_SYSTEM,
    "instructs": INSTRUCTS,
    "opens a thought": OPENS_THOUGHT,
}
_TOKENS = {
    "headers": ("<|eot_id|>", ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"]),
    "instructs": ("</s>", ["<s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"]),
}


def make_tokenizer(template: str | None, eos: str = "<|im_end|>", others: list[str] | None = None) -> Any:
    """Bytes, ChatML and tool markup, special tokens of its own, a template."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_byte_tokenizer(folder)
    if others is not None:
        tokenizer.add_special_tokens({"eos_token": eos, "additional_special_tokens": others})
    tokenizer.chat_template = template
    return tokenizer


@lru_cache(maxsize=len(TEMPLATES))
def tokenizer_with(name: str) -> Any:
    """The tokenizer whose template is TEMPLATES[name]."""
    return make_tokenizer(TEMPLATES[name], *_TOKENS.get(name, ()))
