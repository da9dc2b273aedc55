"""An environment whose work is done in the worker processes of a pool. Its policy stays with the caller.

`rollout` runs in one worker from its beginning to its end; the tokens of each generation come here and go back. The
other methods are short questions that any worker can answer, because the answers depend on their arguments alone; they
block their caller, and tasks are made ahead, so that who asks for one after the other rarely waits.

It refuses to know who the policy is. Invariants: what the policy raises and the rollout lets through is raised here as
it was; an answer never reaches another rollout than the one that asked; a rollout that is over asks nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.pool import messages, wire
from spmd_rl.envs.pool.errors import DeadlinePassed, WorkerDied
from spmd_rl.envs.pool.jobs import Job
from spmd_rl.envs.pool.mailbox import Mailbox
from spmd_rl.envs.pool.pool import Pool, value_of
from spmd_rl.envs.pool.spec import OPTIONAL, EnvironmentSpec
from spmd_rl.envs.protocol import Policy, Split
from spmd_rl.rollouts.plain import episode_from
from spmd_rl.rollouts.types import Episode, Task

METHOD_TRIES = 3  # a question whose worker died beside it is asked again


class PooledEnvironment:
    """An `Environment`, with the optional methods that the real one has.

    Args:
        deadline_s: of one rollout in its worker; a caller with a deadline of its own sets a little more here.
        method_s: of any other method.
        ahead: tasks that are made before they are asked for, while indices come one after the other.

    Raises what `Pool.build` raises.
    """

    def __init__(
        self, spec: EnvironmentSpec, pool: Pool, *, deadline_s: float, method_s: float = 60.0, ahead: int = 8
    ) -> None:
        self._pool, self._label = pool, spec.label
        self._deadline_s, self._method_s, self._ahead = deadline_s, method_s, ahead
        self._env, offers = pool.build(spec)
        self._last: dict[Split, int] = {}
        self._coming: dict[tuple[Split, int], Job] = {}
        for name in OPTIONAL:
            if name not in offers:
                setattr(self, name, None)  # whoever asks sees that there is none

    def task(self, index: int, split: Split) -> Task:
        """The task number `index`."""
        job = self._coming.pop((split, index), None)
        if self._last.get(split) == index - 1:
            for later in range(index + 1, index + 1 + self._ahead):
                if (split, later) not in self._coming:
                    self._coming[split, later] = self._start("task", later, split)
        else:
            for key in [key for key in self._coming if key[0] == split]:
                self._coming.pop(key).future.cancel()
        self._last[split] = index
        return Task(**self._answer(job, "task", index, split))

    def prompt(self, task: Task) -> np.ndarray:
        """int32[T]."""
        return _ids(self._ask("prompt", task))

    def hint(self, task: Task) -> np.ndarray:
        """int32[H]."""
        return _ids(self._ask("hint", task))

    def teacher(self, task: Task, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(prompt int32[T], answer int32[n]); what is drawn in the worker follows from one draw of `rng`."""
        prompt, answer = self._ask("teacher", task, _child(rng))
        return _ids(prompt), _ids(answer)

    def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
        """The teacher's next turn; what is drawn in the worker follows from one draw of `rng`."""
        text: str = self._ask("solve", task, heard, _child(rng))
        return text

    async def check_reward(self, tasks: int) -> None:
        """Try the reward beforehand. Raised, a ValueError where the environment raised one."""
        job = self._start("check_reward", tasks, deadline_s=self._deadline_s)
        value_of(await self._pool.mailboxes.wait(job.future))

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """One attempt, in one worker.

        Raises what the policy raised, Raised for what the environment raised, DeadlinePassed, WorkerDied (it may be
        tried again from the beginning, with a policy that begins again) or PoolClosed.
        """
        conversation = _Conversation(policy, self._pool.mailboxes.mine())
        job = self._pool.submit(
            f"a rollout of {self._label}, task {task.index}",
            lambda id: messages.Rollout(id, self._env, task, policy.sampling),
            self._deadline_s,
            self._env,
            conversation.asked,
        )
        conversation.tell = lambda message: self._pool.tell(job, message)
        try:
            outcome = await self._pool.mailboxes.wait(job.future)
        finally:
            await conversation.close()
        if isinstance(outcome, messages.Failed) and outcome.number in conversation.raised:
            raise conversation.raised[outcome.number]
        return episode_from(value_of(outcome), task)

    def metrics(self) -> dict[str, float]:
        """What `Pool.metrics` says of the pool."""
        return self._pool.metrics()

    def _start(self, name: str, *arguments: Any, deadline_s: float | None = None) -> Job:
        given = wire.pickled(arguments, f"what {name} is given")
        return self._pool.submit(
            f"{name} of {self._label}",
            lambda id: messages.Method(id, self._env, name, given),
            self._method_s if deadline_s is None else deadline_s,
            self._env,
        )

    def _ask(self, name: str, *arguments: Any) -> Any:
        return self._answer(None, name, *arguments)

    def _answer(self, job: Job | None, name: str, *arguments: Any) -> Any:
        """The answer of a question, which may have been asked already. A worker that dies beside it is no answer."""
        for left in reversed(range(METHOD_TRIES)):
            job = job or self._start(name, *arguments)
            try:
                return value_of(job.future.result(self._pool.longest_s(self._method_s)))
            except WorkerDied:
                if not left:
                    raise
            except TimeoutError:
                raise DeadlinePassed(f"{name} of {self._label}: the pool does not answer") from None
            job = None
        raise AssertionError("unreachable")


class _Conversation:
    """What one rollout asks of its policy, and what it hears. All but `asked` belongs to the caller's event loop."""

    def __init__(self, policy: Policy, mailbox: Mailbox) -> None:
        self.raised: dict[int, BaseException] = {}  # by the number of the generation
        self.tell: Callable[[messages.Message], None] = _nobody
        self._policy, self._mailbox = policy, mailbox
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._over = False

    def asked(self, message: messages.Generate | messages.Withdrawn) -> None:
        """The worker says something; on the pool's thread."""
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits any more
            self._mailbox.post(self._hear, message)

    async def close(self) -> None:
        """The rollout is over, one way or another."""
        self._over, self.tell = True, _nobody  # a worker may keep the job for a while, but not the pool with it
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)

    def _hear(self, message: messages.Generate | messages.Withdrawn) -> None:
        if self._over:
            return
        if isinstance(message, messages.Generate):
            task = asyncio.create_task(self._generate(message))
            self._asked[message.number] = task
            task.add_done_callback(lambda task: self._asked.pop(message.number, None))
        elif message.number in self._asked:
            self._asked[message.number].cancel()

    async def _generate(self, message: messages.Generate) -> None:
        job, number = message.job, message.number
        try:
            sampling = msgspec.convert(message.sampling, SamplingConfig)
            done = await self._policy.generate(message.tokens, sampling)
            self.tell(messages.Answer(job, number, done.tokens, done.logprobs, done.versions, done.stop_reason))
        except (Exception, asyncio.CancelledError) as error:  # who has withdrawn the question does not hear of it
            self.raised[number] = error
            text = wire.sendable(str(error))
            self.tell(messages.Refusal(job, number, type(error).__name__, text, isinstance(error, ValueError)))


def _nobody(message: messages.Message) -> None:
    """Who is told before the job begins and after it has ended."""


def _ids(tokens: Any) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


def _child(rng: np.random.Generator) -> np.random.Generator:
    """The worker draws from a copy, which would leave `rng` where it was."""
    return np.random.default_rng(int(rng.integers(2**63)))
