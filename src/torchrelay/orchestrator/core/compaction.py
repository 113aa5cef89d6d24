"""Compaction: when a snapshot of the state is taken, so that a start is short whatever the journal's age."""

from __future__ import annotations

import logging

from torchrelay.orchestrator.store import archive, saved_cluster
from torchrelay.orchestrator.store.journal import Journal
from torchrelay.orchestrator.store.saved_cluster import SavedCluster
from torchrelay.orchestrator.views.scene import Ways
from torchrelay.protocol.model.state import Cluster

log = logging.getLogger("torchrelay.orchestrator")

LATEST = 5  # so many times overdue it is taken in the middle of things, too
PER_RANK = 8  # events of a recovery for each rank, and more: it is not taken in the middle of one


class Compaction:
    """Of one journal. `seq`: of the newest snapshot that was kept, or tried."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._behind = False  # whether there is more to pack away
        self.seq = 0

    def start(self) -> SavedCluster | None:
        """The snapshot that a start can begin with; None: it begins with the first event."""
        found = self._journal.snapshot()
        self.seq = found.seq if found is not None else 0
        return found

    def take(self, cluster: Cluster, ways: Ways, *, busy: bool) -> None:
        """Take one, if it is time. `busy`: somebody waits for us just now. Raises as `Journal.append` does."""
        seq = self._journal.last_seq
        if seq - self.seq < wanted(cluster, busy):
            if self._behind and not busy:
                self._behind = self._journal.pack_away()
            return
        self.seq = seq
        try:
            state = saved_cluster.encode(seq, cluster, ways)
        except saved_cluster.Inexact as error:
            log.error("no snapshot of the state after event %d: %s (a defect of torchrelay)", seq, error)
            return
        self._journal.keep_snapshot(state)
        self._behind = self._journal.pack_away()


def wanted(cluster: Cluster, busy: bool) -> int:
    """After how many events a snapshot is to be taken: what it costs grows with the ranks."""
    ranks = sum(len(job.seats) for job in cluster.jobs.values())
    return max(archive.EVERY * LATEST, LATEST * PER_RANK * ranks) if busy else max(archive.EVERY, ranks)
