"""Niceness: a spare that starts, or the target of a move, works beside ranks that train and lets them go first.

Its threads get a lower priority, and the old one back when it is called for. An ordinary user may only do the first; so
it is tried, on a thread that ends, whether the way back is open. (`setpriority` on Linux is per thread, and new threads
take over the priority of the one that makes them.) Where the kernel shares processors out by session, that alone does
nothing, and the session steps back, too: see `SessionPriority`. The target of a move also rests (`Pace`).
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

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
        session = read_priority()
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


# ---------------------------------------------------------------- a whole session's share

# Where the kernel groups tasks by session (`/proc/sys/kernel/sched_autogroup_enabled`, on by default), the priorities
# of threads count among the threads of one session only, and each worker has a session of its own: a worker whose
# threads have all stepped back still gets as much as a rank. What counts between sessions is the priority of the
# session, see "The autogroup feature" in sched(7). Unlike a thread's, an ordinary user may lower it and raise it again.

FILE = Path("/proc/self/autogroup")
AGAIN_S = 0.02  # the kernel takes one change in 100 ms from all ordinary users of a machine together
LIMIT_S = 10.0


def read_priority() -> int | None:
    """Of our session, by nice's scale; None if it is not ours alone, or the kernel does not group by session."""
    if os.getsid(0) != os.getpid():
        return None
    try:
        found = re.search(r"nice (-?\d+)", FILE.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def write_priority(priority: int) -> None:
    """Raises BlockingIOError if it is to be tried again, another OSError if it is not allowed."""
    FILE.write_text(str(priority))


class SessionPriority:
    """The priority of this process's session: the last one that was wanted, as soon as the kernel takes it."""

    def __init__(self, write: Callable[[int], None] = write_priority, again_s: float = AGAIN_S) -> None:
        self._write = write
        self._again_s = again_s
        self._lock = threading.Lock()
        self._wanted = 0
        self._insisting = False

    def want(self, priority: int) -> None:
        """Now, or soon: who calls this does not wait."""
        with self._lock:
            self._wanted = priority
            if self._insisting or self._set():
                return
            self._insisting = True
        threading.Thread(target=self._insist, name="torchrelay priority", daemon=True).start()

    def _set(self) -> bool:
        """Whether that is settled."""
        try:
            self._write(self._wanted)
        except BlockingIOError:
            return False
        except OSError as error:
            log.warning("the priority of this session stays as it is: %s", error)
        return True

    def _insist(self) -> None:
        until = time.monotonic() + LIMIT_S
        while True:
            time.sleep(self._again_s)
            with self._lock:
                if self._set():
                    self._insisting = False
                    return
                if time.monotonic() > until:
                    log.warning("the kernel does not take priority %d for this session", self._wanted)
                    self._insisting = False
                    return


# ---------------------------------------------------------------- rests

# The target of a move works in small portions, and rests after each while the processors have enough to do. A low
# priority alone does not keep it out of the way of ranks that train on the same processors: they
# wait for one another in each step, a target fills each of these gaps at once, and whoever wakes up finds its processor
# taken, for as long as it takes to make the page that it is about to touch.

SHARE = 0.1  # of one processor, for who works beside others
REST_LIMIT_S = 5.0  # all rests of one kind of work together: a move that was asked for is to come
ROOM = 0.25  # of all processors idle: then nobody is in anybody's way
SHORTEST_S = 0.002  # no rest is worth less
_PROC_STAT = Path("/proc/stat")


class Pace:
    """Measures the processor time of this process and rests in proportion.

    rest       does nothing for so many seconds, or less if there is a reason to hurry
    since_s    the processor time from which on it counts, if not from now on
    """

    def __init__(
        self,
        rest: Callable[[float], None],
        since_s: float | None = None,
        *,
        cpu_s: Callable[[], float] = time.process_time,
    ) -> None:
        self._rest = rest
        self._cpu_s = cpu_s
        self._left_s = REST_LIMIT_S
        self._since_s = cpu_s() if since_s is None else since_s
        self._times = idle_and_all()
        self._room = False  # whether processors were idle when we last looked

    def __call__(self) -> None:
        """A portion is done: rest, if no processor has been idle meanwhile."""
        used = self._cpu_s() - self._since_s
        rest = min(used * (1 / SHARE - 1), self._left_s)
        if rest < SHORTEST_S:
            return
        self._look()
        if not self._room:
            begin = time.monotonic()
            self._rest(rest)
            self._left_s -= time.monotonic() - begin
        self._since_s = self._cpu_s()

    def _look(self) -> None:
        idle, total = idle_and_all()
        if total > self._times[1]:
            self._room = (idle - self._times[0]) / (total - self._times[1]) >= ROOM
            self._times = idle, total


def no_pace() -> None:
    """No rest at all."""


def idle_and_all() -> tuple[int, int]:
    """Ticks that the processors of this machine were idle, and all ticks: proc(5), the first line of /proc/stat."""
    try:
        ticks = [int(field) for field in _PROC_STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(ticks[3:5]), sum(ticks)
