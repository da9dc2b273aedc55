"""Boxes for code that a model wrote: `async with open_sandbox("auto") as box: await box.exec("python x.py")`.

`interface` says what a box is; `bwrap`, `docker` and `plain` make one each; `choose` picks one.
"""

from spmd_rl.envs.sandbox.choose import open_sandbox
from spmd_rl.envs.sandbox.interface import BoxFileError, Kind, Limits, Result, Sandbox, SandboxError

__all__ = ["BoxFileError", "Kind", "Limits", "Result", "Sandbox", "SandboxError", "open_sandbox"]
