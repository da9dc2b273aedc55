"""Run one program from an event loop: deadline, capped output, a watch over what it uses, and no thread.

The standard library's subprocesses cost a thread each on Python 3.11 and keep all output; this one hears of the end
through a pidfd. It refuses to know what a box is: how to end everything a program started is handed in. Invariants:
what is kept of the output is bounded however much is printed; a program that was started has ended, its descriptors
are closed and its output is complete when waiting for it returns, raises or is cancelled.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from spmd_rl.envs.sandbox.interface import Killed, Result, SandboxError

FLOOD = 64 * 2**20  # bytes printed after which a program is ended: to read them costs the event loop's time
CHUNK = 2**16
GRACE_S, AGAIN_S = 10.0, 0.005  # for a killed program to be gone; between two attempts to kill it
WATCH_S, WATCH_MOST_S, WATCH_GROWTH = 0.02, 0.5, 1.5  # pause before a look at what it uses: first, at most, growth


@dataclass(frozen=True)
class Start:
    """How to start a program, and how to end it."""

    argv: Sequence[bytes | str]
    env: Mapping[str, str]
    # Ends process `pid` and all it started; called when it has ended by itself, too. False: too early, call again.
    end: Callable[[int], bool]
    cwd: str = "/"
    pass_fds: Sequence[int] = ()
    owner: int | None = None  # the user that opens stdout and stderr by name, where that isn't this process's user
    watch: Callable[[int], Killed] | None = None  # why process `pid` must end now; "" while all is well


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    code: int  # as subprocess has it: -n when signal n ended it
    stdout: Kept
    stderr: Kept
    killed: Killed
    seconds: float

    def result(self, code: int | None = None) -> Result:
        """As a result; `code`: the exit code where it is known better."""
        code = self.code if code is None else code
        truncated = bool(self.stdout.left_out or self.stderr.left_out)
        texts = self.stdout.text(), self.stderr.text()
        return Result(128 - code if code < 0 else code, *texts, self.killed, truncated, self.seconds)


@dataclass
class Kept:
    """The first and the last bytes of a stream, `most` in all."""

    most: int
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    total: int = 0

    def add(self, data: bytes) -> None:
        """Take the stream's next bytes."""
        self.total += len(data)
        room = self.most - self.most // 2 - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        del self.tail[: max(0, len(self.tail) - self.most // 2)]

    @property
    def left_out(self) -> int:
        """Bytes that are gone."""
        return self.total - len(self.head) - len(self.tail)

    def text(self) -> str:
        """What was kept, with a line where something is missing."""
        head, tail = bytes(self.head), bytes(self.tail)
        if not self.left_out:
            return (head + tail).decode("utf-8", "replace")
        gap = f"\n… {self.left_out} bytes left out …\n"
        return head.decode("utf-8", "replace") + gap + tail.decode("utf-8", "replace")


class Program:
    """A running program and the event loop's callbacks that attend to it."""

    def __init__(self, start: Start, *, timeout_s: float, stdin: bytes, keep: int) -> None:
        """Start it. `keep`: bytes kept of stdout and of stderr. SandboxError when it can't be started."""
        self._start, self._stdin = start, memoryview(stdin)
        self._loop = asyncio.get_running_loop()
        self._kept = (Kept(keep), Kept(keep))
        self._killed: Killed = ""
        self._began = self._loop.time()
        self._ended: asyncio.Future[Ended] = self._loop.create_future()
        self._popen, self._pidfd, self._streams, self._feed = _started(start, bool(stdin))
        self._loop.add_reader(self._pidfd, self._exited)
        for stream, kept in zip(self._streams, self._kept, strict=True):
            self._loop.add_reader(stream, self._readable, stream, kept)
        if self._feed is not None:
            self._loop.add_writer(self._feed, self._writable)
        self._timers = {"deadline": self._loop.call_later(timeout_s, self.kill, "deadline")}
        if start.watch is not None:
            self._look(start.watch, WATCH_S)

    async def end(self) -> Ended:
        """Wait for its end; cancelled, bring it about. SandboxError when it doesn't end although it was killed."""
        try:
            return await asyncio.shield(self._ended)
        finally:
            if not self._ended.done():  # a second cancellation cuts only the waiting short, not the end
                await self.stop()

    async def stop(self) -> None:
        """Make it end, where it has not."""
        self.kill("closed")
        await asyncio.wait([self._ended], timeout=2 * GRACE_S)

    def kill(self, why: Killed) -> None:
        """End it; the first reason counts."""
        if self._ended.done():
            return
        self._killed = self._killed or why
        if "gone" not in self._timers:
            self._timers["gone"] = self._loop.call_later(GRACE_S, self._stuck)
        if not self._start.end(self._popen.pid):
            self._timers["again"] = self._loop.call_later(AGAIN_S, self.kill, why)

    def _look(self, watch: Callable[[int], Killed], pause: float) -> None:
        def look() -> None:
            if why := watch(self._popen.pid):
                self.kill(why)
            else:
                self._look(watch, min(pause * WATCH_GROWTH, WATCH_MOST_S))

        self._timers["watch"] = self._loop.call_later(pause, look)

    def _readable(self, stream: int, kept: Kept) -> bool:
        """Take one chunk. False when there is none now, or none will come."""
        try:
            data = os.read(stream, CHUNK)
        except BlockingIOError:
            return False
        kept.add(data)
        if not data:
            self._loop.remove_reader(stream)
        elif kept.total > FLOOD:
            self.kill("output")
        return bool(data)

    def _writable(self) -> None:
        try:
            self._stdin = self._stdin[os.write(self._feed, self._stdin[:CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # it does not want to hear more
            self._stdin = self._stdin[:0]
        if not self._stdin:
            self._unfed()

    def _unfed(self) -> None:
        if self._feed is not None:
            self._loop.remove_writer(self._feed)
            os.close(self._feed)
            self._feed = None

    def _exited(self) -> None:
        self._start.end(self._popen.pid)  # before its number can be another's
        code = self._popen.wait()
        for stream, kept in zip(self._streams, self._kept, strict=True):
            while kept.total <= FLOOD and self._readable(stream, kept):
                pass  # what it printed last; not more, as something it started may hold the other end
        self._let_go()
        self._ended.set_result(Ended(code, *self._kept, self._killed, self._loop.time() - self._began))

    def _stuck(self) -> None:
        """It was killed, but did not end. It may when nobody waits any more."""
        self._popen.kill()
        self._let_go()
        error = SandboxError(f"a killed program (process {self._popen.pid}) did not end within {GRACE_S:g} s")
        self._ended.set_exception(error)

    def _let_go(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for descriptor in (self._pidfd, *self._streams):
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._unfed()


def end_group(pid: int) -> bool:
    """End the process group that `pid` leads."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return True


def _started(start: Start, fed: bool) -> tuple[subprocess.Popen[bytes], int, list[int], int | None]:
    """The program in a session of its own, its pidfd, and our ends of its stdout and stderr, and of its stdin if `fed`.

    SandboxError when the system gives us no process or no descriptors; nothing is left then.
    """
    pipes: list[tuple[int, int]] = []
    popen = None
    try:
        for _ in range(3 if fed else 2):
            pipes.append(os.pipe())
        theirs = [write for _, write in pipes[:2]] + [read for read, _ in pipes[2:]]
        if start.owner is not None:
            for descriptor in theirs:
                os.fchown(descriptor, start.owner, start.owner)
        popen = subprocess.Popen(
            start.argv,
            stdin=theirs[2] if fed else subprocess.DEVNULL,
            stdout=theirs[0],
            stderr=theirs[1],
            env=start.env,
            cwd=start.cwd,
            pass_fds=start.pass_fds,
            umask=0o022,
            start_new_session=True,
        )
        pidfd = os.pidfd_open(popen.pid)
    except OSError as error:
        for descriptor in sum(pipes, ()):
            os.close(descriptor)
        if popen is not None:
            start.end(popen.pid)
            popen.kill()
            popen.wait()
        raise SandboxError(f"can't start {os.fsdecode(start.argv[0])}: {error}") from error
    ours = [read for read, _ in pipes[:2]] + [write for _, write in pipes[2:]]
    for descriptor in theirs:
        os.close(descriptor)
    for descriptor in ours:
        os.set_blocking(descriptor, False)
    return popen, pidfd, ours[:2], ours[2] if fed else None
