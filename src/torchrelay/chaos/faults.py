"""Faults: what can be done to a process from outside, knowing only its id."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from msgspec import Struct

from torchrelay.wire.files.procfs import ProcessGone, read_stat


class Fault(StrEnum):
    """A way to break a process. What the process notices of it stands beside."""

    KILL = "kill"  # SIGKILL: nothing; what the kernel's OOM killer does
    STOP = "stop"  # SIGSTOP: nothing; it hangs, with its connections open
    CONTINUE = "continue"  # SIGCONT: wakes up after a stop, as if no time had passed
    CRASH = "crash"  # SIGSEGV: dies of a signal, as from a bug in native code
    ABORT = "abort"  # SIGABRT: dies of a signal, as from a failed assertion in native code
    TERMINATE = "terminate"  # SIGTERM: what a scheduler sends first
    STARVE = "starve"  # no more memory: its next new mapping fails; it may live on what it has for long
    QUOTA = "quota"  # no more disk: its next write to a file fails, an exception in the script


SIGNALS = {
    Fault.KILL: signal.SIGKILL,
    Fault.STOP: signal.SIGSTOP,
    Fault.CONTINUE: signal.SIGCONT,
    Fault.CRASH: signal.SIGSEGV,
    Fault.ABORT: signal.SIGABRT,
    Fault.TERMINATE: signal.SIGTERM,
}
# What the process may have no more of; Python ignores SIGXFSZ, so a write over the limit is an OSError.
LIMITS = {Fault.STARVE: resource.RLIMIT_AS, Fault.QUOTA: resource.RLIMIT_FSIZE}


class Gone(LookupError):
    """The victim has ended, or its id belongs to another process by now."""


class Victim(Struct, frozen=True):
    """A process, told apart from a later one with the same id by when it started (ticks since boot)."""

    pid: int
    started: int


def observe(pid: int) -> Victim:
    """The process that has this id now. Raises `Gone` if there is none, `ValueError` for one that is not to be hit."""
    if pid <= 1 or pid == os.getpid():
        raise ValueError(f"process {pid} is no victim: name the process id of a worker")
    try:
        return Victim(pid, read_stat(pid).started)
    except ProcessGone as error:
        raise Gone(f"process {pid} has ended") from error


@contextmanager
def held(victim: Victim) -> Iterator[Callable[[Fault], None]]:
    """What strikes it, at once and as often as is wanted. Raises `Gone` if it has ended, or does while it is held."""
    try:
        handle = os.pidfd_open(victim.pid)
    except ProcessLookupError as error:
        raise Gone(f"process {victim.pid} has ended") from error

    def hit(fault: Fault) -> None:
        if fault in LIMITS:
            # Below what it has of it, not at it: otherwise what it gives back it could have again.
            _, hard = resource.prlimit(victim.pid, LIMITS[fault])
            resource.prlimit(victim.pid, LIMITS[fault], (0, hard))
        else:
            signal.pidfd_send_signal(handle, SIGNALS[fault])

    try:
        # Compared after the handle is held: from here on the id cannot come to mean another process.
        if observe(victim.pid) != victim:
            raise Gone(f"process {victim.pid} is another one by now")
        yield hit
    except ProcessLookupError as error:
        raise Gone(f"process {victim.pid} has ended") from error
    finally:
        os.close(handle)


def strike(victim: Victim, fault: Fault) -> None:
    """Do it. Raises `Gone` if the victim ended before, and `PermissionError` if it is another user's."""
    with held(victim) as hit:
        hit(fault)
