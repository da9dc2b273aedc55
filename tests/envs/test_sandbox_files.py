"""Files into boxes and out of them: paths, links and programs that try to lead us astray."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.envs.sandbox import BoxFileError, open_sandbox
from spmd_rl.envs.sandbox.folder import LONGEST, parts

KINDS = ["bwrap", "subprocess"]


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_in_and_come_out(kind: str):
    async def inside() -> None:
        async with open_sandbox(kind, allow_unsafe=True) as box:
            await box.write("./x//y/z.txt", "long ago\ud800")
            await box.write("x/y/z.txt", "short")
            assert (await box.exec("cat x/y/z.txt; echo more >> x/y/z.txt")).stdout == "short"
            assert await box.read("x/y/z.txt") == b"shortmore\n"
            assert await box.read("x/y/z.txt", max_bytes=3) == b"sho"
            assert (await box.exec("touch x/y/new && chmod 700 x && rm -r x")).code == 0

    asyncio.run(inside())


BAD_PATHS = {
    "../x": "'..'",
    "a/../../x": "'..'",
    "/etc/passwd": "absolute",
    "": "names no file",
    "./.": "names no file",
    "a\0b": "no file name",
    "\ud800": "no file name",
    "a/" * 5000: "too long",
    "x" * 300: "too long",
    "no/such/file": "No such file",
    "folder": "folder",
}


@pytest.mark.parametrize("kind", KINDS)
def test_bad_paths_are_told(kind: str):
    async def inside() -> None:
        async with open_sandbox(kind, files={"folder/file": ""}, allow_unsafe=True) as box:
            for path, why in BAD_PATHS.items():
                with pytest.raises(BoxFileError, match=why):
                    await box.read(path)
                if path != "no/such/file":
                    with pytest.raises(BoxFileError):
                        await box.write(path, "x")

    asyncio.run(inside())


@pytest.mark.parametrize("kind", KINDS)
def test_links_and_pipes_are_not_followed(kind: str, tmp_path: Path):
    (tmp_path / "secret").write_text("secret")
    commands = [
        f"ln -s {tmp_path} folder; ln -s {tmp_path}/secret file; ln -s {tmp_path}/new new",
        "mkdir real; echo ok > real/file; ln -s real near; mkfifo pipe",
    ]

    async def inside() -> None:
        async with open_sandbox(kind, allow_unsafe=True) as box:
            assert [(await box.exec(command)).code for command in commands] == [0, 0]
            for path in ("folder/secret", "file", "new", "near/file", "pipe"):
                with pytest.raises(BoxFileError):
                    await box.read(path)
                with pytest.raises(BoxFileError):
                    await box.write(path, "evil")
            with pytest.raises(BoxFileError):
                await box.write("folder/below/x", "evil")
            assert await box.read("real/file") == b"ok\n"

    asyncio.run(inside())
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert (tmp_path / "secret").read_text() == "secret"


SWAP = """
import os, shutil, sys
os.symlink(sys.argv[1], "link")
while True:
    shutil.rmtree("d", ignore_errors=True)
    try:
        os.rename("link", "d")
        os.rename("d", "link")
    except OSError:
        pass
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_swaps_folders_for_links_gains_nothing(kind: str, tmp_path: Path):
    os.chmod(tmp_path, 0o777)

    async def inside() -> tuple[int, int]:
        async with open_sandbox(kind, allow_unsafe=True) as box:
            swapping = asyncio.create_task(box.exec(["python", "-c", SWAP, str(tmp_path)], timeout_s=60))
            written = refused = 0
            for _ in range(20_000):
                try:
                    await box.write("d/evil", "evil")
                    written += 1
                except BoxFileError:
                    refused += 1
                if min(written, refused) >= 20:
                    break
                await asyncio.sleep(0.0005)
            swapping.cancel()
            await asyncio.wait([swapping])
            return written, refused

    assert min(asyncio.run(inside())) > 0
    assert list(tmp_path.iterdir()) == []


@given(st.text(st.sampled_from("ab./\0\ud800é"), max_size=12))
def test_a_path_stays_below_or_is_refused(path: str):
    try:
        names = parts(path)
    except BoxFileError:
        return
    whole = os.path.normpath(f"/box/{path}")
    assert whole == "/box/" + "/".join(names) and whole.startswith("/box/") and len(path) <= LONGEST
