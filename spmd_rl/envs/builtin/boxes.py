"""Where environments run what a model wrote: which kind of box, and how many programs at once.

A box that waits takes little; a program takes a core. So many boxes may be open, while programs queue for their turn:
outside of `exec`, whose deadline must not count the queue.

It refuses to know what is run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import get_args
from weakref import WeakKeyDictionary

from spmd_rl.envs.builtin.arguments import check_choice, check_number
from spmd_rl.envs.sandbox import Kind, Limits, Sandbox, open_sandbox

PER_CORE = 4  # programs: most of the time of one the kernel makes and removes namespaces, which is waiting


class Boxes:
    """Opens boxes of one kind. All environments that run code take these arguments:

    - `sandbox`: auto (which is bwrap), bwrap, docker or subprocess;
    - `allow_unsafe`: for `subprocess`, which confines nothing;
    - `at_once`: programs that run at the same time in one process of environments; 0: four for each core.
    """

    def __init__(self, source: str, sandbox: Kind, allow_unsafe: bool, at_once: int) -> None:
        """ValueError for arguments that can't work."""
        check_choice(source, "sandbox", sandbox, get_args(Kind))
        check_number(source, "at_once", at_once, 0, 10_000)
        if sandbox == "subprocess" and not allow_unsafe:
            raise ValueError(
                f"{source}: sandbox = 'subprocess' confines nothing, and the code is a model's: use bwrap or docker, "
                "or set allow_unsafe = true where nothing can be lost"
            )
        self._kind, self._unsafe = sandbox, allow_unsafe
        self._at_once = at_once or PER_CORE * len(os.sched_getaffinity(0))
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def turn(self) -> asyncio.Semaphore:
        """`async with boxes.turn():` waits until it is this caller's turn to open a box or to run a program."""
        return self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._at_once))

    def open(
        self, limits: Limits, files: Mapping[str, bytes | str] | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A new box with some files; see `open_sandbox`."""
        return open_sandbox(self._kind, files=files, limits=limits, allow_unsafe=self._unsafe)
