"""The text of every token, so that the pieces joined are the text of all of them.

Tokenizers decode sequences, not tokens: a character may be spread over several tokens, and a token alone may lose
its leading space. So a token's own text is looked for where it stands in the whole text. A character spread over tokens
goes to the last of them, and the others get nothing. It refuses to know the tokenizer: `decode` is all it has.

Invariants: one piece per token; "".join(pieces) == decode(ids), whatever the ids are.
"""

from __future__ import annotations

from collections.abc import Callable

Decode = Callable[[list[int]], str]

LONGEST_CHARACTER = 4  # tokens: bytes of UTF-8
LONGEST_GAP = 8  # characters that tokens may lack when they are decoded alone
REPLACEMENT = "\ufffd"  # what tokenizers make of a piece of a character


def token_pieces(ids: list[int], decode: Decode) -> list[str]:
    """str[T] for ids of T tokens. Raises what `decode` raises."""
    whole = decode(ids)
    alone = {token: decode([token]) for token in set(ids)}
    pieces: list[str] = []
    at = missing = 0  # characters of `whole` that are given out; characters of tokens that were not found in it
    while len(pieces) < len(ids):
        first = len(pieces)
        text = alone[ids[first]]
        if _broken(text):
            found = _character(whole, at, ids[first : first + LONGEST_CHARACTER], decode) or [
                text if whole.startswith(text, at) else ""
            ]
        else:
            start = whole.find(text, at, at + len(text) + LONGEST_GAP + missing)
            found = [whole[at : start + len(text)] if start >= 0 else ""]
            missing = 0 if start >= 0 else missing + len(text)
        pieces += found
        at += sum(map(len, found))
    if pieces:
        pieces[-1] += whole[at:]
    return pieces


def _character(whole: str, at: int, ids: list[int], decode: Decode) -> list[str]:
    """Pieces of the tokens that share the character at `at`; none when the next few tokens make no whole one."""
    for count in range(2, len(ids) + 1):
        together = decode(ids[:count])
        if not _broken(together) and whole.startswith(together, at):
            return [""] * (count - 1) + [together]
    return []


def _broken(text: str) -> bool:
    """Whether it holds a part of a character: the replacement character, or a byte as a lone surrogate."""
    return any(c == REPLACEMENT or "\udc80" <= c <= "\udcff" for c in text)
