"""A limit on the time of one call, told apart from time-outs that the call itself raises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class TooSlow(Exception):
    """A call missed its deadline."""


async def within(deadline_s: float, work: Awaitable[T]) -> T:
    """The result of `work`. Raises TooSlow when there is none after `deadline_s`, else what `work` raises."""
    try:
        async with asyncio.timeout(deadline_s) as scope:
            return await work
    except TimeoutError as error:
        if scope.expired():
            raise TooSlow(f"no result after {deadline_s:g} s") from error
        raise
