"""Kinship: a signal handler that ends its process, with exit code 0, if its parent has sent the signal.

From anybody else the signal does nothing. torch's own handler in loader workers heeds its parent in the same way:
`terminate()` ends them at once, whatever they are at, and torch does not take it for a failure.

Who has sent a signal is told to the handler alone, and one in Python runs too late, without being told. A thread that
waits for the signal would be told; but then it has to be blocked, and what the process starts would have it blocked,
too. So it is machine code: two system calls and a comparison, harmless at any moment. An exec undoes it.

The kernel keeps one signal of a kind for a process that has not had it yet: a parent's that comes in the moment between
a stranger's and its handling is lost, and has to be sent again.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform

# void handler(int, siginfo_t *info, void *) { if (getppid() == info->si_pid) exit_group(0); }
CODE = {
    "x86_64": (
        "f30f1efa"  # endbr64
        "b86e000000"  # mov eax, 110 (getppid)
        "0f05"  # syscall: it leaves rsi, the second argument, alone
        "3b4610"  # cmp eax, [rsi + 16]
        "7509"  # jne to the end
        "31ff"  # xor edi, edi
        "b8e7000000"  # mov eax, 231 (exit_group)
        "0f05"  # syscall
        "c3"  # ret
    ),
    "aarch64": (
        "5f2403d5"  # bti c
        "a81580d2"  # mov x8, 173 (getppid)
        "010000d4"  # svc 0
        "221040b9"  # ldr w2, [x1, 16]
        "1f00026b"  # cmp w0, w2
        "81000054"  # b.ne to the end
        "000080d2"  # mov x0, 0
        "c80b80d2"  # mov x8, 94 (exit_group)
        "010000d4"  # svc 0
        "c0035fd6"  # ret
    ),
}
SA_SIGINFO = 4  # say who has sent it
SA_RESTART = 0x10000000  # a read that it interrupts goes on


class Action(ctypes.Structure):
    """`struct sigaction`, as the C libraries have it on these machines."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_kept: list[ctypes.c_char] = []
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sigaction.argtypes = (ctypes.c_int, ctypes.POINTER(Action), ctypes.c_void_p)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@functools.cache
def loaded() -> int:
    """Where the handler lies in memory, for good: children that are forked have it, too. Raises OSError."""
    code = CODE.get(platform.machine())
    if code is None:
        raise OSError(errno.ENOSYS, f"not known on {platform.machine()}")
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(bytes.fromhex(code))
    view = ctypes.c_char.from_buffer(memory)
    _kept.append(view)  # and with it the memory
    address = ctypes.addressof(view)
    # Never writable and executable at once; as it becomes executable the kernel clears what processors have cached.
    if _libc.mprotect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


def heed_parent_only(number: int) -> None:
    """From now on this signal ends this process if its parent sends it, and does nothing otherwise. Raises OSError."""
    action = Action(handler=loaded(), flags=SA_SIGINFO | SA_RESTART)
    if _libc.sigaction(number, ctypes.byref(action), None) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
