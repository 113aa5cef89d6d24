"""Migration: which ranks should be elsewhere, and bringing up targets for them while training goes on.

    wishes     read off the state: taints with NoExecute, what operators asked for (`requests`), the way home
    a move     WAITING until there is room and leave to act; PREPARING until every target is prepared; then the boundary

`progress_migration` is called after every event and makes one change at a time, like `progress_recovery`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.events import Effect
from torchrelay.protocol.messages.ids import JobId, NodeId, Rank, WorkerId
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.moves import KEPT_MOVES, Move, MoveKind, MoveState
from torchrelay.protocol.model.roster import Life, Seat, Worker
from torchrelay.protocol.model.state import Cluster, is_over
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.placement.boundary import HOUR_MS, REST_MS, TRIES, begin_quiesce, call_off, give_up
from torchrelay.protocol.placement.taints import is_closed, on_slot
from torchrelay.protocol.recovery.placing import free_slots, spare_for
from torchrelay.protocol.recovery.requests import ranks_in_question
from torchrelay.protocol.recovery.sharing import company, shares_with, slots_to_share, with_own_slot

# How long a rank is away from home at least, or for its probation if that is shorter.
AWAY_MS = 600_000


class Wish(Struct, frozen=True):
    """Why a rank should be elsewhere."""

    kind: MoveKind
    reason: str
    source: str
    to: NodeId | None = None
    group: str = ""  # planned wishes of one group are fulfilled together
    shares: bool = False  # if there is no other room, a slot that others use will do


# ---------------------------------------------------------------- facts


def worker_prepared(cluster: Cluster, event: ev.WorkerPrepared) -> Cluster:
    known = cluster.workers.get(event.worker)
    if known is None or known.incoming_for is None or known.life is Life.FENCING or known.prepared:
        return cluster
    cluster = cluster.with_worker(replace(known, prepared=True, note=event.note))
    job = cluster.jobs[known.job]
    move = job.open_move
    if move is None:
        return cluster
    text = f"target {known.worker} of rank {known.incoming_for} is prepared" + (f": {event.note}" if event.note else "")
    return keep_move(cluster, job, move.tell(cluster.now_ms, text))


# ---------------------------------------------------------------- wishes


def wishes_to_move(cluster: Cluster, job: Job) -> dict[Rank, Wish]:
    """The ranks that should be elsewhere, each with the strongest reason."""
    found: dict[Rank, Wish] = {}
    for rank in ranks_in_question(cluster, job):
        seat = job.seats[rank]
        worker = None if seat.worker is None else cluster.workers.get(seat.worker)
        if worker is None:
            continue
        wish = tainted(cluster, worker) or asked(job, rank, worker) or homesick(cluster, job, worker, seat)
        if wish is not None:
            found[rank] = wish
    return found | cramped(cluster, job, found)


def cramped(cluster: Cluster, job: Job, others: Iterable[Rank]) -> dict[Rank, Wish]:
    """Ranks that share slots go to slots of their own, as many as there are, and together: the job grows again."""
    if job.spec.ranks_per_slot == 1:
        return {}
    found: dict[Rank, Wish] = {}
    for rank, seat in sorted(job.seats.items()):
        worker = None if seat.worker is None else cluster.workers.get(seat.worker)
        host = None if worker is None else shares_with(cluster, worker)
        if worker is not None and host is not None and rank not in others:
            who = "a spare" if host.rank is None else f"rank {host.rank}"
            found[rank] = Wish(
                MoveKind.PLANNED, f"rank {rank} shares slot {worker.place} with {who}", "torchrelay", group="room"
            )
    # A move that is being prepared has taken its room.
    move = job.open_move
    under_way = () if move is None or move.shares or move.state is MoveState.WAITING else move.ranks
    going = [rank for rank in found if rank in under_way]
    staying = sorted((rank for rank in found if rank not in under_way), key=lambda rank: -company(cluster, job, rank))
    room = 0 if going else room_for(cluster, job, None)
    return {rank: found[rank] for rank in (*going, *staying[:room])}


def tainted(cluster: Cluster, worker: Worker) -> Wish | None:
    """The wish that taints on a worker's place lead to: a warning before a plan."""
    lying = [t for t in on_slot(cluster, worker.node, worker.slot) if t.effect is Effect.NO_EXECUTE]
    if not lying:
        return None
    first = min(lying, key=lambda taint: (taint.planned, taint.since_ms, taint.key))
    kind = MoveKind.PLANNED if first.planned else MoveKind.PRE_EMPTIVE
    reason = f"{first.place} is tainted {first.key}" + (f": {first.reason}" if first.reason else "")
    return Wish(kind, reason, first.source, group=f"taint {first.node}", shares=True)


def asked(job: Job, rank: Rank, worker: Worker) -> Wish | None:
    request = job.moving.requests.get(rank)
    if request is None or request.worker != worker.worker:
        return None
    return Wish(MoveKind.PLANNED, request.reason, request.source, request.to, f"request {request.group}")


def homesick(cluster: Cluster, job: Job, worker: Worker, seat: Seat) -> Wish | None:
    """A rank moves back when the node it began on is alive and nothing is held against it any more.

    Not at once: whatever has driven it away without a taint, such as a crash, must not do so again and again.
    """
    home = seat.home
    if not job.spec.return_home or home is None or worker.node == home:
        return None
    if cluster.now_ms - seat.assigned_ms < min(AWAY_MS, job.spec.probation_ms):
        return None
    node = cluster.nodes.get(home)
    if node is None or not node.alive or any(taint.node == home for taint in cluster.taints.values()):
        return None
    # A move that is being prepared has taken its room there.
    move = job.open_move
    under_way = move is not None and move.state is not MoveState.WAITING and home in move.to.values()
    if not under_way and not room_for(cluster, job, home):
        return None
    return Wish(MoveKind.PLANNED, f"returns home to {home}", "torchrelay", home, f"home {home}")


# ---------------------------------------------------------------- room


def able_spares(cluster: Cluster, job: Job, to: NodeId | None, *, guests: bool = False) -> list[Worker]:
    """Spares that may take a rank, on one node or anywhere; those that are guests in a slot only if asked for."""
    there = (spare for spare in cluster.spares(job.spec.job) if to in (None, spare.node))
    open_ones = (spare for spare in there if not is_closed(cluster, spare.node, spare.slot))
    able = [spare for spare in open_ones if cluster.nodes[spare.node].alive]
    return able if guests else with_own_slot(cluster, able)


def room_for(cluster: Cluster, job: Job, to: NodeId | None) -> int:
    """How many ranks could be taken in: by spares, and by workers that could be started in free slots."""
    free = [node for node, _ in free_slots(cluster, job) if to in (None, node)]
    return len(able_spares(cluster, job, to)) + len(free)


def room_to_share(cluster: Cluster, job: Job) -> int:
    """How many more ranks could be taken in by slots in use."""
    guests = len(able_spares(cluster, job, None, guests=True)) - len(able_spares(cluster, job, None))
    return guests + len(slots_to_share(cluster, job, len(job.seats)))


def fit(cluster: Cluster, job: Job, ranks: Sequence[Rank], wanted: dict[Rank, Wish]) -> list[Rank]:
    """Of these ranks, those for which there is room, all of them taken together."""
    named: dict[NodeId, int] = {}
    taken: list[Rank] = []
    total = room_for(cluster, job, None)
    if all(wanted[rank].shares for rank in ranks):
        total += room_to_share(cluster, job)
    for rank in sorted(ranks, key=lambda one: (wanted[one].to is None, one)):
        to = wanted[rank].to
        if len(taken) >= total or (to is not None and named.get(to, 0) >= room_for(cluster, job, to)):
            continue
        if to is not None:
            named[to] = named.get(to, 0) + 1
        taken.append(rank)
    return sorted(taken)


# ---------------------------------------------------------------- one change at a time


def progress_migration(cluster: Cluster, job_id: JobId) -> Cluster:
    """One change, if one is due; the same cluster if not."""
    job = cluster.jobs[job_id]
    move = job.open_move
    if is_over(job):
        return cluster if move is None else abandon(cluster, job, move, MoveState.CALLED_OFF, "the job has finished")
    if move is None:
        return open_move(cluster, job)
    if move.state is MoveState.CUT_OVER:
        return cluster
    tended = tend(cluster, job, move)
    if tended is not None:
        return tended
    if job.phase is not JobPhase.RUNNING:
        return cluster
    return wait(cluster, job, move) if move.state is MoveState.WAITING else prepare_targets(cluster, job, move)


def keep_move(cluster: Cluster, job: Job, move: Move) -> Cluster:
    """The job with its newest move as it is now."""
    return cluster.with_job(job.with_moving(moves=(*job.moving.moves[:-1], move)))


def open_move(cluster: Cluster, job: Job) -> Cluster:
    """Make a move of what is wished; at first it waits."""
    if job.phase is not JobPhase.RUNNING or job.parking.asked:
        return cluster
    wanted = due(cluster, job)
    if not wanted:
        return cluster
    kind, ranks, reason = choose_group(cluster, job, wanted)
    move = aim(job, Move(job.moving.named + 1, kind, (), reason, cluster.now_ms), kind, ranks, wanted)
    move = move.begin(cluster.now_ms, wanted[ranks[0]].source)
    job = job.with_moving(moves=(*job.moving.moves, move)[-KEPT_MOVES:], named=move.number)
    return cluster.with_job(job)


def due(cluster: Cluster, job: Job) -> dict[Rank, Wish]:
    """What is wished, but for what was given up: that rests for a while, unless an operator asks again."""
    given_up = [move for move in job.moving.moves if move.state is MoveState.FAILED and cluster.now_ms < move.again_ms]
    resting = {rank for move in given_up for rank in move.ranks} - set(job.moving.requests)
    return {rank: wish for rank, wish in wishes_to_move(cluster, job).items() if rank not in resting}


def aim(job: Job, move: Move, kind: MoveKind, ranks: Sequence[Rank], wanted: dict[Rank, Wish]) -> Move:
    """The move, with what it is to move."""
    outgoing_workers = Table((rank, holder) for rank in ranks if (holder := job.seats[rank].worker) is not None)
    to = Table((rank, node) for rank in ranks if (node := wanted[rank].to) is not None)
    shares = all(wanted[rank].shares for rank in ranks)
    return replace(move, kind=kind, ranks=tuple(ranks), outgoing_workers=outgoing_workers, to=to, shares=shares)


def choose_group(cluster: Cluster, job: Job, wanted: dict[Rank, Wish]) -> tuple[MoveKind, list[Rank], str]:
    """What is moved together: all that is about to fail, else the first group of plans for which there is room."""
    urgent = [rank for rank, wish in wanted.items() if wish.kind is MoveKind.PRE_EMPTIVE]
    ranks = fit(cluster, job, urgent, wanted)
    if ranks:
        return MoveKind.PRE_EMPTIVE, ranks, reasons(wanted, ranks)
    groups: dict[str, list[Rank]] = {}
    for rank, wish in wanted.items():
        if rank not in urgent:
            groups.setdefault(wish.group, []).append(rank)
    chosen = next((one for one in groups.values() if fit(cluster, job, one, wanted) == sorted(one)), None)
    if urgent and chosen is None:
        return MoveKind.PRE_EMPTIVE, urgent, reasons(wanted, urgent)
    ranks = sorted(chosen or next(iter(groups.values())))
    return MoveKind.PLANNED, ranks, reasons(wanted, ranks)


def reasons(wanted: dict[Rank, Wish], ranks: Sequence[Rank]) -> str:
    return "; ".join(dict.fromkeys(wanted[rank].reason for rank in ranks))


# ---------------------------------------------------------------- waiting


def wait(cluster: Cluster, job: Job, move: Move) -> Cluster:
    """Begin when nothing speaks against it; else say what does."""
    wanted = due(cluster, job)
    state = over_by(job, move)
    yet = [rank for rank in move.ranks if rank in job.moving.requests or not lost_first(job, move, rank)]
    still = [rank for rank in yet if rank in wanted]
    if not wanted or (not still and state is MoveState.RECOVERED):
        return keep_move(cluster, job, move.close(state, cluster.now_ms, ending(cluster, job, move)))
    kind, ranks, reason = choose_group(cluster, job, wanted)
    relieved = [rank for rank in move.outgoing_workers if rank not in still and lost_first(job, move, rank)]
    if {*relieved, *move.moved} & set(ranks):  # one should be elsewhere again: that is another move
        why = parting(cluster, job, move, relieved, still)
        return keep_move(cluster, job, move.close(MoveState.RECOVERED, cluster.now_ms, why))
    move = tell_faults(cluster, job, move, still)
    former = [(rank, who) for rank, who in move.outgoing_workers.items() if rank in relieved or rank in move.moved]
    move = aim(job, replace(move, reason=reason), kind, ranks, wanted)
    move = replace(move, outgoing_workers=Table((*former, *move.outgoing_workers.items())))
    why = objection(cluster, job, move, wanted)
    if why:
        return keep_move(cluster, job, move.tell(cluster.now_ms, f"waits: {why}"))
    text = f"prepares rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} while training goes on"
    return keep_move(cluster, job, move.enter(MoveState.PREPARING, cluster.now_ms, text))


def parting(cluster: Cluster, job: Job, move: Move, relieved: Sequence[Rank], still: Sequence[Rank]) -> str:
    """What has become of the ranks of a move that ends by halves."""
    told = [fault_text(cluster, job, relieved)] if relieved else []
    told += [f"rank {', '.join(map(str, move.moved))} has gone"] if move.moved else []
    told += [f"rank {', '.join(map(str, still))} is to move yet"] if still else []
    return "; ".join(told)


def tell_faults(cluster: Cluster, job: Job, move: Move, still: Sequence[Rank]) -> Move:
    """Say of the ranks whose holders a fault has taken first whether they are to move yet."""
    for rank in move.ranks:
        if not lost_first(job, move, rank):
            continue
        text = f"rank {rank} need not move any more: a fault came first"
        if rank in still:
            text = f"{fault_text(cluster, job, [rank])}, and is to move yet"
        move = move.tell(cluster.now_ms, text)
    return move


def objection(cluster: Cluster, job: Job, move: Move, wanted: dict[Rank, Wish]) -> str:
    """What speaks against beginning this move now; empty if nothing does."""
    hindrance = leave_to_act(cluster, job)
    if hindrance:
        return hindrance
    if job.seats.any(facts.has_not_joined):
        return "not all ranks have called protect()"
    room = fit(cluster, job, move.ranks, wanted)
    if len(room) < len(move.ranks):
        where = sorted({to for rank in move.ranks if (to := wanted[rank].to) is not None})
        on = f" on {', '.join(where)}" if where else ""
        return f"{len(move.ranks)} worker{'s' if len(move.ranks) > 1 else ''} needed{on}, there is room for {len(room)}"
    return ""


def leave_to_act(cluster: Cluster, job: Job) -> str:
    """Why nothing is moved at the moment, whatever is wished; empty if it may be."""
    if cluster.freezes:
        who, why = next(iter(sorted(cluster.freezes.items())))
        return f"frozen by {who}" + (f": {why}" if why else "")
    if job.seats.count(facts.has_not_finished) < len(job.seats):
        return "the job is about to end"
    limit = job.spec.moves_per_hour
    recent = [at for at in job.moving.cutovers if cluster.now_ms - at < HOUR_MS]
    if 0 <= limit <= len(recent):
        return f"{len(recent)} moves within the last hour, {limit} are allowed (--moves-per-hour)"
    return ""


# ---------------------------------------------------------------- preparing


def tend(cluster: Cluster, job: Job, move: Move) -> Cluster | None:
    """See to an open move that has not cut over: lost targets, wishes that are gone, a freeze. None if all is well."""
    wanted = wishes_to_move(cluster, job)
    still = tuple(rank for rank in move.ranks if to_be_moved(job, move, rank, wanted))
    if move.state is not MoveState.WAITING:
        if cluster.freezes or not still:
            why = leave_to_act(cluster, job) if cluster.freezes else ending(cluster, job, move)
            state = MoveState.CALLED_OFF if cluster.freezes else over_by(job, move)
            return abandon(cluster, job, move, state, why)
        if still != move.ranks:
            gone = [rank for rank in move.ranks if rank not in still]
            return narrow(cluster, job, move, still, gone)
    if gives_precedence(cluster, job, move, wanted):
        return wait_again(cluster, job, move, "waits: a place is about to fail, and what is on it goes first")
    for rank, target in move.targets.items():
        worker = cluster.workers.get(target)
        to = wanted[rank].to if rank in wanted else None
        if worker is not None and to not in (None, worker.node):  # an operator has thought of another node
            why = f"rank {rank} is to go to {to}"
            move = replace(move, targets=move.targets.drop(rank), to=move.to.put(rank, to)).tell(cluster.now_ms, why)
            return without_target(keep_move(cluster.fence(target), job, move), job.spec.job, why)
        if worker is None or worker.life is Life.FENCING:
            return lost_target(cluster, job, move, rank, f"target {target} of rank {rank} is lost")
        if worker.brought is not None and job.phase is JobPhase.RUNNING:
            move = replace(move, targets=move.targets.drop(rank))
            move = move.tell(cluster.now_ms, f"target {target} was brought to {worker.brought}: training is further")
            return keep_move(cluster.fence(target), job, move)
        if is_closed(cluster, worker.node, worker.slot):
            cluster = cluster.fence(target)
            return lost_target(cluster, job, move, rank, f"the place of target {target} is tainted by now")
        late = cluster.now_ms - worker.since_ms >= job.spec.ready_ms
        if late and not worker.prepared and job.phase is JobPhase.RUNNING:
            cluster = cluster.fence(target)
            return lost_target(cluster, job, move, rank, f"target {target} of rank {rank} was not prepared in time")
    return None


def gives_precedence(cluster: Cluster, job: Job, move: Move, wanted: dict[Rank, Wish]) -> bool:
    """Whether a plan that is being prepared makes way for ranks whose places are about to fail."""
    if move.kind is not MoveKind.PLANNED or move.state is not MoveState.PREPARING or job.phase is not JobPhase.RUNNING:
        return False
    urgent = [rank for rank, wish in due(cluster, job).items() if wish.kind is MoveKind.PRE_EMPTIVE]
    return bool(urgent) and bool(move.targets or fit(cluster, job, urgent, wanted))


def to_be_moved(job: Job, move: Move, rank: Rank, wanted: dict[Rank, Wish]) -> bool:
    """Whether this move still has to move a rank. Of a vacant one that is seen when it is held again."""
    holder = job.seats[rank].worker
    return holder is None or (holder == move.outgoing_workers[rank] and rank in wanted)


def over_by(job: Job, move: Move) -> MoveState:
    """How a move ends of which nothing is left to do: its ranks were lost first, or the request was withdrawn."""
    return (
        MoveState.RECOVERED
        if any(lost_first(job, move, rank) for rank in move.outgoing_workers)
        else MoveState.CALLED_OFF
    )


def lost_first(job: Job, move: Move, rank: Rank) -> bool:
    """Whether a fault, and not this move, which has not cut over again, has taken a rank from its holder."""
    return rank not in move.moved and job.seats[rank].worker != move.outgoing_workers[rank]


def ending(cluster: Cluster, job: Job, move: Move) -> str:
    gone = [rank for rank in move.outgoing_workers if lost_first(job, move, rank)]
    return fault_text(cluster, job, gone) if gone else "the request was withdrawn"


def fault_text(cluster: Cluster, job: Job, ranks: Sequence[Rank]) -> str:
    """Where ranks are whose holders were lost: the replacements may have to be replaced in their turn."""
    places = []
    for rank in sorted(ranks):
        name = job.seats[rank].worker
        places.append(f"rank {rank} is " + ("vacant" if name is None else f"on {cluster.workers[name].place} now"))
    return f"a fault came first: {', '.join(places)}"


def narrow(cluster: Cluster, job: Job, move: Move, still: tuple[Rank, ...], gone: Sequence[Rank]) -> Cluster:
    """Some ranks need not move any more: their targets are let go; a boundary that was asked for is called off."""
    for rank in gone:
        target = move.targets.get(rank)
        if target is not None and target in cluster.workers:
            cluster = cluster.fence(target)
        move = replace(move, targets=move.targets.drop(rank))
    text = f"rank {', '.join(map(str, gone))} need not move any more"
    lost = [rank for rank in gone if lost_first(job, move, rank)]
    told = fault_text(cluster, job, lost) if lost == list(gone) else text
    unwanted = set(gone) - set(lost)
    kept = Table((rank, who) for rank, who in move.outgoing_workers.items() if rank not in unwanted)
    move = replace(move, ranks=still, outgoing_workers=kept)
    return without_target(keep_move(cluster, job, move.tell(cluster.now_ms, told)), job.spec.job, text)


def without_target(cluster: Cluster, job_id: JobId, why: str) -> Cluster:
    """A target was let go. If all are being asked to stop, that is called off: the move lacks what it stops for."""
    job = cluster.jobs[job_id]
    if job.phase in (JobPhase.QUIESCING, JobPhase.HALTING):
        return call_off(cluster, job, why, MoveState.PREPARING)
    return cluster


def lost_target(cluster: Cluster, job: Job, move: Move, rank: Rank, why: str) -> Cluster:
    """The next spare is prepared, until this has happened too often. The outgoing worker has noticed nothing."""
    move = replace(move, targets=move.targets.drop(rank), tries=move.tries + 1).tell(cluster.now_ms, why)
    cluster = keep_move(cluster, job, move)
    job = cluster.jobs[job.spec.job]
    if move.tries >= TRIES:
        return abandon(cluster, job, move, MoveState.FAILED, f"given up after {move.tries} tries: {why}")
    return without_target(cluster, job.spec.job, why)


def abandon(cluster: Cluster, job: Job, move: Move, state: MoveState, why: str) -> Cluster:
    """Close a move that has not cut over: its targets are let go, and who was asked to stop goes on."""
    for target in move.targets.values():
        if target in cluster.workers:
            cluster = cluster.fence(target)
    if state is MoveState.FAILED:
        move = replace(move, again_ms=cluster.now_ms + REST_MS)
        job = give_up(job, move, cluster.now_ms)
    cluster = keep_move(cluster, job, move)
    job = cluster.jobs[job.spec.job]
    if job.phase in (JobPhase.QUIESCING, JobPhase.HALTING):
        return call_off(cluster, job, why, state)
    return keep_move(cluster, job, move.close(state, cluster.now_ms, why))


def prepare_targets(cluster: Cluster, job: Job, move: Move) -> Cluster:
    """Give each rank a target; when all are prepared, ask for the boundary."""
    wanted = wishes_to_move(cluster, job)
    for rank in move.ranks:
        if rank in move.targets:
            continue
        spares = able_spares(cluster, job, wanted[rank].to, guests=move.shares)
        spare, reason = spare_for(cluster, job, rank, spares)
        if spare is not None:
            return appoint(cluster, job, move, rank, spare.worker, reason)
        if not fit(cluster, job, [rank], wanted):  # others have taken the room meanwhile
            return wait_again(cluster, job, move, f"waits: no room for rank {rank} any more")
    ready = [cluster.workers[target].prepared for target in move.targets.values()]
    if len(ready) < len(move.ranks) or not all(ready) or cluster.now_ms < move.again_ms:
        return cluster
    if job.exceptions.broken is not None or leave_to_act(cluster, job):
        return cluster
    return begin_quiesce(cluster, job, move)


def wait_again(cluster: Cluster, job: Job, move: Move, why: str) -> Cluster:
    """Back to waiting, without holding room that others could use."""
    for target in move.targets.values():
        cluster = cluster.fence(target)
    move = replace(move, targets=Table()).enter(MoveState.WAITING, cluster.now_ms, why)
    return keep_move(cluster, job, move)


def appoint(cluster: Cluster, job: Job, move: Move, rank: Rank, spare: WorkerId, reason: str) -> Cluster:
    """This spare becomes the target of a rank: it takes on the rank's identity, and can have no other."""
    worker = replace(cluster.workers[spare], incoming_for=rank, since_ms=cluster.now_ms)
    move = replace(move, targets=move.targets.put(rank, spare)).tell(cluster.now_ms, reason)
    return keep_move(cluster.with_worker(worker), job, move)


__all__ = ["progress_migration", "wishes_to_move", "worker_prepared"]
