"""What ranks say to each other, as typed structs.

Three streams: **decisions** go down from rank 0 to the engine leaders with a tick, **events** come up from all
leaders with the answer to that tick, **orders** go from rank 0 to every trainer rank over the `data` group. A message
holds numbers, text and numpy arrays; token ids, never text, are what is generated and trained on.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np


class Message(msgspec.Struct, tag=True, frozen=True):
    """Base of everything that travels; the class name is the tag on the wire."""


# --- decisions: rank 0 → leader of a replica ---------------------------------------------------------------------


class Partial(Message, frozen=True):
    """What a request in flight has generated so far, n tokens."""

    id: int
    tokens: np.ndarray  # int32[n]
    logprobs: np.ndarray  # float32[n]
    versions: np.ndarray  # int32[n]
    salt: str


class Generate(Message, frozen=True):
    """Continue `tokens`. The seed and the absolute position of a token alone decide its sampling noise."""

    id: int
    tokens: np.ndarray  # int32[T]
    max_tokens: int
    temperature: float  # 0 = greedy
    seed: int  # 63 bits
    stop_token_ids: list[int]
    top_p: float = 1.0
    top_k: int = 0
    salt: str = ""  # KV blocks are shared only within one salt; empty: the engine's current policy version
    begun: Partial | None = None  # generated before a restart; it counts toward max_tokens and is part of the answer
    routes_from: int = -1  # the leader keeps the routed experts from this position on; -1: of none


class Cancel(Message, frozen=True):
    """Forget a request; it is answered by a `Generated` with stop reason "aborted"."""

    id: int


class Pull(Message, frozen=True):
    """Receive policy version `version` from the trainer ranks and swap it in between two engine steps."""

    version: int
    probe: list[np.ndarray]  # int32[T] each: score these with the new weights, at temperature 1
    tick: int = -1  # lockstep: swap at the beginning of this tick, and wait for the weights if need be


class Fence(Message, frozen=True):
    """Begin every request in flight anew behind its tokens, on empty caches; answered by `Fenced`."""


class Tick(Message, frozen=True):
    """Lockstep: after what came before it, take so many engine steps (idle ones count), then answer."""

    number: int
    steps: int
    orders: int = 0  # where ranks train and infer in turns: so many orders, from the start, are carried out before them


class Stop(Message, frozen=True):
    """The run is over: leave the loop."""


class SendRoutes(Message, frozen=True):
    """Send kept routed experts to the trainer ranks, for the rows of step `step`."""

    step: int
    pieces: list[np.ndarray]  # by trainer rank, int64[n, 3]: request, first position, one past the last


class ForgetRoutes(Message, frozen=True):
    """The routed experts of these requests are not needed (any more)."""

    requests: list[int]


Decision = Generate | Cancel | Pull | Fence | Tick | SendRoutes | ForgetRoutes | Stop

# --- events: leader → rank 0 --------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The role is built and may be given work."""

    rank: int
    info: dict[str, float | int | str]


class Generated(Message, frozen=True):
    """A finished generation of n tokens."""

    id: int
    tokens: np.ndarray  # int32[n]
    logprobs: np.ndarray  # float32[n]
    versions: np.ndarray  # int32[n]
    stop_reason: str  # "stop" | "length" | "aborted"
    salt: str


class Refused(Message, frozen=True):
    """The engine could not take a request; the rollout fails, the run goes on."""

    id: int
    why: str


class Pulled(Message, frozen=True):
    """A replica now serves `version`."""

    rank: int
    version: int
    bytes: int
    receive_s: float  # from the first bucket to the last, beside engine steps
    stall_s: float  # how long the swap kept the engine from stepping
    staging_bytes: int  # of the buffers, on each rank


class Probed(Message, frozen=True):
    """Logprobs of tokens 1..T-1 of each probe sequence."""

    rank: int
    version: int
    logprobs: list[np.ndarray]  # float32[T-1] each


class Fenced(Message, frozen=True):
    """A replica has begun its requests anew: what they had, in the order in which they were admitted."""

    rank: int
    partials: list[Partial]


class EngineLoad(Message, frozen=True):
    """Counters since the start, for the metrics."""

    rank: int
    steps: int
    step_s: float
    tokens: int  # generated
    cpu_s: float  # of the whole process, all threads


class Trained(Message, frozen=True):
    """An optimizer step is complete."""

    step: int
    phase: str
    metrics: dict[str, float]


class Sent(Message, frozen=True):
    """The trainer has scored the probe set with the weights of `version`, which are on their way."""

    version: int
    gather_s: float
    logprobs: list[np.ndarray]  # float32[T-1] each


class Exported(Message, frozen=True):
    """A Hugging Face folder is complete on disk."""

    folder: str


class Validated(Message, frozen=True):
    """The loss on rows that nothing was learned from."""

    step: int  # optimizer steps taken before
    metrics: dict[str, float]


class Saved(Message, frozen=True):
    """A checkpoint is complete on disk."""

    folder: str


Event = (
    Ready | Generated | Refused | Pulled | Probed | Fenced | EngineLoad | Trained | Sent | Exported | Validated | Saved
)

# --- orders: rank 0 → every trainer rank ---------------------------------------------------------------------------


class Train(Message, frozen=True):
    """One batch: an optimizer step on each minibatch of this rank's rows (as many on every rank)."""

    step: int
    phase: str  # "warmup" | "rl"
    rows: list[list[dict[str, np.ndarray]]]  # [minibatch][row], fields of rollouts.types.Row
    lr: float = -1.0  # learning rate; below 0: as the config's schedule has it
    routes: list[np.ndarray] = []  # what a leader that trains too gives each trainer rank, as in `SendRoutes`


class FreshOptimizer(Message, frozen=True):
    """Forget the optimizer's state: a new phase begins."""

    phase: str


class Send(Message, frozen=True):
    """Send the weights as policy version `version`; score the probe set with exactly these weights."""

    version: int
    probe: list[np.ndarray]  # int32[T] each


class Export(Message, frozen=True):
    """Write the weights as a Hugging Face folder."""

    folder: str


class Validate(Message, frozen=True):
    """The loss on this rank's rows (as many on every rank); nothing is learned."""

    step: int
    rows: list[dict[str, np.ndarray]]


class Save(Message, frozen=True):
    """Write a checkpoint beside everything that follows; what goes with it is not looked at."""

    folder: str
    state: dict[str, Any]  # a few numbers, as JSON for people too
    snapshot: bytes = b""  # the orchestrator's; only the first trainer rank gets it


class Restore(Message, frozen=True):
    """Weights and optimizer as a checkpoint has them."""

    folder: str


Order = Train | FreshOptimizer | Send | Export | Validate | Save | Restore | Stop
