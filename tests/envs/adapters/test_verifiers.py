"""Tasksets of verifiers 0.4 as environments: rollouts, token for token, and what is not a reward."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import verifiers.v1 as vf
from hypothesis import given, settings
from hypothesis import strategies as st
from offline_taskset import Calculator
from playing import Remembering, check, make, play, text

from spmd_rl.envs.adapters.verifiers_agents import Table
from spmd_rl.envs.adapters.verifiers_tools import Workshop
from spmd_rl.envs.demonstrate import demonstration
from spmd_rl.models.byte_tokenizer import SPECIAL_TOKENS
from spmd_rl.rollouts.types import Reward, RewardError
from tests.envs.fakes import Said, byte_tokenizer

RENDERERS = ["template", "qwen3", {"name": "qwen3", "enable_thinking": False}]
JUNK = [
    *SPECIAL_TOKENS,
    "<tool_call>{",
    '{"name": "calc_add", "arguments": ',
    '"\\ud800"',
    "{}}",
    "²",
    "é",
    "\n",
    "[" * 50,
]


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(env, policy: Remembering) -> tuple[Table, list[vf.Trace]]:
    """The first training task, and the traces of verifiers."""
    table = Table(env._env, env._seats, Workshop([]), env._rendering, policy)
    return table, asyncio.run(table.play(env._tasks.of(env.task(0, "train")))).traces


@pytest.mark.parametrize("renderer", RENDERERS, ids=str)
def test_one_turn(renderer):
    env = make(renderer=renderer)
    task = env.task(0, "train")
    answer = task.data["row"]["answer"]
    episode, policy = play(env, [answer])
    assert episode.reward == Reward(2.0, {"exact": 2.0, "turns": 1.0}) and episode.status == "ok" and episode.valid
    assert np.array_equal(env.prompt(task), policy.heard[0][0])
    check(episode.samples, policy)
    wrong, _ = play(env, [answer + "!"])
    assert wrong.reward.value == 0.0


def test_the_prompt_is_the_tokenizers_own_chat():
    env = make()
    row = env.task(3, "train").data["row"]
    messages = [{"role": "system", "content": "Reverse."}, {"role": "user", "content": row["prompt"]}]
    expected = byte_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert env.prompt(env.task(3, "train")).tolist() == list(expected)


def test_the_prompt_is_found_inside_of_a_running_loop_too():
    env = make()

    async def ask() -> np.ndarray:
        return env.prompt(env.task(0, "train"))

    assert np.array_equal(asyncio.run(ask()), env.prompt(env.task(0, "train")))


@pytest.mark.parametrize("renderer", RENDERERS, ids=str)
def test_a_game_of_several_turns_is_one_sample(renderer):
    env = make(env="offline_game", renderer=renderer)
    episode, policy = play(env, ["a", Said("bcd", "length"), "c", "d"])
    assert len(policy.heard) == 4 and len(episode.samples) == 1
    check(episode.samples, policy)
    assert episode.status == "truncated"  # one of its replies was cut
    assert episode.reward.parts["turns"] == 4


def test_dropped_thoughts_begin_another_sample():
    env = make(env="offline_game", renderer={"name": "qwen3", "thinking_retention": "tool_cycle"})
    episode, policy = play(env, ["<think>hm</think>a", "b", "c", "d"])
    assert len(episode.samples) == 4 and "hm" not in text(episode.samples[1].tokens)
    check(episode.samples, policy)
    _, (trace,) = played(env, Remembering(["<think>hm</think>a", "b", "c", "d"]))
    assert [branch.token_ids for branch in trace.branches] == [s.tokens.tolist() for s in episode.samples]
    assert [len(branch.messages) for branch in trace.branches] == [3, 5, 7, 9]


def test_examples_in_the_prompt_are_not_the_policys():
    episode, policy = play(make(options={"kind": "example"}), ["x"])
    assert "assistant\nba<|im_end|>" in text(policy.heard[0][0])
    check(episode.samples, policy)


@pytest.mark.parametrize("renderer", RENDERERS, ids=str)
def test_samples_are_the_traces_branches(renderer):
    env = make(options={"kind": "sum"}, renderer=renderer)
    table, (trace,) = played(env, Remembering([call("calc_add", a=1, b=2) + call("calc_peek"), "3"]))
    (branch,), (sample,) = trace.branches, table.runs[0].conversation.samples()
    assert trace.ok and trace.num_turns == 2
    assert branch.token_ids == sample.tokens.tolist()
    assert branch.sampled_mask == [bool(m) for m in sample.mask]
    assert np.allclose(branch.logprobs, sample.logprobs)
    assert [m.role for m in branch.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert trace.usage.completion_tokens == sample.mask.sum()


@pytest.mark.parametrize("renderer", RENDERERS, ids=str)
def test_tools_are_called_and_share_the_traces_state(renderer):
    env = make(options={"kind": "sum"}, renderer=renderer)
    row = env.task(0, "train").data["row"]
    a, b = row["prompt"].removesuffix("=?").split("+")
    script = [call("calc_add", a=int(a), b=b), call("calc_peek") + call("calc_add", a=1, b=1), row["answer"]]
    episode, policy = play(env, script)
    assert episode.reward == Reward(1.0, {"exact": 1.0, "calls": 2.0})
    assert row["answer"] in text(policy.heard[1][0]) and row["answer"] in text(policy.heard[2][0])
    check(episode.samples, policy)


def test_a_tasks_tools_are_its_own():
    env = make(options={"kind": "sum"})
    for index in range(2):
        task = env.task(index, "train")
        _, policy = play(env, [call("calc_peek"), "done"], task)
        assert f"<tool_response>{task.data['row']['answer']}</tool_response>" in text(policy.heard[1][0])


def test_tools_are_closed_when_a_run_ends_or_is_cancelled():
    env = make(options={"kind": "sum"})
    tasks = [env.task(i, "train") for i in range(2)]
    Calculator.closed.clear()
    play(env, ["done"], tasks[0])
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(env.rollout(tasks[1], Silent([])), 0.05))
    assert Calculator.closed == [task.data["row"]["answer"] for task in tasks]


def test_a_call_that_makes_no_sense_is_answered():
    env = make(options={"kind": "sum"})
    script = [
        call("calc_ad", a=1, b=2) + call("calc_fail"),
        call("calc_add", a="x", b=2) + "<tool_call>{oops</tool_call>",
        call("calc_shout"),
        "done",
    ]
    _, policy = play(env, script)
    heard = text(policy.heard[-1][0])
    for told in ("unknown tool 'calc_ad'", "no such luck \ufffd", "valid integer", "malformed tool call", "truncated"):
        assert told in heard
    assert len(policy.heard[-1][0]) < 30_000


def test_a_policy_that_is_stuck_in_bad_calls_is_stopped():
    episode, policy = play(make(options={"kind": "sum"}), lambda _: call("nothing"))
    assert len(policy.heard) == 3 and episode.reward.value == 0.0
    episode, policy = play(make(options={"kind": "sum"}), [call("calc_peek") * 40, "done"])
    assert text(policy.heard[1][0]).count("<tool_response>") == 17 and "only the first 16" in text(policy.heard[1][0])


def test_no_tool_is_called_where_there_are_none_or_by_a_reply_that_was_cut():
    episode, policy = play(make(), [call("calc_peek")])
    assert len(policy.heard) == 1 and episode.status == "ok"
    episode, policy = play(make(options={"kind": "sum"}), [Said(call("calc_peek") + "<tool_call>", "length")])
    assert len(policy.heard) == 1 and episode.reward.parts["calls"] == 0


def test_a_shared_toolset_is_one_for_all_tasks():
    env = make(options={"kind": "sum"})

    async def both() -> list[Remembering]:
        policies = [Remembering([call("look_up", word="tok"), "done"]) for _ in range(2)]
        await asyncio.gather(*(env.rollout(env.task(i, "train"), p) for i, p in enumerate(policies)))
        return policies

    answers = sorted(text(p.heard[1][0]).split("<tool_response>")[1].split("</tool")[0] for p in asyncio.run(both()))
    assert answers == ["tok: asked 1 times", "tok: asked 2 times"]


def test_a_tasks_stops_and_interceptors_are_obeyed():
    env = make(options={"kind": "stops"})
    adds = call("calc_add", a=1, b=1)
    episode, policy = play(env, [adds, adds, "never said"])
    assert len(policy.heard) == 2 and episode.reward.parts["calls"] == 2
    check(episode.samples, policy)
    _, policy = play(env, [call("calc_peek"), "done"])
    assert "peeking is not allowed" in text(policy.heard[1][0])


def test_limits():
    loop = {"options": {"kind": "sum"}}
    episode, policy = play(make(max_turns=2, **loop), lambda _: call("calc_peek"))
    assert len(policy.heard) == 2 and episode.status == "truncated" and episode.valid
    episode, policy = play(make(agents={"agent": {"max_turns": 1}}, max_turns=2, **loop), lambda _: call("calc_peek"))
    assert len(policy.heard) == 1
    episode, policy = play(make(max_tokens=3), ["abcdef"])
    assert policy.asked[0][1].max_tokens == 3 and episode.status == "truncated" and episode.samples[0].mask.sum() == 3
    agents = {"agent": {"sampling": {"max_tokens": 2}, "max_output_tokens": 3}}
    episode, policy = play(make(agents=agents, **loop), lambda _: call("calc_peek"))
    assert policy.asked[0][1].max_tokens == 2
    assert policy.sampling.max_tokens > 3  # the policy's own is as it was


def test_no_room_for_another_reply_ends_the_attempt():
    env = make(options={"kind": "sum"})
    room = len(env.prompt(env.task(0, "train"))) + len(byte_tokenizer().encode(call("calc_peek"))) + 5
    episode, policy = play(env, lambda _: call("calc_peek"), seq_len=room)
    assert episode.status == "truncated" and isinstance(episode.reward, Reward) and len(policy.heard) == 1
    episode, _ = play(env, lambda _: "x", seq_len=10)
    assert episode.status == "failed" and "PromptTooLong" in episode.reward.why


def test_an_aborted_reply_fails_the_episode():
    episode, _ = play(make(), [Said("ab", "aborted")])
    assert episode.status == "failed" and "aborted" in episode.reward.why
    _, (trace,) = played(make(), Remembering([Said("ab", "aborted")]))
    assert not trace.ok and not trace.rewards  # what failed is not scored


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("fails", "the reward's own mistake"),
        ("unrewarded", "no reward"),
        ("container", "runs no programs and no containers"),
    ],
)
def test_what_is_not_a_reward(kind, says):
    episode, _ = play(make(options={"kind": kind}), ["x"])
    assert isinstance(episode.reward, RewardError) and says in episode.reward.why and episode.status == "failed"
    assert not episode.samples


def test_what_an_environment_raises_reaches_the_caller():
    with pytest.raises(vf.EnvError, match="the game's own mistake"):
        play(make(env="offline_game", env_options={"breaks": True}), ["x"])


def test_a_timeout_that_is_scored_is_a_truncation_and_one_of_scoring_is_an_error():
    episode, _ = play(make(options={"kind": "hangs"}, agents={"agent": {"timeout": {"finalize": 0.01}}}), ["x"])
    assert episode.status == "truncated" and episode.valid
    episode, _ = play(make(options={"kind": "slow_score"}, agents={"agent": {"timeout": {"scoring": 0.01}}}), ["x"])
    assert episode.status == "timeout" and "scoring_timeout): exact, slow" in episode.reward.why
    episode, _ = play(make(env="offline_game", env_options={"timeout": {"episode": 1e-9}}), lambda _: "x")
    assert episode.status == "timeout" and isinstance(episode.reward, RewardError)


class Silent(Remembering):
    """Never answers."""

    async def generate(self, tokens, sampling):
        await asyncio.sleep(1000)


def test_a_policy_that_does_not_answer_in_time():
    env = make(agents={"agent": {"timeout": {"rollout": 0.01}}})
    episode = asyncio.run(env.rollout(env.task(0, "train"), Silent([])))
    assert episode.status == "timeout" and isinstance(episode.reward, RewardError)


class Slow(Remembering):
    """Takes its time."""

    async def generate(self, tokens, sampling):
        await asyncio.sleep(0.04)
        return await super().generate(tokens, sampling)


def test_an_agents_time_is_for_all_of_its_turns():
    env = make(env="offline_game", agents={"player": {"timeout": {"rollout": 0.1}}})
    policy = Slow(lambda _: "x")
    episode = asyncio.run(env.rollout(env.task(0, "train"), policy))
    assert len(policy.heard) < 4 and episode.status in ("truncated", "timeout")


@pytest.mark.parametrize("env", ["", "offline_game"])
def test_a_rollout_that_is_cancelled_ends(env):
    made = make(env=env)

    async def cut_short() -> None:
        async with asyncio.timeout(0.05):
            await made.rollout(made.task(0, "train"), Silent([]))

    with pytest.raises(TimeoutError):
        asyncio.run(cut_short())


def test_several_agents():
    env = make(env="offline_game", env_options={"players": 2}, options={"length": 2})
    episode, policy = play(env, ["a", "b", "c", "d"])
    assert [(s.agent, s.reward) for s in episode.samples] == [("player", 0.0), ("player", 1.0)]
    assert episode.reward == Reward(0.5, {"exact": 0.0, "place": 0.5, "turns": 1.5})
    assert len(policy.heard) == 4  # the host spoke too, and is not trained
    policy.heard.pop()
    check(episode.samples, policy)


def test_the_stock_best_of_n():
    env = make(env="best-of-n", env_options={"n": 3, "max_concurrent_agents": None})
    answer = env.task(0, "train").data["row"]["answer"]
    episode, _ = play(env, ["x", answer, "y"])
    assert sorted(s.reward for s in episode.samples) == [0.0, 0.0, 2.0]
    assert episode.reward.parts["pass_at_n"] == 1.0 and episode.reward.parts["best"] == pytest.approx(1 / 3)


def test_rollouts_at_the_same_time_do_not_mix():
    env = make(env="offline_game", options={"length": 3})

    async def all_of_them() -> list:
        return await asyncio.gather(
            *(env.rollout(env.task(i, "train"), Remembering([f"{i}-{turn}" for turn in range(3)])) for i in range(30))
        )

    for number, episode in enumerate(asyncio.run(all_of_them())):
        (sample,) = episode.samples
        said = text(sample.tokens[sample.mask == 1])
        assert said == "".join(f"{number}-{turn}<|im_end|>" for turn in range(3))
        assert env.task(number, "train").data["row"]["prompt"] in text(sample.tokens)


def test_a_teacher_of_your_own():
    env = make(solve="playing_teacher:reverse", env="offline_game", options={"length": 2})
    task = env.task(0, "train")
    ((tokens, mask),) = asyncio.run(demonstration(byte_tokenizer(), env, task, np.random.default_rng(0)))
    assert text(tokens[mask == 1]) == "".join(f"{c}<|im_end|>" for c in task.data["row"]["answer"])


@pytest.mark.parametrize("renderer", RENDERERS[:2], ids=str)
@settings(max_examples=60, deadline=None)
@given(replies=st.lists(st.lists(st.sampled_from(JUNK) | st.text(max_size=5), max_size=8).map("".join), max_size=4))
def test_junk_is_never_an_exception(renderer, replies):
    said = iter([r.encode("utf-8", "replace").decode() for r in replies])
    episode, policy = play(ENVIRONMENTS[str(renderer)], lambda _: next(said, "done"))
    assert isinstance(episode.reward, Reward)
    check(episode.samples, policy)


ENVIRONMENTS = {str(r): make(options={"kind": "sum"}, renderer=r, max_turns=5) for r in RENDERERS[:2]}

WATCHED = """
import asyncio, sys
sys.path[:0] = {path!r}
from playing import make, play
kinds = [make(), make(options={{"kind": "sum"}}), make(env="offline_game")]
seen = []
asyncio.new_event_loop().close()  # what a loop itself opens is none of ours
watched = ("socket.bind", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.fork", "os.exec", "os.system",
           "os.posix_spawn", "os.mkdir", "shutil.rmtree")
sys.addaudithook(lambda event, args: seen.append((event, args)) if event.startswith(watched) else None)
for env in kinds:
    env.prompt(env.task(0, "train"))
    call = '<tool_call>{{"name": "calc_add", "arguments": {{"a": 1, "b": 2}}}}</tool_call>'
    said = iter([call, "a", "b", "c", "d"])
    episode, _ = play(env, lambda _: next(said))
    assert episode.valid, episode
print(seen)
"""


def test_no_socket_and_no_process():
    here = Path(__file__).parent
    script = WATCHED.format(path=[str(here), str(here.parents[2])])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
