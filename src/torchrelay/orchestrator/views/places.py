"""Places: what nodes, slots and spares hold, what is held against them, and the moves of ranks, as operators see it."""

from __future__ import annotations

from torchrelay.api.shown import (
    FailureView,
    FreezeView,
    Moves,
    MoveView,
    Nodes,
    NodeView,
    SlotView,
    Spares,
    SpareView,
    TaintView,
    Told,
)
from torchrelay.orchestrator.views.scene import Scene
from torchrelay.protocol.messages.events import Effect
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.model.incident import Incident, Mark, Resolution
from torchrelay.protocol.model.job import Job
from torchrelay.protocol.model.moves import Move, Taint
from torchrelay.protocol.model.roster import Life, Node, Worker, natural_key
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.placement.policy import is_cordoned

CLOSING = (Effect.NO_SCHEDULE, Effect.NO_EXECUTE)

# ---------------------------------------------------------------- taints and freezes


def view_taint(scene: Scene, taint: Taint) -> TaintView:
    now = scene.now_ms
    return TaintView(
        place=taint.place,
        node=taint.node,
        slot=taint.slot,
        key=taint.key,
        value=taint.value,
        effect=taint.effect,
        reason=taint.reason,
        source=taint.source,
        since=scene.at(taint.since_ms),
        age_s=max(0, now - taint.since_ms) / 1000,
        left_s=None if taint.until_ms is None else max(0, taint.until_ms - now) / 1000,
        planned=taint.planned,
    )


def view_taints(scene: Scene, node: NodeId | None = None) -> tuple[TaintView, ...]:
    """The taints of one node, or all, in the order of their places."""
    found = [taint for taint in scene.cluster.taints.values() if node in (None, taint.node)]
    found.sort(key=lambda taint: (natural_key(taint.node), -1 if taint.slot is None else taint.slot, taint.key))
    return tuple(view_taint(scene, taint) for taint in found)


def view_freezes(cluster: Cluster) -> tuple[FreezeView, ...]:
    return tuple(FreezeView(source=source, reason=why) for source, why in sorted(cluster.freezes.items()))


def refusing_taint(cluster: Cluster, node: NodeId, slot: int) -> Taint | None:
    """The taint that keeps new workers and ranks off a slot; None if none does."""
    found = [taint for taint in cluster.taints.values() if taint.covers(node, slot) and taint.effect in CLOSING]
    return min(found, key=lambda taint: taint.since_ms, default=None)


def refusal_text(taint: Taint | None) -> str:
    """The same in words; empty if none does."""
    if taint is None:
        return ""
    return f"tainted {taint.key} on {taint.place}" + (f": {taint.reason}" if taint.reason else "")


# ---------------------------------------------------------------- nodes and slots


def view_nodes_in_full(scene: Scene) -> Nodes:
    nodes = sorted(scene.cluster.nodes.values(), key=lambda node: natural_key(node.node))
    return Nodes(nodes=tuple(view_node(scene, node) for node in nodes), freezes=view_freezes(scene.cluster))


def view_node(scene: Scene, node: Node) -> NodeView:
    heard = scene.failure_detector.heard.get((node.node, node.incarnation))
    failures = [(slot, at) for (name, slot), at in scene.cluster.failures.items() if name == node.node]
    failures.sort(key=lambda one: -1 if one[0] is None else one[0])
    lost = scene.cluster.failures.get((node.node, None), ())
    return NodeView(
        node=node.node,
        alive=node.alive,
        lost_since=scene.at(lost[-1]) if lost and not node.alive else "",
        silent_ms=None if heard is None else scene.now_ms - heard,
        incarnation=node.incarnation,
        slots=tuple(view_slot(scene.cluster, node, slot, scene.now_ms) for slot in range(node.slots)),
        taints=view_taints(scene, node.node),
        failures=tuple(FailureView(slot=slot, times=tuple(map(scene.at, times))) for slot, times in failures),
        silence=scene.silence(node),
    )


def view_slot(cluster: Cluster, node: Node, slot: int, now_ms: int) -> SlotView:
    there = [worker for worker in cluster.workers.values() if (worker.node, worker.slot) == (node.node, slot)]
    worker = min(there, key=lambda one: (one.guest, natural_key(one.worker)), default=None)
    if worker is None:
        holds, why = empty_slot(cluster, node, slot, now_ms)
        return SlotView(slot=slot, holds=holds, rank=None, worker=None, life="", move="", why=why)
    job = cluster.jobs[worker.job]
    holds, move = held_by(job, worker)
    rank = worker.incoming_for if holds == "target" else worker.rank
    why = refusal_text(refusing_taint(cluster, node.node, slot)) if holds == "spare" else ""
    guests = tuple(sorted((one.worker for one in there if one != worker), key=natural_key))
    return SlotView(
        slot=slot, holds=holds, rank=rank, worker=worker.worker, life=worker.life, move=move, why=why, guests=guests
    )


def empty_slot(cluster: Cluster, node: Node, slot: int, now_ms: int) -> tuple[str, str]:
    """What a slot without a worker is, and why it is not simply free."""
    if not node.alive:
        return "lost", "its node is lost"
    strikes = cluster.strikes.get((node.node, slot), ())
    if any(is_cordoned(job.spec, strikes, now_ms) for job in cluster.jobs.values()):
        return "cordoned", f"it lost {len(strikes)} workers (--slot-faults)"
    closed = refusal_text(refusing_taint(cluster, node.node, slot))
    return ("closed", closed) if closed else ("free", "")


def held_by(job: Job, worker: Worker) -> tuple[str, str]:
    """What a worker is to its job, and the move that it takes part in."""
    move = job.open_move
    name = "" if move is None else move.name
    if any(seat.outgoing == worker.worker for seat in job.seats.values()):
        return "outgoing", name
    if worker.life is Life.FENCING:
        return "ending", ""
    if worker.rank is not None:
        moving = move is not None and worker.rank in move.ranks
        return "rank", name if moving else ""
    return ("target", name) if worker.incoming_for is not None else ("spare", "")


def view_spares(scene: Scene, job: Job) -> Spares:
    """Workers without a rank, targets of a move included."""
    found = sorted(scene.cluster.spares(job.spec.job), key=lambda spare: natural_key(spare.worker))
    targets = [w for w in scene.cluster.of_job(job.spec.job) if w.incoming_for is not None and w.rank is None]
    found += [target for target in targets if target not in found and target.life is not Life.FENCING]
    rows = tuple(view_spare(scene, job, spare) for spare in found)
    return Spares(job=job.spec.job, wanted=job.spec.spares, spares=rows)


def view_spare(scene: Scene, job: Job, spare: Worker) -> SpareView:
    move = job.open_move
    name = move.name if move is not None and spare.incoming_for is not None else ""
    refused = refusal_text(refusing_taint(scene.cluster, spare.node, spare.slot))
    return SpareView(
        worker=spare.worker,
        node=spare.node,
        slot=spare.slot,
        state=spare.life,
        target_of=spare.incoming_for,
        move=name,
        prepared=spare.prepared,
        note=spare.note,
        refused=refused,
    )


# ---------------------------------------------------------------- moves


def view_moves(scene: Scene, job: Job) -> Moves:
    return Moves(job=job.spec.job, moves=tuple(view_move(scene, job, move) for move in job.moving.moves))


def view_open_move(scene: Scene, job: Job) -> MoveView | None:
    move = job.open_move
    return None if move is None else view_move(scene, job, move)


def view_move(scene: Scene, job: Job, move: Move) -> MoveView:
    incident = incident_of(job, move)
    story = tuple(Told(at=scene.at(at), after_ms=at - move.asked_ms, text=text) for at, text in move.story)
    return MoveView(
        name=move.name,
        job=job.spec.job,
        kind=move.kind,
        state=move.state,
        open=move.open,
        ranks=move.ranks,
        legs=scene.way(job, move),
        reason=move.reason,
        asked=scene.at(move.asked_ms),
        ended="" if move.ended_ms is None else scene.at(move.ended_ms),
        tries=move.tries,
        why=move.story[-1][1] if move.story else "",
        incident="" if incident is None else incident.name,
        pause_ms=None if incident is None else pause_of(incident),
        story=story,
    )


def incident_of(job: Job, move: Move) -> Incident | None:
    """The interruption that a move made."""
    return next((one for one in job.accounting.incidents if one.number == move.incident), None)


def pause_of(incident: Incident) -> int | None:
    """How long training stood: from the first fault, or in a move from the first worker that stood at the boundary."""
    begun, resumed = begin_of(incident), incident.marks.get(Mark.RESUMED)
    if begun is None or resumed is None or incident.resolution not in PAUSED:
        return None  # some may have gone on, all have not
    return max(0, resumed - begun)


def begin_of(incident: Incident) -> int | None:
    """When the pause of an incident began; None if there was none, as in a move that was called off in time."""
    begun = incident.marks.get(Mark.FAULT)
    if incident.kind == UNPLANNED:
        return begun
    return incident.marks.get(Mark.STOOD, None if incident.resolution is Resolution.CALLED_OFF else begun)


UNPLANNED = "unplanned"
# Of which it is known how long training stood.
PAUSED = (Resolution.RESUMED, Resolution.CLEAN, Resolution.CALLED_OFF, Resolution.ROLLED_BACK)
