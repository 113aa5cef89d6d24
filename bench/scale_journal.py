"""The journal of a large job: bytes for a recovery, and how soon an orchestrator starts from the journal of a day.

The core itself makes the events, half an hour between two losses, and they are written as an orchestrator writes them,
with its snapshots. Then a real orchestrator is started on that, and killed, several times: once the day is over, and
right after a recovery, which it replays.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median

from figures import progress
from journal import start
from scale_core import JOB, Core
from torchrelay.api.endpoint import JOURNAL
from torchrelay.orchestrator.core.compaction import Compaction
from torchrelay.orchestrator.store.journal import Journal
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od

BETWEEN_MS = 1_728_000  # two losses of a day with 50
STARTS = 3


class Written(Core):
    """A core whose events are in a journal."""

    def __init__(self, nodes: int, journal: Journal) -> None:
        self.journal, self.compaction = journal, Compaction(journal)
        self.pauses_ms: list[float] = []
        journal.anchor(0, 1)
        super().__init__(nodes)

    def hear(self, events: Sequence[ev.Event]) -> list[od.Order]:
        self.journal.append_all(events, self.now_ms + 10)
        return super().hear(events)

    def rest(self) -> None:
        """Until the next loss: a snapshot is taken if one is due, and what is old is packed away."""
        for _ in range(10):
            begun = time.perf_counter()
            self.compaction.take(self.cluster, {}, busy=False)
            self.pauses_ms.append(1000 * (time.perf_counter() - begun))
        self.now_ms += BETWEEN_MS
        self.journal.keep_time(self.now_ms, 1 + self.now_ms)


def size_of(run_dir: Path) -> int:
    return sum(path.stat().st_size for path in run_dir.glob(f"{JOURNAL}*"))


def measure(nodes: int, incidents: int) -> dict[str, float]:
    """A day of so many incidents; sizes in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        with closing(Journal(run_dir / JOURNAL)) as journal:
            core = Written(nodes, journal)
            ranks = len(core.cluster.jobs[JOB].seats)
            core.rest()
            before, first = size_of(run_dir), journal.last_seq
            for number in range(incidents):
                progress(f"journal: recovery {number + 1} of {incidents}")
                core.kill((number * 37 + 3) % ranks)
                core.rest()
            each = (size_of(run_dir) - before) / incidents
            events = (journal.last_seq - first) / incidents
        day = median(start(run_dir) for _ in range(STARTS))
        with closing(Journal(run_dir / JOURNAL)) as journal:
            more = Written.__new__(Written)
            more.__dict__.update(core.__dict__, journal=journal)
            more.kill(1)
        after = median(start(run_dir) for _ in range(STARTS))
    return {
        "ranks": ranks,
        "incidents": incidents,
        "events_per_recovery": events,
        "bytes_per_recovery": each,
        "longest_snapshot_ms": max(core.pauses_ms),
        "start_s": day,
        "start_after_recovery_s": after,
    }
