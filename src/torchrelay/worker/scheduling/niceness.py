"""Niceness: a spare that starts, or the target of a move, works beside ranks that train and lets them go first.

Its threads get a lower priority, and the old one back when it is called for. An ordinary user may only do the first; so
it is tried, on a thread that ends, whether the way back is open. (`setpriority` on Linux is per thread, and new threads
take over the priority of the one that makes them.) Where the kernel shares processors out by session, that alone does
nothing, and the session steps back, too: see `autogroup`.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from torchrelay.worker.scheduling import autogroup
from torchrelay.worker.scheduling.autogroup import SessionPriority

log = logging.getLogger(__name__)

LOWEST = 19
STEPS = 15  # of nice: about a thirtieth of the processor's time beside others that want all of it
# The same for a session: a tenth. It holds the control thread, too, and competes with whatever else the machine does.
SESSION_STEPS = 10


class Niceness:
    """The priority of this process, but for the control thread, which calls this and must hear its orders."""

    def __init__(self) -> None:
        self._before: int | None = None
        self._session_before: int | None = None
        self._session = SessionPriority()
        self._over = False

    def give_way(self) -> None:
        """Let others go first, if that can be taken back. Not again once its turn has come: orders are repeated."""
        if self._over:
            return
        session = autogroup.read_priority()
        if self._session_before is None and session is not None and session >= 0:  # below, the way back may be barred
            self._session_before = session
            self._session.want(min(session + SESSION_STEPS, LOWEST))
        before = os.getpriority(os.PRIO_PROCESS, 0)
        if self._before is None and may_return(before):
            self._before = before
            set_all(min(before + STEPS, LOWEST), of=before)

    def take_turn(self) -> None:
        """Be as quick as others again."""
        self._over = True
        if self._session_before is not None:  # first: until then we hardly get a processor beside others
            self._session.want(self._session_before)
            self._session_before = None
        if self._before is not None:
            before, self._before = self._before, None
            low = min(before + STEPS, LOWEST)
            set_all(before, of=low)
            bring_children(os.getpid(), low, before)


def may_return(priority: int) -> bool:
    """Whether a thread with a lower priority may have this one again."""
    found: list[bool] = []

    def attempt() -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, priority + 1)
            os.setpriority(os.PRIO_PROCESS, 0, priority)
        except PermissionError:
            return
        found.append(True)

    thread = threading.Thread(target=attempt, name="niceness")
    thread.start()
    thread.join()
    return bool(found)


def set_all(priority: int, *, of: int) -> None:
    """Set the priority of all other threads that have this one; who has chosen another keeps it.

    Twice, as one may begin meanwhile, with the priority of its maker.
    """
    caller = threading.get_native_id()
    for _ in range(2):
        for task in Path("/proc/self/task").iterdir():
            if int(task.name) == caller:
                continue
            try:
                if os.getpriority(os.PRIO_PROCESS, int(task.name)) == of:
                    os.setpriority(os.PRIO_PROCESS, int(task.name), priority)
            except ProcessLookupError:
                pass  # it has ended
            except PermissionError as error:  # the script has given up the right to it
                log.warning("a thread stays at a low priority: %s", error)


def bring_children(pid: int, low: int, priority: int) -> None:
    """Who was started meanwhile has the low priority from its maker: bring it back with its threads and children.

    As well as it goes: what has ended, belongs to another user or has a priority of its own choice is left alone.
    """
    for child in _children(pid):
        for task in _threads(child):
            try:
                if os.getpriority(os.PRIO_PROCESS, task) == low:
                    os.setpriority(os.PRIO_PROCESS, task, priority)
            except OSError:
                pass  # see above
        bring_children(child, low, priority)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in _threads(pid):
        try:
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        except OSError:
            pass  # it has ended, or this kernel does not tell
    return found


def _threads(pid: int) -> list[int]:
    try:
        return [int(task) for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []
