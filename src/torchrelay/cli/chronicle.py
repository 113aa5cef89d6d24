"""Chronicle: what a journal tells of a run whose orchestrator is away."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from torchrelay.cli.client import Denied
from torchrelay.orchestrator.endpoint import JOURNAL
from torchrelay.orchestrator.journal import JournalRefused, read_history
from torchrelay.orchestrator.story import replay
from torchrelay.orchestrator.views import Incidents, JobStatus, Ranks, Scene, view_incidents, view_job, view_ranks
from torchrelay.protocol.job import Job, JobPhase
from torchrelay.protocol.vitals import Vitals


@dataclass(frozen=True, slots=True)
class Chronicle:
    """A journal, replayed. `remark` says how old it is."""

    scene: Scene
    remark: str

    @classmethod
    def of(cls, run_dir: Path) -> Chronicle:
        """Read the journal of a run. Raises `Denied` if it cannot be read."""
        try:
            history = read_history(run_dir / JOURNAL)
        except JournalRefused as error:
            raise Denied(500, str(error)) from error
        cluster = replay(history.entries)
        last = max(history.entries[-1].at_ms if history.entries else 0, cluster.now_ms)
        scene = Scene(cluster, Vitals(), history.reached, history.anchors, last)
        over = all(job.phase is JobPhase.ENDED for job in cluster.jobs.values()) and cluster.jobs
        return cls(scene, f"the run ended at {scene.at(last)}" if over else away(scene, last))

    def job(self, job: str | None = None) -> JobStatus:
        return view_job(self.scene, self._find(job))

    def view_ranks(self, job: str | None = None) -> Ranks:
        return view_ranks(self.scene, self._find(job))

    def view_incidents(self, job: str | None = None) -> Incidents:
        return view_incidents(self.scene, self._find(job))

    def _find(self, name: str | None) -> Job:
        for job in reversed(list(self.scene.cluster.jobs.values())):
            if name in (None, job.spec.job):
                return job
        raise Denied(404, "no job has been submitted" if name is None else f"no job named {name!r}")


def away(scene: Scene, last_ms: int) -> str:
    """That the orchestrator does not answer, and how old what it wrote is."""
    at = scene.at(last_ms)
    if not at:
        return "the orchestrator is away, and its journal is empty"
    seconds = time.time() - scene.wall_ms(last_ms) / 1000
    return f"the orchestrator is away; its journal ends at {at}, {seconds:.0f} s ago"
