"""What tests of properties share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.exhaustive import check_orders, check_roster
from tests.support.telling import JOB, Stand, answers, private, training
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import START, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.state import KEPT_RECORDS
from torchrelay.protocol.rules.cluster import EMPTY, Cluster, advance, orders

RANKS = 3
SPEC = ev.JobSpec(
    job=JOB,
    world_size=RANKS,
    nproc_per_node=2,
    nodes=2,
    spares=2,
    slot_faults=0,
    max_restarts=1,
    report_ms=500,
    ready_ms=2_000,
    reconfigure_ms=1_000,
    restore_ms=1_000,
    spare_wait_ms=3_000,
)
NODES = (NodeId("node-0"), NodeId("node-1"))


@dataclass
class Tally:
    """The world as the test knows it."""

    cluster: Cluster = EMPTY
    now_ms: int = 0
    stands: dict[WorkerId, Stand] = field(default_factory=dict)
    ranks: dict[WorkerId, Rank] = field(default_factory=dict)
    dead: set[WorkerId] = field(default_factory=set)
    left: dict[tuple[Rank, Point], bytes] = field(default_factory=dict)  # in this start
    told: list[ev.Event] = field(default_factory=list)
    start: int = 0  # of all workers, counted
    started_in: dict[WorkerId, int] = field(default_factory=dict)
    furthest: Point = START  # from which this start of all workers has ever resumed

    @property
    def job(self) -> Job:
        return self.cluster.jobs[JOB]

    def hear(self, event: ev.Event) -> None:
        before = self.job if JOB in self.cluster.jobs else None
        self.cluster = advance(self.cluster, event, self.now_ms)
        self.told.append(event)
        self.cluster = advance(self.cluster, event, self.now_ms)  # twice counts once, or at least does no harm
        if before is not None and self.job.phase is JobPhase.STARTING and before.generation != self.job.generation:
            self.left.clear()
            self.furthest = START
            self.start += 1
        self.judge()

    # ------------------------------------------------------------ what may happen

    def obey(self, choice: int) -> None:
        """Someone does what is ordered."""
        standing = sorted(orders(self.cluster), key=repr)
        if not standing:
            return
        order = standing[choice % len(standing)]
        if isinstance(order, od.Fence):
            self.end(order.worker)
            return
        worker: WorkerId = order.worker  # type: ignore[attr-defined]  # all orders name a worker
        if isinstance(order, od.StartWorker):
            self.stands.setdefault(worker, Stand())
        if worker in self.dead:
            return
        if isinstance(order, od.Assign):
            self.ranks[worker] = order.rank
            self.started_in.setdefault(worker, self.start)
        for event in answers(order, self.stands):
            self.hear(event)

    def end(self, worker: WorkerId) -> None:
        """A worker's process ends, and its page is read."""
        known = self.cluster.workers.get(worker)
        node = known.node if known is not None else NODES[0]
        if worker in self.dead:
            self.hear(ev.WorkerExited(worker=worker, node=node, cause="unknown here"))
            return
        self.dead.add(worker)
        stand, rank = self.stands.get(worker, Stand()), self.ranks.get(worker)
        records = []
        if rank is not None:
            for record in stand.records(worker):
                data = f"rank {rank} at {record.point} by {worker}".encode()
                records.append(ev.PrivateRecord(record.point, data))
                if self.started_in[worker] == self.start:
                    self.left[rank, record.point] = data
        self.hear(ev.WorkerExited(worker=worker, node=node, signal=9, private=tuple(records)))

    def kill(self, choice: int) -> None:
        living = sorted(worker for worker in self.cluster.workers if worker not in self.dead)
        if living:
            self.end(living[choice % len(living)])

    def hang(self, choice: int) -> None:
        living = sorted(self.cluster.workers)
        if living:
            self.hear(ev.WorkerHung(worker=living[choice % len(living)], evidence="stopped"))

    def train(self, choice: int) -> None:
        """All are in the gate of the next step, and those in the mask `choice` have passed it."""
        holders = [seat.worker for seat in self.job.seats.values() if seat.worker is not None]
        stands = {self.stands.get(worker, Stand()).committed for worker in holders}
        alive = len(holders) == RANKS and not self.dead & set(holders)
        if self.job.phase is not JobPhase.RUNNING or not alive or len(stands) != 1 or None in stands:
            return
        for number, worker in enumerate(holders):
            point = self.stands[worker].committed
            assert point is not None, "checked above"
            passed = choice >> number & 1
            gate = Stand(point, WorkerPhase.GATE, point.after_step())
            self.stands[worker] = training(point.after_step()) if passed else gate

    def wait(self, choice: int) -> None:
        self.now_ms += (10, 260, 600, 1_100, 5_000)[choice % 5]
        self.hear(ev.Tick())

    def repeat(self, choice: int) -> None:
        """Something is heard again, however old. A node's word is not: its connection keeps the order."""
        old = [event for event in self.told if not isinstance(event, ev.NodeJoined | ev.NodeLost | ev.JobSubmitted)]
        if old:
            self.hear(old[choice % len(old)])

    def fail(self, choice: int) -> None:
        """Connecting, fetching or a collective fails."""
        for order in sorted(orders(self.cluster), key=repr):
            if isinstance(order, od.Restore | od.Reconfigure):
                who: dict[str, Any] = {
                    "job": JOB,
                    "generation": order.generation,
                    "worker": order.worker,
                    "rank": order.rank,
                }
                if isinstance(order, od.Reconfigure) and choice % 3 == 0:
                    self.hear(ev.ReconfigureFailed(**who, reason="refused"))
                elif isinstance(order, od.Restore) and order.sources:
                    source = order.sources[choice % len(order.sources)].rank
                    self.hear(ev.RestoreFailed(**who, source=source, reason="broken", mismatch=choice % 2 == 0))
                return
        holders = [(rank, seat.worker) for rank, seat in self.job.seats.items() if seat.worker is not None]
        for rank, worker in holders[:1]:
            generation = self.job.generation
            self.hear(ev.CollectiveFailed(worker=worker, job=JOB, rank=rank, generation=generation, summary="reset"))

    def lose_node(self, choice: int) -> None:
        node = NODES[choice % 2]
        known = self.cluster.nodes.get(node)
        if choice % 4 < 2 and known is not None and known.alive:
            self.dead |= {worker.worker for worker in self.cluster.workers.values() if worker.node == node}
            self.hear(ev.NodeLost(node=node, incarnation=known.incarnation, reason="silence"))
        else:
            alive = tuple(
                ev.WorkerSeen(worker=worker.worker, slot=worker.slot, pid=1, job=worker.job)
                for worker in self.cluster.workers.values()
                if worker.node == node and worker.worker not in self.dead
            )
            self.hear(ev.NodeJoined(node=node, incarnation=f"again-{len(self.told)}", slots=3, workers=alive))

    def wish(self, choice: int) -> None:
        """Somebody wants ranks elsewhere, or thinks better of it; a place is tainted, or cleared."""
        ranks = tuple(Rank(rank) for rank in range(RANKS) if choice >> rank & 1)
        node = NODES[choice % 2]
        match choice % 5:
            case 0 | 1:
                self.hear(ev.MoveAsked(job=JOB, ranks=ranks, to=node if choice & 32 else None, reason="r", source="a"))
            case 2:
                self.hear(ev.MoveWithdrawn(job=JOB, ranks=ranks, source="a"))
            case 3:
                slot = None if choice & 32 else choice % 3
                ttl_ms = 600 if choice & 16 else None
                self.hear(ev.TaintSet(node=node, slot=slot, key="k", planned=choice & 8 > 0, source="a", ttl_ms=ttl_ms))
            case _:
                for taint in list(self.cluster.taints.values()):
                    self.hear(ev.TaintCleared(node=taint.node, slot=taint.slot, key=taint.key, source="a"))

    def freeze(self, choice: int) -> None:
        """Seldom set, and soon lifted: in a frozen job the first fault is the last."""
        if choice % 4 == 0:
            self.hear(ev.FreezeSet(source="a"))
        else:
            self.hear(ev.FreezeCleared(source="a"))

    def keep(self, choice: int) -> None:
        """From now on some workers have copies of their wards' records, as buddies have."""
        for number, worker in enumerate(sorted(self.stands)):
            self.stands[worker] = replace(self.stands[worker], keeps=choice >> number & 1 > 0)

    def quiet(self, choice: int) -> None:
        """All do what is ordered, each order in its turn, for a while."""
        for _ in range(1 + choice % 12):
            for order in sorted(orders(self.cluster), key=repr):
                standing = sorted(orders(self.cluster), key=repr)
                if order in standing:
                    self.obey(standing.index(order))

    # ------------------------------------------------------------ what must be true

    def judge(self) -> None:
        job = self.job
        check_roster(self.cluster, job)
        check_orders(self.cluster, job)
        for order in orders(self.cluster):
            self.judge_order(order)
        assert all(len(seat.private) <= KEPT_RECORDS for seat in job.seats.values())

    def judge_order(self, order: od.Order) -> None:
        match order:
            case od.Decide(worker=worker, point=point, verdict=verdict):
                stand = self.stands[worker]
                forward = stand.phase is WorkerPhase.GATE and stand.pending == point
                # Nobody was lost: who is in a gate comes out of it, and goes on to the boundary from there.
                in_peace = verdict is od.Verdict.GO_ON and stand.pending is not None and stand.pending <= point
                assert stand.committed == point or in_peace or (forward and verdict is od.Verdict.ROLL_FORWARD)
            case od.Replay(rank=rank, point=point, private=data):
                # What this rank's last holder left there, handed over there, or what a buddy has kept of it.
                assert data in (self.left.get((rank, point)), private(point))
            case od.Restore(point=point, sources=sources):
                for source in sources:
                    holder = WorkerId(source.address.removeprefix("at:"))
                    assert self.stands[holder].committed == point
                    assert self.ranks[holder] == source.rank
            case od.Resume() if self.job.phase is JobPhase.RELEASING:
                pass  # everybody goes on from where it is
            case od.Resume(worker=worker, point=point):
                assert point is None or self.stands[worker].committed == point
                if point is not None:
                    assert point >= self.furthest
                    self.furthest = point
            case _:
                pass


ACTIONS: tuple[Callable[[Tally, int], None], ...] = (
    Tally.obey, Tally.obey, Tally.quiet, Tally.quiet, Tally.kill, Tally.hang, Tally.train, Tally.wait, Tally.repeat,
    Tally.fail, Tally.lose_node, Tally.wish, Tally.wish, Tally.freeze, Tally.keep,
)  # fmt: skip


def begun() -> Tally:
    tally = Tally()
    tally.hear(ev.JobSubmitted(spec=SPEC))
    for node in NODES:
        tally.hear(ev.NodeJoined(node=node, incarnation="a", slots=3))
    return tally


def play(moves: list[tuple[int, int]]) -> Tally:
    """Let things happen, then let everybody do what is ordered until the job trains or has ended."""
    tally = begun()
    tally.quiet(11)
    for action, choice in moves:
        ACTIONS[action % len(ACTIONS)](tally, choice)
    for node in NODES:
        tally.lose_node(2 + NODES.index(node))
    tally.freeze(1)
    tally.wish(4)
    for _ in range(40):
        if tally.job.phase in (JobPhase.RUNNING, JobPhase.ENDED):
            break
        tally.quiet(11)  # rounds enough for all phases: else each would end by its deadline, and none go on
        tally.wait(4)
    return tally


MOVES = st.lists(st.tuples(st.integers(0, len(ACTIONS) - 1), st.integers(0, 63)), max_size=40)


def check(moves: list[tuple[int, int]]) -> None:
    tally = play(moves)
    assert tally.job.phase in (JobPhase.RUNNING, JobPhase.ENDED), tally.job.why
