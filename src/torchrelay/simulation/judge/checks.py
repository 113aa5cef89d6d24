"""Checks: what the ledger says of an event, and what is ordered after it, against what the world knows.

Of time, the ledger says what the world's own clock says, whoever was away meanwhile:

the job's time    goes with the world's, also where the orchestrator's clock leaves something out
a fault           is dated when the process ended, however late that is heard
the standstill    begins when the first stands at the boundary, and the pause ends when the last goes on
"""

from __future__ import annotations

from collections.abc import Iterable

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import START, Point, Rank, WorkerId
from torchrelay.protocol.model.incident import UNSETTLED, Mark, Resolution
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.moves import Move, MoveState
from torchrelay.protocol.model.roster import Seat
from torchrelay.simulation.scene import Scene


class Violation(AssertionError):
    """An invariant does not hold: this ends the world."""


# ---------------------------------------------------------------- dates


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
    if not now.accounting.incidents:
        return
    known = was is not None and len(was.accounting.incidents) == len(now.accounting.incidents)
    old = was.accounting.incidents[-1].faults if was is not None and known else ()
    faults = now.accounting.incidents[-1].faults
    new = [fault for fault in faults if fault not in old and fault.detector.startswith("agent: ")]
    ended = world.processes[event.worker].ended_ms if event.worker in world.processes else None
    for fault in new:
        if fault.at_ms != ended:
            raise Violation(f"{event.worker} ended at {ended}, and the ledger says {fault.at_ms}")
        begun = now.accounting.incidents[-1].marks.get(Mark.FAULT)
        if begun is None or begun > fault.at_ms:
            raise Violation(f"the pause begins at {begun}, after its fault at {fault.at_ms}")


def check_end(world: Scene, now: Job) -> None:
    """All train again since the last of them went on."""
    incident = now.accounting.incidents[-1]
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


# ---------------------------------------------------------------- orders that make sense at one time


def check_together(standing: frozenset[od.Order]) -> None:
    """What is said to one worker at one time makes sense together."""
    of_worker: dict[WorkerId, set[type[od.Order]]] = {}
    for order in standing:
        if isinstance(order, od.PassOn):
            continue  # it is the agent's to send, whatever its worker does
        worker: WorkerId = getattr(order, "worker")  # noqa: B009 - every order names a worker, each kind by itself
        kinds = of_worker.setdefault(worker, set())
        if type(order) in kinds:
            raise Violation(f"{worker} is told {type(order).__name__} twice, differently")
        kinds.add(type(order))
    for worker, kinds in of_worker.items():
        if len(kinds) > 1 and frozenset(kinds) not in TOGETHER:
            raise Violation(f"{worker} is told at once: {sorted(kind.__name__ for kind in kinds)}")


TOGETHER = frozenset(
    {
        frozenset({od.Assign, od.Interrupt}),
        frozenset({od.Assign, od.Replay}),
        frozenset({od.Assign, od.Decide}),  # a replacement that was restored, and is interrupted before it resumed
        frozenset({od.Reconfigure, od.Restore}),
        frozenset({od.Decide, od.Recall}),
        frozenset({od.Assign, od.Decide, od.Recall}),
        frozenset({od.Assign, od.Recall}),  # all go back to snapshots: replacements hand out what lies on their nodes
        frozenset({od.Assign, od.Replay, od.Recall}),
    }
)


# ---------------------------------------------------------------- what is called clean

# An incident is clean only when all ranks have committed a point after the one from which they went on.


def check_proofs(world: Scene, was: Job, now: Job) -> None:
    """What an event has made clean, against what the ranks have done."""
    for before, after in zip(was.accounting.incidents, now.accounting.incidents, strict=False):
        if before.resolution is after.resolution or after.resolution is not Resolution.CLEAN:
            continue
        world.seen(f"resolution: {after.resolution}")
        points = [furthest(world, rank) for rank in now.seats]
        # From open to clean at once: all scripts had ended by the time when it was heard that all had gone on.
        if before.resolution not in UNSETTLED or min(points) <= after.since:
            raise Violation(f"{after.name} is called clean, and ranks have come to {points} from {after.since}")
    told = sum(incident.resolution is Resolution.RESUMED for incident in now.accounting.incidents)
    unproved, attempts = now.accounting.unproved, now.attempts
    if unproved > told or (unproved < told and not attempts.restarts and attempts.trained):
        raise Violation(f"{unproved} incidents are to be proved, and {told} are not")


def furthest(world: Scene, rank: Rank) -> Point:
    """The last point that anybody has committed as this rank."""
    every = [each.training.committed for each in world.processes.values() if each.rank == rank]
    return max((point for point in every if point is not None), default=START)


def lets_go(move: Move, rank: Rank) -> bool:
    """Whether a move is over for a rank, and has not only been called off."""
    over = rank not in move.ranks if move.open else move.state is not MoveState.CALLED_OFF
    return over or rank in move.moved
