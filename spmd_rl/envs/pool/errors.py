"""How a job of the pool can fail, as types that a caller can tell apart.

Invariant: whatever happens to a job, its caller sees its result, one of these errors, or its own cancellation.
"""

from __future__ import annotations

from typing import Literal

from spmd_rl.envs.deadline import TooSlow

Death = Literal[
    "exit",  # it ended by itself: os._exit, sys.exit in a task, a signal (a crash, the kernel's out-of-memory killer)
    "hung",  # it had work and gave no sign of life for hang_s
    "deadline",  # another job of it missed its deadline and did not let itself be cancelled
    "start",  # it never became ready
]


class PoolError(Exception):
    """Base of all."""


class WorkerDied(PoolError):
    """The worker of this job is gone, and the job with it; the job itself may be innocent and can be tried again."""

    def __init__(self, kind: Death, why: str) -> None:
        super().__init__(why)
        self.kind, self.why = kind, why


class DeadlinePassed(PoolError, TooSlow):
    """The job itself missed its deadline."""


class PoolClosed(PoolError):
    """The pool was closed before the job ended."""


class Raised(PoolError):
    """What ran in the worker raised. The worker's traceback is a note of this error.

    `kind` is the name of the exception's class, `text` its message.
    """

    def __init__(self, kind: str, text: str, trace: str = "") -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text
        if trace:
            self.add_note(f"In the worker:\n{trace}")


class RaisedValueError(Raised, ValueError):
    """The same, for a ValueError: bad input, where a caller may know the way out."""
