"""A worker process as the pool sees it: start it, talk to it, find out that it ended, end it.

A fresh interpreter, not a fork: the pool's own process has threads that hold locks, and torch in its memory. It gets
the pool's working directory and `sys.path`, so what can be imported there can be imported here. It refuses to know what
jobs are.

Invariants: `lost` is called once at most; after `end` the process and its process group are gone and reaped; what it
prints is read as fast as it prints it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from spmd_rl.envs.pool.messages import FromWorker, Message
from spmd_rl.envs.pool.output import Output
from spmd_rl.envs.pool.wire import Frames, frame

# The path comes before the first import of ours. multiprocessing starts its processes in the same way.
BOOT = (
    "import sys; fd, parent, *sys.path = sys.argv[1:]; del sys.argv[1:]; "
    "from spmd_rl.envs.pool.worker import main; main(int(fd), int(parent))"
)
OURS = os.path.join("pool", "worker.py")
DUMP_SIGNAL = signal.SIGUSR2  # a worker prints where its threads are
DUMP_S = 0.2  # for that
REAP_S = 5.0  # until a killed process is gone, unless the kernel holds it
LOOK_S = 0.005


class WorkerProcess:
    """One process. All methods belong to the thread of `loop`.

    Args:
        name: for its lines in the log.
        heard: gets every message.
        lost: gets the reason when the connection ends, "" when it just ends.
        log: gets what the process prints, line by line.
    """

    def __init__(
        self,
        name: str,
        heard: Callable[[FromWorker], None],
        lost: Callable[[str], None],
        log: Callable[[str], object],
    ) -> None:
        self.name = name
        self._frames = Frames(FromWorker, heard, lost)
        self._output = Output(name, log)
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, directory: str) -> None:
        """Start it in a working directory. OSError when the system can't."""
        loop = asyncio.get_running_loop()
        ours, its = socket.socketpair()
        ours.setblocking(False)
        reading, writing = os.pipe()
        try:
            path = [os.path.join(directory, entry) for entry in sys.path if isinstance(entry, str)]
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, str(its.fileno()), str(os.getpid()), *path],
                cwd=directory,
                env={"OMP_NUM_THREADS": "1", **os.environ},  # many processes share the cores
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                pass_fds=[its.fileno()],
                start_new_session=True,  # a group that can be ended whole, out of reach of the terminal's Ctrl-C
            )
        except BaseException:
            ours.close()
            os.close(reading)
            raise
        finally:
            its.close()
            os.close(writing)
        await loop.connect_read_pipe(lambda: self._output, os.fdopen(reading, "rb", buffering=0))
        await loop.connect_accepted_socket(lambda: self._frames, ours)

    def send(self, message: Message) -> None:
        """Send a message."""
        self._frames.send(frame(message))

    def send_frame(self, data: bytes) -> None:
        """Send a message that is a frame already."""
        self._frames.send(data)

    def ended(self) -> bool:
        """Whether the process has ended; it is not reaped by asking."""
        if self._process is None:
            return False
        if self._process.returncode is not None:
            return True
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self._process.pid, flags) is not None
        except ChildProcessError:  # somebody else reaps this process's children
            return self._process.poll() is not None

    async def end(self, wait_s: float = 0.0, dump: bool = False) -> str:
        """Wait for its end, then end it; how it ended, in words. With `dump` it first prints where it is."""
        if self._process is None:
            return "it could not be started"
        if dump and not self.ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, DUMP_SIGNAL)
            await asyncio.sleep(DUMP_S)
        await self._wait(wait_s)
        by_itself = self.ended()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # before it is reaped: then the number is free again
        await self._wait(REAP_S)
        code = self._process.poll()
        self._frames.close()
        await self._output.end()
        return _in_words(code) if by_itself or code is None else "it was ended"

    @property
    def last_words(self) -> str:
        """The last lines that it printed; of a traceback what user code did, not how we came to it."""
        shown, ours = [], False
        for line in self._output.last:
            ours = f'{OURS}"' in line or (ours and line.startswith("  File "))
            if not ours:
                shown.append(line)
        return "\n".join(shown)

    async def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)


def _in_words(code: int | None) -> str:
    if code is None:
        return f"it was killed and is still there after {REAP_S:g} s: the kernel holds it"
    if code >= 0:
        return f"it ended by itself with code {code}"
    name = signal.Signals(-code).name if -code in {number.value for number in signal.Signals} else f"signal {-code}"
    guess = " (was the machine out of memory?)" if name == "SIGKILL" else ""
    return f"it was ended by {name}{guess}"
