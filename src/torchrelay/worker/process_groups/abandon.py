"""Waiting for calls that cannot be interrupted: they run in a thread that is left behind when they must not be awaited.

Connecting blocks inside libraries for as long as their timeouts say, whatever happens to this job meanwhile. So the
call gets a thread of its own, and the caller waits for the first of: its end, a break, the deadline. A thread that is
left behind ends by the call's own timeout, and whatever it still produces is dropped.

Such a thread asks no name server: torch asks one for the name of every address it connects to, only to have it for its
messages, and waits 5 s or more if there is no answer. All names have become addresses before.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

Result = TypeVar("Result")


class Abandoned(RuntimeError):
    """The call was left behind: somebody broke it, or it took too long."""


class _Call(Generic[Result]):
    """One call in a thread of its own."""

    def __init__(self, work: Callable[[], Result], what: str) -> None:
        self.work = work
        self.what = what
        self.result: list[Result] = []  # one element when done
        self.error: BaseException | None = None
        self.left_behind = False
        self.awake = threading.Event()  # the call has ended, or somebody broke it
        self.ended = False

    def run(self) -> None:
        ask_no_name_server()
        try:
            result = self.work()
        except BaseException as error:  # noqa: BLE001  the top of this thread: the error belongs to who waits
            if not self.left_behind:
                self.error = error
        else:
            if not self.left_behind:
                self.result.append(result)
        self.ended = True
        self.awake.set()


_waiting: set[_Call[object]] = set()


def await_unless_broken(work: Callable[[], Result], timeout_s: float, what: str) -> Result:
    """Run `work` in a thread and return its result, or raise its exception.

    Raises `Abandoned` when `break_all` was called meanwhile, or after `timeout_s`; `what` then names the call.
    """
    call: _Call[Result] = _Call(work, what)
    _waiting.add(call)  # type: ignore[arg-type]  # a set of calls of any result
    try:
        threading.Thread(target=call.run, name=f"torchrelay {what}", daemon=True).start()
        in_time = call.awake.wait(timeout_s)
        if not call.ended:
            call.left_behind = True
            call.result.clear()
            raise Abandoned(f"{what} was interrupted" if in_time else f"{what} took longer than {timeout_s:g} s")
    finally:
        _waiting.discard(call)
    if call.error is not None:
        _raise(call)
    return call.result.pop()


def _raise(call: _Call[Result]) -> NoReturn:
    """Raise what the call raised, and keep nothing of it.

    An error holds the frames it came through, so a call or a frame that holds the error is a circle, which keeps all
    that those frames know, a process group among it, until garbage is collected: perhaps in a forked child.
    """
    error, call.error = call.error, None
    assert error is not None, "asked for when there is one"
    try:
        raise error
    finally:
        del error


def break_all() -> int:
    """Wake everybody who waits here; they raise `Abandoned`. Returns how many."""
    waiting = tuple(_waiting)
    for call in waiting:
        call.awake.set()
    return len(waiting)


class _Resolver(ctypes.Structure):
    """The head of glibc's `struct __res_state`, of which every thread has its own."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
    )


def ask_no_name_server() -> None:
    """From here on, what this thread looks up is looked up in files alone. Does nothing where there is no glibc."""
    library = ctypes.CDLL(None)
    initialise, state = getattr(library, "__res_init", None), getattr(library, "__res_state", None)
    if initialise is None or state is None or initialise() != 0:
        return
    state.restype = ctypes.POINTER(_Resolver)
    state().contents.nscount = 0
