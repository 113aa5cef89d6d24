"""Phases: the life of a job on one screen: what is asked in each, what counts, when it is over, what comes next.

`speech` says what is asked, `answers` lets those through that count, recovery and moves go on when a phase is over. The
table of docs/protocol.md is printed from this one; what is asked of targets and outgoing workers of a move is told
there. At the end of HALTING the targets must stand at the boundary, too (`boundary`), and the cutover makes a new
generation.

The loss of a holder leaves the table's path (`ending.react`):

    until the first wiring is done     all start again: STARTING
    in FINISHING and later             nothing: the job is over
    a replacement that is not ready    AGREEING, PREPARING: the next spare takes its place
    nobody has reported yet            AGREEING: nothing more, all are being asked
    under a freeze                     RUNNING, and before a cutover: the job falls back
    else                               AGREEING in a new generation

A seat without a holder owes no report, nor does a replacement that took its rank in this generation: AGREEING is over
when nobody owes one (`recovery.owes_report`). A move that is called off before its cutover ends in RELEASING; how a
move ended is in `MoveState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.roster import Seat

Orders = tuple[type[od.Order], ...]
Answers = tuple[type[ev.Answer], ...]
Fact = Callable[[Seat], bool]


class Phase(Struct, frozen=True):
    """One phase of a job."""

    holders: Orders  # what holders of ranks are asked to do
    replacements: Orders  # what those are asked to do that have taken a rank and hold no state yet
    answers: Answers  # the answers that count
    lacks: tuple[Fact, ...]  # it is over when no seat has one of these
    when: str  # that in words
    then: JobPhase | None  # what comes next then


P = JobPhase
ENDED_WELL = ev.WorkerFinished
CONNECTED = (ev.WorkerReconfigured, ev.ReconfigureFailed, ev.StateRestored, ev.RestoreFailed)
PHASES: dict[JobPhase, Phase] = {
    # asked of holders, of replacements; answers that count;
    #     over when no seat ...; that in words; what is next
    # the job's own course
    P.STARTING: Phase((od.Assign,), (), (ev.WorkerReady, ENDED_WELL),
        (facts.is_not_ready,),                                "every rank asks to be connected",    P.RECONFIGURING),
    P.RUNNING: Phase((), (), (ENDED_WELL,),
        (facts.has_not_finished,),                            "every script has ended with 0",      P.FINISHING),
    # a recovery
    P.AGREEING: Phase((od.Interrupt,), (od.Assign,), (ev.WorkerReported,),
        (facts.has_not_reported,),                            "every survivor has reported",        P.PREPARING),
    P.PREPARING: Phase((od.Decide,), (od.Assign, od.Replay), (ev.WorkerReady, ev.RecordKept),
        (facts.is_not_ready,),                                "all stand at the safepoint of T",    P.RECONFIGURING),
    P.RECONFIGURING: Phase((od.Reconfigure,), (od.Restore,), CONNECTED,
        (facts.is_not_reconfigured, facts.is_not_restored),   "all are connected and hold T",       P.RESUMING),
    P.RESUMING: Phase((od.Resume,), (), (ev.WorkerResumed, ENDED_WELL),
        (facts.has_not_resumed,),                             "all train on",                       P.RUNNING),
    # a move, until the cutover
    P.QUIESCING: Phase((od.Halt,), (), (ev.WorkerReported,),
        (facts.has_not_reported,),                            "all have said how far they are",     P.HALTING),
    P.HALTING: Phase((od.Decide,), (), (ev.WorkerReady,),
        (facts.is_not_ready,),                                "all stand after B, targets too",     P.RECONFIGURING),
    P.RELEASING: Phase((od.Resume,), (), (ev.WorkerResumed, ENDED_WELL),
        (facts.has_not_resumed,),                             "all have gone on",                   P.RUNNING),
    # a parking, after a halt as for a move
    P.PARKING: Phase((od.Park,), (), (ev.WorkerParked, ev.ParkFailed),
        (facts.has_not_parked,),                              "every rank is written down",          P.SEALING),
    P.SEALING: Phase((), (), (),
        (),                                                   "the manifest is written",             P.ENDING),
    # the end
    P.FINISHING: Phase((od.Leave,), (), (),
        (),                                                   "every process of a rank has ended",  P.ENDING),
    P.ENDING: Phase((), (), (),
        (),                                                   "every process has ended",            P.ENDED),
    P.ENDED: Phase((), (), (),
        (),                                                   "",                                   None),
}  # fmt: skip
# An order stands as long as the seat of the worker has this fact; others until the phase is over.
UNTIL: dict[type[od.Order], Fact] = {
    od.Assign: facts.is_not_ready,
    od.Interrupt: facts.has_not_reported,
    od.Halt: facts.has_not_reported,
    od.Decide: facts.is_not_ready,
    od.Replay: facts.is_not_ready,
    od.Reconfigure: facts.is_not_reconfigured,
    od.Restore: facts.is_not_restored,
    od.Resume: facts.has_not_resumed,
    od.Park: facts.has_not_parked,
}


def asked(job: Job, seat: Seat) -> list[type[od.Order]]:
    """What a seat's worker is asked to do in this phase, and has not done yet."""
    phase = PHASES[job.phase]
    kinds = phase.holders + phase.replacements if seat.replacement else phase.holders
    return [kind for kind in kinds if kind not in UNTIL or UNTIL[kind](seat)]


def counts(job: Job, answer: ev.Answer) -> bool:
    """Whether this kind of answer counts now."""
    return isinstance(answer, PHASES[job.phase].answers)


def still_lacking(job: Job) -> Iterator[tuple[Rank, Seat]]:
    """Seats for whose sake the phase is not over, in the order of ranks."""
    for fact in PHASES[job.phase].lacks:
        yield from job.seats.where(fact)


def is_complete(job: Job) -> bool:
    """Whether the phase is over, by what its seats say. That of the last three is seen by the processes."""
    lacks = PHASES[job.phase].lacks
    return bool(lacks) and not any(job.seats.any(fact) for fact in lacks)


def enter_next(job: Job, now_ms: int, why: str) -> Job:
    """The phase that follows this one when it is over."""
    following = PHASES[job.phase].then
    assert following is not None, "nothing follows the end"
    return job.enter(following, now_ms, why)
