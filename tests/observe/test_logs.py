"""Log files per rank: everything below Python is caught too, the screen follows, nothing is lost on a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from spmd_rl.observe.logs import last_lines

REPO = Path(__file__).parents[2]

# One line from Python, one straight to the descriptor, one from a child process, one to stderr.
SPEAK = """
import os, signal, sys
from spmd_rl.observe.logs import redirect_rank_output
print("before")
output = redirect_rank_output({folder!r}, rank=3, console={console})
print("from python ü")
os.write(1, b"from the descriptor\\n")
os.system("echo from a child")
print("from stderr", file=sys.stderr)
"""
SPOKEN = ["from python ü", "from the descriptor", "from a child", "from stderr"]


def run(folder: Path, console: bool, then: str) -> subprocess.CompletedProcess[str]:
    program = SPEAK.format(folder=str(folder), console=console) + then
    command = [sys.executable, "-X", "utf8", "-c", program]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # as users run it
    return subprocess.run(command, cwd=REPO, env=env, text=True, capture_output=True, check=False, timeout=60)


def log_of(folder: Path) -> list[str]:
    return (folder / "logs" / "rank_00003.log").read_text("utf-8").splitlines()


def test_a_quiet_rank_writes_only_its_file(tmp_path):
    done = run(tmp_path, False, "output.restore(); print('after')")
    assert log_of(tmp_path) == SPOKEN
    assert (done.stdout.splitlines(), done.stderr) == (["before", "after"], "")


def test_the_console_rank_speaks_on_the_screen_too(tmp_path):
    done = run(tmp_path, True, "output.restore(); print('after')")
    assert log_of(tmp_path) == SPOKEN
    assert done.stdout.splitlines() == ["before", *SPOKEN, "after"]


def test_after_restore_the_traceback_reaches_the_screen(tmp_path):
    done = run(tmp_path, False, "output.restore(); output.restore(); raise ValueError('the end')")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: the end\n")
    assert "the end" not in "\n".join(log_of(tmp_path))


def test_leaving_the_block_by_an_exception_restores(tmp_path):
    done = run(tmp_path, False, "with output: raise ValueError('the end')")
    assert done.stderr.endswith("ValueError: the end\n")


def test_a_killed_process_leaves_its_last_words(tmp_path):
    done = run(tmp_path, True, "os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    assert log_of(tmp_path) == SPOKEN


def test_another_display_can_take_the_screen(tmp_path):
    then = "shown = []; output.show = shown.append; print('new'); output.restore(); print(''.join(shown).split('\\n'))"
    done = run(tmp_path, True, then)
    assert "'new'" in done.stdout.splitlines()[-1]


def test_the_screen_can_be_written_to_directly(tmp_path):
    done = run(tmp_path, False, "print('picture', file=output.screen); output.restore()")
    assert done.stdout.splitlines() == ["before", "picture"]
    assert "picture" not in log_of(tmp_path)


def test_much_output_arrives_whole_and_in_order(tmp_path):
    done = run(tmp_path, True, "[print(i, 'é' * 40) for i in range(20000)]; output.restore()")
    expected = [f"{i} {'é' * 40}" for i in range(20000)]
    assert done.stdout.splitlines()[-20000:] == expected
    assert log_of(tmp_path)[-20000:] == expected


def test_a_screen_that_takes_nothing_does_not_keep_the_run_from_ending(tmp_path):
    stuck = "import threading; output.show = lambda text: threading.Event().wait(); print('more')\n"
    done = run(tmp_path, True, "from spmd_rl.observe import logs; logs.SCREEN_S = 0.2\n" + stuck + "output.restore()")
    assert done.returncode == 0


def test_another_attempt_writes_on_and_shows_only_its_own(tmp_path):
    run(tmp_path, True, "output.restore()")
    again = run(tmp_path, True, "output.restore()")
    assert log_of(tmp_path) == [*SPOKEN, "", "---- started again ----", *SPOKEN]
    assert again.stdout.splitlines() == ["before", *SPOKEN]


def test_last_lines_are_at_hand(tmp_path):
    done = run(tmp_path, False, "text = output.tail(2); output.restore(); print(text)")
    assert done.stdout.splitlines()[1:] == SPOKEN[-2:]
    assert last_lines(tmp_path / "logs" / "rank_00003.log", 1) == SPOKEN[-1]
    assert last_lines(tmp_path / "no such file") == ""


def test_last_lines_of_a_large_file_read_only_its_end(tmp_path):
    path = tmp_path / "log"
    path.write_text("x" * 100_000 + "\nlast")
    assert last_lines(path, 5, max_bytes=10).splitlines() == ["xxxxx", "last"]
