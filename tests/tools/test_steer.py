"""The command that tells a run something: what it takes, and where it puts it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl.orchestrator.steering import Steering

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.toml").write_text("")
    return tmp_path


def steer(*words: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(ROOT / "tools/steer.py"), *words], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def taken(folder: Path, step: int = 3) -> list[str]:
    async def main() -> list[str]:
        return Steering(folder, print).take(step)

    return asyncio.run(main())


def test_commands_arrive_in_order_and_once_and_a_stop_comes_last(folder):
    for command in (["set", "lr=1e-5"], ["stop"], ["save"], ["pause"], ["resume"], ["eval"]):
        code, said = steer(str(folder), *command)
        assert code == 0 and " ".join(command) in said
    assert taken(folder) == ["set lr=1e-5", "save", "pause", "resume", "eval", "stop"]
    assert taken(folder) == []


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("set lr=fast", "only lr can be set"),
        ("set lr=-1", "to 0 or more"),
        ("set temperature=2", "only lr can be set"),
        ("halt", "say set lr=NUMBER, pause, resume, save, eval, stop"),
    ],
)
def test_what_is_no_command_is_refused_before_it_reaches_the_run(folder, command, says):
    code, said = steer(str(folder), *command.split())
    assert code == 2 and says in said
    assert not (folder / "steer").exists()


def test_a_folder_without_a_run_is_refused(tmp_path):
    code, said = steer(str(tmp_path), "save")
    assert code == 2 and "is no output folder of a run" in said


def test_a_command_may_wait_for_its_step(folder):
    (folder / "steer").mkdir()
    (folder / "steer/1.txt").write_text("@5 save")
    (folder / "steer/2.txt").write_text("eval")

    async def main() -> list[list[str]]:
        steering = Steering(folder, print)
        return [steering.take(step) for step in (4, 5, 6)]

    assert asyncio.run(main()) == [["eval"], ["save"], []]
