"""Checks: what the ledger says of an event, and what is ordered after it, against what the world knows.

Of time, the ledger says what the world's own clock says, whoever was away meanwhile:

the job's time    goes with the world's, also where the orchestrator's clock leaves something out
a fault           is dated when the process ended, however late that is heard
the standstill    begins when the first stands at the boundary, and the pause ends when the last goes on
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import START, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.model.incident import UNSETTLED, Mark, Resolution
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.moves import Move, MoveState, Request
from torchrelay.protocol.model.roster import Seat
from torchrelay.protocol.succession.succession import CopyId, Succession, VoterId, as_settled, is_majority
from torchrelay.simulation.ports import Entry
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


# ---------------------------------------------------------------- what was asked for


def check_cutover(was: Job, now: Job) -> None:
    """All were connected anew for a move: then a rank of it has changed hands."""
    before, after = was.open_move, now.open_move
    if before is None or after is None or (before.state, after.state) != (MoveState.STOPPING, MoveState.CUT_OVER):
        return
    if not any(now.seats[rank].worker != was.seats[rank].worker for rank in after.ranks):
        raise Violation(f"all are connected anew for {after.name}, and nobody has moved")


def check_settled(world: Scene, job: Job, rank: Rank, request: Request) -> None:
    """A request is not kept any more: a move tells why, and unless it was given up, the rank is where wanted."""
    told = {
        move.state
        for move in job.moving.moves
        if move.outgoing_workers.get(rank) == request.worker and lets_go(move, rank)
    }
    if not told:
        raise Violation(f"what was asked for rank {rank} is forgotten, and no move tells of it")
    holder = job.seats[rank].worker
    worker = None if holder is None else world.shell.cluster.workers.get(holder)
    if MoveState.FAILED in told or worker is None:
        return
    fits = worker.node == request.to if request.to else worker.place != f"{request.node}/{request.slot}"
    if not fits:
        raise Violation(f"rank {rank} is on {worker.place}, and what was asked for it is forgotten")


def lets_go(move: Move, rank: Rank) -> bool:
    """Whether a move is over for a rank, and has not only been called off."""
    over = rank not in move.ranks if move.open else move.state is not MoveState.CALLED_OFF
    return over or rank in move.moved


# ---------------------------------------------------------------- who acts


@dataclass
class Reign:
    """What an orchestrator has written; `known`: how much of it has had an effect."""

    copy: CopyId
    journal: Sequence[Entry]
    known: int = 0
    shared: dict[int, int] = field(default_factory=dict)  # with others, by their lease: how much stands in both


class Reigns:
    """All of a world. `seen` is told what comes late, and does no harm."""

    def __init__(self, seen: Callable[[str], None]) -> None:
        self._seen = seen
        self.reigns: dict[int, Reign] = {}
        self.successions: dict[tuple[int, int], tuple[Succession, set[VoterId]]] = {}  # with who has noted it

    # ------------------------------------------------------------ who acts

    def acts(self, succession: Succession, journal: Sequence[Entry]) -> None:
        """An orchestrator begins to act: its first succession is settled."""
        lease, copy = succession.lease, succession.head.copy
        if lease in self.reigns:
            raise Violation(f"{copy} acts under lease {lease}, and so does {self.reigns[lease].copy}")
        reign = Reign(copy, journal)
        for other, before in self.reigns.items():
            both = shared(before.journal, journal)
            reign.shared[other] = before.shared[lease] = both
            if other < lease and before.known > both:
                lacks = f"with {both} entries of {before.copy}, and {before.known} have had effects"
                raise Violation(f"{copy} acts under lease {lease} {lacks}")
        self.reigns[lease] = reign

    def obeyed(self, lease: int, known: int, node: NodeId) -> None:
        """An agent obeys an order that was given when so much stood in the journal."""
        if self._has_effect(lease, known, f"{node} obeys an order of lease {lease}"):
            self._seen("late: an order of a former head")

    def acknowledged(self, lease: int, known: int, node: NodeId) -> None:
        """An agent hears that what it told stands in the journal."""
        if self._has_effect(lease, known, f"{node} is told under lease {lease} that its event is kept"):
            self._seen("late: an acknowledgement of a former head")

    def answered(self, lease: int, known: int) -> None:
        """An operator hears that what was asked for stands in the journal."""
        self._has_effect(lease, known, f"an operator is answered under lease {lease}")

    def _has_effect(self, lease: int, known: int, what: str) -> bool:
        """Whether somebody acts with a higher lease by then."""
        reign = self.reigns[lease]
        higher = [other for other in self.reigns if other > lease]
        for other in higher:
            if known > reign.shared[other]:
                raise Violation(f"{what}, and {self.reigns[other].copy} acts, which does not know why")
        reign.known = max(reign.known, known)
        return bool(higher)

    # ------------------------------------------------------------ what is settled

    def noted(self, voter: VoterId, succession: Succession) -> None:
        """A voter has noted a succession."""
        known, voters = self.successions.setdefault(succession.order, (succession, set()))
        if as_settled(known) != as_settled(succession):
            raise Violation(f"two successions are numbered {succession.order}: {known} and {succession}")
        voters.add(voter)

    def settled(self, living: Collection[VoterId], known: Iterable[Succession]) -> Succession:
        """The newest succession that is settled as far as those who live can tell. `known`: to be, by one of them."""
        noted = [(one, voters & set(living)) for one, voters in self.successions.values()]
        found = [one for one, voters in noted if all(is_majority(voters, group) for group in one.groups)]
        return max((*found, *known), key=lambda one: one.order)

    def newer(self, order: tuple[int, int]) -> list[Succession]:
        """Those that somebody has noted, and that may be settled some day."""
        return [one for known, (one, _) in self.successions.items() if known > order]


def shared(one: Sequence[Entry], other: Sequence[Entry]) -> int:
    """How much at the beginning of two journals is the same entry."""
    both = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine is not theirs:
            break
        both += 1
    return both
