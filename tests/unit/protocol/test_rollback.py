"""Going back to snapshots: when, to which point, and who takes which rank again."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from tests.support.telling import JOB, Stand, Story, private, training
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId, Point, Rank, WorkerId
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.roster import Life, Seat
from torchrelay.protocol.model.state import Cluster, vacate_seat
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.placement.policy import ROLL_BUDGET
from torchrelay.protocol.recovery.rollback import keepers_of, may_come, places_for, within_reach

A, B = NodeId("node-0"), NodeId("node-1")


def snapshots(*points: int, ranks: Iterable[int] = (0, 1), restarts: int = 0) -> tuple[ev.Snapshot, ...]:
    return tuple(ev.Snapshot(Rank(rank), Point(point), restarts) for rank in ranks for point in points)


class Sharded:
    """Two ranks on two nodes, each with a shard of its own, and a spare slot on the first."""

    def __init__(self, point: int = 7, **fields: int) -> None:
        story = self.story = Story()
        spec = ev.JobSpec(job=JOB, world_size=2, nproc_per_node=1, nodes=2, spares=1, **fields)  # type: ignore[arg-type]
        story.hear(ev.JobSubmitted(spec=spec))
        for node, slots in ((A, 2), (B, 1)):
            story.hear(ev.NodeJoined(node=node, incarnation="a", slots=slots))
        story.settle()
        self.train(point)

    def train(self, point: int) -> None:
        for rank in (0, 1):
            worker = self.story.holder(rank)
            self.story.stands[worker] = replace(training(Point(point)), shard=f"shard {rank}")
            self.story.hear(ev.WorkerJoined(worker=worker, job=JOB, rank=Rank(rank), shard=f"shard {rank}"))

    def lose(self, rank: int, kept: tuple[ev.Snapshot, ...]) -> None:
        worker = self.story.holder(rank)
        node, left = self.story.cluster.workers[worker].node, self.story.stands[worker].records(worker)
        self.story.hear(ev.WorkerExited(worker=worker, node=node, signal=9, private=left, kept=kept))

    def report(self, rank: int, kept: tuple[ev.Snapshot, ...], point: int = 7) -> None:
        job, worker = self.story.job, self.story.holder(rank)
        stand = self.story.stands[worker]
        self.story.hear(
            ev.WorkerReported(
                job=JOB,
                generation=job.generation,
                worker=worker,
                rank=Rank(rank),
                committed=Point(point),
                phase=stand.phase,
                pending=stand.pending,
                kept=kept,
            )
        )

    def keep(self) -> None:
        """Whoever is asked for a record out of a snapshot has it."""
        for worker, known in self.story.cluster.workers.items():
            stand = self.story.stands.get(worker, Stand())
            self.story.stands[worker] = replace(stand, keeps=True, shard=f"shard {known.rank}")

    def answer_recalls(self) -> None:
        """Nobody has a record from the gates."""
        self.story.answer((od.Recall,))

    def settle(self) -> None:
        """Everybody does what is ordered; the private records lie in the snapshots."""
        for _ in range(60):
            before = self.story.cluster
            self.keep()
            self.story.answer()
            if self.story.cluster == before:
                return
        raise AssertionError("it never comes to rest")


@pytest.fixture
def sharded() -> Sharded:
    return Sharded()


def both_tell(sharded: Sharded, on_a: tuple[ev.Snapshot, ...], on_b: tuple[ev.Snapshot, ...]) -> None:
    sharded.lose(1, on_b)
    sharded.report(0, on_a)


def both_tell_at(sharded: Sharded, point: int, kept: tuple[ev.Snapshot, ...]) -> None:
    sharded.lose(1, kept)
    sharded.report(0, kept, point)


def test_all_go_back_to_the_newest_that_all_have(sharded: Sharded) -> None:
    both_tell(sharded, snapshots(1, 6), (*snapshots(1, 6, ranks=[0]), *snapshots(1, ranks=[1])))
    job = sharded.story.job
    assert (job.rollback.point, job.resume_point) == (Point(6), Point(6))
    assert all(seat.worker is None for seat in job.seats.values())
    assert job.open_incident is not None
    assert job.open_incident.lost == 1


def test_one_that_a_rank_lacks_is_none(sharded: Sharded) -> None:
    both_tell(sharded, snapshots(1), (*snapshots(1, 6, ranks=[0]),))
    assert sharded.story.job.rollback.point == Point(1)


def test_without_a_common_one_it_ends_as_without_us(sharded: Sharded) -> None:
    both_tell(sharded, snapshots(6, ranks=[0]), snapshots(1, ranks=[1]))
    job = sharded.story.job
    assert job.outcome is not None
    assert job.outcome.code == 91
    assert job.outcome.reason == "no replica holds the shard of rank 1"


def test_those_of_an_earlier_start_of_the_job_do_not_count(sharded: Sharded) -> None:
    both_tell(sharded, snapshots(1, 6, restarts=1), snapshots(1, 6, restarts=1))
    assert sharded.story.job.outcome is not None
    assert sharded.story.job.outcome.reason == "no replica holds the shard of rank 1"


def test_ranks_come_back_to_their_slots_and_the_spare_stays_one(sharded: Sharded) -> None:
    before = {rank: sharded.story.cluster.workers[sharded.story.holder(rank)].place for rank in (0, 1)}
    both_tell(sharded, snapshots(6), snapshots(6))
    sharded.settle()
    job = sharded.story.job
    assert job.phase is JobPhase.RUNNING
    after = {rank: sharded.story.cluster.workers[sharded.story.holder(rank)].place for rank in (0, 1)}
    assert after == before
    assert job.accounting.incidents[-1].resolution is Resolution.ROLLED_BACK
    assert (job.rollback.point, len(job.rollback.kept)) == (None, 0)


def test_they_come_back_though_there_are_spares_enough_elsewhere(sharded: Sharded) -> None:
    story = sharded.story
    story.cluster = story.cluster.with_job(replace(story.job, spec=replace(story.job.spec, spares=3)))
    story.hear(ev.NodeJoined(node=NodeId("node-2"), incarnation="a", slots=2))
    sharded.settle()
    sharded.train(7)
    assert len(story.cluster.spares(JOB)) == 3
    before = {rank: story.cluster.workers[story.holder(rank)].place for rank in (0, 1)}
    both_tell(sharded, snapshots(6), snapshots(6))
    sharded.settle()
    assert {rank: story.cluster.workers[story.holder(rank)].place for rank in (0, 1)} == before


def test_nobody_takes_a_rank_before_all_former_holders_have_ended(sharded: Sharded) -> None:
    both_tell(sharded, snapshots(6), snapshots(6))
    ending = [worker for worker in sharded.story.cluster.workers.values() if worker.life == "fencing"]
    for worker in ending:
        assert not [order for order in sharded.story.orders() if isinstance(order, od.Assign)]
        assert all(seat.worker is None for seat in sharded.story.job.seats.values())
        sharded.story.hear(ev.WorkerExited(worker=worker.worker, node=worker.node, signal=9))
    assert len(ending) == 2  # the survivor, and the spare that had taken the lost rank
    assert all(seat.worker is not None for seat in sharded.story.job.seats.values())


def restoring(sharded: Sharded) -> list[od.Restore]:
    """All have gone back, and their states are to be restored: by these orders."""
    both_tell(sharded, snapshots(6), snapshots(6))
    for _ in range(20):
        found = [order for order in sharded.story.orders() if isinstance(order, od.Restore)]
        if found:
            return found
        sharded.keep()
        sharded.story.answer((od.Fence, od.StartWorker, od.Assign, od.Recall, od.Replay))
    raise AssertionError("nobody is restored")


def test_who_is_not_up_hands_out_no_snapshot_nor_one_that_has_failed(sharded: Sharded) -> None:
    restoring(sharded)
    cluster, job = sharded.story.cluster, sharded.story.job

    def keepers(life: Life = Life.WARM, *, tried: bool = False, **seat: frozenset[Rank]) -> list[Rank]:
        first = replace(cluster.workers[sharded.story.holder(0)], life=life)
        changed = job.with_seat(Rank(0), replace(job.seats[Rank(0)], **seat))
        return [rank for rank, _ in keepers_of(cluster.with_worker(first), changed, Rank(0), tried=tried)]

    assert keepers() == keepers(Life.STARTED) == [0, 1]
    assert keepers(Life.STARTING) == keepers(Life.FENCING) == [1]
    own = frozenset({Rank(0)})
    assert (keepers(failed=own), keepers(failed=own, tried=True)) == ([1], [0, 1])
    assert keepers(distrusted=own) == keepers(distrusted=own, tried=True) == [1]


def test_of_several_other_nodes_the_one_of_the_lowest_rank_comes_first(sharded: Sharded) -> None:
    restoring(sharded)
    cluster, job = sharded.story.cluster, sharded.story.job
    first, second = (cluster.workers[sharded.story.holder(rank)] for rank in (0, 1))
    third = replace(second, worker=WorkerId("third"), node=NodeId("node-2"), rank=Rank(2))
    former = replace(second, worker=WorkerId("former"), node=NodeId("node-4"))  # it holds its rank no more
    for worker in (replace(first, node=NodeId("node-3")), third, former):
        cluster = cluster.with_worker(worker)
    job = job.with_seat(Rank(2), replace(job.seats[Rank(1)], worker=third.worker))
    job = job.with_rollback(kept=Table({node: snapshots(6) for node in (third.node, former.node, B)}))
    assert [rank for rank, _ in keepers_of(cluster, job, Rank(0))] == [1, 2]


def test_a_snapshot_may_come_from_who_has_not_denied_it_or_from_where_somebody_will_be(sharded: Sharded) -> None:
    restoring(sharded)
    cluster, job = sharded.story.cluster, sharded.story.job
    first, second = sharded.story.holder(0), sharded.story.holder(1)
    together = cluster.with_worker(replace(cluster.workers[second], node=A))

    def comes(there: Cluster, *asked: WorkerId, node: NodeId = A, vacant: bool = False) -> bool:
        seat = replace(job.seats[Rank(0)], asked_buddies=frozenset(asked))
        other = vacate_seat(job.seats[Rank(1)]) if vacant else job.seats[Rank(1)]
        changed = job.with_seat(Rank(0), seat).with_seat(Rank(1), other)
        return may_come(there, changed.with_rollback(kept=Table({node: snapshots(6)})), Rank(0))

    assert comes(cluster)
    assert not comes(cluster, first)
    assert comes(together, first), "the other one on its node has not"
    assert not comes(cluster, first, vacant=True)
    assert not comes(together, node=B), "nobody is there, nor will be"
    assert comes(together, node=B, vacant=True)


def test_nothing_is_started_elsewhere_while_ranks_wait_for_their_own_slots(sharded: Sharded) -> None:
    sharded.story.hear(ev.NodeJoined(node=NodeId("node-2"), incarnation="a", slots=2))
    both_tell(sharded, snapshots(6), snapshots(6))
    assert sharded.story.cluster.fencing(JOB)
    assert not [order for order in sharded.story.orders() if isinstance(order, od.StartWorker)]


def test_replacements_are_restored_from_snapshots_their_own_node_first(sharded: Sharded) -> None:
    found = restoring(sharded)
    assert {order.rank: [source.rank for source in order.sources] for order in found} == {0: [0, 1], 1: [1, 0]}
    assert all(order.snapshot and order.point == Point(6) for order in found)


def test_where_the_snapshots_lay_is_told(sharded: Sharded) -> None:
    both_tell(sharded, snapshots(6), snapshots(6))
    sharded.settle()
    told = [text for _, text in sharded.story.job.accounting.incidents[-1].story if "restored from" in text]
    assert told == [
        f"rank {rank} restored from its snapshot, kept on the node of rank {rank}: 1,000 bytes, digest d1 equal"
        for rank in (0, 1)
    ]


def test_a_lost_node_takes_its_copies_along(sharded: Sharded) -> None:
    sharded.story.hear(ev.NodeLost(node=B, incarnation="a", reason="silent"))
    sharded.report(0, (*snapshots(6, ranks=[0]), *snapshots(1, 6, ranks=[1])))
    sharded.answer_recalls()
    assert sharded.story.job.rollback.point == Point(6)
    sharded.settle()
    assert sharded.story.job.phase is JobPhase.RUNNING
    assert sharded.story.cluster.workers[sharded.story.holder(1)].node == A


def test_what_a_node_kept_is_forgotten_when_it_is_lost_after_it_was_told() -> None:
    sharded = Sharded()
    sharded.lose(1, snapshots(6))
    assert B in sharded.story.job.rollback.kept
    sharded.story.hear(ev.NodeLost(node=B, incarnation="a", reason="silent"))
    assert B not in sharded.story.job.rollback.kept
    sharded.report(0, snapshots(6, ranks=[0]))
    assert sharded.story.job.outcome is not None


def test_a_snapshot_of_the_point_at_which_all_are_costs_no_step() -> None:
    sharded = Sharded(6)
    both_tell_at(sharded, 6, snapshots(1, 6))
    job = sharded.story.job
    assert (job.rollback.point, [incident.lost for incident in job.accounting.incidents]) == (Point(6), [0])


def test_what_lies_where_nobody_is_is_out_of_reach_when_all_ranks_are_taken() -> None:
    sharded = Sharded()
    sharded.lose(1, snapshots(6))
    cluster, job = sharded.story.cluster, sharded.story.job
    assert set(within_reach(cluster, job).rollback.kept) == set()
    vacant = job.with_seat(Rank(1), vacate_seat(job.seats[Rank(1)]))
    assert set(within_reach(cluster, vacant).rollback.kept) == {B}


def test_a_rank_of_which_no_place_is_known_takes_what_the_others_leave(sharded: Sharded) -> None:
    job, spares = sharded.story.job, list(sharded.story.cluster.workers.values())
    place = (A, 0)
    seats = Table({Rank(0): Seat(), Rank(1): Seat(place=place)})
    found = places_for(replace(job, seats=seats), [spare for spare in spares if spare.node == A])
    assert {rank: (worker, sharded.story.cluster.workers[worker].slot) for rank, worker in found.items()} == {
        1: (found[Rank(1)], 0),
        0: (found[Rank(0)], 1),
    }


@pytest.mark.parametrize(("faults", "point"), [(2, Point(6)), (1, None)])
def test_where_no_worker_may_be_started_any_more_nobody_hands_out_a_copy(faults: int, point: Point | None) -> None:
    sharded = Sharded(slot_faults=faults)
    both_tell(sharded, snapshots(6, ranks=[0]), snapshots(6))
    assert sharded.story.job.rollback.point == point


def test_a_copy_that_is_not_there_after_all_leads_to_an_older_one(sharded: Sharded) -> None:
    both_tell(sharded, snapshots(1, 6), snapshots(1, 6, ranks=[0]))
    assert sharded.story.job.rollback.point == Point(6)
    for _ in range(2):
        sharded.story.answer((od.Fence, od.StartWorker))
    for _ in range(9):  # everybody is asked for one at a time
        for recall in [order for order in sharded.story.orders() if isinstance(order, od.Recall)]:
            told = b"" if recall.ward == 1 else private(Point(6))
            sharded.story.hear(
                ev.RecordKept(
                    job=JOB,
                    generation=recall.generation,
                    worker=recall.worker,
                    rank=recall.rank,
                    ward=recall.ward,
                    point=Point(6),
                    private=told,
                )
            )
    assert sharded.story.job.rollback.point == Point(1)


def test_the_same_step_is_not_tried_for_ever(sharded: Sharded) -> None:
    for _ in range(ROLL_BUDGET):
        both_tell(sharded, snapshots(6), snapshots(6))
        assert sharded.story.job.rollback.point == Point(6)
        sharded.settle()
        sharded.train(7)
    both_tell(sharded, snapshots(6), snapshots(6))
    assert sharded.story.job.outcome is not None
    told = f"{ROLL_BUDGET} times in a row all went back to snapshots, and came no further than"
    assert told in sharded.story.job.outcome.reason


def test_getting_further_makes_all_tries_new(sharded: Sharded) -> None:
    for step in range(7, 8 + ROLL_BUDGET):
        sharded.train(step)
        sharded.lose(1, snapshots(step - 1))
        sharded.report(0, snapshots(step - 1), step)
        assert sharded.story.job.rollback.point == Point(step - 1)
        sharded.settle()
    assert sharded.story.job.outcome is None


def test_all_are_lost_at_once_long_after_the_last_recovery(sharded: Sharded) -> None:
    """Where training went on from the last time says nothing of how far it has come since: the records do."""
    both_tell(sharded, snapshots(6), snapshots(6))
    sharded.settle()
    assert (sharded.story.job.phase, sharded.story.job.resume_point) == (JobPhase.RUNNING, Point(6))
    sharded.train(20)
    for rank in (0, 1):
        sharded.lose(rank, snapshots(15, 19))
    job = sharded.story.job
    assert (job.outcome, job.rollback.point) == (None, Point(19))
    assert job.open_incident is not None
    assert job.open_incident.lost == 1
    assert job.rollback.furthest == Point(20)


def test_what_lies_beyond_all_records_is_of_steps_that_were_made_again(sharded: Sharded) -> None:
    both_tell(sharded, (*snapshots(2), *snapshots(7, ranks=[0])), snapshots(2))
    sharded.settle()
    sharded.train(5)
    for rank in (0, 1):
        sharded.lose(rank, snapshots(4, 7))
    assert sharded.story.job.rollback.point == Point(4)


def test_all_are_lost_at_once_before_any_recovery(sharded: Sharded) -> None:
    for rank in (0, 1):
        sharded.lose(rank, snapshots(3))
    job = sharded.story.job
    assert job.rollback.point == Point(3)
    assert job.open_incident is not None
    assert job.open_incident.lost == 7 - 3


def test_all_are_lost_at_once_and_no_page_can_be_read(sharded: Sharded) -> None:
    """Nothing is known of how far they had come: whatever snapshot all have is as good as any."""
    sharded.story.hear(ev.NodeLost(node=B, incarnation="a", reason="silent"))
    worker = sharded.story.holder(0)
    sharded.story.hear(ev.WorkerExited(worker=worker, node=A, signal=9, kept=snapshots(3, 6)))
    assert (sharded.story.job.outcome, sharded.story.job.rollback.point) == (None, Point(6))


def test_steps_that_were_lost_before_and_made_again_are_counted_once(sharded: Sharded) -> None:
    sharded.train(20)
    sharded.lose(1, snapshots(10))
    sharded.report(0, snapshots(10), 20)
    sharded.settle()
    sharded.train(15)
    for rank in (0, 1):
        sharded.lose(rank, snapshots(14))
    lost = [incident.lost for incident in sharded.story.job.accounting.incidents]
    assert (lost, sharded.story.job.rollback.furthest) == ([10, 1], Point(20))


def test_of_two_times_back_in_one_incident_each_counts_what_it_costs(sharded: Sharded) -> None:
    sharded.train(20)
    both_tell_at(sharded, 20, snapshots(18))
    sharded.settle()
    sharded.train(19)
    both_tell_at(sharded, 19, snapshots(10, 18))
    for _ in range(9):
        sharded.keep()
        sharded.story.answer((od.Fence, od.StartWorker, od.Assign, od.Recall))
    for rank in (0, 1):
        sharded.lose(rank, snapshots(10))
    assert [incident.lost for incident in sharded.story.job.accounting.incidents] == [2, 1 + 8]


def test_who_goes_back_further_on_the_way_back_has_lost_all_of_it(sharded: Sharded) -> None:
    both_tell(sharded, snapshots(1, 6), snapshots(1, 6))
    for _ in range(9):
        sharded.keep()
        sharded.story.answer((od.Fence, od.StartWorker, od.Assign, od.Recall))
    for rank in (0, 1):
        sharded.lose(rank, snapshots(1))
    job = sharded.story.job
    assert job.rollback.point == Point(1)
    assert [incident.lost for incident in job.accounting.incidents] == [6]


def test_a_shard_with_a_replica_needs_no_snapshot() -> None:
    sharded = Sharded()
    for rank in (0, 1):
        worker = sharded.story.holder(rank)
        sharded.story.hear(ev.WorkerJoined(worker=worker, job=JOB, rank=Rank(rank), shard="all"))
    worker = sharded.story.holder(1)
    record = ev.PrivateRecord(Point(7), private(Point(7)))
    sharded.story.hear(ev.WorkerExited(worker=worker, node=B, signal=9, private=(record,), kept=snapshots(6)))
    sharded.report(0, snapshots(6))
    assert (sharded.story.job.rollback.point, sharded.story.job.resume_point) == (None, Point(7))


def test_who_has_the_record_but_whose_copy_is_gone_goes_back_further() -> None:
    """A node came back without its memory, when all records were known."""
    sharded = Sharded()
    both_tell(sharded, snapshots(1, 6, ranks=[0]), (*snapshots(1, 6), *snapshots(1, ranks=[0])))
    for _ in range(9):
        sharded.keep()
        sharded.story.answer((od.Fence, od.StartWorker, od.Assign, od.Recall))
    seat = sharded.story.job.seats[Rank(1)]
    assert seat.record_of(Point(6)) is not None
    sharded.story.hear(ev.WorkerExited(worker=sharded.story.holder(1), node=B, signal=9, kept=snapshots(1)))
    assert sharded.story.job.rollback.point == Point(1)
