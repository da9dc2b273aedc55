"""An agent program as the environment: what it is given, what becomes of what it says, and that it leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.tree import Config, SamplingConfig, SourceConfig
from spmd_rl.envs.builtin.command import LONGEST, Command
from spmd_rl.envs.builtin.verdict import verdict
from spmd_rl.envs.endpoint.endpoint import Access
from spmd_rl.envs.protocol import Generation
from spmd_rl.envs.sandbox.program import Ended, Kept
from spmd_rl.orchestrator.policy import ChangedCourse
from spmd_rl.orchestrator.rollouts import Rollouts
from spmd_rl.rollouts.types import Episode, Reward, RewardError
from tests.envs.endpoint.talking import Heard, ask, said
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer

# What every program below begins with: `ask(messages)` is the reply's message, or the error's code.
ASK = """
import http.client, json, os, sys, time
from urllib.parse import urlsplit
url, key = urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
def ask(messages, **more):
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    body = json.dumps({"model": os.environ["MODEL"], "messages": messages, **more})
    connection.request("POST", url.path + "/chat/completions", body, {"Authorization": "Bearer " + key})
    answer = json.loads(connection.getresponse().read())
    return answer["choices"][0]["message"] if "choices" in answer else answer["error"]["code"]
def user(text):
    return {"role": "user", "content": text}
"""

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


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(20)]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def agent(tasks: str, program: str, **args: Any) -> Command:
    return Command(byte_tokenizer(), 0, **{"command": ["{python}", "-c", escaped(program)], "tasks": tasks} | args)


def escaped(program: str) -> str:
    """As a word of a command, in which braces name places."""
    return (ASK + program).replace("{", "{{").replace("}", "}}")


def attempt(env: Command, lines: Any = (), policy: Any = None, deadline_s: float = 60.0, **options: Any) -> Episode:
    """One rollout, as a run does it; whatever comes of it, nothing is left."""
    policy = policy or ScriptedPolicy(byte_tokenizer(), lines, **options)
    before = folders()
    rollouts = Rollouts(replace(Config(), seq_len=4096))

    async def main() -> Episode:
        episode = await rollouts.run(env, env.task(0, "train"), policy, deadline_s)
        assert len(asyncio.all_tasks()) == 1
        return episode

    episode = asyncio.run(main())
    assert folders() == before
    return episode


def folders() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("spmd_rl-agent-")}


def why(episode: Episode) -> str:
    assert isinstance(episode.reward, RewardError) and not episode.valid
    return episode.reward.why


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


def test_a_program_that_goes_on_for_ever_goes_with_all_it_started(tasks: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
ask([user("a")])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""

    env = agent(tasks, program)

    async def main() -> None:
        policy = ScriptedPolicy(byte_tokenizer(), ["x"])
        rollout = asyncio.create_task(env.rollout(env.task(0, "train"), policy))
        while not pids.exists() or len(pids.read_text().split()) < 2:
            assert not rollout.done(), rollout
            await asyncio.sleep(0.02)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

    before = folders()
    asyncio.run(main())
    assert folders() == before
    deadline = time.monotonic() + 60  # they were killed, which the kernel does when it finds the time
    while left := [pid for pid in pids.read_text().split() if running(int(pid))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # a child that nobody waits for any more


def test_the_runs_deadline_and_its_own(tasks: str) -> None:
    hangs = "ask([user('a')]); time.sleep(600)"
    episode = attempt(agent(tasks, hangs), ["x"], deadline_s=1.0)
    assert episode.status == "timeout" and "no result within 1 s" in why(episode)
    episode = attempt(agent(tasks, hangs, timeout_s=1.0), ["x"])
    assert episode.status == "timeout" and "timeout_s = 1 s" in why(episode)


class Waiting(ScriptedPolicy):
    """Never answers the second request."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.waits = asyncio.Event()

    async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
        if self.asked:
            self.waits.set()
            await asyncio.Event().wait()
        return await super().generate(tokens, sampling)


def test_what_was_sampled_before_the_end_counts_and_nothing_else(tasks: str) -> None:
    program = """
import threading
ask([user("a")])
threading.Thread(target=ask, args=([user("b")],), daemon=True).start()
time.sleep(0.2)
print('{"reward": 1}', flush=True)
os._exit(0)
"""
    episode = attempt(agent(tasks, program), policy=Waiting(byte_tokenizer(), ["x"]))
    assert episode.reward == Reward(1.0) and len(episode.samples) == 1 and episode.status == "ok"


def test_a_key_that_outlives_its_program_opens_nothing(tasks: str, tmp_path: Path) -> None:
    known, go = tmp_path / "known", tmp_path / "go"
    program = f"""
ask([user("a")])
open({str(known)!r} + ".new", "w").write(os.environ["OPENAI_BASE_URL"] + " " + key)
os.rename({str(known)!r} + ".new", {str(known)!r})
while not os.path.exists({str(go)!r}):
    time.sleep(0.01)
print('{{"reward": 1}}')
"""
    env = agent(tasks, program)

    async def main() -> tuple[Episode, Heard]:
        policy = Waiting(byte_tokenizer(), ["x"])
        rollout = asyncio.create_task(env.rollout(env.task(0, "train"), policy))
        while not known.exists():
            assert not rollout.done(), rollout
            await asyncio.sleep(0.01)
        url, key = known.read_text().split()
        stray = asyncio.create_task(ask(Access(url, key, "policy"), said("b")))
        await policy.waits.wait()
        go.touch()
        return await rollout, await stray

    episode, heard = asyncio.run(main())
    assert episode.reward == Reward(1.0) and len(episode.samples) == 1
    assert heard.status == 503 and heard.error["code"] == "rollout_over"


OVERFLOWS = "first = ask([user('a')]); code = ask([user('a'), first, user('b' * 200)]); assert code is None, code"


def test_a_policy_that_ran_out_of_room_gets_a_reward_all_the_same(tasks: str) -> None:
    episode = attempt(agent(tasks, OVERFLOWS, overflow_reward=-0.25), ["x"], seq_len=150)
    assert episode.reward == Reward(-0.25) and episode.status == "truncated" and len(episode.samples) == 1
    many = "codes = [ask([user('a')]) for _ in range(3)]; sys.exit(codes[-1] == 'insufficient_quota')"
    episode = attempt(agent(tasks, many, max_replies=2), ["x", "y"])
    assert episode.reward == Reward(0.0) and episode.status == "truncated" and len(episode.samples) == 2
    copes = "first = ask([user('a')]); ask([user('a'), first, user('b' * 200)]); print('{\"reward\": 0.5}')"
    assert attempt(agent(tasks, copes), ["x"], seq_len=150).reward == Reward(0.5)


def test_a_reply_that_was_cut_or_aborted(tasks: str) -> None:
    program = "ask([user('a')]); print('{\"reward\": 1}')"
    cut = attempt(agent(tasks, program), [Said("x", "length")])
    assert (cut.reward, cut.status) == (Reward(1.0), "truncated")
    fails = attempt(agent(tasks, "ask([user('a')]); sys.exit(3)"), [Said("x", "length")])
    assert fails.status == "failed" and "exited with 3" in why(fails)
    aborted = attempt(agent(tasks, program), [Said("", "aborted")])
    assert aborted.status == "failed" and "aborted" in why(aborted)


def test_what_the_policy_raises_ends_the_program_at_once(tasks: str) -> None:
    class Changed(ScriptedPolicy):
        async def generate(self, tokens: np.ndarray, sampling: SamplingConfig) -> Generation:
            raise ChangedCourse("something else than before")

    episode = attempt(agent(tasks, "ask([user('a')]); time.sleep(600)"), policy=Changed(byte_tokenizer(), []))
    assert episode.reward.kind == "ChangedCourse" and "something else than before" in why(episode)


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


def test_an_endpoint_that_cannot_be_had_is_no_zero(tasks: str) -> None:
    episode = attempt(agent(tasks, "", host="203.0.113.7"))
    assert episode.reward.kind == "EndpointError" and "203.0.113.7" in why(episode)


def test_it_needs_aiohttp(tasks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd_rl.envs.endpoint.endpoint.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install 'aiohttp"):
        agent(tasks, "")


def test_the_arguments_fit_a_source(tasks: str) -> None:
    source = SourceConfig(env="command", args={"command": ["true"], "tasks": tasks, "exit_rewards": {"0": 1.0}})
    assert Command(byte_tokenizer(), 0, **source.args).task(0, "train").source == "command"
