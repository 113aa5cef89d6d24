"""Lasting: processes that outlive the SIGTERM with which a scheduler tells a job to go, so that the job can park.

Slurm sends it to every process of a job, each by itself: agents, workers, whatever they have started. One that ends by
it is lost to the parking. What has outlived it still ends by SIGKILL, and so do workers when their agent ends. A
loader's workers end by their parent's SIGTERM, too: Python sends it when the parent exits, and waits for their ends
without limit.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Mapping

from torchrelay.schedulers.kinship import heed_parent_only

AGAIN_S = 5.0  # Slurm may send it several times in a row; what comes so much later says that the time is over

_lasting = False  # whether this process, or the one that has forked it, outlives SIGTERM
_before = threading.local()  # its `mask`: of signals, in the thread that forks
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


def outlive(*, but_for_parent: bool = False) -> None:
    """From now on SIGTERM does nothing to this process. To be called in its main thread.

    `but_for_parent`: its parent's SIGTERM ends it, with exit code 0 (raises OSError where that cannot be had).

    Python goes on to say that it has the default handler: a script that asks gets the answer it gets without us, and
    what it sets itself counts. Children that it forks have the default again.
    """
    global _lasting
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if but_for_parent:
        heed_parent_only(signal.SIGTERM)
    else:
        _libc.signal(signal.SIGTERM, _NOTHING)
    if not _lasting:  # what the one that has forked us has registered is registered here
        os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_begin)
    _lasting = True


def be_mortal() -> bool:
    """Have the default handler again; False if somebody has set another one since, which stays."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
    _libc.signal(signal.SIGTERM, None)
    return True


# A child that is told to end before it is mortal would never hear of it, and who waits for its end would wait for good.
# So SIGTERM waits meanwhile.


def _hold() -> None:
    _before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before.mask)


def _begin() -> None:
    be_mortal()
    _let_go()


def end_by(number: int) -> None:
    """What this signal does without us to a process that has no handler for it."""
    if number == signal.SIGTERM and be_mortal():
        os.kill(os.getpid(), number)
