"""Dating: what the ledger says of time is what the world's own clock says, whoever was away meanwhile.

the job's time    goes with the world's, also where the orchestrator's clock leaves something out
a fault           is dated when the process ended, however late that is heard
the standstill    begins when the first stands at the boundary, and the pause ends when the last goes on
"""

from __future__ import annotations

from collections.abc import Iterable

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.model.incident import Mark, Resolution
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.roster import Seat
from torchrelay.simulation.judge.violation import Violation
from torchrelay.simulation.scene import Scene


def check_dates(world: Scene, event: ev.Event, now_ms: int, was: Job | None, now: Job) -> None:
    """After an event, heard when the orchestrator's clock said `now_ms`. Raises `Violation`."""
    if now.moment(now_ms) != world.now:
        raise Violation(f"the ledger says {now.moment(now_ms)} at {world.now}")
    if isinstance(event, ev.WorkerExited):
        check_fault(world, event, was, now)
    elif isinstance(event, ev.WorkerReady) and now.phase is JobPhase.HALTING and now.open_incident is not None:
        stood = now.open_incident.marks.get(Mark.STOOD)
        times = said(world, (seat for seat in now.seats.values() if seat.ready), od.Decide)
        if times and stood != min(times):
            raise Violation(f"the first stood at {min(times)}, and the ledger says {stood}")
    if was is not None and was.open_incident is not None and now.open_incident is None:
        check_end(world, now)


def check_fault(world: Scene, event: ev.WorkerExited, was: Job | None, now: Job) -> None:
    """The fault that an exit makes: it happened when the process ended."""
    if not now.incidents:
        return
    known = was is not None and len(was.incidents) == len(now.incidents)
    old = was.incidents[-1].faults if was is not None and known else ()
    new = [fault for fault in now.incidents[-1].faults if fault not in old and fault.detector.startswith("agent: ")]
    ended = world.processes[event.worker].ended_ms if event.worker in world.processes else None
    for fault in new:
        if fault.at_ms != ended:
            raise Violation(f"{event.worker} ended at {ended}, and the ledger says {fault.at_ms}")
        begun = now.incidents[-1].marks.get(Mark.FAULT)
        if begun is None or begun > fault.at_ms:
            raise Violation(f"the pause begins at {begun}, after its fault at {fault.at_ms}")


def check_end(world: Scene, now: Job) -> None:
    """All train again since the last of them went on."""
    incident = now.incidents[-1]
    if incident.resolution is not Resolution.RESUMED or any(seat.finished for seat in now.seats.values()):
        return
    times = said(world, now.seats.values(), od.Resume)
    resumed = incident.marks.get(Mark.RESUMED)
    if len(times) == len(now.seats) and resumed != max(times):
        raise Violation(f"the last went on at {max(times)}, and the ledger says {resumed}")


def said(world: Scene, seats: Iterable[Seat], order: type[od.Order]) -> list[int]:
    """When the holders of these seats have answered an order of this kind, as far as they have."""
    holders = [world.processes[seat.worker] for seat in seats if seat.worker is not None]
    return [holder.training.answers[order][1] for holder in holders if order in holder.training.answers]
