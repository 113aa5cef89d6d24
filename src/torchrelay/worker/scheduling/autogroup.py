"""Autogroup: the share of the processors that a whole session gets.

Where the kernel groups tasks by session (`/proc/sys/kernel/sched_autogroup_enabled`, on by default), the priorities of
threads count among the threads of one session only, and each worker has a session of its own: a worker whose threads
have all stepped back still gets as much as a rank. What counts between sessions is the priority of the session, see
"The autogroup feature" in sched(7). Unlike a thread's, an ordinary user may lower it and raise it again.
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
