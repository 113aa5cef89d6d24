"""Tether: processes that end when the one that started them ends, however that happens (Linux); how to end them."""

from __future__ import annotations

import asyncio.subprocess
import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Found before any fork: between fork and exec nothing may be imported.
_libc = ctypes.CDLL(None, use_errno=True)


def tethered(number: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """A `preexec_fn`: the child is sent this signal when the thread that started it ends (its process, mostly).

    Start children from the main thread, or from one that lives as long as they should.
    """
    parent = os.getpid()

    def tie() -> None:
        if number != signal.SIGKILL:
            # Until exec the child has its parent's handlers: they would swallow the signal, and it would run on.
            signal.signal(number, signal.SIG_DFL)
        if _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:  # it ended before the tether held
            os.kill(os.getpid(), number)

    return tie


def signal_child(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a child a signal; one that has ended is let be.

    In place of `process.kill()` and its like: before Python 3.13 those ask first whether it has ended (through
    `Popen.poll`), which takes its exit status away from asyncio if it has this moment: the end is then told as 255.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def adopt_orphans() -> None:
    """From now on, descendants whose parent ends become children of this process: none can get lost.

    Raises OSError where the kernel cannot do it.
    """
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
