"""Unclaimed: what processes say before we are told that they are ours.

A worker runs as soon as it is forked. That it was forked is told to the agent on another socket, and an agent that had
to wait for a processor may read the two in either order. So what nobody knows is not dropped before it has lain here
from one look to the next but one; what a process has said is taken in the order in which it was said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MOST = 64  # reports that are kept: strangers must not fill our memory


@dataclass(frozen=True)
class Said:
    """One datagram.

    pid, user   who has sent it, as the kernel says
    cut         it was longer than what is read of it
    at          when it came, in seconds of this machine's monotonic clock
    """

    data: bytes
    pid: int
    user: int
    cut: bool
    at: float


class Unclaimed:
    """Reports, and process ids of pages, that have not been claimed yet."""

    def __init__(self) -> None:
        self._before: list[Said] = []  # here since before the last look
        self._since: list[Said] = []
        self._pages: set[int] = set()

    def keep(self, said: Said) -> bool:
        """Whether there was room for it."""
        if len(self._before) + len(self._since) >= MOST:
            return False
        self._since.append(said)
        return True

    def claim(self, pid: int) -> list[Said]:
        """Those of a process that is known by now, in their order."""
        mine = [said for said in (*self._before, *self._since) if said.pid == pid]
        if mine:
            self._before = [said for said in self._before if said.pid != pid]
            self._since = [said for said in self._since if said.pid != pid]
        return mine

    def look(self, known: Callable[[int], bool]) -> tuple[list[Said], list[Said]]:
        """Of a look at all: the reports of processes that are known by now, and those that were kept long enough."""
        pids = dict.fromkeys(said.pid for said in (*self._before, *self._since))
        claimed = [said for pid in pids if known(pid) for said in self.claim(pid)]
        overdue, self._before, self._since = self._before, self._since, []
        return claimed, overdue

    def pages(self, unknown: set[int]) -> set[int]:
        """Of the process ids of unknown pages in this look: those that were unknown in the last one, too."""
        overdue = unknown & self._pages
        self._pages = unknown
        return overdue
