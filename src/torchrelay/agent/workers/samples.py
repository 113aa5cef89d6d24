"""Samples: a worker as it can be seen from outside, without its help: its page, and what the kernel counts.

What a worker has begun in which group, and on which line it stands, is told only when it has stood still for longer
than its last step took, and then every two seconds: as long as all goes well, beats stay small however many groups
there are.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchrelay.agent.workers.forks import Ended
from torchrelay.protocol.health.pulses import Sample
from torchrelay.protocol.messages.events import PrivateRecord
from torchrelay.protocol.messages.ids import Generation, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.deaths import MISMATCH
from torchrelay.wire.files.page import BadPage, Groups, Page, Status
from torchrelay.wire.files.procfs import ProcessGone, read_proc, read_stat

logger = logging.getLogger(__name__)

_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
STANDS_NS = 1_000_000_000  # a worker stands still if nothing has changed for so long, and for as long as a step
MOST_BELOW = 256  # processes below a worker whose time is counted; each costs some 50 us, several times a second
AGAIN_NS = 2_000_000_000  # between two tellings of the groups of one that stands still


@dataclass
class _Seen:
    """Where a worker was seen, since when, and when its groups were told last."""

    place: tuple[object, ...]
    since_ns: int
    told_ns: int = 0

    def due(self, step_ns: int, now_ns: int) -> bool:
        """Whether its groups are to be told now."""
        if now_ns - self.since_ns < max(STANDS_NS, step_ns) or now_ns - self.told_ns < AGAIN_NS:
            return False
        self.told_ns = now_ns
        return True


class Sampler:
    """Reads the pages in one folder; keeps them open between samples.

    A page that cannot be read any more is as good as one that was never made: what is wrong with one worker must not
    reach the others through their agent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pages: dict[WorkerId, Page] = {}
        self._first_seen_ns: dict[WorkerId, int] = {}
        self._stands: dict[WorkerId, _Seen] = {}
        self._bad: set[WorkerId] = set()  # of these a page was whole once

    def path(self, worker: WorkerId) -> Path:
        """Where this worker's page is, or will be."""
        return self._folder / f"{worker}.page"

    def sample(self, worker: WorkerId, pid: int, rank: Rank | None) -> Sample | None:
        """The worker now; None if its process has ended."""
        try:
            state, cpu_ms, main_ms = read_process(pid)
        except ProcessGone:
            return None
        now = time.monotonic_ns()
        first = self._first_seen_ns.setdefault(worker, now)
        status, groups, page = self._look(worker)
        if status is None or page is None:  # it has not come so far as to make its page
            return Sample(
                worker=worker,
                rank=rank,
                generation=Generation(0),
                point=None,
                phase=WorkerPhase.BOOTING,
                phase_ms=span_ms(first, now),
                step_ms=0.0,
                collectives=0,
                beat_ms=span_ms(first, now),
                process=state,
                cpu_ms=cpu_ms,
                main_ms=main_ms,
            )
        tells = self._tells(worker, status, groups, now)
        return Sample(
            worker=worker,
            rank=rank,
            generation=Generation(status.generation),
            point=Point(status.step, status.section) if status.step >= 0 else None,
            phase=status.phase,
            phase_ms=span_ms(status.entered_ns or first, now),
            step_ms=status.step_ns / 1e6,
            collectives=status.collectives,
            beat_ms=span_ms(status.beat_ns or first, now),
            process=state,
            cpu_ms=cpu_ms,
            main_ms=main_ms,
            elsewhere=groups.begun,
            groups=groups.known if tells else None,
            spot=page.spot() if tells else None,
        )

    def _tells(self, worker: WorkerId, status: Status, groups: Groups, now: int) -> bool:
        """Whether its groups, and where it stands, are to be told now."""
        place = (status.step, status.section, status.phase, status.generation, status.collectives, groups.begun)
        stand = self._stands.get(worker)
        if stand is None or stand.place != place:
            self._stands[worker] = _Seen(place, now)
            return False
        return stand.due(status.step_ns, now)

    def records(self, worker: WorkerId) -> tuple[PrivateRecord, ...]:
        """What an ended worker left in its page; nothing if it never made one, or if it cannot be read."""
        page = self._page(worker)
        try:
            return page.records() if page is not None else ()
        except BadPage as error:
            self._complain(worker, error)
            return ()

    def remove(self, worker: WorkerId) -> None:
        """Close and delete the page of an ended worker."""
        self._first_seen_ns.pop(worker, None)
        self._stands.pop(worker, None)
        self._bad.discard(worker)
        page = self._pages.pop(worker, None)
        if page is not None:
            page.close()
        self.path(worker).unlink(missing_ok=True)

    def _look(self, worker: WorkerId) -> tuple[Status | None, Groups, Page | None]:
        page = self._page(worker)
        try:
            return (page.status(), page.groups(), page) if page is not None else (None, Groups(None), None)
        except BadPage as error:
            self._complain(worker, error)
            return None, Groups(None), None

    def _complain(self, worker: WorkerId, error: BadPage) -> None:
        if worker not in self._bad:
            self._bad.add(worker)
            logger.error("%s: %s", worker, error)

    def _page(self, worker: WorkerId) -> Page | None:
        page = self._pages.get(worker)
        if page is None:
            try:
                page = Page(self.path(worker))
            except OSError:
                return None  # not made yet
            try:
                page.status()
            except BadPage:  # this very moment: no size or no header
                page.close()
                return None
            self._pages[worker] = page
        return page


def span_ms(since_ns: int, now_ns: int) -> int:
    return max(0, (now_ns - since_ns) // 1_000_000)


def read_process(pid: int) -> tuple[str, int, int]:
    """State letter, and CPU time in ms: of the process and its descendants, and of its main thread and these.

    Raises `ProcessGone`.
    """
    stat, main = read_stat(pid), read_stat(pid, main_thread=True)
    below = 0
    for child in descendants(pid):
        try:
            below += read_stat(child).cpu_ticks
        except ProcessGone:
            continue
    return stat.state, int((stat.cpu_ticks + below) * _TICK_MS), int((main.cpu_ticks + below) * _TICK_MS)


def descendants(pid: int) -> Iterator[int]:
    """Children and theirs (loader workers), as far as the kernel lists them: those of the main threads.

    At most `MOST_BELOW` of them, those nearest first: whoever makes more must not cost the agent its beat.
    """
    waiting, found = deque([pid]), 0
    while waiting and found < MOST_BELOW:
        parent = waiting.popleft()
        for child in (read_proc(f"/proc/{parent}/task/{parent}/children") or "").split()[: MOST_BELOW - found]:
            found += 1
            waiting.append(int(child))
            yield int(child)


# ---------------------------------------------------------------- what Gloo said before it ended a process

# Gloo aborts in a thread of its own when data of another size comes than it waits for: two ranks make collectives that
# do not match. Its words, and the stack that `faulthandler` prints behind them, are the last of the rank's log.

LAST = 64 << 10  # bytes of a log that are looked at
_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_ABORT = "gloo::EnforceNotMet"
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in \w+')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/torchrelay/", "<")
SIGABRT = 6


def cause_of(ended: Ended, logs: list[Path]) -> str:
    """How a worker ended, in words; with Gloo's reason if that stands in one of these logs."""
    if ended.signal != SIGABRT:
        return ended.cause
    for log in logs:
        found = mismatch(last_of(log))
        if found:
            return f"{ended.cause}: {found}"
    return ended.cause


def last_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def mismatch(text: str) -> str:
    """What the last abort in a log says of collectives that do not match; empty if it says nothing of that."""
    _, abort, last = text.rpartition(_ABORT)
    sizes = _SIZES.search(last) if abort else None
    if sizes is None:
        return ""
    told = f"{MISMATCH}: Gloo ended the process as {sizes[1]} bytes came where it waited for {sizes[2]}"
    line = line_in(last)
    return f"{told} ({line})" if line else told


def line_in(text: str) -> str:
    """The innermost line of the script, in the stacks that `faulthandler` has printed."""
    for name, line in _FRAME.findall(text):
        if not any(part in name for part in _LIBRARIES):
            return f"{Path(name).name}:{line}"
    return ""
