"""The system calls that programs in a bwrap box don't get, as a classic BPF program.

Each one would either take memory that no limit counts (shared segments, memory files, kernel keys), or open parts of
the kernel that no exercise needs and that most escapes went through (new user namespaces, mounts, bpf, io_uring …). It
refuses to know what else the box is made of. Invariant: the filter is for one machine architecture; system calls of any
other (32-bit ones on a 64-bit machine) end the program.
"""

from __future__ import annotations

import errno
import platform
import struct

from spmd_rl.envs.sandbox.interface import SandboxError

# Architecture as the kernel's audit calls it, and the numbers: name → (x86_64, aarch64). From asm/unistd.h.
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = {
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "clone3": (435, 435),  # its flags are out of a filter's reach; the C library falls back on clone
}
CLONE = (56, 220)
CLONE_NEWUSER = 0x10000000
X32 = 0x40000000  # the bit of a second set of numbers on x86_64

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCH_AT, ARGUMENT_AT = 0, 4, 16  # offsets in struct seccomp_data; both machines are little-endian
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000


def filter_program(machine: str | None = None) -> bytes:
    """The filter for `bwrap --seccomp`; `machine` as `uname -m` has it, by default this one.

    SandboxError for a machine whose numbers are not known here.
    """
    machine = machine or platform.machine()
    if machine not in AUDIT:
        raise SandboxError(f"the bwrap sandbox has no system call filter for {machine}; there is one for {list(AUDIT)}")
    which = list(AUDIT).index(machine)
    missing, forbidden = FAIL | errno.ENOSYS, FAIL | errno.EPERM
    program = [(LOAD, 0, 0, ARCH_AT), (EQUAL, 1, 0, AUDIT[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER_AT)]
    if machine == "x86_64":
        program += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, missing)]
    for numbers in NUMBERS.values():
        program += [(EQUAL, 0, 1, numbers[which]), (RETURN, 0, 0, missing)]
    program += [
        (EQUAL, 0, 3, CLONE[which]),
        (LOAD, 0, 0, ARGUMENT_AT),
        (ANY_BIT, 0, 1, CLONE_NEWUSER),
        (RETURN, 0, 0, forbidden),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)
