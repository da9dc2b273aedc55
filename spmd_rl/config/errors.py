"""The one error of the config package: everything that is wrong, in one message.

A config is read by a person who wants to fix all of it at once, so problems are collected and reported together.
"""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """One or more problems, each naming the key, the value and the way out; `origin` is the file or "command line"."""

    def __init__(self, problems: Sequence[str], origin: str = "") -> None:
        self.problems = tuple(problems)
        self.origin = origin
        where = f"{origin}: " if origin else ""
        if len(problems) == 1:
            super().__init__(where + problems[0])
        else:
            super().__init__(f"{where}{len(problems)} problems\n" + "\n".join(f"  - {problem}" for problem in problems))
