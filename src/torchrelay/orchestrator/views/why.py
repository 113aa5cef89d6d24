"""Why: what speaks for and against a move, a rank, a node, a slot or a spare being used, read off the state.

Asked mostly for what does not happen: why does rank 3 not move, why is this spare idle, why does node-2 take nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchrelay.api.shown import Leg, WhyView, span_text
from torchrelay.orchestrator.views.places import empty_slot, held_by, refusal_text, refusing_taint, view_move
from torchrelay.orchestrator.views.plans import PlanRefused, holder_of, last_of, leg_text, node_of, ranks_text
from torchrelay.orchestrator.views.scene import Scene
from torchrelay.protocol.messages.events import Effect
from torchrelay.protocol.messages.ids import NodeId, Rank, WorkerId
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.moves import MoveState
from torchrelay.protocol.model.roster import Life, Node, Worker
from torchrelay.protocol.model.state import Cluster, is_over
from torchrelay.protocol.recovery.sharing import shares_with
from torchrelay.protocol.rules.migration import leave_to_act, wishes_to_move

RANK = re.compile(r"(?:rank|r)[ -]?(\d+)", re.IGNORECASE)
MOVE = re.compile(r"M-?(\d+)", re.IGNORECASE)
SLOT = re.compile(r"(.+)/(\d+)")


def why(scene: Scene, job: Job, about: str) -> WhyView:
    """Raises `PlanRefused` if there is nothing of that name."""
    cluster = scene.cluster
    # What is called so comes first: machines have names like m3, too.
    if WorkerId(about) in cluster.workers:
        worker = cluster.workers[WorkerId(about)]
        return WhyView(about=f"worker {about}", lines=tuple(why_worker(cluster, job, worker)))
    if NodeId(about) in cluster.nodes:
        node = cluster.nodes[NodeId(about)]
        return WhyView(about=str(node.node), lines=tuple(why_node(scene, job, node)))
    if found := MOVE.fullmatch(about):
        return why_move(scene, job, int(found[1]))
    if found := RANK.fullmatch(about):
        rank = Rank(int(found[1]))
        if rank not in job.seats:
            raise PlanRefused(f"no rank {rank}: {job.spec.job} has ranks 0 to {len(job.seats) - 1}")
        return WhyView(about=f"rank {rank} of {job.spec.job}", lines=tuple(why_rank(cluster, job, rank)))
    if found := SLOT.fullmatch(about):
        node = node_of(cluster, found[1])
        return WhyView(about=about, lines=tuple(why_slot(scene, job, node, int(found[2]))))
    kinds = "an incident (I-3), a move (M-3), a rank (rank 3), a node (node-1), a slot (node-1/0) or a worker"
    raise PlanRefused(f"nothing is named {about!r}: give {kinds}")


# ---------------------------------------------------------------- moves and ranks


def why_move(scene: Scene, job: Job, number: int) -> WhyView:
    for move in job.moving.moves:
        if move.number == number:
            found = view_move(scene, job, move)
            lines = [f"{found.name} of {found.job} ({found.kind}): {found.state}", f"because {found.reason}"]
            for leg in found.legs:
                went = leg_text(scene.cluster, leg, moves=True) if found.open else leg_told(leg, found.state)
                lines += [went] if leg.node is not None else []
            lines += [f"its interruption is {found.incident}"] if found.incident else []
            lines += standstill(scene.cluster, job) if found.open else []
            return WhyView(about=found.name, lines=tuple(lines), story=found.story)
    known = ", ".join(move.name for move in job.moving.moves[-8:]) or "none so far"
    raise PlanRefused(f"no move M-{number} of {job.spec.job}; there are: {known}")


def why_rank(cluster: Cluster, job: Job, rank: Rank) -> Iterator[str]:
    """Where a rank is, whether it should be elsewhere, and what keeps it."""
    worker = holder_of(cluster, job, rank)
    if worker is None:
        yield f"nobody holds it: {job.why}"
        return
    yield f"it is held by {worker.worker} on {worker.node}/{worker.slot}"
    host = shares_with(cluster, worker)
    if host is not None:
        yield f"it shares this slot with {host.worker}, as there was no spare, and moves when there is room"
    if is_over(job):
        yield f"{job.spec.job} is {job.phase}: nothing moves any more"
        return
    elsewhere = list(why_elsewhere(cluster, job, rank))
    if elsewhere:
        yield from elsewhere
        yield from standstill(cluster, job)
    else:
        yield "nothing asks it to move: no taint with NoExecute lies on its place, and nobody asked for it"
    ended = [one for one in job.moving.moves if rank in one.outgoing_workers and not (one.open and rank in one.ranks)]
    for past in ended[-2:]:
        if rank not in past.ranks:
            did = "moved it" if rank in past.moved else "was to move it, and a fault came first"
            yield f"before: {past.name} {did}"
            continue
        yield f"before: {past.name} {past.state}: {last_of(past)}"
        if past.state is MoveState.FAILED and cluster.now_ms < past.again_ms:
            yield f"it is tried again in {span_text((past.again_ms - cluster.now_ms) / 1000)}"


def why_elsewhere(cluster: Cluster, job: Job, rank: Rank) -> Iterator[str]:
    """Of a rank that is held: what wants it elsewhere, and how far that has come. Nothing if it may stay."""
    wish = wishes_to_move(cluster, job).get(rank)
    move = job.open_move
    if wish is None:
        request = job.moving.requests.get(rank)
        if move is not None and move.state is MoveState.CUT_OVER and rank in move.ranks:
            yield f"{move.name} moves it just now: {last_of(move)}"
        elif request is not None:
            yield f"{request.source} asked for it to leave {request.node}/{request.slot}, and then a fault came"
            yield "whether that has done it is seen when training goes on"
        return
    yield f"it should move ({wish.kind}): {wish.reason} (says {wish.source})"
    if move is not None and rank in move.ranks:
        waiting = move.state is MoveState.WAITING and last_of(move).startswith("waits")
        yield f"{move.name} moves it, and " + (last_of(move) if waiting else f"is {move.state}: {last_of(move)}")
    elif move is not None:
        yield f"it waits for {move.name} of {ranks_text(move.ranks)}, which is {move.state}: one move at a time"
    elif job.phase is not JobPhase.RUNNING:
        yield f"{job.spec.job} is {job.phase}: moves begin while it trains"


def standstill(cluster: Cluster, job: Job) -> list[str]:
    """What keeps every move from beginning at the moment."""
    hindrance = leave_to_act(cluster, job)
    return [f"nothing moves at the moment: {hindrance}"] if hindrance else []


def leg_told(leg: Leg, state: str) -> str:
    """The way of one rank in a move that is over."""
    verb = "went" if state == MoveState.DONE else "was to go"
    to = "elsewhere" if leg.to_node is None else leg.to_text + (f" ({leg.to_worker})" if leg.to_worker else "")
    return f"rank {leg.rank} {verb} from {leg.from_text} ({leg.worker}) to {to}"


# ---------------------------------------------------------------- places


def why_worker(cluster: Cluster, job: Job, worker: Worker) -> Iterator[str]:
    """What a worker is, and for a spare: why it has no rank."""
    place = f"{worker.node}/{worker.slot}"
    if worker.job != job.spec.job:
        yield f"it is of job {worker.job}, on {place}"
        return
    holds, move = held_by(job, worker)
    match holds:
        case "rank":
            yield from why_rank(cluster, job, Rank(worker.rank or 0))
        case "target":
            ready = "prepared" if worker.prepared else "being prepared"
            yield f"it is on {place}, target of rank {worker.incoming_for} in {move}, {ready} {worker.note}".rstrip()
        case "outgoing":
            yield f"it is on {place}, has handed over its rank in {move}, and serves its state until all train"
        case "ending":
            yield f"it is on {place}, and its end is ordered and awaited"
        case _:
            yield f"it is a spare on {place} ({worker.life})"
            yield from why_idle(cluster, job, worker)


def why_idle(cluster: Cluster, job: Job, spare: Worker) -> Iterator[str]:
    """Why a spare has no rank."""
    if not cluster.nodes[spare.node].alive:
        yield f"{spare.node} is lost"
    taint = refusing_taint(cluster, spare.node, spare.slot)
    if taint is not None:
        yield f"it may not be used: {refusal_text(taint)} ({taint.effect}, says {taint.source})"
        return
    if spare.life is not Life.WARM:
        yield "it is not warm yet: warm ones are taken first"
    last = [t for t in cluster.taints.values() if t.covers(spare.node, spare.slot) and t not in (taint,)]
    for one in last:
        if one.effect is Effect.PREFER_NO_SCHEDULE:
            yield f"it is taken last: {one.place} has {one.key}{': ' if one.reason else ''}{one.reason}"
    move = job.open_move
    if job.waiting_ms is not None:
        yield f"the job waits: {job.why}"
    elif move is None:
        yield "no rank needs it: nothing has failed, and nothing is to be moved"
    elif move.state is MoveState.WAITING:
        yield f"{move.name} waits: {last_of(move)}"
    else:
        yield f"{move.name} has its targets: it is left over"
    yield from standstill(cluster, job)


def why_node(scene: Scene, job: Job, node: Node) -> Iterator[str]:
    """What a node holds, and what keeps it from taking more."""
    cluster = scene.cluster
    state = "alive" if node.alive else "lost: nothing is put there until it comes back"
    yield f"it has {node.slots} slots and is {state}"
    for taint in cluster.taints.values():
        if taint.node == node.node:
            until = (
                "" if taint.until_ms is None else f", for another {span_text((taint.until_ms - scene.now_ms) / 1000)}"
            )
            reason = f": {taint.reason}" if taint.reason else ""
            yield f"{taint.place} is tainted {taint.key} ({taint.effect}) by {taint.source}{reason}{until}"
    for (name, slot), times in cluster.failures.items():
        if name == node.node:
            where = "it" if slot is None else f"slot {slot}"
            last = scene.at(times[-1])[:19]
            yield f"{where} failed {len(times)} time{'s' if len(times) > 1 else ''} within 30 days, last at {last}"
    hindrance = standstill(cluster, job)
    for slot in range(node.slots):
        holder = next((w for w in cluster.workers.values() if (w.node, w.slot) == (node.node, slot)), None)
        if holder is not None and holder.rank is not None and holder.job == job.spec.job:
            elsewhere = "; ".join(why_elsewhere(cluster, job, holder.rank)) if not is_over(job) else ""
            yield f"slot {slot}: rank {holder.rank} ({holder.worker})" + (f": {elsewhere}" if elsewhere else "")
            continue
        first, *more = [line for line in why_slot(scene, job, node, slot) if line not in hindrance]
        yield f"slot {slot}: {first}" + (f" ({'; '.join(more)})" if more else "")
    yield from hindrance


def why_slot(scene: Scene, job: Job, node: Node, slot: int) -> Iterator[str]:
    """What a slot holds; of an empty one, why nothing is put there."""
    cluster = scene.cluster
    if not 0 <= slot < node.slots:
        raise PlanRefused(f"no slot {slot} on {node.node}; there are: {node.node}/0 to {node.node}/{node.slots - 1}")
    worker = next((w for w in cluster.workers.values() if (w.node, w.slot) == (node.node, slot)), None)
    if worker is not None:
        yield from why_worker(cluster, job, worker)
        return
    holds, because = empty_slot(cluster, node, slot, scene.now_ms)
    if because:
        yield f"{holds}: {because}"
        return
    yield f"free: {why_free(cluster, job)}"


def why_free(cluster: Cluster, job: Job) -> str:
    """Why no worker is started in a slot that could be used."""
    spares = len(cluster.spares(job.spec.job))
    if is_over(job):
        return f"{job.spec.job} is {job.phase}"
    if spares >= job.spec.spares:
        return f"no worker is started there, as all {job.spec.spares} spares that are wanted are there"
    if job.phase is not JobPhase.RUNNING:
        return f"{job.spec.job} is {job.phase}; spares are filled up when it trains"
    return f"{spares} of {job.spec.spares} spares are there: one is to be started"
