"""Views: what operators are shown, read off the state. The service sends them as JSON; the command line decodes them.

Everything here is a pure function of a `Scene`, so a view can also be made from a journal whose orchestrator is away.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from msgspec import Struct

from torchrelay.api.shown import (
    Audit,
    AuditEntry,
    Exclusion,
    FaultView,
    Incidents,
    IncidentTally,
    IncidentView,
    JobStatus,
    NodeStatus,
    OutcomeView,
    Ranks,
    RankStatus,
    SpareTally,
    Told,
    root_causes,
    size_text,
)
from torchrelay.orchestrator.store.journal import Call
from torchrelay.orchestrator.views.parking import parking_text
from torchrelay.orchestrator.views.places import (
    UNPLANNED,
    begin_of,
    pause_of,
    view_freezes,
    view_open_move,
    view_taints,
)
from torchrelay.orchestrator.views.scene import Scene, clock_text
from torchrelay.protocol.health.pulses import Pulse
from torchrelay.protocol.messages.ids import JobId, Rank, WorkerId
from torchrelay.protocol.model.deaths import Death
from torchrelay.protocol.model.incident import PARKS, UNSETTLED, Fault, Incident, Mark, Resolution
from torchrelay.protocol.model.job import Job, Outcome
from torchrelay.protocol.model.parts import Raised
from torchrelay.protocol.model.roster import Life, Seat, Worker, natural_key
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.recovery.ending import PARKED, REFUSED, STOPPED
from torchrelay.protocol.recovery.sharing import shares_with

# The phases of a recovery one after another: each ends at its mark and begins where the one before it ended, so that
# they add up to the pause. What runs at the same time counts for the earlier one.
PHASES: tuple[tuple[str, Mark], ...] = (
    ("detect", Mark.HEARD),
    ("interrupt", Mark.INTERRUPTED),
    ("agree", Mark.AGREED),
    ("acquire", Mark.READY),
    ("reconfigure", Mark.RECONFIGURED),
    ("restore", Mark.RESTORED),
    ("resume", Mark.RESUMED),
)
# Those of a move, whose pause begins when the first worker stands at the boundary.
MOVE_PHASES: tuple[tuple[str, Mark], ...] = (
    ("stand", Mark.READY),
    ("cutover", Mark.CUTOVER),
    ("reconfigure", Mark.RECONFIGURED),
    ("restore", Mark.RESTORED),
    ("resume", Mark.RESUMED),
)
ALL_PHASES = tuple(dict.fromkeys(phase for phase, _ in (*PHASES, *MOVE_PHASES)))


# ---------------------------------------------------------------- jobs and nodes


def view_job(scene: Scene, job: Job) -> JobStatus:
    spec = job.spec
    spares = scene.cluster.spares(spec.job)
    warm = sum(spare.life is Life.WARM for spare in spares)
    pulses = [scene.failure_detector.pulses.get(seat.worker) for seat in job.seats.values() if seat.worker is not None]
    times = [pulse.sample.step_ms for pulse in pulses if pulse is not None and pulse.sample.step_ms > 0]
    reached = scene.reached.get(spec.job)
    waiting = None if job.waiting_ms is None else (scene.now_ms - job.waiting_ms) / 1000
    return JobStatus(
        job=spec.job,
        phase=job.phase,
        why=job.why,
        generation=job.generation,
        world_size=spec.world_size,
        step=None if reached is None else reached[1].step,
        step_ms=round(median(times), 3) if times else None,
        spares=SpareTally(wanted=spec.spares, warm=warm, starting=len(spares) - warm),
        incidents=tally(job),
        restarts=job.attempts.restarts,
        joined=reached is not None or any(seat.joined for seat in job.seats.values()),
        waiting_s=waiting,
        outcome=None if job.outcome is None else OutcomeView(code=job.outcome.code, reason=job.outcome.reason),
        move=view_open_move(scene, job),
        freezes=view_freezes(scene.cluster),
        taints=view_taints(scene),
        lease=scene.lease,
        parking=parking_text(job),
        sharing=tuple(rank for rank, seat in sorted(job.seats.items()) if is_guest(scene.cluster, seat.worker)),
    )


def is_guest(cluster: Cluster, name: WorkerId | None) -> bool:
    """Whether this worker runs in the slot of another."""
    worker = None if name is None else cluster.workers.get(name)
    return worker is not None and shares_with(cluster, worker) is not None


def tally(job: Job) -> IncidentTally:
    incidents = job.accounting.incidents
    eligible = [incident for incident in incidents if exclusion(incident, job) is None]
    under_way = UNSETTLED if job.outcome is None else frozenset({Resolution.OPEN})
    return IncidentTally(
        total=len(incidents),
        eligible=len(eligible),
        clean=sum(incident.resolution is Resolution.CLEAN for incident in eligible),
        open=sum(incident.resolution in under_way for incident in incidents),
    )


def view_nodes(scene: Scene) -> tuple[NodeStatus, ...]:
    found = []
    for node in sorted(scene.cluster.nodes.values(), key=lambda node: natural_key(node.node)):
        heard = scene.failure_detector.heard.get((node.node, node.incarnation))
        silent = None if heard is None else scene.now_ms - heard
        rhythm = scene.failure_detector.rhythms.get(node.node)
        status = NodeStatus(
            node=node.node,
            alive=node.alive,
            slots=node.slots,
            silent_ms=silent,
            silence=scene.silence(node),
            gap_ms=None if rhythm is None else rhythm.longest_ms,
            limit_ms=None if rhythm is None else rhythm.limit_ms(scene.failure_detector.beat_ms),
        )
        found.append(status)
    return tuple(found)


def view_audit(calls: Sequence[Call]) -> Audit:
    entries = (
        AuditEntry(at=clock_text(call.wall_ms), who=call.who, call=call.call, what=call.what, seq=call.seq)
        for call in calls
    )
    return Audit(calls=tuple(entries))


# ---------------------------------------------------------------- ranks


def view_ranks(scene: Scene, job: Job) -> Ranks:
    rows = [view_rank(scene, rank, seat) for rank, seat in sorted(job.seats.items())]
    waiting = sorted(scene.cluster.spares(job.spec.job), key=lambda spare: natural_key(spare.worker))
    rows += [view_worker(scene, spare, None, replacement=False) for spare in waiting]
    return Ranks(
        job=job.spec.job,
        generation=job.generation,
        phase=job.phase,
        ranks=tuple(rows),
        snapshot_every=job.rollback.every,
        snapshot_buddies=job.rollback.buddies,
    )


def view_rank(scene: Scene, rank: Rank, seat: Seat) -> RankStatus:
    worker = None if seat.worker is None else scene.cluster.workers.get(seat.worker)
    if worker is not None:
        return view_worker(scene, worker, rank, replacement=seat.replacement, shard=seat.shard)
    return RankStatus(
        rank=rank,
        worker=None,
        node=None,
        slot=None,
        pid=None,
        state="vacant",
        generation=None,
        step=None,
        section=None,
        step_ms=None,
        in_state_ms=None,
        process=None,
        cpu_ms=None,
        silent_ms=None,
        replacement=False,
        shard=seat.shard,
    )


def view_worker(scene: Scene, worker: Worker, rank: Rank | None, *, replacement: bool, shard: str = "") -> RankStatus:
    pulse = scene.failure_detector.pulses.get(worker.worker)
    sample = None if pulse is None else pulse.sample
    point = None if sample is None else sample.point
    host = shares_with(scene.cluster, worker)
    return RankStatus(
        rank=rank,
        worker=worker.worker,
        node=worker.node,
        slot=worker.slot,
        pid=worker.pid or None,
        state=state_of(worker, rank, pulse),
        generation=None if sample is None else sample.generation,
        step=None if point is None else point.step,
        section=None if point is None else point.section,
        step_ms=None if sample is None or point is None else sample.step_ms,
        in_state_ms=None if sample is None else sample.phase_ms,
        process=None if sample is None else sample.process,
        cpu_ms=None if sample is None else sample.cpu_ms,
        silent_ms=None if pulse is None else scene.now_ms - pulse.heard_ms,
        replacement=replacement,
        shard=shard,
        shares_with=None if host is None else host.worker,
    )


def state_of(worker: Worker, rank: Rank | None, pulse: Pulse | None) -> str:
    """What a worker does, in one word; what its start is waiting for if it has no rank or was never heard."""
    if worker.life is Life.FENCING or rank is None or pulse is None:
        return worker.life
    return pulse.sample.phase


# ---------------------------------------------------------------- incidents


def view_incidents(scene: Scene, job: Job) -> Incidents:
    return Incidents(job=job.spec.job, incidents=tuple(view_incident(scene, one) for one in job.accounting.incidents))


def view_incident(scene: Scene, incident: Incident) -> IncidentView:
    begun = incident.marks.get(Mark.FAULT, incident.marks.get(Mark.HEARD, 0))
    excluded = exclusion(incident, scene.cluster.jobs[incident.job])
    return IncidentView(
        name=incident.name,
        job=incident.job,
        generation=incident.generation,
        at=scene.told_at(incident.job, begun),
        resolution=incident.resolution,
        eligible=excluded is None,
        kind=incident.kind,
        move="" if incident.move is None else f"M-{incident.move}",
        faults=tuple(view_fault(scene, incident.job, fault) for fault in incident.faults),
        verdict=incident.verdict,
        resume_point="" if incident.resume_point is None else str(incident.resume_point),
        sources=incident.sources,
        shares=dict(sorted(incident.shares.items())),
        bytes=incident.size,
        digest=incident.digest,
        lost=incident.lost,
        phases=phases_of(incident),
        pause_ms=pause_of(incident),
        story=tuple(
            Told(at=scene.told_at(incident.job, at), after_ms=at - begun, text=text) for at, text in incident.story
        ),
        summary=summarize(incident),
        cause=cause_of(incident),
        excluded="" if excluded is None else excluded.reason,
        evidence="" if excluded is None else excluded.evidence,
    )


def view_fault(scene: Scene, job: JobId, fault: Fault) -> FaultView:
    return FaultView(
        at=scene.told_at(job, fault.at_ms),
        cause=fault.cause,
        detector=fault.detector,
        rank=fault.rank,
        worker=fault.worker,
        node=fault.node,
    )


def phases_of(incident: Incident) -> dict[str, int]:
    """How long each phase took, in ms."""
    begun = begin_of(incident)
    if begun is None:
        return {}
    ends = [("", begun)]
    for phase, mark in PHASES if incident.kind == UNPLANNED else MOVE_PHASES:
        at = incident.marks.get(mark)
        if at is not None and (mark is not Mark.RESUMED or pause_of(incident) is not None):
            ends.append((phase, max(at, ends[-1][1])))
    return {phase: end - start for (_, start), (phase, end) in pairwise(ends)}


def cause_of(incident: Incident) -> str:
    """What went wrong first; of a move nothing did: what was said first."""
    faults = root_causes(incident.faults)
    if faults:
        return faults[0].cause
    said = incident.story[0][1] if incident.story else incident.kind
    return said if incident.move is None else f"M-{incident.move}: {said}"


def summarize(incident: Incident) -> str:
    """One line: what happened, and how it was resolved."""
    what = (
        "; ".join(describe(fault) for fault in root_causes(incident.faults)) or f"{incident.kind}: {cause_of(incident)}"
    )
    pause = pause_of(incident)
    took = f" in {pause / 1000:.2f} s" if pause is not None else ""
    how = [f"{incident.name} {incident.resolution}{took}", what]
    if incident.resolution in (Resolution.RESUMED, Resolution.CLEAN, Resolution.ROLLED_BACK) and incident.verdict:
        how.append(incident.verdict)
    if incident.resolution is Resolution.ROLLED_BACK:
        how.append(f"{size_text(incident.size)} of state from snapshots, {incident.lost} steps made again")
    elif incident.sources:
        ranks = "rank " if len(incident.sources) == 1 else "ranks "
        how.append(f"{size_text(incident.size)} of state from {ranks}{', '.join(map(str, incident.sources))}")
    if incident.resolution in (Resolution.FELL_BACK, Resolution.ENDED, Resolution.RESTARTED) and incident.story:
        how += [text for _, text in incident.story[:-1]][-1:]
    return ", ".join(part for part in how if part)


def describe(fault: Fault) -> str:
    who = f"rank {fault.rank}" if fault.rank is not None else fault.worker or fault.node or "the job"
    return f"{who}: {fault.cause}"


# ---------------------------------------------------------------- what does not count in the clean ratio

# Each incident that does not count comes with its reason and the evidence.
#
# Counted is whatever stopped training, or would have, unless it is shown to be one of these. Without evidence it
# counts.

RAISED = "worker: exception"  # the detector of a process that ended after it had told of an exception
OWN_ERROR = "the script's own error"
# What the operating system says of a storage that is away, full or broken, as Python words it: EIO, ENOSPC, EROFS,
# ESTALE, EREMOTEIO, EDQUOT. Only of an OSError with its number: other words may be about anything.
STORAGE = re.compile(r"\[Errno (5|28|30|116|121|122)\] ")
MEMORY = "/dev/shm/"  # a folder in memory, full of the script's own samples: no storage


class Excluded(Struct, frozen=True):
    """Why one is not counted, and what shows it."""

    reason: Exclusion
    evidence: str


def exclusion(incident: Incident, job: Job) -> Excluded | None:
    """Why an incident is not counted; None if it is.

    What ended the job is judged by how it ended. What was resolved is a user's bug, too, if another worker has raised
    the same exception at the same point later, and that has ended the job: so the first was no fault of a machine.
    """
    first = first_cause(incident)
    if first is not None and first.detector == PARKS and incident.resolution is not Resolution.CALLED_OFF:
        return None if incident.eligible else Excluded(Exclusion.PARKED, first.cause)
    if incident.resolution is Resolution.CALLED_OFF:
        return Excluded(Exclusion.CALLED_OFF, why_called_off(incident))
    if first is not None and first.detector == RAISED:
        if is_storage(first.cause):
            return Excluded(Exclusion.STORAGE, f"rank {first.rank} on {first.node}: {first.cause}")
        again = raised_again(job, first.worker)
        if again is not None and incident.eligible:
            told = f"{first.cause}; rank {again.rank} ({again.worker}) raised the same there, and the job ended"
            return Excluded(Exclusion.USER_BUG, told)
    if first is not None and incident.eligible:
        died = died_again(job, first.worker)
        if died is not None:
            told = f"{first.cause}; rank {died.rank} ({died.worker}) ended alike there, and the job ended"
            return Excluded(Exclusion.USER_BUG, told)
    if not incident.eligible:
        return of_the_end(incident, job.outcome)
    if incident.resolution is Resolution.RESUMED and job.outcome is not None:
        return unproved(incident, job.outcome)
    return None


def of_the_end(incident: Incident, outcome: Outcome | None) -> Excluded:
    """Of an incident that the core does not count: who or what ended the job, and how long after the fault.

    A stop that comes late may have been for the fault's sake, so that a reader is to see it.
    """
    first = first_cause(incident)
    if outcome is None:  # not with a journal of ours
        return Excluded(Exclusion.UNTOLD, last_words(incident))
    told = f"the job ended with {outcome.code}: {outcome.reason}"
    own = outcome.reason.startswith(OWN_ERROR)
    if first is not None and not (own and first.detector == RAISED):
        told += f"; it had begun{since(incident)} with: {first.cause}"
    if own:
        return Excluded(Exclusion.USER_BUG, told)
    reasons = {REFUSED: Exclusion.REFUSED, STOPPED: Exclusion.OPERATOR}
    return Excluded(reasons.get(outcome.code, Exclusion.UNTOLD), told)


def unproved(incident: Incident, outcome: Outcome) -> Excluded | None:
    """Of an incident after which all went on, and the job ended before anything was committed: None if that counts."""
    told = f"all went on after {incident.since}, and nothing was committed before the job ended with {outcome.code}"
    reasons = {0: Exclusion.UNPROVED, REFUSED: Exclusion.REFUSED, STOPPED: Exclusion.OPERATOR}
    reasons |= {PARKED: Exclusion.UNPROVED}
    reason = reasons.get(outcome.code)
    return None if reason is None else Excluded(reason, f"{told}: {outcome.reason}")


def since(incident: Incident) -> str:
    """How long before its end an incident had begun."""
    begun = incident.marks.get(Mark.FAULT, incident.marks.get(Mark.HEARD))
    if begun is None or not incident.story:
        return ""
    return f" {(incident.story[-1][0] - begun) / 1000:.1f} s before"


def is_storage(text: str) -> bool:
    """Whether an exception's words are those of the operating system for a storage that fails."""
    return STORAGE.search(text) is not None and MEMORY not in text


def raised_again(job: Job, worker: WorkerId | None) -> Raised | None:
    """Who has raised the same as this worker, at the same point, if the script's own error has ended the job."""
    if job.outcome is None or not job.outcome.reason.startswith(OWN_ERROR):
        return None
    mine = [one for one in job.exceptions.raised if one.worker == worker and not one.cramped]
    for one in mine:
        for other in job.exceptions.raised:
            same = (one.signature, one.point) == (other.signature, other.point)
            if same and other.worker != worker and not other.cramped:
                return other
    return None


def died_again(job: Job, worker: WorkerId | None) -> Death | None:
    """Who has ended like this worker, later at the same point, if that has ended the job."""
    if job.outcome is None or not job.outcome.reason.startswith(OWN_ERROR):
        return None
    mine = [death for death in job.exceptions.deaths if death.worker == worker]
    return next((other for one in mine for other in job.exceptions.deaths if one.same(other)), None)


def first_cause(incident: Incident) -> Fault | None:
    """What went wrong first, symptoms of it left out; None of a move."""
    faults = root_causes(incident.faults)
    return faults[0] if faults else None


def why_called_off(incident: Incident) -> str:
    told = [text for _, text in incident.story if text.startswith("called off")]
    return told[-1] if told else last_words(incident) or "the move did not take place"


def last_words(incident: Incident) -> str:
    """What was said last, but for how it was resolved."""
    told = [text for _, text in incident.story if not text.startswith("resolved:")]
    return told[-1] if told else ""
