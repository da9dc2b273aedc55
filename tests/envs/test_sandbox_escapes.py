"""What a hostile program tries in a bwrap box, for real: each attempt fails in the way that shows what stopped it."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from spmd_rl.envs.sandbox import Limits, Result, open_sandbox

REPOSITORY = Path(__file__).parents[2]

# Every attempt is Python; `tried(call)` prints the name of the error, or what the call returned.
TRIED = """
import ctypes, errno, os, resource, socket, subprocess, sys
def tried(call, *arguments):
    try:
        print(call(*arguments))
    except OSError as error:
        print(errno.errorcode.get(error.errno, error))
    except Exception as error:
        print(type(error).__name__)
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    ctypes.set_errno(0)
    done = libc.syscall(*arguments)
    return done if done >= 0 else errno.errorcode[ctypes.get_errno()]
"""


def attempt(code: str, *arguments: str, timeout_s: float = 60.0, **limits) -> Result:
    async def inside() -> Result:
        async with open_sandbox("bwrap", files={"x.py": TRIED + code}, limits=Limits(**limits)) as box:
            return await box.exec(["python", "-I", "x.py", *arguments], timeout_s=timeout_s)

    return asyncio.run(inside())


def said(code: str, *arguments: str, **limits) -> list[str]:
    result = attempt(code, *arguments, **limits)
    assert (result.code, result.stderr, result.killed) == (0, "", "")
    return result.stdout.splitlines()


# What can be seen.


def test_files_of_the_host(tmp_path: Path):
    (tmp_path / "secret").write_text("secret")
    os.chmod(tmp_path, 0o777)
    paths = ["/etc/shadow", "/etc/hostname", "/etc/ssh", str(REPOSITORY / "pyproject.toml"), str(tmp_path / "secret")]
    paths += ["/var/log", "/boot", "/sys", "/run", "/mnt", "/srv", "/proc/1/root/etc/shadow", "/proc/self/root/boot"]
    paths += ["/proc/self/cwd/../../etc/shadow", str(Path.home() / ".bashrc"), "/dev/mem", "/dev/kmsg", "/dev/sda"]
    assert said("for path in sys.argv[1:]: tried(open, path)", *paths) == ["ENOENT"] * len(paths)


def test_the_home_folder_shows_this_python_at_most():
    prefix = Path(sys.base_prefix)
    code = """
for folder, below, files in os.walk(sys.argv[1]):
    print(folder, *files)
    if folder == sys.argv[2]:
        below.clear()
"""
    shown = said(code, str(Path.home()), str(prefix))
    assert all(prefix.is_relative_to(folder) for folder in shown if folder.split()[0] != str(prefix))


def test_environment_variables(monkeypatch):
    monkeypatch.setenv("API_KEY", "secret-in-the-environment")
    code = "print(os.environ); [print(open(f'/proc/{p}/environ').read()) for p in os.listdir('/proc') if p.isdigit()]"
    shown = "\n".join(said(code))
    assert "PATH" in shown and "secret-in-the-environment" not in shown and "API_KEY" not in shown


def test_processes_of_the_host():
    shown = said("[print(p, open(f'/proc/{p}/cmdline').read()) for p in os.listdir('/proc') if p.isdigit()]")
    assert len(shown) == 2 and all("x.py" in line for line in shown)  # the first process, and the program


def test_open_files_of_the_host():
    with open(REPOSITORY / "pyproject.toml") as file:
        os.set_inheritable(file.fileno(), True)
        links = "[print(n, os.readlink(f'/proc/{p}/fd/{n}')) for p in '12' for n in os.listdir(f'/proc/{p}/fd')[:-1]]"
        shown = [line.split(" ", 1) for line in said(links)]
    allowed = ("/dev/null", "pipe:", "/sandbox/x.py")  # the shell reads no script from a file
    assert {number for number, _ in shown} <= {"0", "1", "2"}
    assert all(target.startswith(allowed) for _, target in shown)


def test_python_is_this_one():
    code = "import json, ssl, ctypes, sqlite3; print(sys.version_info[:3], sys.prefix)"
    assert said(code) == [f"{sys.version_info[:3]} {sys.base_prefix}"]


# What can be reached.


def test_the_network():
    abstract = f"\0spmd_rl-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(abstract)
        local.listen()
        code = f"""
tried(socket.create_connection, ("127.0.0.1", {server.getsockname()[1]}), 5)
tried(socket.create_connection, ("192.0.2.1", 80), 5)
tried(socket.socket(socket.AF_UNIX).connect, {abstract!r})
tried(socket.getaddrinfo, "example.org", 80)
print(os.listdir("/sys/class/net") if os.path.exists("/sys") else socket.if_nameindex())
"""
        refused, unreachable, hidden, _, interfaces = said(code)
    assert (refused, unreachable, hidden, interfaces) == ("ECONNREFUSED", "ENETUNREACH", "ECONNREFUSED", "[(1, 'lo')]")


def test_its_own_loopback_works():
    code = """
server = socket.create_server(("localhost", 0))
client = socket.create_connection(server.getsockname())
client.sendall(b"hello")
print(server.accept()[0].recv(5))
"""
    assert said(code) == ["b'hello'"]


def test_places_to_write():
    code = """
for folder, below, _ in os.walk("/"):
    if folder in ("/proc", "/usr/share", "/usr/lib") or folder.startswith(sys.base_prefix + "/lib"):
        below.clear()
    try:
        open(os.path.join(folder, "written"), "w").close()
        print(folder)
    except OSError:
        pass
tried(os.chmod, "/", 0o777)
tried(os.mkdir, "/new")
tried(os.rename, "/etc/passwd", "/etc/x")
tried(open, "/proc/sys/kernel/hostname", "w")
tried(open, "/proc/sysrq-trigger", "w")
tried(open, "/proc/1/oom_score_adj", "w")
"""
    *folders, mode, new, moved, host, trigger, _ = said(code)
    assert sorted(folders) == ["/dev/shm", "/home/box", "/sandbox", "/tmp"]
    assert (mode, new, moved) == ("EROFS", "EROFS", "EROFS")
    assert {host, trigger} <= {"EACCES", "EROFS", "EPERM", "ENOENT"}


def test_devices():
    harmless = "console core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"
    *made, devices = said("""
import stat
for kind in (stat.S_IFCHR, stat.S_IFBLK):
    tried(os.mknod, "device", kind | 0o666, os.makedev(1, 1))
print(*sorted(os.listdir("/dev")))
""")
    assert made == ["EPERM", "EPERM"]
    assert set(devices.split()) <= set(harmless.split())


def test_stdout_can_be_opened_by_its_name():
    assert said("open('/dev/stdout', 'w').write('a\\n'); open('/dev/fd/1', 'w').write('b\\n')") == ["a", "b"]


def test_links_to_files_of_the_system():
    assert said("tried(os.link, '/usr/bin/env', 'env'); tried(os.link, '/etc/passwd', 'p')") == ["EXDEV", "EXDEV"]


def test_namespaces_are_its_own():
    names = ["user", "ipc", "pid", "net", "uts", "mnt"]
    inside = said("for name in sys.argv[1:]: print(os.readlink(f'/proc/self/ns/{name}'))", *names)
    assert not set(inside) & {os.readlink(f"/proc/self/ns/{name}") for name in names}


# What can be done.

CALLS = {
    "x86_64": {"unshare": 272, "mount": 165, "clone3": 435, "bpf": 321, "keyctl": 250, "memfd": 319, "shmget": 29},
    "aarch64": {"unshare": 97, "mount": 40, "clone3": 435, "bpf": 280, "keyctl": 219, "memfd": 279, "shmget": 194},
}[platform.machine()]
CLONE, X32 = (56, 0x40000000) if platform.machine() == "x86_64" else (220, None)


def test_system_calls_that_nothing_needs():
    assert said("for number in sys.argv[1:]: print(call(int(number), 0, 0, 0, 0, 0))", *map(str, CALLS.values())) == [
        "ENOSYS"
    ] * len(CALLS)
    assert said(f"print(call({CLONE}, 0x10000000 | 17, 0, 0, 0, 0))") == ["EPERM"]  # a new user namespace
    if X32 is not None:
        assert said(f"print(call({X32 | 39}))") == ["ENOSYS"]  # getpid, by its second number
    assert said("tried(os.memfd_create, 'x')") == ["ENOSYS"]


def test_threads_and_processes_work():
    code = """
import multiprocessing, threading
def f(x): return x * x
if __name__ == "__main__":
    thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
    with multiprocessing.Pool(2) as pool: print(pool.map(f, [1, 2, 3]))
    print(subprocess.run(["sh", "-c", "echo child"], capture_output=True).stdout)
"""
    assert said(code) == ["thread", "[1, 4, 9]", "b'child\\n'"]


def test_rights():
    names = "('Cap', 'NoNewPrivs', 'Seccomp:')"
    code = f"print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith({names})])"
    shown = said(f"{code}\ntried(os.setuid, 0)\ntried(os.chroot, '/tmp')\nprint(os.getuid(), os.getgid())")
    assert shown == [" ".join(["0" * 16] * 5 + ["1", "2"]), "EINVAL", "EPERM", "1000 1000"]


def test_the_first_process_gives_no_more_than_it_has():
    own, first = said("for p in ('self', '1'): print(open(f'/proc/{p}/limits').read().split('\\n'))", cpu_s=7)
    assert own == first and "'Max cpu time              7                    8 " in own
    (result,) = [attempt("os.kill(1, 9); os.kill(1, 15); print('here')")]
    assert result.stdout == "here\n"


def test_killing_everything_ends_the_box_alone():
    assert said("tried(os.kill, -1, 9)") == ["ESRCH"]  # there is nobody else
    assert said("child = subprocess.Popen(['sleep', '100']); os.kill(-1, 9); print(child.wait())") == ["-9"]


# What can be used up.


def test_a_file_of_ten_gigabytes():
    code = """
with open("x", "wb", 0) as file:
    def fill():
        while True: file.write(bytes(2**20))
    tried(fill)
print(os.path.getsize("x"))
"""
    assert said(code, file_mb=2) == ["EFBIG", str(2 * 2**20)]


@pytest.mark.parametrize("folder", ["/sandbox", "/tmp", "/home/box", "/dev/shm"])
def test_many_large_files(folder: str):
    code = f"""
def fill():
    for i in range(1000):
        with open(f"{folder}/{{i}}", "wb", 0) as file: assert file.write(bytes(2**20)) == 2**20
tried(fill)
print(sum(entry.stat().st_size for entry in os.scandir("{folder}")) // 2**20 < 9)
"""
    error, small = said(code, folder_mb=8)
    assert error in ("ENOSPC", "AssertionError") and small == "True"


def test_the_folder_is_not_freed_by_a_new_program():
    async def inside() -> list[Result]:
        async with open_sandbox("bwrap", limits=Limits(folder_mb=4)) as box:
            fill = "head -c 3M /dev/zero > $(mktemp)"
            return [await box.exec(fill), await box.exec(fill), await box.exec("rm /tmp/*; " + fill)]

    first, second, third = asyncio.run(inside())
    assert (first.code, third.code) == (0, 0) and "No space left" in second.stderr


def test_many_files():
    code = """
count = 0
def fill():
    global count
    while True:
        os.mkdir(f"{count}")
        count += 1
tried(fill)
print(400 < count <= 520)
"""
    assert said(code, files=500) == ["ENOSPC", "True"]


def test_memory_that_belongs_to_nobody():
    shared = f"print(call({CALLS['shmget']}, 0, 2**30, 0o1600))"
    assert said(f"tried(os.memfd_create, 'x')\n{shared}") == ["ENOSYS", "ENOSYS"]


def test_a_program_that_hides_from_the_deadline():
    seconds = f"87654.{os.getpid()}"
    code = f"""
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "{seconds}"])
        os._exit(0)
"""
    ended = attempt(code)  # they hold stdout open
    assert ended.code == 0 and ended.seconds < 87654
    assert attempt(code + "\nimport time; time.sleep(1000)", timeout_s=1).timed_out
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(path.read_bytes())
    assert not any(seconds.encode() in line for line in lines)


def test_git_works():
    async def inside() -> list[Result]:
        async with open_sandbox("bwrap", files={"a.txt": "one\n"}) as box:
            first = await box.exec("git init -q . && git add . && git commit -qm first && echo two >> a.txt")
            return [first, await box.exec("git diff --stat && git stash -q && git log --format=%s%an && git status -s")]

    first, second = asyncio.run(inside())
    assert (first.code, first.stderr, second.code) == (0, "", 0)
    assert "1 file changed, 1 insertion(+)" in second.stdout and second.stdout.endswith("firstbox\n")
