"""Parking as operators see it: what a call to park would do, and how a parking stands."""

from __future__ import annotations

from torchrelay.api.shown import Change
from torchrelay.orchestrator.views.plans import Planned, PlanRefused, check_job, nothing
from torchrelay.orchestrator.views.scene import Scene
from torchrelay.protocol.messages.events import ParkAsked, Tick
from torchrelay.protocol.model.job import Job
from torchrelay.protocol.rules.cluster import advance
from torchrelay.protocol.rules.parking import lasting_objection


def plan_park(scene: Scene, job: Job, reason: str, grace_ms: int | None, number: int, who: str) -> Planned:
    """Raises `PlanRefused`."""
    check_job(job)
    spec, parking = job.spec, job.parking
    if not spec.park_dir:
        raise PlanRefused(f"{spec.job} was started without --park-dir: it has nowhere to write itself down")
    why = lasting_objection(scene.cluster, job)
    if why:
        raise PlanRefused(f"{spec.job} cannot be parked now: {why}")
    event = ParkAsked(
        job=spec.job, reason=reason or f"asked for by {who}", source=who, grace_ms=grace_ms, number=number
    )
    if advance(scene.cluster, event, scene.now_ms) == advance(scene.cluster, Tick(), scene.now_ms):
        return nothing("park", f"{spec.job} is to park already ({parking.source}): {parking.reason}")
    takes = f"about {parking.takes_ms / 1000:.1f} s" if parking.takes_ms else "a time that was not measured yet"
    lines = [f"park {spec.job}: all stop at the next boundary, write themselves to {spec.park_dir} ({takes})"]
    lines.append("and the job ends with 75. `torchrelay run --resume DIR` goes on from there")
    if parking.why_not:
        lines.append(f"the last time it came to nothing: {parking.why_not}")
    if grace_ms is not None and parking.takes_ms > grace_ms:
        lines.append(f"it does not fit into {grace_ms / 1000:g} s: the ranks are told to end by themselves instead")
    return Planned(event, Change(verb="park", applied=False, changes=True, plan=tuple(lines)))


def parking_text(job: Job) -> str:
    """How a parking stands, in words; empty if there is nothing to say."""
    spec, parking = job.spec, job.parking
    if not spec.park_dir or job.outcome is not None:
        return ""
    takes = f", takes about {parking.takes_ms / 1000:.1f} s" if parking.takes_ms else ""
    if parking.asked:
        waits = f"; waits: {parking.why_not}" if parking.why_not and not parking.name else ""
        return f"asked for by {parking.source}: {parking.reason}{waits}"
    return f"to {spec.park_dir}{takes}" + (f"; {parking.why_not}" if parking.why_not else "")
