"""One way to get a box of any kind.

It refuses to know how boxes are made. Invariants: model-written code never runs unconfined by accident, neither by a
default nor because a program is missing; whatever happens inside `async with`, the box is gone after it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import get_args

from spmd_rl.envs.sandbox.bwrap import BwrapBox
from spmd_rl.envs.sandbox.docker import IMAGE, DockerBox
from spmd_rl.envs.sandbox.interface import Kind, Limits, Sandbox, SandboxError
from spmd_rl.envs.sandbox.plain import PlainBox


@asynccontextmanager
async def open_sandbox(
    kind: Kind = "auto",
    *,
    files: Mapping[str, bytes | str] | None = None,
    limits: Limits | None = None,
    allow_unsafe: bool = False,
    image: str = IMAGE,
) -> AsyncIterator[Sandbox]:
    """A box with `files` (path in the working folder → content) in it, for the length of an `async with`.

    `auto` is bwrap; `subprocess` confines nothing and needs `allow_unsafe`; `image` is docker's. Raises ValueError for
    another kind, BoxFileError for a path that does not fit, SandboxError when the box can't be had here.
    """
    box = _box(kind, limits or Limits(), allow_unsafe, image)
    try:
        await box.open()
        for path, data in (files or {}).items():
            await box.write(path, data)
        yield box
    finally:
        await box.close()


def _box(kind: Kind, limits: Limits, allow_unsafe: bool, image: str) -> Sandbox:
    if kind not in get_args(Kind):
        raise ValueError(f"sandbox = {kind!r} is none of {', '.join(get_args(Kind))}")
    if kind == "subprocess" and not allow_unsafe:
        raise SandboxError(
            "the subprocess sandbox confines nothing: code that a model wrote could read, change and send away "
            "whatever this user can. Use bwrap (apt install bubblewrap) or docker; or set allow_unsafe = true for code "
            "that you trust"
        )
    if kind == "subprocess":
        return PlainBox(limits)
    return DockerBox(limits, image) if kind == "docker" else BwrapBox(limits)
