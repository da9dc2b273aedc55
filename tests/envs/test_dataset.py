"""Rows as tasks: prompts, sides, rewards, and what is refused before anything starts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from spmd_rl.config.tree import SamplingConfig, SourceConfig
from spmd_rl.data.tables import DataError
from spmd_rl.envs import prompts
from spmd_rl.envs.load import load
from spmd_rl.envs.protocol import Generation
from spmd_rl.models.byte_tokenizer import make_byte_tokenizer
from spmd_rl.rollouts.types import Reward, RewardError

ROWS = [{"q": f"{i}+1", "a": str(i + 1), "chat": [{"role": "user", "content": f"{i}?"}]} for i in range(30)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def make(tmp_path: Path, tokenizer):
    def make(rows=ROWS, seed=0, tokenizer=tokenizer, **source):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        defaults = {"data": str(path), "prompt": "{q}=", "answer": "a", "reward": "exact"}
        return load(SourceConfig(**(defaults | source)), tokenizer, seed)

    return make


class Says:
    """A policy that always answers the same."""

    def __init__(self, ids: list[int], stop_reason: str = "stop") -> None:
        self.sampling, self.ids, self.stop_reason = SamplingConfig(max_tokens=5), ids, stop_reason
        self.asked: list[SamplingConfig] = []

    async def generate(self, tokens, sampling):
        self.asked.append(sampling)
        n = len(self.ids)
        return Generation(
            np.asarray(self.ids, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), self.stop_reason
        )


def text(env, ids) -> str:
    return env.tokenizer.decode(np.asarray(ids).tolist())


def test_sides_are_disjoint_and_together_everything(make):
    env = make(heldout_share=0.2)
    sides = {
        side: [env.task(i, side).data["number"] for i in range(len(env.rows[side]))] for side in ("train", "heldout")
    }
    assert len(sides["heldout"]) == 6
    assert sorted(sides["train"] + sides["heldout"]) == list(range(30))
    other = make(heldout_share=0.2, seed=9)
    assert set(env.rows["heldout"].tolist()) == set(other.rows["heldout"].tolist())


def test_training_rows_come_in_a_new_order_every_epoch_and_the_same_for_the_same_seed(make):
    env, again, other = make(), make(), make(seed=1)
    count = len(env.rows["train"])
    orders = [[env.task(e * count + i, "train").data["number"] for i in range(count)] for e in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
    assert orders[0] == [again.task(i, "train").data["number"] for i in range(count)]
    assert orders[0] != [other.task(i, "train").data["number"] for i in range(count)]


def test_a_dataset_of_its_own_for_evaluation(make, tmp_path):
    (tmp_path / "held.jsonl").write_text(json.dumps({"q": "9+9", "a": "18"}))
    env = make(heldout=str(tmp_path / "held.jsonl"))
    assert len(env.rows["train"]) == 30 and env.task(5, "heldout").data["row"] == {"q": "9+9", "a": "18"}


def test_prompts(make):
    plain, row = make(), None
    row = plain.task(0, "train").data["row"]
    assert text(plain, plain.prompt(plain.task(0, "train"))) == f"{row['q']}="
    chat = make(chat=True, system="Be brief.")
    assert text(chat, chat.prompt(chat.task(0, "train"))) == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{row['q']}=<|im_end|>\n<|im_start|>assistant\n"
    )
    column = make(messages="chat")
    assert text(column, column.prompt(column.task(0, "train"))).endswith("?<|im_end|>\n<|im_start|>assistant\n")
    hinted = make(hint="{q}={a} so {q}=")
    assert text(hinted, hinted.hint(hinted.task(0, "train"))) == f"{row['q']}={row['a']} so {row['q']}="
    assert plain.hint is None and make(answer="", reward="regex", reward_args={"pattern": "x"}).teacher is None


def test_a_rollout_is_rewarded_for_the_text_before_the_end_token(make, tokenizer):
    env = make()
    task = env.task(0, "train")
    policy = Says([*tokenizer.encode(task.data["row"]["a"]), tokenizer.eos_token_id])
    episode = asyncio.run(env.rollout(task, policy))
    assert episode.reward == Reward(1.0) and episode.status == "ok"
    assert policy.asked[0] == policy.sampling
    (sample,) = episode.samples
    assert sample.tokens.tolist() == [*env.prompt(task).tolist(), *policy.ids]
    cut = asyncio.run(env.rollout(task, Says(tokenizer.encode(task.data["row"]["a"]), "length")))
    assert cut.reward == Reward(1.0) and cut.status == "truncated"


def test_the_teacher_gives_the_right_answer_and_ends(make, tokenizer):
    env = make()
    task = env.task(3, "train")
    prompt, answer = env.teacher(task, np.random.default_rng(0))
    assert text(env, prompt) == f"{task.data['row']['q']}="
    assert answer.tolist() == [*tokenizer.encode(task.data["row"]["a"]), tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"q": "x"}, "rows.jsonl, line 10 has no column 'a'; it has q: mend"),
        ({"a": "x"}, "rows.jsonl, line 10 has no column 'q'; it has a: mend"),
        ({"a": "x", "q": None}, "rows.jsonl, line 10 has null in column 'q'; it has a, q"),
        ({"a": None, "q": "x"}, "rows.jsonl, line 10 has null in column 'a'"),
    ],
)
def test_a_row_without_what_is_named_is_found_before_anything_starts(make, tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        make(rows=[*ROWS[:9], row, *ROWS])
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, [*ROWS[:9], row])))
    with pytest.raises(DataError, match=message.replace("rows.jsonl", "held.jsonl")):
        make(heldout=str(tmp_path / "held.jsonl"))
    make(rows=[*ROWS[:9], {"q": "x", "a": 0, "other": None}])


def test_later_rows_are_named_when_their_turn_comes(make, monkeypatch):
    monkeypatch.setattr(prompts, "ROWS_LOOKED_AT", 9)
    env = make(rows=[*ROWS[:9], {"q": "x"}])
    with pytest.raises(DataError, match=r"rows.jsonl, line 10 has no column 'a'; it has q"):
        for i in range(9):
            env.teacher(env.task(i, "train"), None)
            env.teacher(env.task(0, "heldout"), None)
    env = make(rows=[*ROWS[:9], {"a": "x"}])
    with pytest.raises(DataError, match=r"line 10 has no column 'q'; it has a"):
        for side, count in (("train", 9), ("heldout", 1)):
            for i in range(count):
                env.prompt(env.task(i, side))


BAD = {
    "prompt column": (
        {"prompt": "{question}"},
        "no column 'question', which prompt names; it has q, a, chat",
    ),
    "answer column": ({"answer": "solution"}, "no column 'solution', which answer names"),
    "hint column": ({"hint": "{b}"}, "no column 'b', which hint"),
    "positional": ({"prompt": "{}="}, r"prompt = '\{\}=': name a column between the braces, as in \{question\}"),
    "number": ({"hint": "{0}="}, "hint = .* name a column between the braces"),
    "open brace": ({"prompt": "{q"}, r"prompt = '\{q' is no format string: expected '\}'.*written \{\{ or \}\}"),
    "JSON": ({"prompt": '{"a": 1} {q}'}, r"no column '\"a\"', which prompt names \(a brace itself is written \{\{"),
    "messages column": ({"messages": "talk"}, "no column 'talk', which messages names"),
}


@pytest.mark.parametrize(("source", "message"), BAD.values(), ids=BAD)
def test_columns_that_are_not_there(make, source, message):
    with pytest.raises(DataError, match=message):
        make(**source)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "the answer"}], "ends with the assistant"),
        (["hello"], "holds no list of messages"),
        ("hello", "holds no list of messages"),
        ([], "holds no list of messages"),
    ],
)
def test_chats_that_are_no_prompt(make, cell, message):
    env = make(rows=[{"chat": cell, "a": "1"}], messages="chat", heldout_share=0.0)
    with pytest.raises(DataError, match=rf"rows.jsonl, line 1: column 'chat' {message}"):
        env.prompt(env.task(0, "train"))


def test_chat_needs_a_template(make, tokenizer):
    class Bare:
        chat_template = None
        encode, decode = tokenizer.encode, tokenizer.decode

    with pytest.raises(DataError, match="need a chat template, and the tokenizer has none"):
        make(chat=True, tokenizer=Bare())


def test_one_row_leaves_nothing_to_evaluate(make):
    env = make(rows=ROWS[:1])
    assert env.task(7, "train").data["number"] == 0
    with pytest.raises(DataError, match=r"no heldout row \(1 rows, .*orchestrator.eval.tasks = 0"):
        env.task(0, "heldout")
    assert len(make(rows=ROWS[:2]).rows["heldout"]) == 1
    assert len(make(rows=ROWS[:2], heldout_share=0.9).rows["train"]) == 1
    assert len(make(heldout_share=0.0).rows["heldout"]) == 0


def test_a_file_has_no_split_to_evaluate_on(make):
    with pytest.raises(DataError, match="'validation' is no dataset, and files have no splits"):
        make(heldout="validation")


OWN = """
import time
def text(completion): return "good"
def nan(completion): return float("nan")
def fails(completion): raise RuntimeError("no judge")
def fails_on_nothing(completion): return 1 / len(completion)
def hangs():
    while True: time.sleep(0.01)
def wants_the_prompt(prompt, row): assert prompt == row["q"] + "="; return 1
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text", r"line \d+, completion '.+': .* is 'good' \(str\)"),
        ("nan", "returned nan"),
        ("fails", "no completion tried got a reward, of 8: the reward .*fails raised RuntimeError: no judge"),
        ("hangs", "of 1: .* took longer than reward_s = 0.2 s"),
    ],
)
def test_rewards_are_tried_before_anything_starts(make, tmp_path, name, message):
    (tmp_path / "own.py").write_text(OWN)
    env = make(reward=f"{tmp_path / 'own.py'}:{name}", reward_s=0.2)
    with pytest.raises(DataError, match=message):
        asyncio.run(env.check_reward(4))


def test_what_a_reward_is_tried_with(make, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    asyncio.run(make(reward=f"{tmp_path / 'own.py'}:wants_the_prompt").check_reward(4))


def test_a_reward_may_raise_for_some_completions(make, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    env = make(reward=f"{tmp_path / 'own.py'}:fails_on_nothing")
    asyncio.run(env.check_reward(4))
    episode = asyncio.run(env.rollout(env.task(0, "train"), Says([env.tokenizer.eos_token_id])))
    assert isinstance(episode.reward, RewardError) and not episode.valid
