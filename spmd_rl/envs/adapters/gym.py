"""Anything with `reset` and `step` as an environment: Gymnasium, the older Gym, and what looks like OpenEnv.

Every attempt makes an instance and resets it with the task's seed. What it observes is said as text; a reply is an
action; the rewards of all steps are added. A reply that is no action is answered with what is allowed, takes a turn
and does nothing else.

It refuses to import any of these libraries before one is named. Invariants: an instance belongs to one attempt; the
same seed begins the same attempt, and an environment that takes no seed is refused; what the model writes is never an
exception, and what the environment raises is never a zero.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from spmd_rl.config.imports import load_object
from spmd_rl.envs.adapters.first_prompt import first_prompt
from spmd_rl.envs.adapters.gym_texts import Actions, as_text
from spmd_rl.envs.adapters.own_objects import called, number
from spmd_rl.envs.builtin.answers import answer_in
from spmd_rl.envs.builtin.arguments import check_number
from spmd_rl.envs.builtin.conversation import Style, ended
from spmd_rl.envs.builtin.splits import Content, Drawn
from spmd_rl.envs.chat import Chat
from spmd_rl.envs.protocol import Policy, Split
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Task

EXTRA = 'pip install "spmd_rl[gymnasium]"'
PREFIX = "gymnasium:"
MOST_SEEDS = 2**31


@dataclass(frozen=True)
class Step:
    """What came of one action."""

    observation: Any
    reward: Any
    done: bool


class Gym:
    """One kind of game.

    Args:
        tokenizer: a Hugging Face tokenizer.
        seed: chooses the training tasks, each of which is a seed of the game.
        make: `gymnasium:FrozenLake-v1`, or the import path of a class or function that makes an instance.
        options: its keyword arguments. Of a Gymnasium environment that can, render_mode is "ansi" unless they say else.
        action: import path of a function (text) → action, for actions that are neither whole numbers nor texts. It
            raises ValueError for what is none; the model reads its text.
        system: what a system message says: the rules.
        max_turns: replies at most.
        step_s: seconds that one call of the game may take.
        heldout: share of the seeds kept from training.
        max_tokens: new tokens of a reply at most; 0: the policy's limit, which holds in any case.
        chat: the tokenizer's chat template, or the short form for tiny models.
        solve: import path of a teacher, a function (task, heard, rng) → text; for the supervised warm-up.

    ValueError, TypeError or ImportError for what can't be played.
    """

    def __init__(
        self,
        tokenizer: Any,
        seed: int = 0,
        make: str = "",
        *,
        options: dict[str, Any] | None = None,
        action: str = "",
        system: str = "",
        max_turns: int = 50,
        step_s: float = 30.0,
        heldout: float = 0.1,
        max_tokens: int = 0,
        chat: bool = True,
        solve: str = "",
    ) -> None:
        self._source = f"gym:{make}"
        check_number(self._source, "max_turns", max_turns, 1, 100_000)
        check_number(self._source, "step_s", step_s, 0.001, 1e6)
        self._max_turns, self._step_s = max_turns, step_s
        self._make, self._options = maker(make, self._source), dict(options or {})
        parse = load_object(action, f"{self._source}: action") if action else None
        game = self._instance()
        if make.startswith(PREFIX) and "ansi" in game.metadata.get("render_modes", []):
            self._options = {"render_mode": "ansi"} | self._options
        _seeding(game, self._source)
        self._actions = Actions(self._source, getattr(game, "action_space", None), parse)
        if hasattr(game, "close"):
            game.close()
        self._style = Style(tokenizer, chat, system, max_tokens)
        self._tasks = Drawn(self._source, seed, heldout, _draw)
        if solve:
            self.solve = load_object(solve, f"{self._source}: solve")

    def task(self, index: int, split: Split) -> Task:
        """A seed of the game."""
        return self._tasks.task(index, split)

    def prompt(self, task: Task) -> np.ndarray:
        """int32[T]: the first observation. A game is begun to see it."""
        return first_prompt(task, lambda policy: self.rollout(task, policy))

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """One game. Raises what it raises."""
        game = self._instance()
        try:
            chat = self._style.begin(policy)
            observation = await self._reset(game, task.data["seed"])
            opening = [await self._seen(game, observation), self._actions.allowed]
            chat.user("\n".join(text for text in opening if text))
            reward = await self._played(game, chat)
            if isinstance(reward, RewardError):
                return Episode(task, chat.samples(), reward, "failed")
            return ended(task, chat, reward)
        finally:
            if hasattr(game, "close"):
                await called(game.close, {}, self._step_s)

    async def _played(self, game: Any, chat: Chat) -> Reward | RewardError:
        total, invalid, done, turn = 0.0, 0, False, 0
        while not done and turn < self._max_turns:
            reply = await chat.reply()
            if reply.stop_reason != "stop":
                break
            turn += 1
            try:
                action = self._actions.read(answer_in(reply.text))
            except ValueError as error:
                invalid += 1
                chat.user(f"error: {error}")
                continue
            step = self._step_of(await called(partial(game.step, action), {}, self._step_s))
            try:
                total += number(0.0 if step.reward is None else step.reward, f"{self._source}: the reward of a step")
            except ValueError as error:
                return RewardError(str(error), "BadReward")
            done = step.done
            if not done:
                chat.user(await self._seen(game, step.observation))
        return Reward(total, {"turns": float(turn), "invalid": float(invalid), "done": float(done)})

    def _instance(self) -> Any:
        game = self._make(**self._options)
        if not callable(getattr(game, "reset", None)) or not callable(getattr(game, "step", None)):
            raise TypeError(f"{self._source} makes a {type(game).__name__}, which has no reset and step")
        return game

    async def _reset(self, game: Any, seed: int) -> Any:
        began = await called(game.reset, _seeding(game, self._source, seed), self._step_s)
        is_pair = isinstance(began, tuple) and len(began) == 2 and isinstance(began[1], dict)
        return began[0] if is_pair else began

    async def _seen(self, game: Any, observation: Any) -> str:
        """The observation, and behind one that is no text the picture in characters where there is one."""
        text = as_text(observation)
        if isinstance(observation, str) or getattr(game, "render_mode", None) != "ansi":
            return text
        return f"{text}\n{as_text(await called(game.render, {}, self._step_s))}"

    def _step_of(self, result: Any) -> Step:
        if isinstance(result, tuple) and len(result) == 5:
            observation, reward, terminated, truncated, _ = result
            return Step(observation, reward, bool(terminated or truncated))
        if isinstance(result, tuple) and len(result) == 4:
            observation, reward, done, _ = result
            return Step(observation, reward, bool(done))
        if hasattr(result, "reward") and hasattr(result, "done"):
            return Step(getattr(result, "observation", result), result.reward, bool(result.done))
        raise TypeError(
            f"{self._source}: step returned a {type(result).__name__}; it must return (observation, reward, "
            "terminated, truncated, info), (observation, reward, done, info), or an object with reward and done"
        )


def maker(make: str, source: str) -> Callable[..., Any]:
    """What makes an instance. ImportError without Gymnasium, ValueError for a name that it does not know."""
    if not make.startswith(PREFIX):
        made: Callable[..., Any] = load_object(make, f"{source}: the environment")
        return made
    name = make.removeprefix(PREFIX)
    try:
        import gymnasium
    except ImportError:
        raise ImportError(f"{source} needs the package gymnasium, which is not installed: {EXTRA}") from None
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(name, gymnasium.registry, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"{source}: {error}{hint}") from None
    return lambda **options: gymnasium.make(name, **options)


def _seeding(game: Any, source: str, seed: int = 0) -> dict[str, Any]:
    """The arguments of a reset with this seed. TypeError for a game that takes none."""
    parameters = inspect.signature(game.reset).parameters
    if "seed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return {"seed": seed}
    if not callable(getattr(game, "seed", None)):
        raise TypeError(
            f"{source} can't be seeded, so no task would be the same twice: give it reset(seed=…), or a method seed"
        )
    game.seed(seed)
    return {}


def _draw(rng: np.random.Generator) -> Content:
    return {"seed": int(rng.integers(MOST_SEEDS))}
