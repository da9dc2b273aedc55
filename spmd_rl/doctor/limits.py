"""Checks: processors, memory, shared memory and the limits of a process.

What counts is what this process may have: its affinity, its cgroups (of both versions), its rlimits. It refuses to know
what the run does with it; the bounds are measured on the small end and stand here as constants.
"""

from __future__ import annotations

import os
import resource
import shutil

from spmd_rl.doctor.finding import Check, Finding, fail, ok, warn
from spmd_rl.doctor.place import Place
from spmd_rl.world.host_memory import cgroups, memory_available, read

GIB = 2**30
RANK_GIB = (0.75, 1.5)  # memory per rank: below the first it fails, below the second it is tight (vLLM imported: 0.6)
SHM_GIB = (0.06, 1.0)  # Docker's default is 64 MiB, which NCCL and vLLM exhaust
OPEN_FILES = (512, 4096)


def cores(place: Place) -> Finding:
    """Processors that this process may run on, for all ranks of this host."""
    count = usable_cores(place)
    value = f"{count:g} for {place.ranks} rank{'s' * (place.ranks > 1)}"
    if place.ranks > count:
        return warn(value, "start fewer processes per host, or expect ranks to wait for each other")
    load = float((place.root / "proc/loadavg").read_text().split()[0])
    if load > max(2.0, 0.75 * count):
        return warn(f"{value}; load average {load:.1f}", "others compute here: figures will vary; end them or wait")
    return ok(value)


def threads(place: Place) -> Finding:
    """Threads that spin beside each other cost more than they bring."""
    said, count = place.environ.get("OMP_NUM_THREADS", ""), usable_cores(place)
    if said and not said.isdigit():
        return fail(f"OMP_NUM_THREADS={said!r}", "export OMP_NUM_THREADS=1")
    each = max(int(said or count), place.wishes.threads)
    value = f"{each} per rank{'' if said else ' (OMP_NUM_THREADS is not set)'}"
    if place.ranks > 1 and each > 1 and each * place.ranks > count:
        return warn(f"{value}, {each * place.ranks} on {count:g} cores", "export OMP_NUM_THREADS=1 before torchrun")
    return ok(value)


def memory(place: Place) -> Finding:
    """What is left of the machine's memory and of every cgroup's limit above this process."""
    available = memory_available(place.root) / GIB
    each = available / place.ranks
    value = f"{available:.1f} GiB free" + (f", {each:.1f} per rank" if place.ranks > 1 else "")
    fails, tight = RANK_GIB
    to_do = "free some, raise the container's or job's limit, or start fewer ranks on this host"
    if each < fails:
        return fail(value, to_do)
    return warn(f"{value}; a rank needs {tight:g}", to_do) if each < tight else ok(value)


def shared_memory(place: Place) -> Finding:
    """/dev/shm, through which ranks of one host talk."""
    folder = place.root / "dev/shm"
    if not folder.is_dir():
        return fail("there is none", "mount -t tmpfs tmpfs /dev/shm")
    if not os.access(folder, os.W_OK):
        return fail(f"{folder} is not writable for this user", f"chmod 1777 {folder}")
    size = shutil.disk_usage(folder)
    value = f"{size.free / GIB:.2f} of {size.total / GIB:.2f} GiB free"
    to_do = "docker run --shm-size 16g (Kubernetes: an emptyDir of medium Memory), or mount -o remount,size=16g"
    fails, tight = SHM_GIB
    if size.free / GIB <= fails:
        return fail(value, to_do)
    return warn(value, to_do) if size.free / GIB < tight else ok(value)


def open_files(place: Place) -> Finding:
    """Every connection between two ranks is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_open_files(soft, hard)


def judge_open_files(soft: int, hard: int) -> Finding:
    """`soft` and `hard` as the kernel counts them; -1 = no limit."""
    if soft == resource.RLIM_INFINITY:
        return ok("no limit")
    ceiling = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    to_do = f"ulimit -n {ceiling} before torchrun" if ceiling > soft else "raise nofile in /etc/security/limits.conf"
    if soft < OPEN_FILES[0]:
        return fail(str(soft), to_do)
    return warn(str(soft), to_do) if soft < OPEN_FILES[1] else ok(str(soft))


def locked_memory(place: Place) -> Finding:
    """InfiniBand registers memory, which must be lockable for that."""
    if not (place.root / "dev/infiniband").is_dir():
        return ok("no InfiniBand here")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        return warn(f"{soft // 2**20} MiB", "ulimit -l unlimited (docker run --ulimit memlock=-1), else RDMA fails")
    return ok("no limit")


def usable_cores(place: Place) -> float:
    """By affinity and by the cgroups' quotas."""
    count = float(len(os.sched_getaffinity(0)))
    for folder in cgroups("cpu", place.root):
        if (v2 := read(folder / "cpu.max")) and not v2.startswith("max"):
            quota, period = v2.split()
            count = min(count, int(quota) / int(period))
        quota, period = read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")
        if quota and period and int(quota) > 0:
            count = min(count, int(quota) / int(period))
    return count


CHECKS = (
    Check("machine", "cores", cores),
    Check("machine", "threads", threads),
    Check("machine", "memory", memory),
    Check("machine", "/dev/shm", shared_memory),
    Check("machine", "open files", open_files),
    Check("machine", "locked memory", locked_memory),
)
