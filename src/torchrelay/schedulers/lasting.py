"""Lasting: processes that outlive the SIGTERM with which a scheduler tells a job to go, so that the job can park.

Slurm sends it to every process of a job, each by itself: agents, workers, whatever they have started. One that ends by
it is lost to the parking. What has outlived it still ends by SIGKILL, and so do workers when their agent ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping

AGAIN_S = 5.0  # Slurm may send it several times in a row; what comes so much later says that the time is over

_lasting = False  # whether this process, or the one that has forked it, outlives SIGTERM
_libc = ctypes.CDLL(None)
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_libc.signal.restype = ctypes.c_void_p
# A handler that does nothing and may run at any moment: any function of libc without effect will do. Being a handler,
# and not SIG_IGN, it is gone after an exec: what a script starts can be ended by SIGTERM, as ever.
_NOTHING = ctypes.cast(_libc.getppid, ctypes.c_void_p)


def is_told_by_slurm(environ: Mapping[str, str]) -> bool:
    """Whether this process runs in a job of Slurm's."""
    return environ.get("SLURM_JOB_ID", "").isdecimal()


def outlives() -> bool:
    """Whether `outlive` was called here."""
    return _lasting


def outlive() -> None:
    """From now on SIGTERM does nothing to this process. To be called in its main thread.

    Python goes on to say that it has the default handler: a script that asks gets the answer it gets without us, and
    what it sets itself counts. Children that it forks have the default again.
    """
    global _lasting
    _lasting = True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _libc.signal(signal.SIGTERM, _NOTHING)
    os.register_at_fork(after_in_child=be_mortal)


def be_mortal() -> bool:
    """Have the default handler again; False if somebody has set another one since, which stays."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
    _libc.signal(signal.SIGTERM, None)
    return True


def end_by(number: int) -> None:
    """What this signal does without us to a process that has no handler for it."""
    if number == signal.SIGTERM and be_mortal():
        os.kill(os.getpid(), number)
