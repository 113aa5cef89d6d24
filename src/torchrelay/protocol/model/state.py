"""The cluster's state, and the few ways in which it changes; every rule is built from these."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from msgspec import Struct
from msgspec.structs import replace

from torchrelay.protocol.messages.events import PrivateRecord, WorkerExited, WorkerStarted
from torchrelay.protocol.messages.ids import JobId, NodeId, Rank, WorkerId
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.moves import Taint, TaintId
from torchrelay.protocol.model.roster import Life, Node, Seat, Worker
from torchrelay.protocol.model.table import Table

# Private records kept of one rank: the newest of its former holders, of whom one leaves four at most.
KEPT_RECORDS = 4


class Cluster(Struct, frozen=True, eq=False):
    """All that the protocol knows. `now_ms` is not part of its identity: time alone changes nothing."""

    now_ms: int = 0
    nodes: Table[NodeId, Node] = Table()
    workers: Table[WorkerId, Worker] = Table()
    jobs: Table[JobId, Job] = Table()
    # Processes that should not be there: of a lost node that came back, or of a job that is over.
    strays: Table[WorkerId, tuple[NodeId, int]] = Table()
    # Processes of jobs that nobody here has heard of. They are another's: they go on, and their slots are theirs.
    foreign: Table[WorkerId, tuple[NodeId, int]] = Table()
    # When the slots lost workers, as (node, slot) -> times.
    strikes: Table[tuple[NodeId, int], tuple[int, ...]] = Table()
    born: int = 0  # workers named so far
    taints: Table[TaintId, Taint] = Table()
    # When nodes, or slots of them, failed or were tainted for a fault; None as slot: the whole node.
    failures: Table[tuple[NodeId, int | None], tuple[int, ...]] = Table()
    freezes: Table[str, str] = Table()  # who holds a freeze -> why

    def _known(self) -> tuple[Hashable, ...]:
        return tuple(getattr(self, name) for name in self.__struct_fields__ if name != "now_ms")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cluster) and self._known() == other._known()

    def __ne__(self, other: object) -> bool:
        return not self == other  # Struct's own does not ask `__eq__`

    def __hash__(self) -> int:
        return hash(self._known())

    # ------------------------------------------------------------ looking

    def of_job(self, job: JobId) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.job == job]

    def on_node(self, node: NodeId) -> list[Worker]:
        return [worker for _, worker in self.workers.group(facts.node_of, node)]

    def fencing(self, job: JobId) -> list[Worker]:
        """Workers of a job whose end is awaited."""
        return [worker for _, worker in self.workers.where(facts.is_fencing) if worker.job == job]

    def spares(self, job: JobId) -> list[Worker]:
        """Workers of a job without a rank, wherever they are in their start; not those that a move has appointed."""
        return [worker for _, worker in self.workers.where(facts.is_idle) if worker.job == job]

    def still_held(self, job: JobId, rank: Rank) -> bool:
        """Whether a former holder of the rank may still run: its end has not been seen."""
        return any(worker.rank == rank for worker in self.fencing(job))

    # ------------------------------------------------------------ changing

    def with_job(self, job: Job) -> Cluster:
        return replace(self, jobs=self.jobs.put(job.spec.job, job))

    def with_worker(self, worker: Worker) -> Cluster:
        return replace(self, workers=self.workers.put(worker.worker, worker))

    def fence(self, worker: WorkerId) -> Cluster:
        """From now on nothing this worker says counts, and its end is ordered."""
        known = self.workers.get(worker)
        if known is None or known.life is Life.FENCING:
            return self
        return self.with_worker(replace(known, life=Life.FENCING, since_ms=self.now_ms))

    def disown(self, worker: WorkerId) -> Cluster:
        """The rank it held has begun anew: what this worker leaves is of another history."""
        return self.with_worker(replace(self.workers[worker], rank=None))

    def forget(self, worker: WorkerId) -> Cluster:
        """The worker has ended, or its node is lost."""
        return replace(self, workers=self.workers.drop(worker))

    def strike(self, worker: Worker) -> Cluster:
        """Remember that a slot lost its worker."""
        place = (worker.node, worker.slot)
        times = (*self.strikes.get(place, ()), self.now_ms)
        return replace(self, strikes=self.strikes.put(place, times[-16:]))


def keep_private(seat: Seat, records: Iterable[PrivateRecord]) -> Seat:
    """Add what a former holder left; a newer record of the same point takes the place of the older.

    The newest points are kept, in whatever order the ends of former holders are heard.
    """
    fresh = tuple(records)
    points = {record.point for record in fresh}
    kept = tuple(record for record in seat.private if record.point not in points)
    newest = sorted((*kept, *fresh), key=lambda record: record.point)[-KEPT_RECORDS:]
    return replace(seat, private=tuple(newest))


def vacate_seat(seat: Seat) -> Seat:
    """The seat without its holder; which shard belongs to it, and what former holders left, stays."""
    return Seat(
        shard=seat.shard,
        home=seat.home,
        private=seat.private,
        distrusted=seat.distrusted,
        outgoing=seat.outgoing,
        place=seat.place,
        ended_ms=seat.ended_ms,
    )


def seat_of(cluster: Cluster, worker: WorkerId) -> tuple[Job, Rank] | None:
    """The job and rank whose seat this worker holds now."""
    known = cluster.workers.get(worker)
    if known is None:
        return None
    job, rank = cluster.jobs[known.job], known.rank  # a worker keeps its rank when it is fenced: the seat decides
    return (job, rank) if rank is not None and job.is_held_by(worker, rank) else None


def mark_started(worker: Worker, event: WorkerStarted, now_ms: int) -> Worker:
    """The worker, with what is known of it once its link is up."""
    return replace(worker, life=Life.STARTED, pid=event.pid, address=event.address, store=event.store, since_ms=now_ms)


def exit_text(event: WorkerExited) -> str:
    """How a worker ended, in words."""
    if event.cause:
        return event.cause
    if event.signal is not None:
        return f"ended by signal {event.signal}"
    return f"exited with {event.code}" if event.code is not None else "gone"


def is_over(job: Job) -> bool:
    """Whether nothing more is expected of the job's ranks."""
    return job.phase in (JobPhase.FINISHING, JobPhase.ENDING, JobPhase.ENDED)
