"""Chronicle: what a journal tells of a run whose orchestrator is away."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from torchrelay.api.endpoint import JOURNAL
from torchrelay.api.shown import Audit, Incidents, JobStatus, Moves, Nodes, Ranks, Spares, WhyView
from torchrelay.client.client import Denied
from torchrelay.orchestrator.store.journal import Call, JournalRefused, read_newest
from torchrelay.orchestrator.views.places import view_moves, view_nodes_in_full, view_spares
from torchrelay.orchestrator.views.plans import PlanRefused
from torchrelay.orchestrator.views.scene import Scene, Ways
from torchrelay.orchestrator.views.story import replay
from torchrelay.orchestrator.views.views import view_audit, view_incidents, view_job, view_ranks
from torchrelay.orchestrator.views.why import why
from torchrelay.protocol.health.pulses import FailureDetector
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.rules.cluster import EMPTY


@dataclass(frozen=True, slots=True)
class Chronicle:
    """A journal, replayed. `remark` says how old it is."""

    scene: Scene
    remark: str
    calls: tuple[Call, ...] = ()
    over: bool = False  # there was a job, and it has ended

    @classmethod
    def of(cls, run_dir: Path) -> Chronicle:
        """Read the journal of a run. Raises `Denied` if it cannot be read."""
        try:
            start, history = read_newest(run_dir / JOURNAL)
        except JournalRefused as error:
            raise Denied(500, str(error)) from error
        ways: Ways = {} if start is None else start.known_ways()
        cluster = replay(history.entries, ways, EMPTY if start is None else start.cluster)
        last = max(history.entries[-1].at_ms if history.entries else 0, cluster.now_ms)
        scene = Scene(cluster, FailureDetector(), history.reached, history.anchors, last, ways, history.lease)
        over = bool(cluster.jobs) and all(job.phase is JobPhase.ENDED for job in cluster.jobs.values())
        remark = f"the run ended at {scene.at(last)}" if over else away(scene, last)
        return cls(scene, remark, history.calls, over)

    def job(self, job: str | None = None) -> JobStatus:
        return view_job(self.scene, self._find(job))

    def view_ranks(self, job: str | None = None) -> Ranks:
        return view_ranks(self.scene, self._find(job))

    def view_incidents(self, job: str | None = None) -> Incidents:
        return view_incidents(self.scene, self._find(job))

    def view_nodes(self) -> Nodes:
        return view_nodes_in_full(self.scene)

    def view_spares(self, job: str | None = None) -> Spares:
        return view_spares(self.scene, self._find(job))

    def view_moves(self, job: str | None = None) -> Moves:
        return view_moves(self.scene, self._find(job))

    def view_why(self, about: str, job: str | None = None) -> WhyView:
        try:
            return why(self.scene, self._find(job), about)
        except PlanRefused as error:
            raise Denied(404, str(error)) from error

    def view_audit(self) -> Audit:
        return view_audit(self.calls)

    def _find(self, name: str | None) -> Job:
        for job in reversed(list(self.scene.cluster.jobs.values())):
            if name in (None, job.spec.job):
                return job
        if name is None:
            raise Denied(503, "no job has been submitted")
        raise Denied(404, f"no job named {name!r}; known: {self._known()}")

    def _known(self) -> str:
        return ", ".join(sorted(self.scene.cluster.jobs)) or "none"


def away(scene: Scene, last_ms: int) -> str:
    """That the orchestrator does not answer, and how old what it wrote is."""
    at = scene.at(last_ms)
    if not at:
        return "the orchestrator is away, and its journal is empty"
    seconds = time.time() - scene.wall_ms(last_ms) / 1000
    return f"the orchestrator is away; its journal ends at {at}, {seconds:.0f} s ago"
