"""An agent program that does not end by itself, or whose policy does not: its reward, its processes and its key."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd_rl.config.tree import SamplingConfig
from spmd_rl.envs.endpoint.endpoint import Access
from spmd_rl.envs.protocol import Generation
from spmd_rl.orchestrator.policy import ChangedCourse
from spmd_rl.rollouts.types import Episode, Reward
from tests.envs.builtin.agents import agent, attempt, folders, why
from tests.envs.endpoint.talking import Heard, ask, said
from tests.envs.fakes import Said, ScriptedPolicy, byte_tokenizer


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


def test_an_endpoint_that_cannot_be_had_is_no_zero(tasks: str) -> None:
    episode = attempt(agent(tasks, "", host="203.0.113.7"))
    assert episode.reward.kind == "EndpointError" and "203.0.113.7" in why(episode)
