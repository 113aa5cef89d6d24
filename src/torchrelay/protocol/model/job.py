"""The life of a job, as a value; its phases are those of the protocol."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from torchrelay.protocol.messages.events import JobSpec, Snapshot
from torchrelay.protocol.messages.ids import START, Generation, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.model.deaths import Death
from torchrelay.protocol.model.incident import Fault, Incident, Mark, Resolution
from torchrelay.protocol.model.moves import Move, Request
from torchrelay.protocol.model.roster import Seat
from torchrelay.protocol.model.table import Table


class JobPhase(StrEnum):
    """Where a job is. `phases` has what leads from one to the next, and what a loss does in each."""

    STARTING = "starting"  # workers come up; nothing is wired
    RUNNING = "running"
    QUIESCING = "quiescing"  # a move: all are asked how far they are, and begin nothing new
    HALTING = "halting"  # on the way to the boundary; targets are brought there
    RELEASING = "releasing"  # the move is called off: all go on as before
    AGREEING = "agreeing"  # interrupted: survivors report where they stand
    PREPARING = "preparing"  # verdict given: survivors go to the safepoint, replacements are brought there
    RECONFIGURING = "reconfiguring"  # all stand at the safepoint: connect, and restore who holds no state
    RESUMING = "resuming"
    FINISHING = "finishing"  # every rank has finished: they may leave
    ENDING = "ending"  # the outcome is known; processes are being ended
    ENDED = "ended"


# A move that has not cut over: everybody trains, or stands at the boundary, in connections that nobody has touched.
BEFORE_CUTOVER = frozenset({JobPhase.QUIESCING, JobPhase.HALTING, JobPhase.RELEASING})
# Everybody trains, or is about to stand at the boundary of a move.
TRAINING = BEFORE_CUTOVER | {JobPhase.RUNNING}
RECOVERING = frozenset({JobPhase.AGREEING, JobPhase.PREPARING, JobPhase.RECONFIGURING, JobPhase.RESUMING})


class Outcome(Struct, frozen=True):
    """How a job ended: the exit code and the reason."""

    code: int
    reason: str


class Raised(Struct, frozen=True):
    """An exception that a worker told of, and the exit code it led to when known."""

    worker: WorkerId
    rank: Rank
    point: Point | None
    signature: str
    summary: str
    at_ms: int
    fatal: bool  # False: its process was interrupted anyway and stays
    code: int | None = None
    cramped: bool = False  # out of memory in a slot that is shared: that says nothing about the script


class PassedOn(Struct, frozen=True):
    """A signal for all ranks, the how manieth of this job, and when it was asked for."""

    number: int
    nth: int
    at_ms: int


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
    generation: Generation = Generation(1)
    resume_point: Point | None = None  # the point this generation starts from; None: the first wiring
    stood_ms: int | None = None  # since when all holders stand at the boundary
    boundary: Point | None = None  # the point after which all stop for a move; meant for this generation or the next
    why: str = "waiting for nodes"
    trained: bool = False  # something was committed since the last start of all workers
    starts: int = 0  # starts of all workers in a row that committed nothing
    failed_starts: int = 0  # of these, those that the script may have failed
    restarts: int = 0  # starts from the script's own checkpoint
    fruitless: int = 0  # generations in a row that were tried, and in which nothing was committed
    advanced_in: Generation = Generation(0)  # which went on from a further point than the one before, the last time
    # Whom each rank's private record was sent to in the last generations, the newest first.
    keepers: tuple[Table[Rank, tuple[WorkerId, ...]], ...] = ()
    waiting_ms: int | None = None  # since when a rank waits for a spare
    broken: Fault | None = None  # a collective has failed, and nobody is known to be lost
    broken_ms: int = 0  # since when that is known
    raised: tuple[Raised, ...] = ()
    deaths: tuple[Death, ...] = ()  # ends of workers, by themselves, while they trained
    last_code: int = 1
    once: Table[Rank, tuple[tuple[str, bytes], ...]] = Table()  # what a rank has done once: names and results, sorted
    requests: Table[Rank, Request] = Table()  # moves that operators want
    moves: tuple[Move, ...] = ()  # the newest last; at most one is open
    moved: int = 0  # moves named so far
    cutovers: tuple[int, ...] = ()  # when ranks were moved within the last hour
    incidents: tuple[Incident, ...] = ()
    snapshot_every: int = 0  # steps; 0: none are taken
    snapshot_buddies: int = 1  # nodes that get a copy of each, beside its own
    kept: Table[NodeId, tuple[Snapshot, ...]] = Table()  # snapshots, by the node in whose memory they lie
    rolled: Point | None = None  # the snapshot from which all ranks begin anew, until training goes on
    furthest: Point = START  # from which it was ever gone back to a snapshot
    rolls: int = 0  # how often, without getting any further
    unproved: int = 0  # incidents after which all went on, and have committed nothing yet
    left_out_ms: int = 0  # what the clock has left out since the job was submitted
    signals: tuple[PassedOn, ...] = ()  # to be passed on to ranks that have not had them
    signalled: int = 0  # how many there were so far
    stop: Stop | None = None
    outcome: Outcome | None = None

    @property
    def open_move(self) -> Move | None:
        return self.moves[-1] if self.moves and self.moves[-1].open else None

    @property
    def open_incident(self) -> Incident | None:
        if self.incidents and self.incidents[-1].resolution is Resolution.OPEN:
            return self.incidents[-1]
        return None

    def is_held_by(self, worker: WorkerId, rank: Rank | None) -> bool:
        """Whether this worker holds that rank now."""
        return rank is not None and rank in self.seats and self.seats[rank].worker == worker

    def with_seat(self, rank: Rank, seat: Seat) -> Job:
        return replace(self, seats=self.seats.put(rank, seat))

    def enter(self, phase: JobPhase, now_ms: int, why: str) -> Job:
        return replace(self, phase=phase, phase_ms=now_ms, why=why).tell(now_ms, why)

    # ------------------------------------------------------------ the incident under way

    def moment(self, now_ms: int, age_ms: int = 0) -> int:
        """When something happened so long ago, as incidents date it: with what the clock has left out.

        Deadlines leave it out, as nobody may be called late because the one who listens was away. But training stood
        still for all of it.
        """
        return now_ms + self.left_out_ms - age_ms

    def with_incident(self, incident: Incident) -> Job:
        return replace(self, incidents=(*self.incidents[:-1], incident))

    def suffer(self, fault: Fault, now_ms: int) -> Job:
        """Open an incident with this fault, or add it to the open one.

        The pause began with the first of them, whichever is heard first; a collective that had failed was its echo.
        What was only judged later says nothing of that: somebody may not have moved for long before anybody stood.
        """
        job = self
        incident = job.open_incident
        if incident is None:
            incident = Incident(len(job.incidents) + 1, job.spec.job, job.generation)
            incident = incident.mark(Mark.HEARD, job.moment(now_ms))
            job = replace(job, incidents=(*job.incidents, incident))
        seen = [one.at_ms for one in (fault, job.broken) if one is not None and one.exact]
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
        job = replace(self, unproved=self.unproved + 1).with_incident(incident)
        return job.close(Resolution.RESUMED, now_ms)

    def prove(self, generation: Generation, point: Point, now_ms: int) -> Job:
        """All ranks have committed this point in this generation: whatever they had resumed from is clean."""
        if not self.unproved:
            return self
        moment, incidents, unseen, still = self.moment(now_ms), list(self.incidents), self.unproved, 0
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
        return replace(self, incidents=tuple(incidents), unproved=still)

    def close(self, resolution: Resolution, now_ms: int, *, eligible: bool = True) -> Job:
        """Close the open incident, if there is one."""
        incident = self.open_incident
        if incident is None:
            return self
        closed = replace(incident, resolution=resolution, eligible=eligible)
        return self.with_incident(closed.tell(self.moment(now_ms), f"resolved: {resolution}"))
