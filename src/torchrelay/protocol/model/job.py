"""The life of a job, as a value; its phases are those of the protocol."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from torchrelay.protocol.messages.events import JobSpec
from torchrelay.protocol.messages.ids import START, Generation, Point, Rank, WorkerId
from torchrelay.protocol.model.incident import Fault, Incident, Mark, Resolution
from torchrelay.protocol.model.moves import Move
from torchrelay.protocol.model.parts import Accounting, Attempts, Exceptions, Moving, Parking, Rollback, Signals
from torchrelay.protocol.model.roster import Seat
from torchrelay.protocol.model.table import Table


class JobPhase(StrEnum):
    """Where a job is. `phases` has what leads from one to the next, and what a loss does in each."""

    STARTING = "starting"  # workers come up; nothing is wired
    RUNNING = "running"
    QUIESCING = "quiescing"  # a move: all are asked how far they are, and begin nothing new
    HALTING = "halting"  # on the way to the boundary; targets are brought there
    RELEASING = "releasing"  # the move is called off: all go on as before
    PARKING = "parking"  # all stand after the boundary, and write themselves down
    SEALING = "sealing"  # all are written down; when the manifest is there the job has parked
    AGREEING = "agreeing"  # interrupted: survivors report where they stand
    PREPARING = "preparing"  # verdict given: survivors go to the safepoint, replacements are brought there
    RECONFIGURING = "reconfiguring"  # all stand at the safepoint: connect, and restore who holds no state
    RESUMING = "resuming"
    FINISHING = "finishing"  # every rank has finished: they may leave
    ENDING = "ending"  # the outcome is known; processes are being ended
    ENDED = "ended"


# A move that has not cut over: everybody trains, or stands at the boundary, in connections that nobody has touched.
BEFORE_CUTOVER = frozenset({JobPhase.QUIESCING, JobPhase.HALTING, JobPhase.RELEASING, JobPhase.PARKING})
# Everybody trains, or is about to stand at the boundary of a move.
TRAINING = BEFORE_CUTOVER | {JobPhase.RUNNING}
RECOVERING = frozenset({JobPhase.AGREEING, JobPhase.PREPARING, JobPhase.RECONFIGURING, JobPhase.RESUMING})


class Outcome(Struct, frozen=True):
    """How a job ended: the exit code and the reason."""

    code: int
    reason: str


class Stop(Struct, frozen=True):
    """The job is to stop: its ranks were told so by a signal, and have some time to end by themselves."""

    number: int
    reason: str
    since_ms: int
    grace_ms: int
    left: tuple[int | None, ...] = ()  # the exit codes of the ranks that have left, in this order; None: by a signal


class Job(Struct, frozen=True):
    """One training run."""

    spec: JobSpec
    seats: Table[Rank, Seat]
    phase_ms: int  # when the phase was entered
    phase: JobPhase = JobPhase.STARTING
    why: str = "waiting for nodes"  # in words, for people
    asks: str = ""  # why all are asked for something in this phase: what a job waits for meanwhile asks nobody anew
    generation: Generation = Generation(1)
    resume_point: Point | None = None  # the point this generation starts from; None: the first wiring
    boundary: Point | None = None  # the point after which all stop for a move; meant for this generation or the next
    answered_ms: int | None = None  # when somebody has reported last in this phase, or stands, or has told of a record
    stood_ms: int | None = None  # since when all holders stand at the boundary
    waiting_ms: int | None = None  # since when a rank waits for a spare
    # Whom each rank's private record was sent to in the last generations, the newest first.
    keepers: tuple[Table[Rank, tuple[WorkerId, ...]], ...] = ()
    once: Table[Rank, tuple[tuple[str, bytes], ...]] = Table()  # what a rank has done once: names and results, sorted
    attempts: Attempts = Attempts()
    exceptions: Exceptions = Exceptions()
    moving: Moving = Moving()
    rollback: Rollback = Rollback()
    parking: Parking = Parking()
    accounting: Accounting = Accounting()
    signals: Signals = Signals()
    stop: Stop | None = None
    outcome: Outcome | None = None

    @property
    def open_move(self) -> Move | None:
        return self.moving.moves[-1] if self.moving.moves and self.moving.moves[-1].open else None

    @property
    def resuming(self) -> bool:
        """Whether it is still to come back from a parking: before all train on it must not begin from anywhere else."""
        return self.parking.found is not None

    @property
    def open_incident(self) -> Incident | None:
        if self.accounting.incidents and self.accounting.incidents[-1].resolution is Resolution.OPEN:
            return self.accounting.incidents[-1]
        return None

    def is_held_by(self, worker: WorkerId, rank: Rank | None) -> bool:
        """Whether this worker holds that rank now."""
        return rank is not None and rank in self.seats and self.seats[rank].worker == worker

    def with_seat(self, rank: Rank, seat: Seat) -> Job:
        return replace(self, seats=self.seats.put(rank, seat))

    def with_attempts(self, **changes: Any) -> Job:
        return replace(self, attempts=replace(self.attempts, **changes))

    def with_exceptions(self, **changes: Any) -> Job:
        return replace(self, exceptions=replace(self.exceptions, **changes))

    def with_moving(self, **changes: Any) -> Job:
        return replace(self, moving=replace(self.moving, **changes))

    def with_rollback(self, **changes: Any) -> Job:
        return replace(self, rollback=replace(self.rollback, **changes))

    def with_parking(self, **changes: Any) -> Job:
        return replace(self, parking=replace(self.parking, **changes))

    def with_accounting(self, **changes: Any) -> Job:
        return replace(self, accounting=replace(self.accounting, **changes))

    def enter(self, phase: JobPhase, now_ms: int, why: str) -> Job:
        return replace(self, phase=phase, phase_ms=now_ms, why=why, asks=why, answered_ms=None).tell(now_ms, why)

    # ------------------------------------------------------------ the incident under way

    def moment(self, now_ms: int, age_ms: int = 0) -> int:
        """When something happened so long ago, as incidents date it: with what the clock has left out.

        Deadlines leave it out, as nobody may be called late because the one who listens was away. But training stood
        still for all of it.
        """
        return now_ms + self.accounting.left_out_ms - age_ms

    def with_incident(self, incident: Incident) -> Job:
        return self.with_accounting(incidents=(*self.accounting.incidents[:-1], incident))

    def suffer(self, fault: Fault, now_ms: int) -> Job:
        """Open an incident with this fault, or add it to the open one.

        The pause began with the first of them, whichever is heard first; a collective that had failed was its echo.
        What was only judged later says nothing of that: somebody may not have moved for long before anybody stood.
        """
        job = self
        incident = job.open_incident
        if incident is None:
            incident = Incident(len(job.accounting.incidents) + 1, job.spec.job, job.generation)
            incident = incident.mark(Mark.HEARD, job.moment(now_ms))
            job = job.with_accounting(incidents=(*job.accounting.incidents, incident))
        seen = [one.at_ms for one in (fault, job.exceptions.broken) if one is not None and one.exact]
        incident = incident.mark(Mark.FAULT, min([incident.marks.get(Mark.FAULT, fault.at_ms), *seen]))
        where = f" on {fault.node}" if fault.node else ""
        who = f"rank {fault.rank} ({fault.worker}{where}): " if fault.rank is not None else ""
        incident = incident.suffer(fault)
        return job.with_incident(incident.tell(job.moment(now_ms), f"{who}{fault.cause}"))

    def tell(self, now_ms: int, text: str) -> Job:
        incident = self.open_incident
        return self if incident is None else self.with_incident(incident.tell(self.moment(now_ms), text))

    def mark(self, mark: Mark, now_ms: int) -> Job:
        incident = self.open_incident
        return self if incident is None else self.with_incident(incident.mark(mark, self.moment(now_ms)))

    def mark_first(self, mark: Mark, moment: int) -> Job:
        """Mark the first of several that are heard in any order, in an incident that is under way."""
        incident = self.open_incident
        assert incident is not None, "somebody has made it"
        return self.with_incident(incident.mark(mark, min(moment, incident.marks.get(mark, moment))))

    def mark_last(self, mark: Mark, moment: int) -> Job:
        """Mark the last of several that are heard in any order."""
        incident = self.open_incident
        last = moment if incident is None else max(moment, incident.marks.get(mark, moment))
        return self if incident is None else self.with_incident(incident.mark(mark, last))

    def went_on(self, now_ms: int) -> Job:
        """All train again, and nothing was lost: that is proved by the next point that all commit."""
        incident = self.open_incident
        if incident is None:
            return self
        incident = replace(incident, went_on=self.generation, since=self.resume_point or START)
        job = self.with_accounting(unproved=self.accounting.unproved + 1).with_incident(incident)
        return job.close(Resolution.RESUMED, now_ms, eligible=incident.eligible)

    def prove(self, generation: Generation, point: Point, now_ms: int) -> Job:
        """All ranks have committed this point in this generation: whatever they had resumed from is clean."""
        if not self.accounting.unproved:
            return self
        moment, incidents = self.moment(now_ms), list(self.accounting.incidents)
        unseen, still = self.accounting.unproved, 0
        for at in range(len(incidents) - 1, -1, -1):  # they are among the last
            if unseen == 0:
                break
            one = incidents[at]
            if one.resolution is not Resolution.RESUMED:
                continue
            unseen -= 1
            if one.went_on <= generation and one.since < point:
                one = one.tell(moment, f"resolved: {Resolution.CLEAN}, as all ranks have committed {point}")
                incidents[at] = replace(one, resolution=Resolution.CLEAN)
            else:
                still += 1
        return self.with_accounting(incidents=tuple(incidents), unproved=still)

    def close(self, resolution: Resolution, now_ms: int, *, eligible: bool = True) -> Job:
        """Close the open incident, if there is one."""
        incident = self.open_incident
        if incident is None:
            return self
        closed = replace(incident, resolution=resolution, eligible=eligible)
        return self.with_incident(closed.tell(self.moment(now_ms), f"resolved: {resolution}"))
