"""Scene: all that views are made from. A living orchestrator has one, and so has a journal that was replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from torchrelay.api.shown import Leg
from torchrelay.orchestrator.store.journal import Anchor, wall_ms
from torchrelay.protocol.health.pulses import FailureDetector
from torchrelay.protocol.health.silent_nodes import SilentNodes
from torchrelay.protocol.messages.ids import Generation, JobId, Point
from torchrelay.protocol.model.job import Job
from torchrelay.protocol.model.moves import Move, MoveState
from torchrelay.protocol.model.roster import Node
from torchrelay.protocol.model.state import Cluster

# By job and number of a move: where its ranks came from and went to. The core forgets that when a move is over.
Ways = dict[tuple[JobId, int], tuple[Leg, ...]]


def clock_text(wall: int) -> str:
    """A moment on the wall clock, in ms since 1970, as ISO 8601 with the local offset."""
    return datetime.fromtimestamp(wall / 1000).astimezone().isoformat(timespec="milliseconds")


@dataclass(frozen=True, slots=True)
class Scene:
    """`reached`: the newest point that beats told of, and in which generation. `lease`: see `journal`."""

    cluster: Cluster
    failure_detector: FailureDetector
    reached: Mapping[JobId, tuple[Generation, Point]]
    anchors: tuple[Anchor, ...]
    now_ms: int
    ways: Mapping[tuple[JobId, int], tuple[Leg, ...]] = field(default_factory=dict)
    lease: int = 0

    def at(self, moment_ms: int) -> str:
        """The moment on the wall clock, ISO 8601 with the local offset; empty if unknown."""
        wall = self.wall_ms(moment_ms)
        return clock_text(wall) if wall else ""

    def told_at(self, job: JobId, moment_ms: int) -> str:
        """The same of a time in an incident, which counts what the clock has left out (`Job.moment`)."""
        known = self.cluster.jobs[job]
        wall = self.wall_ms(self.now_ms)
        return clock_text(wall - (known.moment(self.now_ms) - moment_ms)) if wall else ""

    def wall_ms(self, moment_ms: int) -> int:
        """The same in ms since 1970; 0 if unknown."""
        return wall_ms(self.anchors, moment_ms)

    def silence(self, node: Node) -> str:
        """How it stands with a node that is not heard, in words; empty if it is."""
        silence = SilentNodes(self.failure_detector, self.cluster, self.now_ms).of(node)
        return "" if silence is None else str(silence)

    def way(self, job: Job, move: Move) -> tuple[Leg, ...]:
        """Where the ranks of a move come from and go to."""
        if move.open:
            return way_of(self.cluster, job, move, self.ways.get((job.spec.job, move.number), ()))
        return self.ways.get((job.spec.job, move.number), ()) or tuple(Leg(rank=rank) for rank in move.ranks)


def note_ways(ways: Ways, before: Cluster, after: Cluster) -> None:
    """Keep where the ranks of the open moves go, after an event."""
    for name, job in after.jobs.items():
        move = job.open_move
        old = before.jobs.get(name)
        if move is not None and old is not job:
            ways[(name, move.number)] = way_of(after, job, move, ways.get((name, move.number), ()))
        if old is not None and old.moving.named != job.moving.named:
            fresh = [one for one in job.moving.moves if one.number > old.moving.named and not one.open]
            ways.update({(name, one.number): way_asked(old, one) for one in fresh})


def way_asked(before: Job, move: Move) -> tuple[Leg, ...]:
    """The legs of a move that was over when it was noted: what was asked for, which a fault has come before."""
    legs = []
    for rank in move.ranks:
        leg = Leg(rank=rank, worker=move.outgoing_workers.get(rank), to_node=move.to.get(rank))
        request = before.moving.requests.get(rank)
        if request is not None:
            leg = msgspec.structs.replace(leg, node=request.node, slot=request.slot)
        legs.append(leg)
    return tuple(legs)


def way_of(cluster: Cluster, job: Job, move: Move, known: tuple[Leg, ...] = ()) -> tuple[Leg, ...]:
    """The legs of an open move: from where the rank is (until the cutover) to its target, when it has one."""
    noted = {leg.rank: leg for leg in known}
    legs = []
    for rank in move.ranks:
        leg = noted.get(rank, Leg(rank=rank))
        holder = job.seats[rank].worker
        worker = None if holder is None else cluster.workers.get(holder)
        # Of a rank that a fault has taken first the way is that from where it was.
        if worker is not None and move.state is not MoveState.CUT_OVER and move.outgoing_workers.get(rank) == holder:
            leg = msgspec.structs.replace(leg, worker=worker.worker, node=worker.node, slot=worker.slot)
        name = move.targets.get(rank)
        target = None if name is None else cluster.workers.get(name)
        if target is not None:
            leg = msgspec.structs.replace(
                leg, to_worker=target.worker, to_node=target.node, to_slot=target.slot, prepared=target.prepared
            )
        elif move.state is not MoveState.CUT_OVER:
            wish = job.moving.requests.get(rank)
            to = None if wish is None else wish.to
            leg = msgspec.structs.replace(leg, to_worker=None, to_node=to, to_slot=None, prepared=False)
        legs.append(leg)
    return tuple(legs)
