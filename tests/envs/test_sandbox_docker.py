"""The docker sandbox, against a stand-in for the docker command that notes what it is asked to and does some of it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.envs.sandbox import BoxFileError, Limits, Sandbox, SandboxError, open_sandbox

SLEEP = f"sleep 34567.{os.getpid()}"  # found again among all processes
# A container is a folder; the sessions of what was executed are noted in it, for `kill -9 -1`.
STAND_IN = """#!{python}
import json, os, pathlib, shutil, signal, subprocess, sys
state = pathlib.Path({state!r})
with open(state / "log", "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if (state / "broken").exists():
    sys.exit("Cannot connect to the Docker daemon")
what, *rest = sys.argv[1:]
if what == "run":
    name = rest[rest.index("--name") + 1]
    (state / name / "sandbox").mkdir(parents=True)
    print("0123456789abcdef")
elif what == "rm":
    shutil.rmtree(state / rest[-1])
elif what == "exec":
    flag, name, *argv = rest
    assert flag == "--interactive"
    container = state / name
    if not container.exists():
        sys.exit("Error: No such container")
    if "kill -9 -1" in argv[-1]:
        for session in (container / "sessions").read_text().split() if (container / "sessions").exists() else []:
            try:
                os.killpg(int(session), signal.SIGKILL)
            except ProcessLookupError:
                pass
        sys.exit(0)
    argv = [part.replace("/sandbox/", f"{{container}}/sandbox/") for part in argv]
    child = subprocess.Popen(argv, cwd=container / "sandbox", start_new_session=True)
    with open(container / "sessions", "a") as sessions:
        sessions.write(f"{{child.pid}}\\n")
    code = child.wait()
    sys.exit(code if code >= 0 else 128 - code)
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch) -> Path:
    """What the stand-in keeps; it is first on PATH."""
    folder = tmp_path / "state"
    folder.mkdir()
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable, state=str(folder)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return folder


def log(state: Path) -> list[list[str]]:
    return [json.loads(line) for line in (state / "log").read_text().splitlines()]


def use(body: Callable[[Sandbox], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def inside() -> None:
        async with open_sandbox("docker", **options) as box:
            await body(box)

    asyncio.run(inside())


async def nothing(box: Sandbox) -> None:
    pass


def test_the_container_is_confined(state: Path):
    use(
        nothing,
        limits=Limits(memory_mb=100, folder_mb=20, processes=9, cpu_s=5, file_mb=1, files=50),
        image="my:image",
    )
    run, removed = log(state)
    text = " ".join(run)
    name = run[run.index("--name") + 1]
    assert removed == ["rm", "--force", "--volumes", name] and name.startswith("spmd_rl-box-")
    for part in (
        "run --detach --rm",
        "--network none",
        "--read-only",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "--user 65534:65534",
        "--memory 120m --memory-swap 120m",
        "--pids-limit 13",
        "--ulimit cpu=5:6",
        "--ulimit fsize=1048576",
        "--ulimit nofile=256",
        "--workdir /sandbox",
        "--tmpfs /sandbox:rw,exec,nosuid,nodev,uid=65534,gid=65534,mode=0755,size=20m,nr_inodes=50",
        "--env HOME=/home/box",
    ):
        assert f" {part} " in f" {text} "
    assert "--volume" not in text and "--privileged" not in text and "-v" not in run
    assert run[-3:-1] == ["my:image", "-c"] and run[run.index("--entrypoint") + 1] == "sh"


def test_programs_and_files(state: Path):
    async def body(box: Sandbox) -> None:
        assert box.folder == "/sandbox"
        result = await box.exec("cat a/b.txt - >&2; exit 5", stdin="in")
        assert (result.code, result.stdout, result.stderr) == (5, "", "textin")
        await box.write("c/d", b"\0" * 5)
        assert await box.read("c/d") == b"\0" * 5 and await box.read("c/d", max_bytes=2) == b"\0\0"
        assert (await box.exec(["echo", "$HOME"])).stdout == "$HOME\n"
        assert (await box.exec("x\0")).code == 126

    use(body, files={"a/b.txt": "text"})
    name = log(state)[0][4]
    assert ["exec", "--interactive", name, "sh", "-c", "cat a/b.txt - >&2; exit 5"] in log(state)
    assert not (state / name).exists()


def test_bad_paths_are_told(state: Path):
    async def body(box: Sandbox) -> None:
        for path, why in {
            "../x": "'..'",
            "/x": "absolute",
            "none": "no such regular file",
            "folder": "regular",
        }.items():
            with pytest.raises(BoxFileError, match=why):
                await box.read(path)
        with pytest.raises(BoxFileError, match="no regular file"):
            await box.write("folder", "x")

    use(body, files={"folder/file": ""})


def test_what_is_left_of_a_program_is_killed_inside(state: Path):
    async def body(box: Sandbox) -> None:
        assert (await box.exec(f"{SLEEP} & {SLEEP}", timeout_s=0.5)).timed_out
        assert (await box.exec(f"{SLEEP} > /dev/null 2>&1 &")).code == 0
        running = asyncio.create_task(box.exec(SLEEP))
        await asyncio.sleep(0.5)
        running.cancel()
        await asyncio.wait([running])

    use(body)
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" "))
    assert not any(SLEEP.encode() in line for line in lines)
    assert sum("kill -9 -1" in call[-1] for call in log(state)) == 3


def test_a_daemon_that_fails_is_no_result(state: Path):
    async def breaks(box: Sandbox) -> None:
        (state / "broken").touch()
        for use in (box.exec("true"), box.write("x", ""), box.read("x")):
            with pytest.raises(SandboxError, match="Cannot connect"):
                await use
        (state / "broken").unlink()

    use(breaks)
    (state / "broken").touch()
    with pytest.raises(SandboxError, match="Cannot connect"):
        use(nothing)
