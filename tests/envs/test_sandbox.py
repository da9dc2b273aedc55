"""What boxes of every kind share: programs, files, deadlines, output, junk, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.envs.sandbox import BoxFileError, Limits, Result, Sandbox, SandboxError, open_sandbox
from spmd_rl.envs.sandbox.program import Kept

KINDS = ["bwrap", "subprocess"]
SLEEP = f"sleep 54321.{os.getpid()}"  # found again among all processes


@pytest.fixture(autouse=True)
def boxes(tmp_path_factory, monkeypatch) -> Path:
    """Where boxes make folders, if they do."""
    folder = tmp_path_factory.mktemp("boxes")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def run(kind: str, *commands, files=None, timeout_s=60.0, stdin=b"", **limits) -> list[Result]:
    """The results of some commands, one after the other in one box."""

    async def inside() -> list[Result]:
        async with open_sandbox(kind, files=files, limits=Limits(**limits), allow_unsafe=True) as box:
            return [await box.exec(command, timeout_s=timeout_s, stdin=stdin) for command in commands]

    return asyncio.run(inside())


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_runs_on_the_files_it_is_given(kind: str):
    files = {"a/b/main.py": "import sys; print(open('../data.bin', 'rb').read()); sys.exit(3)", "a/data.bin": b"\xff\0"}
    (result,) = run(kind, "cd a/b && python main.py", files=files)
    assert (result.code, result.stdout, result.stderr) == (3, "b'\\xff\\x00'\n", "")
    assert not (result.killed or result.timed_out or result.truncated) and result.seconds > 0


@pytest.mark.parametrize("kind", KINDS)
def test_text_goes_to_a_shell_and_a_list_does_not(kind: str):
    text, words, missing = run(kind, "echo $((6 * 7)) >&2; exit 4", ["echo", "$((6 * 7))", ""], ["no-such-program"])
    assert (text.code, text.stderr) == (4, "42\n")
    assert (words.code, words.stdout) == (0, "$((6 * 7)) \n")
    assert missing.code == 127 and "no-such-program" in missing.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_files_persist_and_processes_do_not(kind: str):
    wrote, read = run(kind, "export X=1; cd /; echo kept > ~/note; echo x > $OLDPWD/file", "echo [$X]; cat ~/note file")
    assert (wrote.code, read.stdout) == (0, "[]\nkept\nx\n")


@pytest.mark.parametrize("kind", KINDS)
def test_stdin_arrives_and_ends(kind: str):
    data = os.urandom(300_000)
    (counted,) = run(kind, "wc -c", stdin=data)
    (ignored,) = run(kind, "true", stdin=data)
    (none,) = run(kind, "cat; echo end")
    assert (int(counted.stdout), ignored.code, none.stdout) == (300_000, 0, "end\n")


@pytest.mark.parametrize("kind", KINDS)
def test_a_deadline_ends_what_will_not_end(kind: str):
    loop, deaf, after = run(kind, "while :; do :; done", "trap '' TERM INT HUP; sleep 1000", "echo well", timeout_s=2)
    assert loop.timed_out and loop.code == 137
    assert deaf.timed_out and deaf.killed == "deadline"
    assert after.stdout == "well\n"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("timeout_s", [0, 0.001, 0.004, 0.008, 0.016])
def test_a_deadline_before_the_program_has_begun(kind: str, timeout_s: float):
    late, after = run(kind, "sleep 1000", "sleep 1000", timeout_s=timeout_s)
    assert late.timed_out and after.timed_out


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_program_leaves_running_ends_with_it(kind: str):
    (result,) = run(kind, f"{SLEEP} > /dev/null 2>&1 & {SLEEP} & echo begun")
    assert (result.code, result.stdout) == (0, "begun\n")
    for _ in range(1000 if kind == "subprocess" else 1):  # killed by then, if not gone
        left = [line for line in command_lines() if SLEEP in line]
        if not left:
            break
        time.sleep(0.01)
    assert not left


@pytest.mark.parametrize("kind", KINDS)
def test_endless_output_fills_nothing(kind: str):
    ended, short = run(kind, "yes", "seq 100000; echo end >&2", output_kb=4)
    assert ended.killed == "output" and ended.truncated and len(ended.stdout) < 5000
    assert short.truncated and short.code == 0 and short.stderr == "end\n"
    assert short.stdout.startswith("1\n2\n") and short.stdout.endswith("99999\n100000\n") and "left out" in short.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_output_that_is_no_text(kind: str):
    (result,) = run(kind, r"printf 'a\xff\xfeb\0c'")
    assert result.stdout == "a\ufffd\ufffdb\0c"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", ["echo \0", ["a", "b\0"], "#" * 200_000, ["echo", *["x" * 1000] * 2000]])
def test_a_command_that_no_system_would_start(kind: str, command):
    result, after = run(kind, command, "echo well")
    assert result.code == 126 and result.stderr.startswith("sandbox: ")
    assert after.stdout == "well\n"


def test_surrogates_and_long_text_pass():
    (echoed,) = run("subprocess", ["echo", "a\ud800b"])
    (long,) = run("subprocess", "#" * 100_000 + "\necho end")
    assert (echoed.stdout, long.stdout) == ("a?b\n", "end\n")


@pytest.mark.parametrize("command", ["", [], b"ls"])
def test_no_command_is_a_mistake_of_the_caller(command):
    with pytest.raises(TypeError, match="exec needs"):
        run("subprocess", command)


@given(st.lists(st.binary(max_size=20)), st.integers(1, 30))
def test_what_is_kept_of_a_stream(chunks: list[bytes], most: int):
    kept, whole = Kept(most), b"".join(chunks)
    for chunk in chunks:
        kept.add(chunk)
    head, tail = bytes(kept.head), bytes(kept.tail)
    assert len(head) + len(tail) == min(most, len(whole)) == len(whole) - kept.left_out
    assert whole.startswith(head) and whole.endswith(tail)


# What must not stay behind.


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", KINDS)
def test_many_boxes_at_once_without_threads(kind: str, boxes: Path):
    async def one(i: int) -> tuple[str, int]:
        async with open_sandbox(kind, files={"x": str(i)}, allow_unsafe=True) as box:
            first = await box.exec("cat x")
            alone = "mkdir alone && sleep 0.1 && rmdir alone"  # these wait for each other
            both = await asyncio.gather(box.exec(alone), box.exec(alone))
            assert [result.code for result in both] == [0, 0]
            return first.stdout, threading.active_count()

    async def inside() -> None:
        threads, open_before = threading.active_count(), descriptors()
        results = await asyncio.gather(*map(one, range(24)))
        assert [text for text, _ in results] == [str(i) for i in range(24)]
        assert {count for _, count in results} == {threads}
        assert descriptors() == open_before

    asyncio.run(inside())
    assert not list(boxes.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_task_leaves_nothing(kind: str, boxes: Path):
    running = asyncio.Event()

    async def one() -> None:
        async with open_sandbox(kind, allow_unsafe=True) as box:
            asyncio.get_running_loop().call_later(0.3, running.set)
            await box.exec(f"{SLEEP} & setsid {SLEEP}" if kind == "bwrap" else f"{SLEEP} & {SLEEP}")

    async def inside() -> None:
        open_before = descriptors()
        task = asyncio.create_task(one())
        await running.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert descriptors() == open_before

    asyncio.run(inside())
    assert not list(boxes.iterdir()) and not any(SLEEP in line for line in command_lines())


def command_lines() -> list[str]:
    """Of every process that has not ended."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
        except OSError:
            continue
    return lines


@pytest.mark.parametrize("kind", KINDS)
def test_a_box_may_be_closed_at_any_time(kind: str):
    async def inside() -> None:
        async with open_sandbox(kind, allow_unsafe=True) as box:
            running = asyncio.create_task(box.exec("sleep 1000"))
            await asyncio.sleep(0.2)
            await box.close()
            assert (await running).killed == "closed"
            for use in (box.exec("true"), box.read("x"), box.write("x", "")):
                with pytest.raises(SandboxError, match="closed"):
                    await use
            await box.close()

    asyncio.run(inside())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scarce", ["pipe", "pidfd_open"])
def test_a_system_with_nothing_to_give_is_no_result(kind: str, scarce: str, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(24, "Too many open files")

    async def inside() -> None:
        async with open_sandbox(kind, allow_unsafe=True) as box:
            before = descriptors()
            with monkeypatch.context() as patch:
                patch.setattr(os, scarce, full)
                with pytest.raises(SandboxError, match="Too many open files"):
                    await box.exec(SLEEP)
            assert descriptors() == before
            assert (await box.exec("echo well")).stdout == "well\n"

    asyncio.run(inside())
    assert not any(SLEEP in line for line in command_lines())


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_inside_leaves_nothing(kind: str, boxes: Path):
    with pytest.raises(BoxFileError):
        run(kind, "true", files={"../x": ""})
    assert not list(boxes.iterdir())


# Which box, and whether there is one.


def test_model_written_code_is_not_run_unconfined_by_accident(monkeypatch, tmp_path: Path):
    async def use(kind: str) -> None:
        async with open_sandbox(kind):
            pass

    with pytest.raises(SandboxError, match="allow_unsafe"):
        asyncio.run(use("subprocess"))
    with pytest.raises(ValueError, match="none of auto, bwrap"):
        asyncio.run(use("chroot"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for kind, way_out in {"auto": "apt install bubblewrap", "docker": "install docker"}.items():
        with pytest.raises(SandboxError, match=way_out):
            asyncio.run(use(kind))


def test_auto_is_bwrap():
    (result,) = run("auto", "pwd")
    assert result.stdout == "/sandbox\n"


@pytest.mark.parametrize("wrong", [{"memory_mb": 0}, {"processes": -1}, {"cpu_s": 1.5}, {"files": True}])
def test_limits_are_checked(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Limits(**wrong)


def test_every_kind_is_a_sandbox():
    async def inside() -> None:
        for kind in KINDS:
            async with open_sandbox(kind, allow_unsafe=True) as box:
                assert isinstance(box, Sandbox) and (await box.exec("pwd")).stdout == f"{box.folder}\n"

    asyncio.run(inside())


@pytest.mark.parametrize("kind", KINDS)
def test_limits_of_a_process(kind: str):
    hungry = ["python", "-c", "bytearray(2**30)"]
    large = ["python", "-c", "open('x', 'wb', 0).write(bytes(2**20)); open('x', 'ab', 0).write(b'!')"]
    wide = ["python", "-c", "files = [open('y', 'w') for _ in range(100)]"]
    loop = ["python", "-c", "while True: pass"]
    raised = ["python", "-c", "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (4096, 4096))"]
    limits = {"memory_mb": 256, "file_mb": 1, "open_files": 40, "cpu_s": 1}
    memory, size, files, cpu, more = run(kind, hungry, large, wide, loop, raised, **limits)
    assert memory.code == 1 and "MemoryError" in memory.stderr
    assert "File too large" in size.stderr
    assert "Too many open files" in files.stderr
    assert cpu.code == 128 + 24 and not cpu.killed
    # Root may raise its own limits, as far as nothing but a limit holds it.
    assert "not allowed to raise" in more.stderr or (kind == "subprocess" and os.geteuid() == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_limits_of_all_processes(kind: str):
    hold = "x = b'x' * (100 * 2**20); import time; time.sleep(100)"
    shared = "import os, time; x = b'x' * (100 * 2**20); [os.fork() for _ in range(2)]; time.sleep(1)"
    many, few = run(
        kind,
        f'for i in 1 2 3; do python -c "{hold}" & done; wait',
        ["python", "-c", shared],  # four processes with the same 100 MB between them
        memory_mb=256,
    )
    assert many.killed == "memory" and many.code == 137
    assert (few.killed, few.code) == ("", 0)


def test_the_folder_of_a_subprocess_is_looked_at():
    fill = "for i in $(seq 9); do head -c 1M /dev/zero > f$i; done; sleep 100"
    many = "mkdir d && touch d/$(seq -s ' d/' 200); sleep 100"

    async def inside(command: str) -> str:
        limits = Limits(folder_mb=5, files=150)
        async with open_sandbox("subprocess", limits=limits, allow_unsafe=True) as box:
            return (await box.exec(command)).killed

    assert [asyncio.run(inside(command)) for command in (fill, many, "sleep 1")] == ["folder", "folder", ""]
