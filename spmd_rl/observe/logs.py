"""Every rank's output in a file of its own, logs/rank_00003.log, and one rank's also on the screen.

The file descriptors themselves are redirected, so the output of C++ libraries and child processes is caught too. They
point straight to the file; the screen gets a copy from a thread that follows the file. (A pipe with a copying
thread would lose the last lines of a killed process, and would stop C++ code that fills it while holding the GIL.)

This module refuses to know about ranks beyond their number. Invariant: after `restore` both descriptors are the
original ones, and the console rank's screen has shown everything that is in the file, unless it takes nothing.
"""

from __future__ import annotations

import codecs
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from spmd_rl.observe.disk import explain_full_disk

AGAIN = b"\n---- started again ----\n"
FOLLOW_S = 0.05  # how far the screen may be behind the file
SCREEN_S = 5.0  # a screen that takes nothing (a stopped pager, a dead connection) must not keep a run from ending


class RankOutput:
    """A redirection in force; made by `redirect_rank_output`."""

    def __init__(self, path: Path, console: bool) -> None:
        self.path = path
        # On a crash Python flushes nothing of ours: whoever runs the rank calls `restore` before the traceback.
        _flush()
        self._saved = {fd: os.dup(fd) for fd in (1, 2)}
        self.screen: TextIO = open(os.dup(self._saved[1]), "w", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.show: Callable[[str], object] = self._write_to_screen  # a live display puts its own function here
        with explain_full_disk(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if os.fstat(target).st_size:
            os.write(target, AGAIN)
        self._begin = os.fstat(target).st_size  # behind what an earlier attempt wrote
        for fd in self._saved:
            os.dup2(target, fd)
        os.close(target)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a file is block-buffered by default: lines would come late
                stream.reconfigure(line_buffering=True)
        self._restoring = threading.Lock()
        self._done = threading.Event()
        self._follower = threading.Thread(target=self._follow, name="follow-log", daemon=True) if console else None
        if self._follower:
            self._follower.start()

    def tail(self, lines: int = 20) -> str:
        """The last lines of this rank's log."""
        _flush()
        return last_lines(self.path, lines)

    def restore(self) -> None:
        """Give both descriptors back, after the screen has caught up. May be called again, and from any thread."""
        with self._restoring:
            if not self._saved:
                return
            _flush()
            for fd, saved in self._saved.items():
                os.dup2(saved, fd)
                os.close(saved)
            self._saved = {}
            self._done.set()
            if self._follower:
                self._follower.join(SCREEN_S)
            if not (self._follower and self._follower.is_alive()):
                self.screen.close()

    def __enter__(self) -> RankOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _follow(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside a character
        with open(self.path, "rb") as log:
            log.seek(self._begin)
            done = False
            while not done:
                done = self._done.wait(FOLLOW_S)  # asked before reading: the last round sees the last bytes
                if text := decoder.decode(log.read()):
                    self.show(text)

    def _write_to_screen(self, text: str) -> None:
        self.screen.write(text)
        self.screen.flush()


def redirect_rank_output(folder: str | Path, rank: int, console: bool) -> RankOutput:
    """Send stdout and stderr of this process to `folder`/logs/rank_<rank>.log; with `console` to the screen too.

    folder: the run's output folder. Undo with `restore()` (or use it as a context manager). What an earlier
    attempt wrote into the same file stays. Raises OSError when the disk is full.
    """
    return RankOutput(Path(folder) / "logs" / f"rank_{rank:05d}.log", console)


def last_lines(path: str | Path, lines: int = 20, max_bytes: int = 65536) -> str:
    """The last `lines` lines of a file, reading at most `max_bytes` of it; "" when there is no such file."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - max_bytes))
            text = log.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
