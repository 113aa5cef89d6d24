"""Leaving: lets a process call `exit_group(code)`, as `os._exit` does: no handler runs, and the code is its own.

Done with ptrace(2), as a debugger would, on x86-64: the next instruction of its main thread becomes the system call.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

from torchrelay.chaos.faults import Gone, Victim, observe

SEIZE, INTERRUPT, CONT, DETACH = 0x4206, 0x4207, 7, 17
GETREGS, SETREGS, POKETEXT = 12, 13, 4
WAIT_ALL = 0x40000000
EXIT_GROUP = 231
SYSCALL = b"\x0f\x05"
# user_regs_struct: 27 words, of which these.
WORDS, RAX, RDI, ORIG_RAX, RIP = 27, 10, 14, 15, 16


class CannotTrace(PermissionError):
    """This machine does not let us do it, and why."""


def obstacle() -> str:
    """Why it is not possible here; empty if it is."""
    if platform.machine() != "x86_64":
        return f"not on {platform.machine()}"
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            scope = int(file.read())
    except FileNotFoundError:
        return ""
    allowed = scope == 0 or (scope < 3 and os.geteuid() == 0)
    return "" if allowed else f"kernel.yama.ptrace_scope is {scope}"


def leave(victim: Victim, code: int) -> None:
    """Let it exit with this code. Raises `Gone`, or `CannotTrace`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    libc.ptrace.restype = ctypes.c_long
    pid = victim.pid

    def trace(request: int, where: int = 0, data: object = None) -> None:
        if libc.ptrace(request, pid, where, data) < 0:
            number = ctypes.get_errno()
            if number == 3:
                raise Gone(f"process {pid} has ended")
            raise CannotTrace(number, f"process {pid} cannot be traced: {os.strerror(number)}")

    trace(SEIZE)
    if observe(pid) != victim:
        trace(DETACH)
        raise Gone(f"process {pid} is another one by now")
    trace(INTERRUPT)
    os.waitpid(pid, WAIT_ALL)
    registers = (ctypes.c_ulonglong * WORDS)()
    trace(GETREGS, data=registers)
    word = struct.unpack("<Q", SYSCALL.ljust(8, b"\xf4"))[0]
    trace(POKETEXT, registers[RIP], ctypes.c_void_p(word))
    registers[RAX], registers[RDI], registers[ORIG_RAX] = EXIT_GROUP, code, 2**64 - 1
    trace(SETREGS, data=registers)
    trace(CONT)
    while not ended(os.waitpid(pid, WAIT_ALL)[1]):
        trace(CONT)


def ended(status: int) -> bool:
    return os.WIFEXITED(status) or os.WIFSIGNALED(status)
