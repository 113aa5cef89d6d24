"""An incident in full, and its line in the ledger, for tests of whatever reads ledgers."""

from __future__ import annotations

from torchrelay.api.shown import IncidentView
from torchrelay.goodput.ledger import Line, line_of
from torchrelay.orchestrator.store.journal import Anchor
from torchrelay.orchestrator.views.scene import Scene
from torchrelay.orchestrator.views.views import view_incident
from torchrelay.protocol.health.pulses import FailureDetector
from torchrelay.protocol.messages.events import JobSpec, JobSubmitted
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.model.incident import Fault, Incident, Mark, Resolution
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.rules.cluster import EMPTY, advance

CLUSTER = advance(EMPTY, JobSubmitted(spec=JobSpec(job=JobId("job"), world_size=4, nproc_per_node=4)), 0)
BEGUN = 1_000
WALL = 1_800_000_000_000
FAULT = Fault("SIGKILL", "agent: process exit", BEGUN, Rank(2), WorkerId("node-1.0.5"), NodeId("node-1"))
MARKS = {
    Mark.FAULT: BEGUN,
    Mark.HEARD: BEGUN + 5,
    Mark.INTERRUPTED: BEGUN + 6,
    Mark.AGREED: BEGUN + 10,
    Mark.ACQUIRED: BEGUN + 7,
    Mark.READY: BEGUN + 50,
    Mark.RECONFIGURED: BEGUN + 80,
    Mark.RESTORED: BEGUN + 70,
    Mark.RESUMED: BEGUN + 90,
}


def view(
    resolution: Resolution = Resolution.CLEAN,
    *,
    faults: tuple[Fault, ...] = (FAULT,),
    marks: dict[Mark, int] = MARKS,
    eligible: bool = True,
    restored: bool = True,
    story: tuple[tuple[int, str], ...] = (),
) -> IncidentView:
    incident = Incident(
        3,
        JobId("job"),
        Generation(4),
        faults,
        Table(marks),
        story,
        "redo the step after 41",
        Point(41),
        (Rank(0),) if restored else (),
        8_000 if restored else 0,
        "d1" * 16 if restored else "",
        eligible,
        resolution,
    )
    scene = Scene(CLUSTER, FailureDetector(), {}, (Anchor(0, WALL, 1),), 5_000)
    return view_incident(scene, incident)


def line(resolution: Resolution = Resolution.CLEAN, *, eligible: bool = True) -> Line:
    return line_of(view(resolution, eligible=eligible))
