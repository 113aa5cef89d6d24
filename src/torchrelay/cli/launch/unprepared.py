"""Unprepared: Ctrl-C before anything is there to be ended in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Meanwhile SIGINT ends the process by itself, as SIGTERM does; who ignores it goes on ignoring it.

    `KeyboardInterrupt` must not come up in the midst of imports: it may be swallowed there, or turn into another error.
    While msgspec's core imports `datetime` it does not look whether that went well; its first decoder of a time then
    ends with SIGSEGV.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are for the main thread, and so are their handlers
        return
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
