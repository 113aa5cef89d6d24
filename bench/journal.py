"""How long an orchestrator takes to start from an old journal: the target is 2 s, whatever the age.

The journal is that of 16 ranks on 2 nodes that lost a rank each hour, made by the protocol core itself and written as
an orchestrator writes it: an event at a time, with its snapshots. Then a real orchestrator is started on it, killed
and started again, several times; and `torchrelay status` reads it without one. `--whole` replays all of it, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from figures import finish, progress
from tests.support.aged import aged
from torchrelay.api.endpoint import JOURNAL, read_endpoint
from torchrelay.client.chronicle import Chronicle
from torchrelay.orchestrator.core.compaction import Compaction
from torchrelay.orchestrator.store.journal import Journal, read_history
from torchrelay.orchestrator.views.scene import Ways, note_ways
from torchrelay.orchestrator.views.story import replay
from torchrelay.protocol.rules.cluster import EMPTY, advance

RANKS = 16
EACH = 68  # events of an incident, about
STARTS = 5
DEADLINE_S = 120.0


def write(path: Path, incidents: int) -> tuple[int, list[float]]:
    """The journal; returns the number of events, and how long each snapshot took, in ms."""
    cluster, ways, pauses = EMPTY, Ways(), []
    with closing(Journal(path)) as journal:
        compaction = Compaction(journal)
        journal.anchor(0, 1)
        for event, at_ms in aged(RANKS, incidents):
            seq = journal.append(event, at_ms)
            before, cluster = cluster, advance(cluster, event, at_ms)
            note_ways(ways, before, cluster)
            begin, kept = time.perf_counter(), compaction.seq
            compaction.take(cluster, ways, busy=False)
            if compaction.seq != kept:
                pauses.append(1000 * (time.perf_counter() - begin))
            if seq % 10_000 == 0:
                progress(f"{seq} events")
        return journal.last_seq, pauses


def start(run_dir: Path) -> float:
    """Seconds from the start of an orchestrator's process until it listens; it is killed then."""
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "torchrelay.orchestrator", "--run-dir", str(run_dir)])
    try:
        while (found := read_endpoint(run_dir)) is None or found.pid != process.pid:
            if process.poll() is not None or time.perf_counter() - begin > DEADLINE_S:
                raise SystemExit("the orchestrator does not listen")
            time.sleep(0.005)
        return time.perf_counter() - begin
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=300_000, help="of the journal, about")
    parser.add_argument("--whole", action="store_true", help="replay all events as well: minutes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        path = run_dir / JOURNAL
        events, pauses = write(path, options.events // EACH)
        figures: dict[str, object] = {"events": events, "file_mb": path.stat().st_size / 1e6}
        figures |= {"snapshot_ms": median(pauses or [0.0]), "longest_snapshot_ms": max(pauses, default=0.0)}
        starts = [start(run_dir) for _ in range(STARTS)]
        figures |= {"start_s": median(starts), "longest_start_s": max(starts)}
        begin = time.perf_counter()
        told = Chronicle.of(run_dir)
        figures["offline_s"] = time.perf_counter() - begin
        figures["incidents"] = len(told.view_incidents().incidents)
        if options.whole:
            begin = time.perf_counter()
            replay(read_history(path).entries)
            figures["whole_s"] = time.perf_counter() - begin
    finish("journal", figures, target={"start_s": 2.0})


if __name__ == "__main__":
    main()
