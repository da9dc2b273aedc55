"""The datasets of the package `reasoning-gym` as environments: one question, one answer, scored by the dataset.

An item is known by its number; which items are held out depends on their questions. An item is made again where it is
needed, and must then ask what the task asks.

The datasets' scores have traps, and this file is about them. Some raise for what they can't read: that is a zero of
the model's, unless the right answer raises too. Some give points for anything: what nonsense gets is measured for each
item and taken off. Most give points to any text that holds the right answer; so a score below 1 counts as 0 unless
`exact` is false.

It refuses to know the datasets. Invariants: nonsense gets 0; an item on which nonsense is as good as the right answer
has no reward; a score that can't be computed is never a zero.
"""

from __future__ import annotations

import difflib
import re
from collections import OrderedDict
from threading import Lock
from typing import Any

import numpy as np

from spmd_rl.envs.adapters.own_objects import called, number
from spmd_rl.envs.builtin.answers import answer_in
from spmd_rl.envs.builtin.arguments import check_number
from spmd_rl.envs.builtin.conversation import Style, ended
from spmd_rl.envs.builtin.splits import Content, Drawn
from spmd_rl.envs.deadline import TooSlow
from spmd_rl.envs.protocol import Policy, Split
from spmd_rl.rollouts.types import Episode, Reward, RewardError, Task

EXTRA = 'pip install "spmd_rl[reasoning-gym]"'
ITEMS = 100_000  # of a dataset; more make some of them slow to open
KEPT = 256  # items, which may take a second to make
TRIED = 4  # items, before anything starts
NONSENSE = ("zzz", "?!")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Unscorable(ValueError):
    """A dataset can't tell a right answer from nonsense, or fails on its own answer."""


class ReasoningGym:
    """One dataset.

    Args:
        tokenizer: a Hugging Face tokenizer.
        seed: chooses the training items.
        dataset: its name.
        options: its configuration, such as {"min_terms": 2}; `seed` and `size` are not among them.
        system: what a system message says; true: the package's own prompt, which asks for <answer>…</answer>.
        exact: a score below 1 counts as 0. False: it counts as it is, less what nonsense gets.
        items: items are drawn from the first so many; word_ladder takes 20,000 at most.
        score_s: seconds that making and scoring an item may take.
        heldout: share of the questions kept from training.
        max_tokens: new tokens of the answer at most; 0: the policy's limit, which holds in any case.
        chat: the tokenizer's chat template, or the short form for tiny models.

    ValueError for what is not there or can't be scored, ImportError without the package.
    """

    def __init__(
        self,
        tokenizer: Any,
        seed: int = 0,
        dataset: str = "",
        *,
        options: dict[str, Any] | None = None,
        system: bool | str = False,
        exact: bool = True,
        items: int = ITEMS,
        score_s: float = 30.0,
        heldout: float = 0.1,
        max_tokens: int = 0,
        chat: bool = True,
    ) -> None:
        self._source = f"reasoning_gym:{dataset}"
        check_number(self._source, "items", items, TRIED, 2**31)
        check_number(self._source, "score_s", score_s, 0.001, 1e6)
        self._exact, self._score_s, self._tagged = exact, score_s, system is True
        self._items, self._dataset = items, opened(self._source, dataset, options or {}, items)
        self._kept: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._lock = Lock()  # items are made on the event loop and in threads
        self._tasks = Drawn(self._source, seed, heldout, self._draw, _key)
        self._style = Style(tokenizer, chat, _prompt(system), max_tokens)
        if not self._try():
            self.solve = None  # there are no answers to show: whoever asks for a teacher sees that

    def task(self, index: int, split: Split) -> Task:
        """An item. ValueError where none seems to be on that side."""
        return self._tasks.task(index, split)

    def prompt(self, task: Task) -> np.ndarray:
        """int32[T]."""
        chat = self._style.begin()
        chat.user(task.data["question"])
        return chat.prompt()

    async def rollout(self, task: Task, policy: Policy) -> Episode:
        """One question, one answer; none when the reply was cut."""
        chat = self._style.begin(policy)
        chat.user(task.data["question"])
        reply = await chat.reply()
        if reply.stop_reason != "stop":
            return ended(task, chat, Reward(0.0))
        try:
            reward = await called(self.reward, {"task": task, "text": reply.text}, self._score_s)
        except (Unscorable, TooSlow) as error:
            why = f"{self._source}, item {task.data['number']}: {error}"
            return Episode(task, chat.samples(), RewardError(why, type(error).__name__), "failed")
        return ended(task, chat, reward)

    def reward(self, task: Task, text: str) -> Reward:
        """Of a whole reply. Unscorable where none can be computed."""
        item = self._same(task)
        floor, score = self._floor(item), self._score(answer_of(text), item)
        value = max(0.0, score - floor) / (1 - floor)
        return Reward(float(score >= 1) if self._exact else value, {"score": score, "floor": floor})

    def solve(self, task: Task, heard: list[str], rng: np.random.Generator) -> str:
        """The item's own answer. ValueError for an item without one."""
        answer = self._same(task)["answer"]
        if not isinstance(answer, str):
            raise ValueError(f"{self._source}: item {task.data['number']} has no answer; set warmup.steps = 0")
        return f"<answer>{answer}</answer>" if self._tagged else answer

    def _draw(self, rng: np.random.Generator) -> Content:
        place = int(rng.integers(self._items))
        return {"number": place, "question": str(self._item(place)["question"])}

    def _item(self, place: int) -> dict[str, Any]:
        with self._lock:
            if place not in self._kept:
                self._kept[place] = self._dataset[place]
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            return self._kept[place]

    def _same(self, task: Task) -> dict[str, Any]:
        item = self._item(task.data["number"])
        if item["question"] != task.data["question"]:
            raise Unscorable("the dataset does not ask what it asked; keep its options and the package's version")
        return item

    def _score(self, answer: str, item: dict[str, Any]) -> float:
        """In 0..1. What raises for the right answer too is Unscorable."""
        try:
            return self._scored(answer, item)
        except Exception:  # of a parser that was given anything
            right = item["answer"]
            if isinstance(right, str) and answer != right:
                try:
                    self._scored(right, item)
                except Exception as error:
                    raise Unscorable(f"the right answer raises {type(error).__name__}: {error}") from error
                return 0.0
            if not isinstance(right, str):
                return 0.0
            raise

    def _scored(self, answer: str, item: dict[str, Any]) -> float:
        score = number(self._dataset.score_answer(answer, item), "the dataset's score")
        return min(max(score, 0.0), 1.0)

    def _floor(self, item: dict[str, Any]) -> float:
        """What nonsense gets. Unscorable where that is everything."""
        floor = max(self._score(nonsense, item) for nonsense in NONSENSE)
        if floor >= 1:
            raise Unscorable("nonsense gets the full score, so right answers can't be told from wrong ones")
        return floor

    def _try(self) -> bool:
        """Whether all of the first items have answers. ValueError for a dataset that can't be scored."""
        answered = True
        for index in range(TRIED):
            item = self._same(self.task(index, "train"))
            right = item["answer"]
            try:
                self._floor(item)
                score = self._scored(right, item) if isinstance(right, str) else 1.0
            except Exception as error:
                raise ValueError(f"{self._source} can't be scored: {type(error).__name__}: {error}") from error
            if score < 1 and self._exact:
                raise ValueError(f"{self._source}: its own right answer scores {score:g}, not 1; set exact = false")
            answered = answered and isinstance(right, str)
        return answered


def opened(source: str, name: str, options: dict[str, Any], items: int) -> Any:
    """The dataset. ImportError without the package, ValueError for an unknown name or options that it does not take."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError(f"{source} needs the package reasoning-gym ({error}): {EXTRA}") from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(DATASETS))}"
        raise ValueError(f"{source}: there is no such dataset; {hint}")
    if taken := {"seed", "size"} & set(options):
        raise ValueError(f"{source}: options must not hold {' or '.join(sorted(taken))}: items are drawn by number")
    try:
        # Not the run's seed: held-out items are the same for every seed.
        return reasoning_gym.create_dataset(name, seed=0, size=items, **options)
    except Exception as error:  # its checks are assertions
        raise ValueError(f"{source}: options = {options}, items = {items}: {type(error).__name__}: {error}") from error


def answer_of(text: str) -> str:
    """What follows the last thought; the last <answer>…</answer> in it where there is one; nothing around it."""
    answer = answer_in(text)
    tagged = _TAGGED.findall(answer)
    return tagged[-1].strip() if tagged else answer


def _prompt(system: bool | str) -> str:
    if not isinstance(system, bool):
        return system
    if not system:
        return ""
    from reasoning_gym.utils import SYSTEM_PROMPTS

    prompt: str = SYSTEM_PROMPTS["default"]
    return prompt


def _key(content: Content) -> str:
    return str(content["question"])
