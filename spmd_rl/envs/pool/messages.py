"""What a pool and its workers say to each other, as typed structs.

What goes to a worker may hold pickles: functions, their arguments, what an environment is made of. What comes from a
worker holds numbers, text, lists, dicts and numpy arrays alone, and for a generation that is so in both directions.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.rollouts.types import Task


class Message(msgspec.Struct, tag=True, frozen=True):
    """Base of everything that travels; the class name is the tag on the wire. `job` is the id of a job."""


# --- pool → worker ------------------------------------------------------------------------------------------------


class Start(Message, frozen=True):
    """The first message."""

    memory_mb: int  # limit of private memory; 0 = none
    beat_s: float  # how often a worker with jobs gives a sign of life


class Build(Message, frozen=True):
    """Make an environment; answered by `Built` or `NotBuilt`."""

    env: int
    spec: bytes  # pickle of an EnvironmentSpec


class Call(Message, frozen=True):
    """function(**arguments)"""

    job: int
    path: str  # the function's import path; empty: it is pickled
    function: bytes  # its pickle
    arguments: bytes  # pickle of a dict


class Method(Message, frozen=True):
    """environment.name(*arguments)"""

    job: int
    env: int
    name: str
    arguments: bytes  # pickle of a tuple


class Rollout(Message, frozen=True):
    """One attempt at a task."""

    job: int
    env: int
    task: Task
    sampling: SamplingConfig


class Answer(Message, frozen=True):
    """A generation of n tokens."""

    job: int
    number: int  # of the Generate of this job that it answers
    tokens: np.ndarray  # int32[n]
    logprobs: np.ndarray  # float32[n]
    versions: np.ndarray  # int32[n]
    stop_reason: str


class Refusal(Message, frozen=True):
    """The policy raised."""

    job: int
    number: int
    kind: str
    text: str
    is_value_error: bool


class Cancel(Message, frozen=True):
    """End a job; answered by `Ended`, or by what it came to before."""

    job: int


class Stop(Message, frozen=True):
    """End in good order."""


ToWorker = Start | Build | Call | Method | Rollout | Answer | Refusal | Cancel | Stop

# --- worker → pool ------------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """Ready for jobs."""


class Beat(Message, frozen=True):
    """A sign of life."""

    lags_ms: np.ndarray  # float32[k]: how late the worker's event loop was at each tick since the last beat


class Built(Message, frozen=True):
    """An environment is there."""

    env: int
    offers: list[str]  # which optional methods it has


class NotBuilt(Message, frozen=True):
    """An environment can't be made."""

    env: int
    kind: str
    text: str
    trace: str


class Generate(Message, frozen=True):
    """The rollout asks its policy."""

    job: int
    number: int  # counts from 0 in every job
    tokens: np.ndarray  # int32[T]
    sampling: Any  # the fields of a SamplingConfig, as the environment filled them in


class Withdrawn(Message, frozen=True):
    """The rollout no longer wants the answer."""

    job: int
    number: int


class Done(Message, frozen=True):
    """What the job came to."""

    job: int
    value: Any


class Failed(Message, frozen=True):
    """The job raised."""

    job: int
    kind: str
    text: str
    trace: str
    is_value_error: bool
    number: int = -1  # it is what the policy raised at this Generate


class Ended(Message, frozen=True):
    """The job was cancelled, and is over."""

    job: int


FromWorker = Ready | Beat | Built | NotBuilt | Generate | Withdrawn | Done | Failed | Ended
