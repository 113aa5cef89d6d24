"""Cut-out: the part of a large job that the protocol core is shown, as a `Cluster` of its own values.

Every rule of the core looks at a lost rank, at who holds the same shard or a copy of its record, at the spares, and
asks of all others only whether they have answered, which they do all alike. So of a job of thousands of nodes it is
enough to show it those, and all spares: what it decides is the same (there is a test that compares), at a cost that
does not grow with the job. A rank stands for a node. Ranks have numbers from 0 in the cut-out, and keep their own here.

Who is needed later, in the middle of an incident, is put in as what it is: a survivor that has done what the others
have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import structs
from msgspec.structs import replace

from torchrelay.forecast.inputs.layouts import Layout
from torchrelay.protocol.messages.events import JobSpec
from torchrelay.protocol.messages.ids import NodeId, Rank, WorkerId
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.parts import Attempts
from torchrelay.protocol.model.roster import Life, Node, Seat, Worker
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.placement.buddies import COPIES
from torchrelay.protocol.rules.cluster import Cluster

ROOMY = 6  # ranks in view beyond which those that are not needed any more are put back


def node_name(number: int) -> NodeId:
    return NodeId(f"node-{number}")


def number_of(node: NodeId) -> int:
    return int(node.removeprefix("node-"))


def spare_worker(spec: JobSpec, node: NodeId, name: str) -> Worker:
    """A spare that is warm."""
    return Worker(WorkerId(name), node, 0, spec.job, Life.WARM, 0, pid=1, address=f"at:{name}", store=f"on:{name}")


class CutOut:
    """A job that trains, with its spares; what the core is shown of it is `cluster`."""

    def __init__(
        self,
        spec: JobSpec,
        layout: Layout,
        places: Iterable[int],
        spares: Iterable[int],
        incarnations: Mapping[NodeId, str] | None = None,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.outside = dict(enumerate(places))  # rank -> node, of ranks that are not shown
        self.outer = set(self.outside.values())
        self.shown: list[int] = []  # the number of each shown rank in the whole job
        self.incarnations = dict(incarnations or {})  # "0" if not told
        self._made = 0
        job = Job(spec, Table(), phase_ms=0, phase=JobPhase.RUNNING, why="training", attempts=Attempts(trained=True))
        nodes, workers = [], []
        for number in spares:
            node = node_name(number)
            nodes.append((node, Node(node, self.incarnations.get(node, "0"), 1, proven=True)))
            spare = spare_worker(spec, node, self.name_for(node))
            workers.append((spare.worker, spare))
        self.cluster = Cluster(nodes=Table(nodes), workers=Table(workers), jobs=Table({spec.job: job}))
        self.show([0])

    @property
    def job(self) -> Job:
        return self.cluster.jobs[self.spec.job]

    def name_for(self, node: NodeId) -> str:
        self._made += 1
        return f"{node}.0.a{self._made}"  # the core's own end with a plain number

    def shard(self, rank: int) -> str:
        return f"part {self.layout.part(rank)}"

    def whole(self, rank: Rank) -> int:
        """The number in the whole job of a rank that is shown."""
        return self.shown[rank]

    def ranks_on(self, node: int) -> list[int]:
        """Ranks of the whole job that are on this node now."""
        name = node_name(node)
        found = [rank for rank, place in self.outside.items() if place == node]
        for dense, seat in self.job.seats.items():
            worker = None if seat.worker is None else self.cluster.workers.get(seat.worker)
            if worker is not None and worker.node == name:
                found.append(self.shown[dense])
        return found

    def hosts(self, node: int) -> bool:
        """Whether a rank is on this node now."""
        if node in self.outer:
            return True
        name, workers = node_name(node), self.cluster.workers
        held = (workers.get(seat.worker) for seat in self.job.seats.values() if seat.worker is not None)
        return any(worker is not None and worker.node == name for worker in held)

    # ------------------------------------------------------------ who is shown

    def neighbours(self, rank: int) -> list[int]:
        """Who has a part in getting over the loss of this rank: itself, others with its shard, and its buddies."""
        copies = [other for other in self.layout.peers(rank) if other != rank]
        # One that is not shown is well, so it is enough.
        near = next((other for other in copies if other in self.outside), None)
        shown = [other for other in copies if other in self.shown]
        buddies = [(rank + step) % self.layout.nodes for step in range(1, COPIES + 1)]
        return list(dict.fromkeys([rank, *shown[:COPIES], *([] if near is None else [near]), *buddies]))

    def attend(self, ranks: Iterable[int], *, keep: bool = False) -> None:
        """Show these ranks and whoever has to do with them; put back others if there are many, unless `keep`."""
        wanted = [other for rank in ranks for other in self.neighbours(rank)]
        if not keep and len(self.shown) > ROOMY and self.quiet():
            self.put_back({0, *wanted, *(self.away() if self.spec.return_home else ())})
        self.show(rank for rank in dict.fromkeys(wanted) if rank not in self.shown)

    def show(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            dense = Rank(len(self.shown))
            number = self.outside.pop(rank)
            self.outer.discard(number)
            node = node_name(number)
            worker, seat = self.alike(rank, dense, node)
            self.shown.append(rank)
            cluster = replace(
                self.cluster,
                nodes=self.cluster.nodes.put(node, Node(node, self.incarnations.get(node, "0"), 1, proven=True)),
            )
            if worker is not None:
                cluster = cluster.with_worker(worker)
            self.cluster = cluster.with_job(self.job.with_seat(dense, seat))

    def alike(self, rank: int, dense: Rank, node: NodeId) -> tuple[Worker | None, Seat]:
        """The worker and the seat of a rank that nothing has happened to: what others like it have."""
        name = WorkerId(self.name_for(node))
        fresh = replace(spare_worker(self.spec, node, name), rank=dense)
        plain = Seat(worker=name, joined=True, shard=self.shard(rank), home=node)
        if self.job.phase is JobPhase.RUNNING:
            return fresh, plain
        other = self.survivor()
        if other is None:  # all have left their ranks: its worker has ended like theirs, and its place is free
            return None, Seat(shard=self.shard(rank), home=node, place=(node, 0))
        its_worker, its_seat = other
        report = its_seat.report
        if report is not None:
            report = structs.replace(report, worker=name, rank=dense, kept=None)
        worker = replace(
            its_worker, worker=name, node=node, slot=0, rank=dense, address=f"at:{name}", store=f"on:{name}"
        )
        return worker, replace(
            its_seat,
            worker=name,
            shard=self.shard(rank),
            home=node,
            report=report,
            private=(),
            place=None,
            failed=frozenset(),
            distrusted=frozenset(),
            asked_buddies=frozenset(),
        )

    def survivor(self) -> tuple[Worker, Seat] | None:
        """Somebody with a rank to whom nothing has happened, if there is one; else any holder."""
        held = [
            (self.cluster.workers[seat.worker], seat) for seat in self.job.seats.values() if seat.worker is not None
        ]
        able = [one for one in held if one[0].life in (Life.STARTED, Life.WARM)]
        return min(able, key=lambda one: (one[1].replacement, one[0].guest, one[0].since_ms), default=None)

    # ------------------------------------------------------------ who is put back

    def quiet(self) -> bool:
        """Whether all is as at the beginning, but for places: only then a rank can be put back."""
        job = self.job
        settled = job.phase is JobPhase.RUNNING and job.open_move is None and not job.moving.requests
        return settled and not any(
            worker.life is Life.FENCING or worker.guest or worker.incoming_for is not None
            for worker in self.cluster.workers.values()
        )

    def has_moved(self, seat: Seat) -> bool:
        """Whether a rank that was taken anew is on another node than before."""
        worker = None if seat.worker is None else self.cluster.workers.get(seat.worker)
        return worker is not None and seat.replacement and (seat.place is None or seat.place[0] != worker.node)

    def away(self) -> set[int]:
        """Ranks that are not where they began."""
        workers = self.cluster.workers
        seats = [(rank, seat, seat.worker and workers.get(seat.worker)) for rank, seat in self.job.seats.items()]
        return {self.shown[rank] for rank, seat, worker in seats if worker and worker.node != seat.home}

    def put_back(self, needed: set[int]) -> None:
        """Take out of view who is not needed; what is remembered of places (faults, taints) stays."""
        cluster, job, shown = self.cluster, self.job, []
        seats: list[tuple[Rank, Seat]] = []
        workers, nodes = dict(cluster.workers.items()), dict(cluster.nodes.items())
        for dense, rank in enumerate(self.shown):
            seat = job.seats[Rank(dense)]
            assert seat.worker is not None, "all have resumed"
            worker = workers[seat.worker]
            if rank in needed:
                workers[seat.worker] = replace(worker, rank=Rank(len(seats)))
                plain = Seat(
                    worker=seat.worker,
                    joined=True,
                    shard=seat.shard,
                    home=seat.home,
                    place=seat.place,
                    assigned_in=seat.assigned_in,
                    assigned_ms=seat.assigned_ms,
                )
                seats.append((Rank(len(seats)), plain))
                shown.append(rank)
            else:
                del workers[seat.worker], nodes[worker.node]
                self.outside[rank] = number_of(worker.node)
                self.outer.add(number_of(worker.node))
        self.shown = shown
        job = replace(job, seats=Table(seats), once=Table()).with_rollback(kept=Table()).with_moving(moves=())
        job = job.with_exceptions(raised=()).with_accounting(incidents=())
        self.cluster = replace(cluster, workers=Table(workers), nodes=Table(nodes)).with_job(job)

    def places(self) -> dict[int, int]:
        """The node of every rank of the whole job that has a living holder."""
        found = dict(self.outside)
        for dense, seat in self.job.seats.items():
            worker = None if seat.worker is None else self.cluster.workers.get(seat.worker)
            if worker is not None:
                found[self.shown[dense]] = number_of(worker.node)
        return found

    def crowd(self) -> int:
        """How many ranks share the fullest slot."""
        load: dict[NodeId, int] = {}
        for seat in self.job.seats.values():
            worker = None if seat.worker is None else self.cluster.workers.get(seat.worker)
            if worker is not None:
                load[worker.node] = load.get(worker.node, 0) + 1
        return max(load.values(), default=1)
