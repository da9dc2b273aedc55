"""An agent program as the environment: what it is given, what becomes of what it says, and wrong arguments."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import SourceConfig
from spmd_rl.envs.builtin.command import LONGEST, Command
from spmd_rl.envs.builtin.verdict import verdict
from spmd_rl.envs.sandbox.program import Ended, Kept
from spmd_rl.rollouts.types import Episode, Reward, RewardError
from tests.envs.builtin.agents import agent, attempt, escaped, why
from tests.envs.fakes import ScriptedPolicy, byte_tokenizer

SOLVES = """
task = json.loads(sys.stdin.read())
assert task == json.loads(os.environ["TASK"])
messages = [user(task["question"])]
reply = ask(messages)
side = ask([user("a sub-agent")])
messages += [reply, user("sure?")]
last = ask(messages)
print("done")
print(json.dumps({"reward": float(last["content"] == task["answer"]), "asked": 3, "sure": True}))
"""


def test_a_program_talks_and_its_tokens_come_back(tasks: str) -> None:
    env = agent(tasks, SOLVES)
    answer = env.task(0, "train").data["answer"]
    policy = ScriptedPolicy(byte_tokenizer(), ["hm", "side", answer])
    episode = attempt(env, policy=policy)
    assert episode.reward == Reward(1.0, {"asked": 3.0, "sure": 1.0}) and episode.status == "ok"
    main, side = episode.samples
    decode = byte_tokenizer().decode
    assert decode(main.tokens[main.mask == 1].tolist()) == f"hm<|im_end|>{answer}<|im_end|>"
    assert main.tokens.tolist()[: len(policy.asked[2][0])] == policy.asked[2][0].tolist()
    assert decode(side.tokens[side.mask == 1].tolist()) == "side<|im_end|>"
    assert (main.temperatures[main.mask == 1] == np.float32(0.9)).all()


def test_what_a_program_is_given(tasks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSED", "on")
    monkeypatch.setenv("SECRET", "kept")
    program = """
ask([user("a")])
names = sorted(os.environ.keys() - {"LC_CTYPE"})
cwd = os.getcwd()
assert os.environ["HOME"] == cwd == sys.argv[1] and os.listdir(cwd) == [] and sys.argv[2:] == ["{x}", here]
open("left", "w").close()
print(json.dumps({"reward": len(names), "passed": float(os.environ["PASSED"] == "on" and os.environ["SET"] == "1")}))
print(names, file=sys.stderr)
"""
    program = f"here = {os.getcwd()!r}{program}"
    words = ["{python}", "-c", escaped(program), "{folder}", "{{x}}", "{here}"]
    env = agent(tasks, "", command=words, pass_env=["PASSED"], env={"SET": "1"})
    episode = attempt(env, ["x"])
    # PATH, LANG, HOME, those two, and the four of its own.
    assert episode.reward == Reward(9.0, {"passed": 1.0})


def test_tasks_are_the_rows_and_held_out_by_what_they_say(tasks: str, tmp_path: Path) -> None:
    env = agent(tasks, "", heldout=0.3)
    train = {env.task(i, "train").data["question"] for i in range(40)}
    heldout = {env.task(i, "heldout").data["question"] for i in range(40)}
    assert train | heldout == {f"q{i}" for i in range(20)} and not train & heldout and heldout
    shuffled = tmp_path / "shuffled.jsonl"
    shuffled.write_text("".join(reversed(Path(tasks).read_text().splitlines(keepends=True))))
    other = Command(byte_tokenizer(), 7, command=["true"], tasks=str(shuffled), heldout=0.3)
    assert {other.task(i, "heldout").data["question"] for i in range(40)} == heldout
    prompt = env.prompt(env.task(0, "train"))
    assert prompt.dtype == np.int32 and "question" in byte_tokenizer().decode(prompt.tolist())


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("ask([user('a')]); sys.exit(3)", "exited with 3"),
        ("ask([user('a')]); print('{\"reward\": 1}'); sys.exit(1)", "exited with 1"),
        ("ask([user('a')]); raise KeyError('lost')", "KeyError: 'lost'"),
        ("ask([user('a')]); os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        ("ask([user('a')]); print('{\"reward\": 1}'); print('bye')", "the last line that it printed is 'bye'"),
        ("ask([user('a')])", "the last line that it printed is ''"),
        ("print('{\"reward\": 1}')", "it asked for none"),
        ("ask([]); print('{\"reward\": 1}')", "it asked for none"),
    ],
)
def test_a_program_that_fails_has_no_reward(tasks: str, program: str, says: str) -> None:
    episode = attempt(agent(tasks, program), ["x"])
    assert says in why(episode) and episode.status == "failed"


def test_rewards_by_exit_code(tasks: str) -> None:
    exits = {"0": 1.0, "10": -0.5}
    for code, reward in [(0, Reward(1.0)), (10, Reward(-0.5)), (1, None)]:
        episode = attempt(agent(tasks, f"ask([user('a')]); sys.exit({code})", exit_rewards=exits), ["x"])
        assert episode.reward == reward if reward else "exited with 1, for which exit_rewards" in why(episode)


def ended(stdout: bytes, code: int = 0, killed: Any = "") -> Ended:
    streams = Kept(2**18), Kept(2**18)
    streams[0].add(stdout)
    return Ended(code, *streams, killed, 1.0)


LINES = [
    b'{"reward": 1e400}',
    b'{"reward": NaN}',
    b'{"reward": "1"}',
    b'{"reward": null}',
    b'{"reward": 1, "part": "x"}',
    b'{"reward": 1, "part": [1]}',
    b"[1]",
    b"1",
    b'{"rewards": 1}',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"reward": ' + b"9" * 400 + b"}",
    b'{"reward": 1} .',
    b'\xef\xbb\xbf{"reward": 1}',
]


@given(line=st.sampled_from(LINES) | st.binary(max_size=40), before=st.binary(max_size=9))
def test_no_last_line_is_an_exception(line: bytes, before: bytes) -> None:
    reward = verdict(ended(before + b"\n" + line), {})
    assert isinstance(reward, RewardError) and reward.kind == "no_reward" and len(reward.why) < 4000


@pytest.mark.parametrize("line", ['{"reward": 1}', ' {"reward": true, "a": 0} \n\n', '{"a": 2, "reward": 1.0}\r\n'])
def test_last_lines(line: str) -> None:
    reward = verdict(ended(b"x\n" + line.encode()), {})
    assert isinstance(reward, Reward) and reward.value == 1.0


def test_a_program_that_was_ended_from_outside() -> None:
    assert "64 MiB" in verdict(ended(b"", -9, "output"), {}).why
    assert "ended by signal 99" in verdict(ended(b"", -99), {0: 1.0}).why


def test_many_rollouts_share_one_endpoint(tasks: str) -> None:
    env = agent(tasks, SOLVES)

    async def main() -> list[Episode]:
        policies = [ScriptedPolicy(byte_tokenizer(), ["1", "2", f"{i}"]) for i in range(6)]
        return await asyncio.gather(*(env.rollout(env.task(i, "train"), p) for i, p in enumerate(policies)))

    episodes = asyncio.run(main())
    for i, episode in enumerate(episodes):
        said = [byte_tokenizer().decode(s.tokens[s.mask == 1].tolist()) for s in episode.samples]
        assert said == [f"1<|im_end|>{i}<|im_end|>", "2<|im_end|>"]


def test_a_task_that_is_too_long_for_a_variable(tmp_path: Path) -> None:
    rows = tmp_path / "long.jsonl"
    longest = {"a": "x" * (LONGEST - len('{"a": ""}'))}
    rows.write_text(json.dumps(longest) + "\n" + json.dumps({"a": longest["a"] + "x"}) + "\n")
    env = agent(str(rows), "ask([user('a')]); print(json.dumps({'reward': len(os.environ['TASK'])}))", heldout=0.0)
    tasks = sorted((env.task(i, "train") for i in range(2)), key=lambda task: len(task.data["a"]))

    async def main() -> Episode:
        with pytest.raises(ValueError, match=f"has {LONGEST + 1} bytes as JSON.*its path into the task"):
            await env.rollout(tasks[1], ScriptedPolicy(byte_tokenizer(), ["x"]))
        return await env.rollout(tasks[0], ScriptedPolicy(byte_tokenizer(), ["x"]))

    assert asyncio.run(main()).reward == Reward(float(LONGEST))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"command": []}, "must be a list"),
        ({"command": "python agent.py"}, "must be a list"),
        ({"command": ["{pythn}"]}, r"names \{pythn\}; there are \{python\}, \{here\}, \{folder\}"),
        ({"command": ["true", "{"]}, "a brace itself is written"),
        ({"command": ["true", "{0}"]}, r"names \{0\}"),
        ({"command": ["true", "\0"]}, "NUL"),
        ({"command": ["no-such-program"]}, "no program 'no-such-program'"),
        ({"command": ["./agent.sh"]}, r"write \{here\}/./agent.sh"),
        ({"command": ["/etc"]}, "that can be run"),
        ({"tasks": ""}, "tasks is empty"),
        ({"tasks": "no/such.jsonl"}, "no/such"),
        ({"heldout": 2.0}, "heldout = 2.0"),
        ({"exit_rewards": {"x": 1.0}}, "an exit code is a number"),
        ({"exit_rewards": {"²": 1.0}}, "an exit code is a number"),
        ({"exit_rewards": {"256": 1.0}}, "an exit code is a number"),
        ({"exit_rewards": {"0": "1"}}, "exit_rewards.0 = '1' must be a number"),
        ({"overflow_reward": float("nan")}, "overflow_reward"),
        ({"max_replies": -1}, "max_replies = -1"),
        ({"timeout_s": "1"}, "timeout_s = '1'"),
        ({"pass_env": "HOME"}, "must be a list of names"),
        ({"pass_env": ["NO_SUCH_VARIABLE"]}, "names 'NO_SUCH_VARIABLE'"),
        ({"env": {"TASK": "1"}}, "TASK is the environment's own"),
        ({"env": {"A": 1}}, "must be a name and a text"),
        ({"env": {"A=B": "1"}}, "must be a name and a text"),
    ],
)
def test_wrong_arguments_are_named(tasks: str, args: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Command(byte_tokenizer(), 0, **{"command": ["true"], "tasks": tasks} | args)


@settings(max_examples=40, deadline=None)
@given(word=st.text(alphabet="{}ab\0!:python", max_size=12))
def test_any_word_is_a_word_of_a_command_or_an_error(word: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    rows = tmp_path_factory.getbasetemp() / "rows.jsonl"
    rows.write_text('{"a": 1}\n')
    try:
        env = Command(byte_tokenizer(), 0, command=["true", word], tasks=str(rows), exit_rewards={"0": 1.0})
    except ValueError:
        return
    assert "asked for none" in why(attempt(env))


def test_it_needs_aiohttp(tasks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd_rl.envs.endpoint.endpoint.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install 'aiohttp"):
        agent(tasks, "")


def test_the_arguments_fit_a_source(tasks: str) -> None:
    source = SourceConfig(env="command", args={"command": ["true"], "tasks": tasks, "exit_rewards": {"0": 1.0}})
    assert Command(byte_tokenizer(), 0, **source.args).task(0, "train").source == "command"
