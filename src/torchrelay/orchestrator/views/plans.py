"""Plans: what a changing call would do, before it is done. A pure function of the state.

The plan is made by the protocol core itself: the event that the call leads to is applied to a copy of the state, and
what would be different then is told. So a plan cannot promise what the core would not do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from torchrelay.api.shown import LONGEST_MS, Change, Leg
from torchrelay.orchestrator.views.scene import Scene, way_of
from torchrelay.protocol.messages.events import Effect, Event, MoveAsked, MoveWithdrawn, TaintCleared, TaintSet
from torchrelay.protocol.messages.ids import JobId, NodeId, Rank
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.moves import Move, MoveState, Taint
from torchrelay.protocol.model.roster import Node, Worker, natural_key
from torchrelay.protocol.model.state import Cluster, is_over
from torchrelay.protocol.rules.cluster import advance

DRAIN, CORDON = "torchrelay/drain", "torchrelay/cordon"
KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,126}")
VALUE = re.compile(r"[A-Za-z0-9._/+-]{0,63}")


class PlanRefused(Exception):
    """This cannot be asked for: what is wrong, and what there is instead."""


class MigrateAsk(Struct, frozen=True, kw_only=True):
    """Ranks, or all ranks on `node`, are wanted elsewhere; or, with `cancel`, not any more."""

    ranks: tuple[int, ...] = ()
    node: str | None = None
    to: str | None = None
    reason: str = ""
    cancel: bool = False


class TaintAsk(Struct, frozen=True, kw_only=True):
    """A taint on a node, or on one slot of it. `verb`: taint, drain, or cordon."""

    node: str
    slot: int | None = None
    key: str = DRAIN
    value: str = ""
    effect: Effect = Effect.NO_EXECUTE
    reason: str = ""
    ttl_ms: int | None = None
    verb: str = "taint"


class UntaintAsk(Struct, frozen=True, kw_only=True):
    """A taint is lifted. `verb`: untaint, undrain, or uncordon, which ends a drain as well."""

    node: str
    slot: int | None = None
    key: str = DRAIN
    healed: bool = False
    verb: str = "untaint"


Ask = MigrateAsk | TaintAsk | UntaintAsk


@dataclass(frozen=True, slots=True)
class Planned:
    """The event that a call leads to (None: there is nothing to change), and what is told of it."""

    event: Event | None
    change: Change
    ranks: tuple[tuple[JobId, Rank], ...] = ()  # that it is about


# ---------------------------------------------------------------- what there is


def node_of(cluster: Cluster, name: str) -> Node:
    """Raises `PlanRefused` with the nodes that there are."""
    node = cluster.nodes.get(NodeId(name))
    if node is None:
        known = ", ".join(sorted(cluster.nodes, key=natural_key)) or "none"
        raise PlanRefused(f"no node {name!r}; there are: {known}")
    return node


def slot_of(node: Node, slot: int | None) -> int | None:
    if slot is not None and not 0 <= slot < node.slots:
        raise PlanRefused(f"no slot {slot} on {node.node}; there are: {node.node}/0 to {node.node}/{node.slots - 1}")
    return slot


def ranks_of(job: Job, ranks: tuple[int, ...]) -> tuple[Rank, ...]:
    for rank in ranks:
        if Rank(rank) not in job.seats:
            raise PlanRefused(f"no rank {rank}: {job.spec.job} has ranks 0 to {len(job.seats) - 1}")
    return tuple(sorted({Rank(rank) for rank in ranks}))


def check_job(job: Job) -> None:
    """Raises `PlanRefused` if nothing more is expected of it."""
    if is_over(job):
        how = f" with {job.outcome.code}: {job.outcome.reason}" if job.outcome is not None else ""
        raise PlanRefused(f"{job.spec.job} {'has ended' if job.phase is JobPhase.ENDED else 'is ending'}{how}")


def check_jobs(cluster: Cluster) -> None:
    """Raises `PlanRefused` if there were jobs, and all are over: nothing would come of it."""
    if cluster.jobs and all(is_over(job) for job in cluster.jobs.values()):
        check_job(list(cluster.jobs.values())[-1])


def holder_of(cluster: Cluster, job: Job, rank: Rank) -> Worker | None:
    name = job.seats[rank].worker
    return None if name is None else cluster.workers.get(name)


def ranks_at(cluster: Cluster, node: NodeId, slot: int | None) -> Iterator[tuple[Job, Rank, Worker]]:
    """Who holds ranks at a place, of jobs that are not over."""
    for job in cluster.jobs.values():
        for rank in sorted(job.seats):
            worker = None if is_over(job) else holder_of(cluster, job, rank)
            if worker is not None and worker.node == node and slot in (None, worker.slot):
                yield job, rank, worker


def place_text(node: str, slot: int | None) -> str:
    return node if slot is None else f"{node}/{slot}"


# ---------------------------------------------------------------- migrate


def plan_migrate(scene: Scene, job: Job, ask: MigrateAsk, who: str) -> Planned:
    """Raises `PlanRefused`."""
    check_job(job)
    cluster, name = scene.cluster, job.spec.job
    if ask.ranks and ask.node is not None:
        raise PlanRefused("give ranks, or --node for all that are there: not both")
    if ask.node is not None:
        node = node_of(cluster, ask.node)
        ranks = tuple(rank for of, rank, _ in ranks_at(cluster, node.node, None) if of is job)
        if not ranks:
            return nothing("migrate", f"no rank of {name} is on {node.node}")
    elif not ask.ranks:
        raise PlanRefused("which ranks? Give their numbers, or --node for all that are there")
    else:
        ranks = ranks_of(job, ask.ranks)
    if ask.cancel:
        return plan_withdrawal(scene, job, ranks, who)
    to = None if ask.to is None else check_target(cluster, job, ranks, ask.to)
    reason = ask.reason or f"asked for by {who}"
    event = MoveAsked(job=name, ranks=ranks, to=to, reason=reason, source=who)
    lines = [f"rank {rank} is vacant: it is placed anew anyway" for rank in ranks if job.seats[rank].worker is None]
    about = tuple((name, rank) for rank in ranks)
    where = f" to {to}" if to is not None else ""
    return foresee(scene, event, "migrate", [f"migrate {ranks_text(ranks)} of {name}{where}", *lines], about)


def check_target(cluster: Cluster, job: Job, ranks: tuple[Rank, ...], to: str) -> NodeId:
    node = node_of(cluster, to)
    if not node.alive:
        raise PlanRefused(f"{to} is lost: choose another node, or none to let torchrelay choose")
    there = [rank for rank in ranks if (w := holder_of(cluster, job, rank)) is not None and w.node == node.node]
    if there:
        verb = "are" if len(there) > 1 else "is"
        raise PlanRefused(f"{ranks_text(tuple(there))} {verb} on {to} already")
    return node.node


def plan_withdrawal(scene: Scene, job: Job, ranks: tuple[Rank, ...], who: str) -> Planned:
    """What was asked for is not wanted any more. What a taint asks for is lifted with the taint."""
    asked = tuple(rank for rank in ranks if rank in job.moving.requests)
    if not asked:
        told = [f"nobody has asked to move {ranks_text(ranks)}"]
        for rank in ranks:
            worker = holder_of(scene.cluster, job, rank)
            taint = None if worker is None else leaving(scene.cluster, worker)
            if taint is not None:
                remedy = "undrain it" if taint.key == DRAIN else "untaint that"
                told.append(f"rank {rank} moves because {taint.place} is tainted {taint.key}: {remedy}")
        return nothing("migrate", *told)
    event = MoveWithdrawn(job=job.spec.job, ranks=asked, source=who)
    about = tuple((job.spec.job, rank) for rank in asked)
    return foresee(scene, event, "migrate", [f"{ranks_text(asked)} need not move any more"], about)


def leaving(cluster: Cluster, worker: Worker) -> Taint | None:
    """The taint because of which a worker's rank should leave; None if there is none."""
    found = [t for t in cluster.taints.values() if t.covers(worker.node, worker.slot)]
    urgent = [taint for taint in found if taint.effect is Effect.NO_EXECUTE]
    return min(urgent, key=lambda taint: (taint.planned, taint.since_ms), default=None)


# ---------------------------------------------------------------- taints


def plan_taint(scene: Scene, ask: TaintAsk, who: str) -> Planned:
    """Raises `PlanRefused`."""
    cluster = scene.cluster
    node = node_of(cluster, ask.node)
    slot = slot_of(node, ask.slot)
    if not KEY.fullmatch(ask.key) or not VALUE.fullmatch(ask.value):
        form = "letters, digits, '.', '_', '-' and '/', a letter or digit first"
        raise PlanRefused(f"key {ask.key!r} or value {ask.value!r} cannot be used: {form}")
    if ask.ttl_ms is not None and ask.ttl_ms <= 0:
        raise PlanRefused(f"a taint of {ask.ttl_ms} ms would be gone at once: give a longer --ttl, or none")
    if ask.ttl_ms is not None and ask.ttl_ms > LONGEST_MS:
        raise PlanRefused("a taint lies for 10 years at most: give a shorter --ttl, or none")
    check_jobs(cluster)
    planned = ask.verb == "drain"
    place = place_text(node.node, slot)
    before = cluster.taints.get((node.node, slot, ask.key))
    if before is not None and says_the_same(before, ask, planned=planned):
        done = DONE.get(ask.verb, f"has the taint {ask.key}")
        since = f", since {scene.at(before.since_ms)[:19]}, by {before.source}"
        return nothing(ask.verb, f"{place} {done} already{since}", explain=place)
    event = TaintSet(
        node=node.node,
        slot=slot,
        key=ask.key,
        value=ask.value,
        effect=ask.effect,
        reason=ask.reason,
        source=who,
        ttl_ms=ask.ttl_ms,
        planned=planned,
    )
    value = f"={ask.value}" if ask.value else ""
    head = f"{ask.verb} {place}" if ask.verb in DONE else f"taint {place} {ask.key}{value}:{ask.effect}"
    lines = [f"{head}: {MEANING[ask.effect]}"]
    lines += [f"it takes the place of {before.key}:{before.effect} by {before.source}"] if before is not None else []
    if not node.alive:
        lines.append(f"{node.node} is lost: it holds when the node comes back")
    about: tuple[tuple[JobId, Rank], ...] = ()
    if ask.effect is Effect.NO_EXECUTE:
        about = tuple((job.spec.job, rank) for job, rank, _ in ranks_at(cluster, node.node, slot))
        lines += [] if about else ["no rank is there"]
    lines += idle_spares(cluster, node.node, slot) if ask.effect is not Effect.PREFER_NO_SCHEDULE else []
    return foresee(scene, event, ask.verb, lines, about, explain=place)


NOT_DONE = {"undrain": "is not drained", "uncordon": "is neither cordoned nor drained"}
DONE = {"drain": "is drained", "cordon": "is cordoned"}
MEANING = {
    Effect.NO_EXECUTE: "what runs there moves away, and nothing new is put there",
    Effect.NO_SCHEDULE: "nothing new is put there; what runs there stays",
    Effect.PREFER_NO_SCHEDULE: "it is taken last",
}


def says_the_same(before: Taint, ask: TaintAsk, *, planned: bool) -> bool:
    """Whether nothing would change: one with a time to live is begun anew each time."""
    forever = ask.ttl_ms is None and before.until_ms is None
    same = (before.value, before.effect, before.planned) == (ask.value, ask.effect, planned)
    return forever and same and ask.reason in ("", before.reason)


def idle_spares(cluster: Cluster, node: NodeId, slot: int | None) -> list[str]:
    """Spares at a place that nobody may use any more."""
    return [
        f"spare {worker.worker} on {node}/{worker.slot} is not used any more"
        for worker in cluster.workers.values()
        if worker.node == node and slot in (None, worker.slot) and worker.rank is None and worker.incoming_for is None
    ]


def plan_untaint(scene: Scene, ask: UntaintAsk, who: str) -> Planned:
    """Raises `PlanRefused`."""
    cluster = scene.cluster
    node = node_of(cluster, ask.node)
    slot = slot_of(node, ask.slot)
    check_jobs(cluster)
    place = place_text(node.node, slot)
    taint = cluster.taints.get((node.node, slot, ask.key))
    if taint is None and ask.verb == "uncordon":
        taint = cluster.taints.get((node.node, slot, DRAIN))
    if taint is None:
        others = sorted(f"{t.place} {t.key}" for t in cluster.taints.values() if t.node == node.node)
        there = f"; there are: {', '.join(others)}" if others else ""
        said = f"{place} {NOT_DONE.get(ask.verb, f'has no taint {ask.key}')}"
        return nothing(ask.verb, f"{said}{there}")
    event = TaintCleared(node=node.node, slot=slot, key=taint.key, source=who, healed=ask.healed)
    lines = [f"{ask.verb} {place} {taint.key} ({taint.source}{': ' if taint.reason else ''}{taint.reason})"]
    left = sorted(t.key for t in cluster.taints.values() if t.node == node.node and t is not taint)
    lines += [f"still on {node.node}: {', '.join(left)}"] if left else []
    planned = foresee(scene, event, ask.verb, lines, (), explain=place)
    after = advance(cluster, event, scene.now_ms)
    new = [t for key, t in after.taints.items() if t.node == node.node and key not in cluster.taints]
    probation = [f"{t.place} is on probation ({t.effect}): {t.reason}; --healed if it was a mistake" for t in new]
    change = msgspec.structs.replace(planned.change, plan=(*planned.change.plan, *probation))
    return Planned(event, change, planned.ranks)


# ---------------------------------------------------------------- what would happen


def nothing(verb: str, *said: str, explain: str = "") -> Planned:
    """All is as wished already."""
    return Planned(None, Change(verb=verb, applied=False, changes=False, plan=said, explain=explain))


def foresee(
    scene: Scene, event: Event, verb: str, lines: list[str], about: tuple[tuple[JobId, Rank], ...], explain: str = ""
) -> Planned:
    """Apply the event to a copy of the state, and tell what became of it."""
    after = advance(scene.cluster, event, scene.now_ms)
    if after == scene.cluster:
        return nothing(verb, *lines, "this changes nothing: all is as wished already", explain=explain)
    change = tell_change(scene.cluster, after, verb, tuple(lines), about, explain)
    return Planned(event, change, about)


def tell_change(
    before: Cluster,
    after: Cluster,
    verb: str,
    lines: tuple[str, ...],
    about: tuple[tuple[JobId, Rank], ...],
    explain: str = "",
    *,
    applied: bool = False,
) -> Change:
    """What is different, in words: called-off moves, the ways of ranks, and why something waits."""
    said: list[str] = [*lines]
    legs: list[Leg] = []
    waits: list[str] = []
    name = ""
    for job_id, job in after.jobs.items():
        old = before.jobs.get(job_id)
        was = None if old is None else old.open_move
        said += [f"{was.name} {now.state}: {last_of(now)}" for now in job.moving.moves if was and ended(was, now)]
        mine = [rank for of, rank in about if of == job_id]
        if not mine:
            continue
        move = job.open_move
        ways = {} if move is None else {leg.rank: leg for leg in way_of(after, job, move)}
        for rank in mine:
            leg = ways.get(rank) or standing(after, job, rank)
            legs.append(leg)
            said.append(leg_text(after, leg, moves=rank in ways or wanted(after, job, rank)))
        if move is not None and ways.keys() & set(mine):
            name = move.name
            waits += [last_of(move)] if move.state is MoveState.WAITING else []
        elif any(wanted(after, job, rank) for rank in mine):
            waits.append(held_up(job, move))
    return Change(
        verb=verb,
        applied=applied,
        changes=True,
        plan=tuple(said),
        waits="; ".join(waits),
        legs=tuple(legs),
        move=name,
        explain=name or explain,
    )


def held_up(job: Job, move: Move | None) -> str:
    """Why there is no move yet although one is wanted."""
    if move is not None:
        return f"waits: {move.name} is under way ({move.state}), one move at a time"
    if job.phase is not JobPhase.RUNNING:
        return f"waits: {job.spec.job} is {job.phase}: moves begin while it trains"
    last = job.moving.moves[-1] if job.moving.moves else None
    return f"waits: {last.name} {last.state}: {last_of(last)}" if last is not None else "waits for its turn"


def wanted(cluster: Cluster, job: Job, rank: Rank) -> bool:
    """Whether a rank should be elsewhere."""
    worker = holder_of(cluster, job, rank)
    if worker is None:
        return False
    request = job.moving.requests.get(rank)
    asked = request is not None and request.worker == worker.worker
    return asked or leaving(cluster, worker) is not None


def ended(before: Move, now: Move) -> bool:
    return now.number == before.number and not now.open


def standing(cluster: Cluster, job: Job, rank: Rank) -> Leg:
    worker = holder_of(cluster, job, rank)
    if worker is None:
        return Leg(rank=rank)
    return Leg(rank=rank, worker=worker.worker, node=worker.node, slot=worker.slot)


def leg_text(cluster: Cluster, leg: Leg, *, moves: bool) -> str:
    """The way of one rank, in words."""
    here = f"rank {leg.rank} on {leg.from_text} ({leg.worker})" if leg.worker is not None else f"rank {leg.rank}"
    if not moves:
        return f"{here} stays"
    if leg.to_worker is None:
        to = f"to {leg.to_node}" if leg.to_node is not None else "to a place that is chosen when it begins"
        return f"{here} moves {to}"
    target = cluster.workers.get(leg.to_worker)
    life = f"{target.life} " if target is not None else ""
    return f"{here} moves to {leg.to_text} ({life}spare {leg.to_worker})"


def last_of(move: Move) -> str:
    return move.story[-1][1] if move.story else move.state


def ranks_text(ranks: tuple[Rank, ...]) -> str:
    """rank 2, or ranks 2, 3."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
