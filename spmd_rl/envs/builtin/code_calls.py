"""Call what a model wrote, in a new box, and compare what comes back with what is right, here.

Nothing that is right ever goes into the box: there is nothing to read it from, no check to switch off, no verdict to
forge. Code that returns the right values for arguments it has not seen before has solved its task, however it did so.

It refuses to know where calls and right values are from. Invariants: values are compared as JSON, so no class of the
model's can equal everything; whatever the code does, every call has a verdict; where Python did not even start there is
a SandboxError.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_rl.envs.builtin import code_runner
from spmd_rl.envs.builtin.boxes import Boxes
from spmd_rl.envs.sandbox import Limits, SandboxError

RUNNER = ["python3", "-I", "-S", "-c", inspect.getsource(code_runner)]
# One process: nothing it could start needs to be waited for. A second of its processor's time stops every endless loop.
LIMITS = Limits(memory_mb=512, cpu_s=1, file_mb=1, folder_mb=16, files=1000, processes=1, output_kb=4096)
DEADLINE_S = 30.0  # for code that sleeps; code that works is stopped long before, also where the machine is busy

Call = tuple[str, list[Any]]  # the function's name, its arguments


@dataclass(frozen=True)
class Code:
    """What a model wrote: the text of an expression over `names`, the text of functions, or whole files."""

    form: str  # expression | function | files
    text: str = ""
    names: Sequence[str] = ()
    files: Mapping[str, bytes | str] | None = None


async def correct_calls(boxes: Boxes, code: Code, calls: Sequence[Call], right: Sequence[Any]) -> list[bool]:
    """For each call, whether it returned the value in `right`, as Python's == has it. Waits for its turn.

    The calls are made one after the other in one process. Raises SandboxError.
    """
    work = {"form": code.form, "text": code.text, "names": list(code.names), "calls": list(calls)}
    async with boxes.turn(), boxes.open(LIMITS, code.files) as box:
        result = await box.exec(RUNNER, timeout_s=DEADLINE_S, stdin=ascii(work))
    began, *lines = result.stdout.split("\n")
    if began != code_runner.BEGAN:
        why = result.killed or f"exit code {result.code}: {result.stderr.strip()[-2000:]}"
        raise SandboxError(f"Python did not start in the box ({why})")
    lines += [""] * len(calls)
    return [_in_list(line) == [value] for line, value in zip(lines, right, strict=False)]


def _in_list(line: str) -> Any:
    """[value] as a line has it; else something that no list of one value equals."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
