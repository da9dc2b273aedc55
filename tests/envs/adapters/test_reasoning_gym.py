"""Datasets of reasoning-gym: scores and their traps, answers, sides. Small datasets of our own stand for the traps."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType

import numpy as np
import pytest

from spmd_rl.envs.adapters.reasoning_gym import ReasoningGym, answer_of
from spmd_rl.envs.demonstrate import demonstration
from spmd_rl.rollouts.types import Episode, RewardError
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer


class Doubles:
    """The package's shape: the double of a number; like its base class, it credits texts that hold the answer."""

    def __init__(self, seed: int, size: int, step: int = 2) -> None:
        assert step > 0, "step must be positive"
        self._step = step

    def __getitem__(self, place: int) -> dict:
        return {"question": f"double {place % 997}", "answer": str(place % 997 * self._step)}

    def score_answer(self, answer: str, entry: dict) -> float:
        if answer == entry["answer"]:
            return 1.0
        return len(entry["answer"]) / len(answer) if entry["answer"] in answer else 0.0


class Raises(Doubles):
    def score_answer(self, answer: str, entry: dict) -> float:
        return float(int(answer) == int(entry["answer"]))


class RaisesLater(Raises):
    """On its own answers, once all is checked."""

    broken = False

    def score_answer(self, answer: str, entry: dict) -> float:
        if RaisesLater.broken:
            raise OSError("a file is gone")
        return super().score_answer(answer, entry)


class Generous(Doubles):
    def __getitem__(self, place: int) -> dict:
        return super().__getitem__(place) | {"answer": None}

    def score_answer(self, answer: str, entry: dict) -> float:
        return {"right": 1.0, "half": 0.625}.get(answer, 0.25)


class Blind(Doubles):
    def score_answer(self, answer: str, entry: dict) -> float:
        return 1.0


class Modest(Doubles):
    def score_answer(self, answer: str, entry: dict) -> float:
        return 0.9 * (answer == entry["answer"])


DATASETS = {cls.__name__.lower(): cls for cls in (Doubles, Raises, RaisesLater, Generous, Blind, Modest)}


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    package, factory, utils = (ModuleType(f"reasoning_gym{part}") for part in ("", ".factory", ".utils"))
    package.create_dataset = lambda name, **options: DATASETS[name](**options)
    factory.DATASETS, utils.SYSTEM_PROMPTS = DATASETS, {"default": "Use <answer>."}
    for module in (package, factory, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def make(name: str = "doubles", seed: int = 0, **args: object) -> ReasoningGym:
    return ReasoningGym(byte_tokenizer(), seed, name, **args)


def play(env: ReasoningGym, says) -> Episode:
    return asyncio.run(env.rollout(env.task(0, "train"), ScriptedPolicy(byte_tokenizer(), [says])))


def right(env: ReasoningGym) -> str:
    return env.solve(env.task(0, "train"), [], np.random.default_rng(0))


def test_the_right_answer_alone_counts() -> None:
    env = make()
    assert play(env, f"<think>1</think>\n{right(env)} ").reward.value == 1
    near = play(env, right(env) + " or so")
    assert near.reward.value == 0 and 0 < near.reward.parts["score"] < 1
    assert play(make(exact=False), right(env) + " or so").reward.value == near.reward.parts["score"]


@pytest.mark.parametrize("junk", ["zzz", "", "²", "9" * 5000, "<answer>", "a" * 50_000])
def test_junk_is_a_zero_also_where_the_dataset_raises(junk: str) -> None:
    episode = play(make("raises"), junk)
    assert episode.valid and episode.reward.value == 0


def test_a_dataset_that_fails_on_its_own_answer_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make("raiseslater")
    monkeypatch.setattr(RaisesLater, "broken", True)
    for says in (right(env), "zzz"):
        episode = play(env, says)
        assert isinstance(episode.reward, RewardError) and "a file is gone" in episode.reward.why


def test_what_nonsense_gets_is_taken_off() -> None:
    env = make("generous", exact=False)
    assert [play(env, says).reward.value for says in ("right", "half", "what")] == [1, 0.5, 0]
    assert env.solve is None  # preflight says that there is no teacher


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("blind", {}, "nonsense gets the full score"),
        ("modest", {}, "its own right answer scores 0.9.*exact = false"),
        ("duobles", {}, "did you mean doubles"),
        ("doubles", {"options": {"step": 0}}, "step must be positive"),
        ("doubles", {"options": {"size": 3}}, "must not hold size"),
        ("doubles", {"heldout": 2}, "heldout"),
    ],
)
def test_mistakes_are_answered_with_the_way_out(name, args, says) -> None:
    with pytest.raises(ValueError, match=says):
        make(name, **args)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r'pip install "spmd_rl\[reasoning-gym\]"'):
        make()


def test_sides_share_no_question_and_held_out_items_are_the_same_for_every_seed() -> None:
    one, two = make(), make(seed=1)
    train, held = ([one.task(i, side).data for i in range(60)] for side in ("train", "heldout"))
    assert not {d["question"] for d in train} & {d["question"] for d in held}
    assert held == [two.task(i, "heldout").data for i in range(60)]
    assert train == [make().task(i, "train").data for i in range(60)] != [two.task(i, "train").data for i in range(60)]


def test_a_cut_answer_is_none() -> None:
    env = make()
    episode = play(env, Said(right(env), "length"))
    assert episode.reward.value == 0 and episode.status == "truncated"
    assert isinstance(play(env, Said("x", "aborted")).reward, RewardError)


def test_a_lesson_gets_the_whole_reward() -> None:
    env = make(system=True)
    task = env.task(0, "train")
    made = asyncio.run(demonstration(byte_tokenizer(), env, task, np.random.default_rng(0)))
    said = byte_tokenizer().decode(made[0][0][made[0][1] == 1].tolist())
    assert said.startswith("<answer>") and play(env, said.split("<|im_end|>")[0]).reward.value == 1
    assert len(env.prompt(task)) < len(made[0][0])


def test_where_the_answer_is() -> None:
    assert answer_of("<think><answer>1</answer></think> <answer> 2\n</answer> <answer>3</answer>.") == "3"
    assert answer_of(" 4 ") == "4" and answer_of("<answer>5") == "<answer>5"
