"""What of a model's text is its answer, decided strictly and never with an exception.

The answer is what follows the last `</think>`, without ASCII whitespace around it. Nothing else is forgiven: no words
around it, no `+7`, `007`, `1_000`, `7.0`, no digits of other scripts (`'²'.isdigit()` is True, and `int('²')` raises).

It refuses to know which answer is right, except for how near to the right text a text is.
"""

from __future__ import annotations

import re

WHITESPACE = " \t\r\n"
LONGEST = 18  # digits: every such number is an int64

_WHOLE_NUMBER = re.compile(rf"0|-?[1-9][0-9]{{0,{LONGEST - 1}}}")


def answer_in(text: str) -> str:
    """What follows the last `</think>`, or all of the text; without spaces, tabs and line ends around it."""
    return text.rpartition("</think>")[2].strip(WHITESPACE)


def whole_number(text: str) -> int | None:
    """The number that the whole answer in `text` is, the way it is printed; None where it is none of 18 digits."""
    answer = answer_in(text)
    return int(answer) if _WHOLE_NUMBER.fullmatch(answer) else None


def nearness(answer: str, right: str) -> float:
    """Share of places with the same character, of the longer text's: 1 only for the same text, two empty ones too."""
    longer = max(len(answer), len(right))
    return sum(a == b for a, b in zip(answer, right, strict=False)) / longer if longer else 1.0
