"""Story: the journal told for people. Each event becomes a moment: what was heard, and what it changed, with reasons.

The same moments come from the live service and from a replayed journal: they are read off the states before and after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from torchrelay.api.shown import SYMPTOM
from torchrelay.orchestrator.store.journal import Entry
from torchrelay.orchestrator.views.scene import Ways, note_ways
from torchrelay.orchestrator.views.views import describe, summarize
from torchrelay.protocol.messages.events import (
    Event,
    StateRestored,
    WorkerReady,
    WorkerReconfigured,
    WorkerReported,
    WorkerResumed,
    WorkerStarted,
    WorkerWarm,
)
from torchrelay.protocol.messages.ids import JobId
from torchrelay.protocol.model.incident import UNSETTLED, Incident
from torchrelay.protocol.model.job import Job
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.rules.cluster import EMPTY, advance


class Kind(StrEnum):
    """What a note is about."""

    SUBMITTED = "submitted"
    NODE = "node"  # a node came or was lost
    PLACE = "place"  # a taint was set or lifted, a freeze began or ended
    MOVE = "move"  # a move was asked for, or has got further
    PHASE = "phase"  # the job entered a phase
    OPENED = "opened"  # an incident began, and its cause is known
    FAULT = "fault"  # one more fault in an open incident
    SYMPTOM = "symptom"  # a collective broke: mostly what follows from a fault that is told next
    DECIDED = "decided"  # a decision within an incident, with its reason
    WAITING = "waiting"  # a rank waits for a spare
    RESOLVED = "resolved"  # an incident was closed
    ENDED = "ended"  # the outcome of the job is known


class Note(Struct, frozen=True, kw_only=True):
    """One line for people."""

    kind: Kind
    text: str
    job: JobId | None = None
    incident: str = ""
    phase: str = ""  # the job's, if it has entered one


class Moment(Struct, frozen=True, kw_only=True):
    """One event of the journal and what it changed. `facts` is the event without its bytes."""

    seq: int
    at_ms: int
    at: str
    event: str
    facts: dict[str, Any]
    notes: tuple[Note, ...] = ()
    outcomes: dict[JobId, int] = {}  # exit codes of jobs whose outcome is known and that this event has changed


class Told(Struct, frozen=True, kw_only=True):
    """A moment as it is kept: its words are made when somebody reads it. Of thousands of answers hardly one is read."""

    seq: int
    at_ms: int
    wall_ms: int
    kind: str  # of event
    light: Event | None  # the event itself, if it has no bytes that would be kept
    facts: dict[str, Any]  # else what there is to say of it
    notes: tuple[Note, ...]
    outcomes: dict[JobId, int]

    def moment(self) -> Moment:
        at = datetime.fromtimestamp(self.wall_ms / 1000).astimezone()
        return Moment(
            seq=self.seq,
            at_ms=self.at_ms,
            at=at.isoformat(timespec="milliseconds"),
            event=self.kind,
            facts=self.facts if self.light is None else plain(self.light),
            notes=self.notes,
            outcomes=self.outcomes,
        )


KEPT_MOMENTS = 100_000
# Answers without bytes, which come by the thousand.
LIGHT = (WorkerStarted, WorkerWarm, WorkerReported, WorkerReconfigured, StateRestored, WorkerResumed)


def tell(seq: int, at_ms: int, wall_ms: int, event: Event, before: Cluster, after: Cluster) -> Told:
    """What an event changed, in words."""
    notes: list[Note] = []
    if after.nodes is not before.nodes:
        notes += tell_nodes(before, after)
    if after.taints is not before.taints or after.freezes is not before.freezes:
        notes += tell_places(before, after)
    outcomes: dict[JobId, int] = {}
    for name, job in after.jobs.items():
        known = before.jobs.get(name)
        if known is not job:
            notes += tell_job(known, job)
            outcomes |= {name: job.outcome.code} if job.outcome is not None else {}
    light = isinstance(event, LIGHT) or (isinstance(event, WorkerReady) and not event.private)
    return Told(
        seq=seq,
        at_ms=at_ms,
        wall_ms=wall_ms,
        kind=type(event).__name__,
        light=event if light else None,
        facts={} if light else plain(event),
        notes=tuple(notes),
        outcomes=outcomes,
    )


class Moments:
    """What was told of late, for whoever reads along."""

    def __init__(self) -> None:
        self._told: list[Told] = []

    def note(
        self, seq: int, at_ms: int, wall_ms: int, event: Event, before: Cluster, after: Cluster
    ) -> tuple[Note, ...]:
        """Keep what an event changed. Returns it."""
        told = tell(seq, at_ms, wall_ms, event, before, after)
        self._told.append(told)
        if len(self._told) > KEPT_MOMENTS:
            del self._told[: KEPT_MOMENTS // 2]
        return told.notes

    def after(self, seq: int) -> list[Moment]:
        """What was told after this number, oldest first."""
        if not self._told:
            return []
        return [told.moment() for told in self._told[max(0, seq + 1 - self._told[0].seq) :]]


def tell_nodes(before: Cluster, after: Cluster) -> Iterator[Note]:
    for _, known, node in after.nodes.differences(before.nodes):
        if node is None:
            continue
        if known is None or known.incarnation != node.incarnation or (node.alive and not known.alive):
            yield Note(kind=Kind.NODE, text=f"{node.node} joined with {node.slots} slots")
        elif known.alive and not node.alive:
            yield Note(kind=Kind.NODE, text=f"{node.node} is lost")


def tell_places(before: Cluster, after: Cluster) -> Iterator[Note]:
    """Taints and freezes that are new, or gone."""
    if after.taints is not before.taints:
        for key, taint in after.taints.items():
            if before.taints.get(key) != taint:
                reason = f": {taint.reason}" if taint.reason else ""
                text = f"{taint.place} is tainted {taint.key} ({taint.effect}) by {taint.source}{reason}"
                yield Note(kind=Kind.PLACE, text=text)
        gone = [taint for key, taint in before.taints.items() if key not in after.taints]
        for taint in gone:
            yield Note(kind=Kind.PLACE, text=f"{taint.place} is not tainted {taint.key} any more")
    for source, why in after.freezes.items():
        if before.freezes.get(source) != why:
            yield Note(kind=Kind.PLACE, text=f"frozen by {source}{': ' if why else ''}{why}: nothing is moved")
    for source in before.freezes:
        if source not in after.freezes:
            yield Note(kind=Kind.PLACE, text=f"the freeze by {source} is over")


def tell_moves(before: Job | None, after: Job) -> Iterator[Note]:
    """Moves that are new or in another state."""
    known = {} if before is None else {move.number: move.state for move in before.moving.moves}
    for move in after.moving.moves:
        if known.get(move.number) != move.state:
            said = move.story[-1][1] if move.story else move.reason
            ranks = ", ".join(map(str, move.ranks))
            text = f"{move.name} ({move.kind}, rank {ranks}) {move.state}: {said}"
            yield Note(kind=Kind.MOVE, job=after.spec.job, text=text)


def tell_job(before: Job | None, after: Job) -> Iterator[Note]:
    job = after.spec.job
    if before is None:
        ranks, spares = after.spec.world_size, after.spec.spares
        yield Note(kind=Kind.SUBMITTED, job=job, text=f"{job}: {ranks} ranks, {spares} spares wanted")
    if before is None or after.moving.moves is not before.moving.moves:
        yield from tell_moves(before, after)
    same = before is not None and before.accounting.incidents is after.accounting.incidents
    told = () if before is None else before.accounting.incidents
    for place, incident in enumerate(() if same else after.accounting.incidents):
        known = told[place] if place < len(told) else None
        if known is not incident:
            yield from tell_incident(known, incident)
    if before is not None and before.phase is not after.phase:
        yield Note(kind=Kind.PHASE, job=job, text=f"{after.phase}: {after.why}", phase=after.phase)
    if before is not None and after.parking.why_not not in ("", before.parking.why_not):
        yield Note(kind=Kind.MOVE, job=job, text=f"no parking: {after.parking.why_not}")
    if after.waiting_ms is not None and (before is None or before.waiting_ms is None):
        yield Note(kind=Kind.WAITING, job=job, text=after.why)
    if after.outcome is not None and (before is None or before.outcome is None):
        yield Note(kind=Kind.ENDED, job=job, text=f"ends with {after.outcome.code}: {after.outcome.reason}")


def tell_incident(before: Incident | None, after: Incident) -> Iterator[Note]:
    old = () if before is None else before.faults
    opened = any(fault.detector != SYMPTOM for fault in old)
    for fault in after.faults[len(old) :]:
        kind = Kind.SYMPTOM if fault.detector == SYMPTOM else Kind.FAULT if opened else Kind.OPENED
        opened = opened or kind is Kind.OPENED
        yield Note(kind=kind, job=after.job, incident=after.name, text=describe(fault))
    # The last line said may have been the last one before; a story only grows.
    for _, text in after.story[0 if before is None else len(before.story) :]:
        yield Note(kind=Kind.DECIDED, job=after.job, incident=after.name, text=text)
    unsettled = before is None or before.resolution in UNSETTLED
    if unsettled and after.resolution not in UNSETTLED:
        yield Note(kind=Kind.RESOLVED, job=after.job, incident=after.name, text=summarize(after))


def plain(event: Event) -> dict[str, Any]:
    """An event as plain values; bytes (private state, recorded results) as their length only."""
    facts: dict[str, Any] = shorten(msgspec.to_builtins(event, builtin_types=(bytes,)))
    facts.pop("type", None)
    return facts


def shorten(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, dict):
        return {key: shorten(inner) for key, inner in value.items()}
    return [shorten(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def replay(entries: Iterable[Entry], ways: Ways | None = None, cluster: Cluster = EMPTY) -> Cluster:
    """The state that a journal leads to; `ways` gets where the ranks of its moves came from and went to.

    `cluster`: the state before the first of these entries.
    """
    for entry in entries:
        before, cluster = cluster, advance(cluster, entry.event, entry.at_ms, more=entry.more)
        if ways is not None:
            note_ways(ways, before, cluster)
    return cluster
