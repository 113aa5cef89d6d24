"""One door: `advance(cluster, event, now_ms)`. What is not in the table of rules is ignored on purpose.

Facts change the state whatever the generation (but what a collective of an old one told is of no account any more).
Answers count only in the job's generation, and only once; see `answers` for whose.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from msgspec.structs import replace

from torchrelay.protocol.health.stalls import MATCHING
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import JobId, NodeId, Rank, WorkerId
from torchrelay.protocol.messages.orders import Order
from torchrelay.protocol.model.deaths import MISMATCH, death_of, remember_death, same_death_twice
from torchrelay.protocol.model.incident import Fault, Mark
from torchrelay.protocol.model.job import BEFORE_CUTOVER, RECOVERING, Job, JobPhase
from torchrelay.protocol.model.parts import Raised
from torchrelay.protocol.model.roster import Life, Node, Seat
from torchrelay.protocol.model.state import Cluster, exit_text, is_over, mark_started, seat_of
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.placement.boundary import with_move
from torchrelay.protocol.placement.taints import (
    expire_taints,
    freeze_cleared,
    freeze_set,
    put_on_probation,
    remember_failure,
    taint_cleared,
    taint_set,
)
from torchrelay.protocol.recovery.ending import (
    NO_STATE,
    REFUSED,
    SILENCE,
    STOPPED,
    collect_ended,
    end_job,
    fall_back,
    is_expendable,
    lose_worker,
)
from torchrelay.protocol.recovery.placing import place_workers
from torchrelay.protocol.recovery.recovery import progress_recovery
from torchrelay.protocol.recovery.replicas import replicas_differ
from torchrelay.protocol.recovery.requests import move_asked, move_withdrawn
from torchrelay.protocol.recovery.rollback import forget_kept, note_found, note_kept, parked_before
from torchrelay.protocol.recovery.sharing import is_shared, note_cramped, out_of_memory
from torchrelay.protocol.rules import answers, parking, stopping
from torchrelay.protocol.rules.migration import progress_migration, worker_prepared
from torchrelay.protocol.rules.speech import standing_orders

EMPTY = Cluster()
OWN_ERROR = "the script's own error"
EQUAL_BATCHES = "give every rank the same number of batches"
# Exceptions after which nobody can go on from what is in memory, by their kind: who tells of them, and the exit code.
# One that is to replace a rank and is refused leaves those who train without it: they have done nothing wrong.
NO_WAY_ON = {
    "undeclared": ("worker: undeclared collective", NO_STATE),
    "diverged": ("worker: another way than its predecessor", NO_STATE),
    "incomplete": ("worker: lacks what its predecessor's calls left", NO_STATE),
    "refused": ("worker: refused replacement", REFUSED),
}
# Raised whenever these rules make something else of what was heard before: a journal is replayed by its own rules only.
RULES_VERSION = 23

# ---------------------------------------------------------------- facts about jobs and nodes


def job_submitted(cluster: Cluster, event: ev.JobSubmitted) -> Cluster:
    if event.spec.job in cluster.jobs:
        return cluster
    seats = Table((Rank(rank), Seat()) for rank in range(event.spec.world_size))
    return cluster.with_job(parked_before(Job(event.spec, seats, phase_ms=cluster.now_ms)))


def job_cancelled(cluster: Cluster, event: ev.JobCancelled) -> Cluster:
    job = cluster.jobs.get(event.job)
    if job is None or job.phase in (JobPhase.ENDING, JobPhase.ENDED):
        return cluster
    return end_job(cluster, job, STOPPED, event.reason, eligible=False)


def node_joined(cluster: Cluster, event: ev.NodeJoined) -> Cluster:
    """An agent is back, or new. Workers we count on and it does not have are lost; the others are strangers.

    What the lost ones have left in their pages comes when the agent reports their ends: they are fenced until then.
    """
    node = Node(event.node, event.incarnation, event.slots, proven=bool(event.workers))
    before = cluster.nodes.get(event.node)
    cluster = replace(cluster, nodes=cluster.nodes.put(event.node, node))
    if before is not None and not before.alive:
        cluster = put_on_probation(cluster, event.node, None, "the node was lost")
    alive = {seen.worker for seen in event.workers}
    for worker in cluster.on_node(event.node):
        # Of one that was never heard of it is not known whether it is being started just now: it is ordered to start,
        # or fenced, until the node tells of it.
        if worker.worker not in alive and worker.pid:
            cause = "was gone when its node's agent came back"
            cluster = lose_worker(cluster, worker.worker, cause=cause, detector="agent", ended=False)
    cluster = recount(cluster, event.node, alive)
    for seen in event.workers:
        if seen.worker not in cluster.workers:
            cluster = meet(cluster, seen.worker, seen.job, (event.node, seen.slot))
    return cluster


def node_lost(cluster: Cluster, event: ev.NodeLost) -> Cluster:
    """A node is given up: what ran there counts as ended, and is fenced should the node return."""
    node = cluster.nodes.get(event.node)
    if node is None or node.incarnation != event.incarnation:
        return cluster
    if not node.alive:
        return cluster
    cluster = replace(cluster, nodes=cluster.nodes.put(event.node, replace(node, alive=False)))
    cluster = forget_kept(remember_failure(cluster, event.node, None), event.node)
    for worker in cluster.on_node(event.node):
        cause = f"its node {event.node} is lost: {event.reason}"
        cluster = lose_worker(
            cluster, worker.worker, cause=cause, detector=SILENCE, ended=True, unread=True, age_ms=event.age_ms
        )
    return cluster


# ---------------------------------------------------------------- facts about workers


def worker_started(cluster: Cluster, event: ev.WorkerStarted) -> Cluster:
    known = cluster.workers.get(event.worker)
    if known is None:
        return meet(cluster, event.worker, event.job, (event.node, event.slot))
    if known.life is not Life.STARTING:
        return cluster
    node = cluster.nodes.get(event.node)
    if node is not None and not node.proven:
        cluster = replace(cluster, nodes=cluster.nodes.put(event.node, replace(node, proven=True)))
    cluster = note_found(cluster, known.job, event)
    return cluster.with_worker(mark_started(known, event, cluster.now_ms))


def worker_warm(cluster: Cluster, event: ev.WorkerWarm) -> Cluster:
    known = cluster.workers.get(event.worker)
    if known is None or known.life is not Life.STARTED:
        return cluster
    return cluster.with_worker(replace(known, life=Life.WARM, since_ms=cluster.now_ms))


def worker_joined(cluster: Cluster, event: ev.WorkerJoined) -> Cluster:
    found = seat_of(cluster, event.worker)
    if found is None:
        known = cluster.workers.get(event.worker)
        if known is None or known.incoming_for is None:
            return cluster
        return cluster.with_worker(replace(known, shard=event.shard))
    job, rank = found
    if event.park_ms is not None:
        job = job.with_parking(takes_ms=max(job.parking.takes_ms, event.park_ms))
    if event.snapshot_every is not None:
        job = job.with_rollback(every=event.snapshot_every, buddies=event.snapshot_buddies)
    return cluster.with_job(job.with_seat(rank, replace(job.seats[rank], joined=True, shard=event.shard)))


def worker_exited(cluster: Cluster, event: ev.WorkerExited) -> Cluster:
    """A process ended. If it raised what another raised at the same point, the error is the script's own."""
    known = cluster.workers.get(event.worker)
    if known is None:
        return gone(cluster, event.worker)
    cluster = note_kept(note_cramped(cluster, known, event.cause), known.job, event.node, event.kept)
    job = cluster.jobs[known.job]
    if known.incoming_for is not None:  # how a target ends says nothing about the job, which is well
        return lose_worker(cluster, event.worker, cause=exit_text(event), detector="agent: process exit", ended=True)
    found = seat_of(cluster, event.worker)
    rank = None if found is None else found[1]
    if rank is not None and stopping.has_left(job, event):
        return stopping.leave(cluster, event, rank)
    if event.code:
        raised = tuple(
            replace(entry, code=event.code) if entry.worker == event.worker and entry.fatal else entry
            for entry in job.exceptions.raised
        )
        cluster = cluster.with_job(job.with_exceptions(raised=raised, last_code=event.code))
    if event.signal and known.life is not Life.FENCING:  # else we have killed it
        cluster = cluster.with_job(job.with_exceptions(last_code=128 + event.signal))
    cause, detector = exit_text(event), "agent: process exit"
    told = [entry.summary for entry in job.exceptions.raised if entry.worker == event.worker]
    if told:
        cause, detector = f"{told[-1]}; {cause}", "worker: exception"
    elif known.life is not Life.FENCING:
        cluster = trained_to_death(cluster, event)
    cluster = lose_worker(
        cluster,
        event.worker,
        cause=cause,
        detector=detector,
        ended=True,
        private=event.private,
        age_ms=event.age_ms,
    )
    return judge_deaths(judge_raised(cluster, known.job), event)


def trained_to_death(cluster: Cluster, event: ev.WorkerExited) -> Cluster:
    """Remember how one that trained, or a replacement on its way, ended by itself; of a survivor that says nothing."""
    found = seat_of(cluster, event.worker)
    if found is None:
        return cluster
    job, rank = found
    comes = job.phase is JobPhase.PREPARING and is_expendable(job.seats[rank])
    if not comes and job.phase not in BEFORE_CUTOVER | {JobPhase.RUNNING, JobPhase.RESUMING}:
        return cluster
    death = death_of(event, rank, exit_text(event), job.resume_point if comes else None)
    if death is None:
        return cluster
    return cluster.with_job(job.with_exceptions(deaths=remember_death(job.exceptions.deaths, death)))


def judge_deaths(cluster: Cluster, event: ev.WorkerExited) -> Cluster:
    """The same end of two workers that held a rank, at the same point: the job ends, or falls back."""
    newest = ((job, job.exceptions.deaths[-1]) for job in cluster.jobs.values() if job.exceptions.deaths)
    found = next((job for job, death in newest if death.worker == event.worker), None)
    both = None if found is None or is_over(found) else same_death_twice(found.exceptions.deaths)
    if found is None or both is None:
        return cluster
    first, last = both
    if last.how == MISMATCH:
        ranks = f"ranks {first.rank} and {last.rank}" if first.rank != last.rank else f"rank {last.rank}, twice"
        reason = f"{OWN_ERROR}, after {last.point} on {ranks}: {last.cause}. {MATCHING}, and {EQUAL_BATCHES}"
        return fall_back(cluster, found, reason)
    reason = (
        f"{OWN_ERROR}, on two workers that held rank {last.rank}: both ended alike after {last.point}: {last.cause}"
    )
    code = 128 + event.signal if event.signal else event.code or NO_STATE
    return end_job(cluster, found, code, reason, eligible=False)


def worker_raised(cluster: Cluster, event: ev.WorkerRaised) -> Cluster:
    """An exception: refused scripts and undeclared collectives end or fall back; others wait for their process."""
    found = seat_of(cluster, event.worker)
    known = cluster.workers.get(event.worker)
    if known is None or known.life is Life.FENCING:
        return cluster
    job = cluster.jobs[known.job]
    if known.incoming_for is not None:
        move = job.open_move
        if move is None:
            return cluster
        text = f"target {known.worker} of rank {known.incoming_for} raised: {event.summary}"
        cluster = cluster.with_job(with_move(job, move.tell(cluster.now_ms, text)))
        return note_cramped(cluster, known, event.signature)
    known_by_now = {(entry.worker, entry.fatal) for entry in job.exceptions.raised}
    if is_over(job) or job.stop is not None or (event.worker, event.fatal) in known_by_now:
        return cluster
    now = cluster.now_ms
    # One that has resumed trains, whether the last of the others has said so or not.
    seat = None if found is None else found[0].seats[found[1]]
    replaces = seat is not None and seat.replacement and not seat.resumed and job.phase in RECOVERING
    if event.kind == "refused" and not replaces:
        return end_job(cluster, job, REFUSED, event.summary, eligible=False)
    own = next((one for one in job.exceptions.raised if event.kind == "incomplete" and _same(one, event)), None)
    if event.kind in NO_WAY_ON and own is None and found is not None:
        at = job.moment(now, event.age_ms)
        detector, code = NO_WAY_ON[event.kind]
        fault = Fault(event.summary, detector, at, event.rank, event.worker, known.node)
        return fall_back(cluster, job.suffer(fault, now), event.summary, code)
    summary = event.summary if own is None else own.summary  # what a replacement lacks has nothing to do with it
    raised = Raised(
        event.worker,
        event.rank,
        event.point,
        event.signature,
        summary,
        now,
        event.fatal,
        cramped=out_of_memory(event.signature) and is_shared(cluster, known),
    )
    job = job.with_exceptions(raised=(*job.exceptions.raised[-63:], raised))
    cluster = cluster.with_job(job.tell(now, f"rank {event.rank} raised: {summary}"))
    return judge_raised(cluster, known.job)


def _same(entry: Raised, event: ev.WorkerRaised) -> bool:
    """Whether another worker has raised this at this point: then it is not for want of anything."""
    return (entry.signature, entry.point) == (event.signature, event.point) and entry.worker != event.worker


def judge_raised(cluster: Cluster, job_id: JobId) -> Cluster:
    """The same exception at the same point on two workers is the script's own: the job ends with the script's code.

    The end waits until one of them has ended, for its exit code.
    """
    job = cluster.jobs[job_id]
    if is_over(job):
        return cluster
    for entry in job.exceptions.raised:
        if entry.code is None:
            continue
        same = [
            other
            for other in job.exceptions.raised
            if other.signature == entry.signature and other.point == entry.point and other.worker != entry.worker
            if not (other.cramped or entry.cramped)
        ]
        if same:
            both = f"ranks {entry.rank} and {same[0].rank}"
            if same[0].rank == entry.rank:
                both = f"two workers that held rank {entry.rank}"
            reason = f"{OWN_ERROR}, on {both}: {entry.summary}"
            return end_job(cluster, job, entry.code, reason, eligible=False)
    return cluster


def collective_failed(cluster: Cluster, event: ev.CollectiveFailed) -> Cluster:
    """Somebody's connection is gone. Mostly a process has ended and its agent says so at once: wait for it.

    It is said once, and may be heard before the last worker has said that it resumed.
    """
    found = seat_of(cluster, event.worker)
    if found is None:
        return cluster
    job, rank = found
    # For a move a new generation begins in the old connections: who has not heard of it yet speaks of the one before.
    known = (job.generation, job.generation - 1) if job.phase in BEFORE_CUTOVER else (job.generation,)
    incident = job.open_incident
    if incident is not None and event.generation == incident.generation and job.phase in RECOVERING:
        # The echo of a fault that is known by now: it may be heard first, and then say when that was.
        return cluster.with_job(job.mark_first(Mark.FAULT, job.moment(cluster.now_ms, event.age_ms)))
    if event.generation not in known or job.exceptions.broken is not None:
        return cluster
    if job.phase not in BEFORE_CUTOVER | {JobPhase.RESUMING, JobPhase.RUNNING}:
        return cluster
    now = cluster.now_ms
    at = job.moment(now, event.age_ms)
    fault = Fault(f"its collective failed: {event.summary}", "collective", at, rank, event.worker, exact=True)
    return cluster.with_job(job.with_exceptions(broken=fault, broken_ms=now))


def worker_hung(cluster: Cluster, event: ev.WorkerHung) -> Cluster:
    found = seat_of(cluster, event.worker)
    if found is not None and found[0].stop is not None:
        return cluster  # who saves keeps others waiting, and there is a deadline
    return lose_worker(cluster, event.worker, cause=event.evidence, detector="hang", ended=False, age_ms=event.age_ms)


def point_committed(cluster: Cluster, event: ev.PointCommitted) -> Cluster:
    """What all went on from has come to a further point: it is clean."""
    job = cluster.jobs.get(event.job)
    if job is None or event.generation > job.generation:
        return cluster
    return cluster.with_job(job.prove(event.generation, event.point, cluster.now_ms))


def once_recorded(cluster: Cluster, event: ev.OnceRecorded) -> Cluster:
    job = cluster.jobs.get(event.job)
    if job is None or event.restarts != job.attempts.restarts:
        return cluster
    known = job.once.get(event.rank, ())
    if event.name in dict(known):
        return cluster
    known = tuple(sorted((*known, (event.name, event.value))))
    return cluster.with_job(replace(job, once=job.once.put(event.rank, known)))


# ---------------------------------------------------------------- time that went by, or was left out


def tick(cluster: Cluster, event: ev.Tick) -> Cluster:
    """Only time passed: what is due is done by `settle`."""
    del event
    return cluster


def time_left_out(cluster: Cluster, event: ev.TimeLeftOut) -> Cluster:
    """For the ledger only. No deadline hears of it."""
    jobs = cluster.jobs.items()
    later = Table((name, job.with_accounting(left_out_ms=job.accounting.left_out_ms + event.ms)) for name, job in jobs)
    return replace(cluster, jobs=later)


# ---------------------------------------------------------------- workers that are not known here

# Strays are fenced; foreign ones are let be.
#
# A stray is of a known job: its node was lost and came back, or its job is over. A foreign one is of a job that nobody
# here has heard of: the journal that knows it was lost, or is another orchestrator's. It is never fenced.


def meet(cluster: Cluster, worker: WorkerId, job: JobId | None, place: tuple[NodeId, int]) -> Cluster:
    """An unknown worker runs there."""
    if worker in cluster.strays:
        return cluster
    if job in cluster.jobs:
        foreign = cluster.foreign.drop(worker)
        return replace(cluster, strays=cluster.strays.put(worker, place), foreign=foreign)
    return replace(cluster, foreign=cluster.foreign.put(worker, place))


def recount(cluster: Cluster, node: NodeId, alive: Collection[WorkerId]) -> Cluster:
    """An agent has told who lives on its node: strangers that it does not name are gone."""
    strays, foreign = (
        Table((name, place) for name, place in known.items() if place[0] != node or name in alive)
        for known in (cluster.strays, cluster.foreign)
    )
    return replace(cluster, strays=strays, foreign=foreign)


def gone(cluster: Cluster, worker: WorkerId) -> Cluster:
    """A stranger has ended."""
    return replace(cluster, strays=cluster.strays.drop(worker), foreign=cluster.foreign.drop(worker))


# ---------------------------------------------------------------- the table and the door

RULES: dict[type[ev.Event], Callable[[Cluster, Any], Cluster]] = {
    ev.JobSubmitted: job_submitted,
    ev.JobCancelled: job_cancelled,
    ev.SignalAsked: stopping.signal_asked,
    ev.ParkAsked: parking.park_asked,
    ev.ParkingSealed: parking.parking_sealed,
    ev.SealFailed: parking.seal_failed,
    ev.NodeJoined: node_joined,
    ev.NodeLost: node_lost,
    ev.TaintSet: taint_set,
    ev.TaintCleared: taint_cleared,
    ev.FreezeSet: freeze_set,
    ev.FreezeCleared: freeze_cleared,
    ev.MoveAsked: move_asked,
    ev.MoveWithdrawn: move_withdrawn,
    ev.WorkerPrepared: worker_prepared,
    ev.WorkerStarted: worker_started,
    ev.WorkerWarm: worker_warm,
    ev.WorkerJoined: worker_joined,
    ev.WorkerExited: worker_exited,
    ev.WorkerRaised: worker_raised,
    ev.CollectiveFailed: collective_failed,
    ev.ReplicasDiffer: replicas_differ,
    ev.WorkerHung: worker_hung,
    ev.PointCommitted: point_committed,
    ev.OnceRecorded: once_recorded,
    ev.Tick: tick,
    ev.TimeLeftOut: time_left_out,
    ev.WorkerReported: answers.worker_reported,
    ev.WorkerReady: answers.worker_ready,
    ev.RecordKept: answers.record_kept,
    ev.WorkerReconfigured: answers.worker_reconfigured,
    ev.ReconfigureFailed: answers.reconfigure_failed,
    ev.StateRestored: answers.state_restored,
    ev.RestoreFailed: answers.restore_failed,
    ev.WorkerResumed: answers.worker_resumed,
    ev.WorkerFinished: answers.worker_finished,
    ev.WorkerParked: parking.worker_parked,
    ev.ParkFailed: parking.park_failed,
}

# A bound on how far one event can take things; reaching it is a defect.
STEPS = 10_000


def advance(cluster: Cluster, event: ev.Event, now_ms: int, *, more: bool = False) -> Cluster:
    """Apply one event at `now_ms`. Returns the same state if the event changes nothing.

    `more`: the next event is heard together with this one. What is due is then done after the last of them, so that a
    step of a large job costs one look at all ranks, and not one for each answer.
    """
    cluster = replace(cluster, now_ms=max(cluster.now_ms, now_ms))
    cluster = RULES[type(event)](cluster, event)
    return cluster if more else settle(cluster)


def settle(cluster: Cluster) -> Cluster:
    """Take every step that is due now, until none is left."""
    for _ in range(STEPS):
        before = cluster
        cluster = expire_taints(cluster)
        for job_id in sorted(cluster.jobs):
            cluster = stopping.wind_up(cluster, job_id)
            if not stopping.winds_up(cluster.jobs[job_id]):
                cluster = place_workers(cluster, job_id)
                cluster = parking.progress_parking(cluster, job_id)
                cluster = progress_migration(cluster, job_id)
                cluster = progress_recovery(cluster, cluster.jobs[job_id])
            cluster = collect_ended(cluster, job_id)
        if cluster == before:
            return cluster
    raise AssertionError("the protocol does not come to rest")


def orders(cluster: Cluster) -> frozenset[Order]:
    """What must still be done, read off the state alone; safe to repeat."""
    return standing_orders(cluster)


def holder(cluster: Cluster, job: JobId, rank: Rank) -> WorkerId | None:
    """The worker that holds a rank now, or None while it is vacant."""
    return cluster.jobs[job].seats[rank].worker


__all__ = ["EMPTY", "RULES", "RULES_VERSION", "Cluster", "advance", "holder", "orders"]
