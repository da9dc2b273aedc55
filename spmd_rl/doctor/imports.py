"""Which packages can be imported here, tried in processes of their own (`trial.py`), in the background.

It refuses to know what a package is good for. Invariant: there is an answer for every name within the deadline, also
when an import crashes, hangs or ends the process.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from spmd_rl.doctor.trial import STATEMENTS

PROGRAM = Path(__file__).with_name("trial.py")
DEADLINE_S = 150.0  # for all of them; a cold disk reads torch and vLLM for a minute


@dataclass(frozen=True)
class Trial:
    """What came of one import."""

    error: str = ""  # empty: it works
    absent: bool = False
    facts: dict[str, Any] = field(default_factory=dict)  # of torch: see `trial.py`


class Imports:
    """Trials that have begun; `of` waits for them."""

    def __init__(
        self, names: Sequence[str] = tuple(STATEMENTS), deadline_s: float = DEADLINE_S, program: Path = PROGRAM
    ) -> None:
        self._deadline_s, self._program = deadline_s, program
        self._all: Future[dict[str, Trial]] = Future()
        Thread(target=self._run, args=(list(names),), name="imports", daemon=True).start()

    def of(self, name: str) -> Trial:
        """The trial of a package. KeyError when it was not asked for."""
        return self._all.result()[name]

    def _run(self, names: list[str]) -> None:
        try:
            self._all.set_result(self._try(names))
        except BaseException as error:
            self._all.set_exception(error)

    def _try(self, names: list[str]) -> dict[str, Trial]:
        """A process that dies over one package is followed by another one for those that are left."""
        known: dict[str, Trial] = {}
        until = time.monotonic() + self._deadline_s
        while left := [name for name in names if name not in known]:
            command = [sys.executable, "-P", str(self._program), *left]
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
            try:
                answers, _ = child.communicate(timeout=max(0.0, until - time.monotonic()))
                end = _end(child.returncode)
            except subprocess.TimeoutExpired:
                child.kill()
                answers, _ = child.communicate()
                end = f"not done within {self._deadline_s:g} s"
            known |= _read(answers)
            if any(name not in known for name in left):
                begun = [entry["begins"] for entry in _entries(answers) if "begins" in entry]
                known[begun[-1] if begun and begun[-1] not in known else left[0]] = Trial(error=end)
        return known


def _end(code: int) -> str:
    if code < 0:
        return f"the process was killed by {signal.Signals(-code).name} while importing it"
    return f"the process ended with code {code} while importing it"


def _entries(answers: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answers.splitlines() if line.startswith("{") and line.endswith("}")]


def _read(answers: str) -> dict[str, Trial]:
    return {
        entry["name"]: Trial(entry["error"], entry["absent"], entry["facts"])
        for entry in _entries(answers)
        if "name" in entry
    }
