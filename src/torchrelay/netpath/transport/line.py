"""One collective of a group at a time, in the order in which they were asked for.

A thread does them; or whoever waits for one, if nobody does anything yet: that saves two changes of threads. When one
has ended whoever chained something to its future is called, and may wait for a later collective: so before it calls,
the thread leaves the line to another one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from torchrelay.netpath.transport.work import Work

MOST_THREADS = 16


class _Job(NamedTuple):
    work: Work
    do: Callable[[], Exception | None]  # what has failed


class Line:
    """The collectives of one group that were asked for and are not done."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)  # threads wait for something to do
        self._all_done = threading.Condition(self._lock)
        self._jobs: deque[_Job] = deque()
        self._busy = False  # somebody does one
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def add(self, work: Work, do: Callable[[], Exception | None]) -> None:
        """Have it done by a thread; the work ends with what `do` returns."""
        with self._lock:
            self._jobs.append(_Job(work, do))
            self._call_somebody()

    def do_here(self, work: Work, do: Callable[[], Exception | None]) -> None:
        """Do it in this thread, if nothing else is to be done; else as `add`."""
        with self._lock:
            self._jobs.append(_Job(work, do))
            if self._busy or len(self._jobs) > 1:
                self._call_somebody()
                return
        self.help_along(work)

    def help_along(self, work: Work) -> None:
        """Do this one in this thread, if it is the next and nobody does anything now."""
        with self._lock:
            if self._busy or not self._jobs or self._jobs[0].work is not work:
                return
            job = self._jobs.popleft()
            self._busy = True
        self._do(job)

    def drain(self, until: float) -> bool:
        """Wait until all are done. Returns whether they are."""
        with self._lock:
            return self._all_done.wait_for(
                lambda: not self._jobs and not self._busy, timeout=max(0.0, until - time.monotonic())
            )

    def close(self) -> None:
        """Its threads end when they have done what there is."""
        with self._lock:
            self._closed = True
            self._turn.notify_all()

    # ------------------------------------------------------------ threads

    def _call_somebody(self) -> None:
        """There is something to do; who is busy calls again when that is done. The lock is held."""
        if self._busy:
            return
        if self._idle:
            self._turn.notify()
        elif len(self._threads) < MOST_THREADS:
            thread = threading.Thread(target=self._serve, name=f"torchrelay group {self._name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
                self._turn.wait_for(lambda: self._closed or (self._jobs and not self._busy))
                self._idle -= 1
                if self._busy or not self._jobs:
                    return  # closed: who is busy calls somebody if there is more
                job = self._jobs.popleft()
                self._busy = True
            self._do(job)

    def _do(self, job: _Job) -> None:
        """Do it, let the next one be done, and tell who waits."""
        error: Exception | None = RuntimeError(f"{job.work.what} was interrupted")
        try:
            with torch.inference_mode():  # tensors that were made in it may be written nowhere else
                error = job.do()
        finally:
            with self._lock:
                self._busy = False
                if self._jobs:
                    self._call_somebody()
                else:
                    self._all_done.notify_all()
            job.work.end(error)
