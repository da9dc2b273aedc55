"""A tokenizer whose first 256 ids are the bytes themselves, written as a folder in Hugging Face format.

It makes tiny models possible: nothing is trained or downloaded, the vocabulary has 265 entries, and every text is
representable. It refuses to know about models and environments.

Invariants: id `b` is byte `b` for 0 ≤ b < 256; there are no merges, so T tokens are exactly T bytes (plus special
tokens); decoding any ids never fails (broken UTF-8 becomes U+FFFD).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, IM_START, IM_END)  # left out by `decode(..., skip_special_tokens=True)`
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
SPECIAL_TOKENS = CONTROL_TOKENS + MARKUP_TOKENS  # ids 256, 257, …
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
PAD_ID, EOS_ID = 256, 258

# Every message is rendered the same wherever it stands, so that a longer conversation extends a shorter one.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Tools you may call, one JSON schema per line:\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- 'To call one, write <tool_call>{"name": its name, "arguments": {...}}</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.role == 'tool' %}
            {{- '<tool_response>' + message.content + '</tool_response>' }}
        {%- else %}
            {{- message.content or '' }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '<tool_call>{"name": ' + function.name | tojson + ', "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_byte_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Write the tokenizer's files into `folder` (made if absent) and return the tokenizer.

    End of sequence is `<|im_end|>`, padding is `<|endoftext|>`. Model files already in the folder stay as they are.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(t, special=t in CONTROL_TOKENS, normalized=False) for t in SPECIAL_TOKENS])

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
    return fast


def _byte_symbols() -> list[str]:
    """The printable character that byte-level tokenizers show for each of the 256 bytes, in byte order.

    Printable Latin-1 characters stand for themselves, the others get code points from 256 upwards (the GPT-2
    convention, which `tokenizers.pre_tokenizers.ByteLevel` shares).
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
