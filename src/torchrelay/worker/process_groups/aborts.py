"""Aborts: an end to the collectives of all communicators that can be aborted.

An abort of NCCL frees memory, and that waits for all kernels of the device: those of other communicators, too, which
wait for a lost rank. Aborted one after the other, the first would wait for ever for the second (NVIDIA/nccl#1013). So
each has a thread of its own, and whoever asks waits for none of them: the control thread must go on hearing orders.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Any

log = logging.getLogger(__name__)

AGAIN_S = 0.5  # a backend makes communicators when they are first used, perhaps after its abort: so it is asked again


class Aborts:
    """The backends of this process that can be aborted. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[_Abortable] = []

    def add(self, thing: Any, *, blocks: bool) -> None:
        """A backend, or a group that is its own, with `abort()`. `blocks`: whether that waits for others."""
        with self._lock:
            self._known = [each for each in self._known if each.of() is not None] + [_Abortable(thing, blocks)]

    def begin(self) -> int:
        """Begin to abort all of them; returns how many. To be called again while somebody is blocked."""
        with self._lock:
            return sum(each.begin(AGAIN_S) for each in self._known)

    def finish(self, deadline: float) -> None:
        """Abort what there is now, wait for it, and forget it. `deadline`: by `time.monotonic()`.

        Raises `RuntimeError` if one did not end in time: its kernels may still be on the device.
        """
        with self._lock:
            known = list(self._known)
        blocking = [each for each in known if each.blocks]
        for each in blocking:
            each.join(deadline)  # an abort from before may have missed what was made since
        with self._lock:
            for each in known:
                each.begin(0.0)
        for each in blocking:
            each.join(deadline)
        with self._lock:
            self._known = [each for each in self._known if each not in blocking]


class _Abortable:
    """One of them."""

    def __init__(self, thing: Any, blocks: bool) -> None:
        self.of = weakref.ref(thing)
        self.blocks = blocks
        self._thread: threading.Thread | None = None
        self._ended_at = -1e9

    def begin(self, again_s: float) -> int:
        """Not twice at once, and not again within `again_s`. Returns how many were begun: 0 or 1."""
        thing = self.of()
        if thing is None:
            return 0
        if not self.blocks:
            thing.abort()
            return 1
        if self._is_alive() or time.monotonic() - self._ended_at < again_s:
            return 0
        self._thread = threading.Thread(target=self._run, args=(thing,), name="torchrelay aborts", daemon=True)
        self._thread.start()
        return 1

    def _run(self, thing: Any) -> None:
        try:
            thing.abort()
        except RuntimeError as error:  # torch's own errors derive from it
            log.warning("a communicator could not be aborted: %s", error)
        self._ended_at = time.monotonic()

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def join(self, deadline: float) -> None:
        """Wait until it has ended. Raises `RuntimeError` if it does not by `deadline`."""
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                raise RuntimeError("a communicator's abort does not end: a kernel may be stuck on the device")
