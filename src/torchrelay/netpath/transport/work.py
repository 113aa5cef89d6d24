"""What a collective gives back, and the line in which collectives are done.

It is something to wait for, with its results and a future. Python and C++ (DDP's reducer, functional collectives) both
wait for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
from torch._C import _distributed_c10d
from torch.futures import Future

from torchrelay.netpath.transport.mesh import Broken

NO_TIMEOUT = timedelta(0)
Tensors = list[torch.Tensor]


class Work(_distributed_c10d.Work):
    """One collective or message, from when it was asked for until its tensors are there."""

    def __init__(self, what: str, results: Tensors, help_along: Callable[[Work], None] | None = None) -> None:
        """`help_along` is called by who waits, and may do the work there."""
        super().__init__()
        self.what = what
        self._results = results
        self._help_along = help_along
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._source = -1
        self._lock = threading.Lock()
        self._pending: Future[Tensors] | None = None  # completed when we end
        self._future: Future[Tensors] | None = None  # what was given out: it has the error, too

    # ------------------------------------------------------------ for whoever does it

    def end(self, error: Exception | None = None, source: int = -1) -> None:
        """It is done, or has failed. Once; wakes all who wait."""
        with self._lock:
            self._error, self._source = error, source
            self._ended.set()
            pending = self._pending
        self._help_along = None
        if pending is not None:
            pending.set_result(self._results)  # calls what was chained to it, in this thread

    @property
    def has_future(self) -> bool:
        """Whether somebody may be called when it ends."""
        return self._pending is not None

    # ------------------------------------------------------------ for whoever asked for it

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until its tensors are there. Raises what has failed, and `Broken` after `timeout` (0: there is none)."""
        if not self._ended.is_set():
            help_along = self._help_along
            if help_along is not None and timeout <= NO_TIMEOUT:
                help_along(self)
            seconds = timeout.total_seconds()
            if not self._ended.wait(seconds if seconds > 0 else None):
                raise Broken(f"torchrelay.netpath: {self.what} has not ended within {seconds:g} s; it goes on")
        self._raise()
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()  # on a CPU there is no stream that could wait in our place

    def result(self) -> Tensors:
        """The tensors that it has written."""
        self._raise()
        return self._results

    def source_rank(self) -> int:
        """Of a message from anybody: the rank in the group that has sent it."""
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> Future[Tensors]:
        """Completes with the tensors, or with the error; its callbacks are called where the work was done."""
        with self._lock:
            if self._future is None:
                pending: Future[Tensors] = Future()
                # A future that C++ waits for must fail as C++ does; only an error in a callback becomes one.
                self._future = cast("Future[Tensors]", pending.then(self._outcome))
                if self._ended.is_set():
                    pending.set_result(self._results)
                else:
                    self._pending = pending
            return self._future

    def _outcome(self, _pending: Any) -> Tensors:
        self._raise()
        return self._results

    def _raise(self) -> None:
        """Each who waits gets an exception of its own: two threads must not share a traceback."""
        error = self._error
        if error is not None:
            raise type(error)(*error.args) from error


def finished(what: str, results: Tensors) -> Work:
    """Work that is done already."""
    work = Work(what, results)
    work.end()
    return work


# ---------------------------------------------------------------- one after the other

# One collective of a group at a time, in the order in which they were asked for.
#
# A thread does them; or whoever waits for one, if nobody does anything yet: that saves two changes of threads. When one
# has ended whoever chained something to its future is called, and may wait for a later collective: so before it calls,
# the thread leaves the line to another one.

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
