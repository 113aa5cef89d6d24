"""Sharing: when no spare is left, lost ranks go on in slots that others use, until there is room again."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.migration import HERE, SIGKILL, asked, cleared, on_nodes, tainted
from tests.support.sharing import back, crowded, holder_of, lost, place, spread
from tests.support.telling import JOB, Story, running, say, training
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId, Rank, WorkerId
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.moves import MoveState
from torchrelay.protocol.placement.policy import DYING_MS
from torchrelay.protocol.recovery.placing import free_slots
from torchrelay.protocol.recovery.sharing import (
    CRAMPED_BUDGET,
    is_shared,
    note_cramped,
    out_of_memory,
    shares_with,
    slots_to_share,
    soon_free,
    with_own_slot,
)

MEMORY = "OutOfMemoryError: CUDA out of memory. at train.py:#"


def shrunk(**fields: Any) -> Story:
    """Node 1 is lost, and its rank goes on in the slot of another."""
    story = spread(**fields)
    story.hear(lost())
    story.settle()
    story.train(HERE.after_step())
    return story


# ---------------------------------------------------------------- shrinking


def test_a_lost_rank_goes_on_in_the_slot_of_another_at_once() -> None:
    story = shrunk()
    assert (story.job.phase, crowded(story), place(story, 1)) == (JobPhase.RUNNING, [1], "node-0/0")
    told = [text for _, text in story.job.accounting.incidents[-1].story]
    assert any("shares slot node-0/0 with rank 0, as no spare is left" in text for text in told)


def test_without_leave_to_share_the_job_waits_for_a_spare() -> None:
    story = shrunk(ranks_per_slot=1)
    assert (story.job.phase, story.job.seats[Rank(1)].worker) == (JobPhase.PREPARING, None)
    assert not any(worker.guest for worker in story.cluster.workers.values())


def test_a_slot_is_free_though_its_node_has_as_many_workers_as_slots() -> None:
    story = on_nodes(2, 2, nproc_per_node=1, nodes=2)
    before = free_slots(story.cluster, story.job)
    worker = story.cluster.workers[story.holder(1)]
    guest = replace(worker, worker=WorkerId("guest"), rank=None, guest=True)
    assert (worker.node, 1) in before
    assert free_slots(story.cluster.with_worker(guest), story.job) == before


def test_the_agent_is_told_that_others_run_in_the_slot() -> None:
    story = spread()
    story.hear(lost())
    started = [order for order in story.orders() if isinstance(order, od.StartWorker)]
    assert [(order.node, order.slot, order.guest) for order in started] == [("node-0", 0, True)]


def test_a_spare_that_is_to_start_where_none_has_come_up_is_not_waited_for() -> None:
    story = spread(spares=1)
    story.hear(ev.NodeJoined(node=NodeId("node-3"), incarnation="a", slots=1))
    assert [spare.node for spare in story.cluster.spares(JOB)] == ["node-3"]
    story.hear(lost())
    assert [worker.guest for worker in story.cluster.workers.values()].count(True) == 1


def test_no_guest_is_started_for_a_wish_that_loses_its_target() -> None:
    story = spread(ranks=3, nodes=3, spares=1)
    story.hear(ev.NodeJoined(node=NodeId("node-3"), incarnation="a", slots=1))
    story.settle()
    story.hear(asked(1))
    assert story.move.state is MoveState.PREPARING
    story.hear(lost("node-3"))
    assert not any(worker.guest for worker in story.cluster.workers.values())


def test_no_guest_is_started_for_a_move_that_waits() -> None:
    story = spread()
    story.hear(ev.FreezeSet(source="ann"), tainted("node-1", None, key="drain", planned=True))
    assert (story.move.state, story.move.shares) == (MoveState.WAITING, True)
    assert not any(worker.guest for worker in story.cluster.workers.values())


def test_guests_are_spread_over_nodes_and_slots() -> None:
    story = spread(ranks=6, slots=2)
    story.hear(lost())
    story.settle()
    assert {place(story, rank) for rank in crowded(story)} == {"node-0/0", "node-2/0"}


def test_a_slot_takes_no_more_than_it_may() -> None:
    story = spread(ranks=4)
    story.hear(lost("node-1"), lost("node-2"), lost("node-3"))
    assert sum(worker.guest for worker in story.cluster.workers.values()) == 1
    story = spread(ranks=4, ranks_per_slot=4)
    story.hear(lost("node-1"), lost("node-2"), lost("node-3"))
    story.settle()
    assert (story.job.phase, crowded(story)) == (JobPhase.RUNNING, [1, 2, 3])


def test_a_guest_goes_where_its_shard_has_a_replica_elsewhere() -> None:
    story = spread(ranks=4)
    shards = ["left", "right", "right", "left"]
    for rank, shard in enumerate(shards):
        story.stands[story.holder(rank)] = replace(training(HERE), shard=shard, keeps=True)
        seat = story.job.seats[Rank(rank)]
        story.cluster = story.cluster.with_job(story.job.with_seat(Rank(rank), replace(seat, shard=shard)))
    story.hear(lost("node-3"))  # node-0 comes first by name, and has the only other copy of the left half
    [guest] = [worker for worker in story.cluster.workers.values() if worker.guest]
    assert guest.node == "node-1"


def test_a_slot_that_will_be_free_in_a_moment_is_waited_for() -> None:
    story = running(spares=0, ranks_per_slot=2)
    hung = story.holder(1)
    story.hear(ev.WorkerHung(worker=hung, evidence="stands"))
    story.answer((od.Interrupt, od.Decide))
    assert not any(worker.guest for worker in story.cluster.workers.values())
    story.wait(DYING_MS - 1)
    assert not any(worker.guest for worker in story.cluster.workers.values())
    story.wait(1)  # it cannot be ended
    assert [worker.place for worker in story.cluster.workers.values() if worker.guest] == ["node-0/0"]


def test_no_guest_is_sent_to_a_place_that_is_tainted_or_cordoned() -> None:
    story = spread(ranks=3, slot_faults=1)
    story.hear(tainted("node-0", None, effect=ev.Effect.NO_SCHEDULE), lost("node-1"))
    assert [worker.node for worker in story.cluster.workers.values() if worker.guest] == ["node-2"]
    story.settle()
    story.train(HERE.after_step())
    for worker in story.stands:
        story.stands[worker] = replace(story.stands[worker], keeps=True)
    story.lose(story.holder(2), signal=SIGKILL)  # its slot is cordoned, and the guest is alone in it
    assert [worker for worker in story.cluster.spares(JOB)] == []


def test_at_the_first_start_each_rank_has_its_own_slot_or_the_job_waits() -> None:
    story = Story()
    spec = ev.JobSpec(job=JOB, world_size=3, nproc_per_node=1, nodes=2, ranks_per_slot=2)
    story.hear(ev.JobSubmitted(spec=spec))
    for node in ("node-0", "node-1"):
        story.hear(ev.NodeJoined(node=NodeId(node), incarnation="a", slots=1))
    story.settle()
    assert (story.job.phase, len(story.cluster.workers)) == (JobPhase.STARTING, 2)


def test_a_job_that_starts_again_may_share() -> None:
    story = spread(max_restarts=1)
    for rank in (0, 2):
        story.hear(ev.WorkerExited(worker=story.holder(rank), node=holder_of(story, rank).node, signal=9))
    story.hear(lost())
    story.settle()
    assert (story.job.attempts.restarts, story.job.phase) == (1, JobPhase.RUNNING)
    assert len(crowded(story)) == 1


# ---------------------------------------------------------------- moves


def test_a_drained_node_is_left_though_slots_must_be_shared() -> None:
    story = spread()
    story.hear(tainted("node-1", None, planned=True))
    story.settle()
    assert (story.move.state, crowded(story), place(story, 1)) == (MoveState.DONE, [1], "node-0/0")


def test_who_only_wishes_to_be_elsewhere_waits_for_room() -> None:
    story = spread()
    story.hear(asked(1))
    story.settle()
    assert (story.move.state, crowded(story)) == (MoveState.WAITING, [])


def test_more_ranks_than_slots_can_take_wait() -> None:
    story = spread(ranks=4)
    for node in ("node-1", "node-2", "node-3"):
        story.hear(tainted(node, None, planned=True))
    story.settle()
    assert sorted(move.state for move in story.job.moving.moves) == [MoveState.DONE, MoveState.WAITING]
    assert len(crowded(story)) == 1


# ---------------------------------------------------------------- growing


def test_it_grows_again_when_a_node_comes_back() -> None:
    story = shrunk()
    story.hear(back())
    assert story.move.reason == "rank 1 shares slot node-0/0 with rank 0"
    story.settle()
    assert (story.move.state, crowded(story), place(story, 1)) == (MoveState.DONE, [], "node-1/0")


def test_as_many_go_together_as_there_is_room_for() -> None:
    story = spread(ranks=6, slots=2, nodes=3, moves_per_hour=-1)
    story.hear(lost())
    story.settle()
    story.train(HERE.after_step())
    story.hear(back(slots=1))
    story.settle()
    assert len(crowded(story)) == 1
    story.train(HERE.after_step().after_step())
    story.hear(ev.NodeJoined(node=NodeId("node-9"), incarnation="a", slots=4))
    story.settle()
    assert (crowded(story), [len(move.ranks) for move in story.job.moving.moves]) == ([], [1, 1])
    story = spread(ranks=6, slots=2, nodes=3)
    story.hear(lost())
    story.settle()
    story.train(HERE.after_step())
    story.hear(back(slots=2))
    story.settle()
    assert (crowded(story), [len(move.ranks) for move in story.job.moving.moves]) == ([], [2])


def test_nobody_moves_to_share_another_slot() -> None:
    story = shrunk(ranks=4)
    story.wait(100_000)
    assert story.job.moving.moves == ()
    assert story.cluster.spares(JOB) == []


def test_when_the_host_leaves_the_guest_has_a_slot_of_its_own() -> None:
    story = shrunk()
    story.hear(back())
    story.answer((od.StartWorker,))
    story.hear(tainted("node-0", 0, effect=ev.Effect.PREFER_NO_SCHEDULE))
    story.lose(story.holder(0), signal=SIGKILL)
    story.settle()
    assert (crowded(story), {place(story, rank) for rank in (0, 1, 2)}) == ([], {"node-0/0", "node-1/0", "node-2/0"})


def test_a_spare_that_comes_first_is_taken_and_the_guest_goes() -> None:
    story = spread()
    story.hear(lost())
    assert [worker.guest for worker in story.cluster.workers.values()] == [False, False, True]
    story.answer(but=(0, 2))  # the guest starts; nobody has reported yet
    story.hear(ev.NodeJoined(node=NodeId("node-3"), incarnation="a", slots=1))
    story.settle()
    story.train(HERE.after_step())
    story.settle()
    assert (story.job.phase, crowded(story)) == (JobPhase.RUNNING, [])
    assert not any(shares_with(story.cluster, worker) for worker in story.cluster.workers.values())


def test_the_room_of_a_healed_place_is_used() -> None:
    story = spread()
    story.hear(tainted("node-1", None, planned=True))
    story.settle()
    story.train(HERE.after_step())
    story.hear(cleared("node-1", None))
    story.settle()
    assert (crowded(story), place(story, 1)) == ([], "node-1/0")


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("signature", [MEMORY, "MemoryError:  at train.py:#"])
def test_memory_that_is_not_enough_for_two_is_not_the_scripts_error(signature: str) -> None:
    story = shrunk()
    for rank in (0, 1):
        story.hear(say(story, ev.WorkerRaised, rank, point=HERE, kind="script", signature=signature, summary="memory"))
    story.lose(story.holder(1), code=1)
    assert story.job.phase is not JobPhase.ENDING


def test_of_ranks_with_slots_of_their_own_it_is() -> None:
    story = shrunk(ranks=4)
    for rank in (2, 3):
        story.hear(say(story, ev.WorkerRaised, rank, point=HERE, kind="script", signature=MEMORY, summary="memory"))
    story.lose(story.holder(2), code=1)
    assert story.job.outcome is not None
    assert story.job.outcome.code == 1


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_if_one_of_two_was_short_of_room_it_is_not_the_scripts_own(first: int, second: int) -> None:
    story = shrunk(ranks=4)
    assert crowded(story) == [1]
    worker = story.holder(first)
    for rank in (first, second):
        story.hear(say(story, ev.WorkerRaised, rank, point=HERE, kind="script", signature=MEMORY, summary="memory"))
    story.lose(worker, code=1)
    assert story.job.outcome is None


def test_other_errors_in_shared_slots_are_the_scripts_own() -> None:
    story = shrunk()
    worker = story.holder(0)
    for rank in (0, 1):
        story.hear(say(story, ev.WorkerRaised, rank, point=HERE, kind="script", signature="E", summary="E"))
    story.lose(worker, code=5)
    assert story.job.outcome is not None
    assert story.job.outcome.code == 5


def test_a_target_that_has_no_memory_is_remembered_when_it_says_so() -> None:
    story = spread()
    story.hear(tainted("node-1", None, key="drain", planned=True))
    target = story.move.targets[Rank(1)]
    raised = ev.WorkerRaised(
        worker=target, job=JOB, rank=Rank(1), point=None, kind="script", signature=MEMORY, summary=MEMORY
    )
    story.hear(raised)
    assert [(entry.worker, entry.cramped) for entry in story.job.exceptions.raised] == [(target, True)]


def test_what_fails_again_and_again_for_lack_of_memory_is_given_up_and_the_job_waits() -> None:
    story = shrunk(slot_faults=0)
    for _ in range(CRAMPED_BUDGET):
        guest = story.holder(1)
        story.hear(say(story, ev.WorkerRaised, 1, point=HERE, kind="script", signature=MEMORY, summary="memory"))
        story.lose(guest, code=1)
        story.settle()
    assert story.job.seats[Rank(1)].worker is None
    assert story.job.waiting_ms is not None
    assert not any(worker.guest for worker in story.cluster.workers.values())


def test_what_the_kernel_kills_for_memory_counts_as_well_and_so_do_targets() -> None:
    story = shrunk(slot_faults=0)
    for _ in range(CRAMPED_BUDGET):
        guest = holder_of(story, 1)
        story.hear(
            ev.WorkerExited(
                worker=guest.worker,
                node=guest.node,
                signal=SIGKILL,
                cause="SIGKILL (out of memory: cgroup oom_kill)",
                private=story.stands[guest.worker].records(guest.worker),
            )
        )
        story.settle()
        story.train(HERE.after_step())
    assert story.job.seats[Rank(1)].worker is None
    story = spread()
    for number in range(CRAMPED_BUDGET):
        story.hear(tainted("node-1", None, key=f"drain-{number}", planned=True))
        target = story.move.targets[Rank(1)]
        story.hear(
            ev.WorkerRaised(
                worker=target, job=JOB, rank=Rank(1), point=None, kind="script", signature=MEMORY, summary=MEMORY
            )
        )
        story.lose(target, code=1)
    assert story.move.state is not MoveState.PREPARING
    assert not any(worker.guest for worker in story.cluster.workers.values())


def test_of_two_that_run_out_of_memory_together_both_are_cramped() -> None:
    story = shrunk(ranks=4)
    guest, host = story.holder(1), story.holder(0)
    story.hear(say(story, ev.WorkerRaised, 0, point=HERE, kind="script", signature=MEMORY, summary="memory"))
    story.lose(host, code=1)
    story.hear(
        ev.WorkerRaised(
            worker=guest, job=JOB, rank=Rank(1), point=HERE, kind="script", signature=MEMORY, summary="memory"
        )
    )
    story.lose(guest, code=1)
    assert story.job.outcome is None


def test_a_guest_that_is_left_over_does_not_keep_a_move_from_its_room() -> None:
    story = spread(ranks=3, nodes=3, moves_per_hour=-1)
    story.hear(ev.NodeJoined(node=NodeId("node-3"), incarnation="a", slots=2))
    story.hear(asked(1, 2))
    targets = dict(story.move.targets.items())
    assert set(targets) == {1, 2}
    story.hear(lost("node-1"))  # its target inherits rank 1
    story.settle()
    story.train(HERE.after_step())
    assert story.holder(1) == targets[Rank(1)]
    story.lose(targets[Rank(2)], signal=SIGKILL)
    story.settle()
    assert story.move.state is MoveState.DONE
    assert crowded(story) == []


def test_the_fullest_slot_is_relieved_first() -> None:
    story = spread(ranks=5, ranks_per_slot=3, nodes=5)
    for node in ("node-2", "node-3", "node-4"):
        story.hear(lost(node))
        story.settle()
        story.train(HERE.after_step())
        for worker, stand in story.stands.items():
            story.stands[worker] = replace(stand, keeps=True)
    loads = {place(story, rank): [r for r in range(5) if place(story, r) == place(story, rank)] for rank in range(5)}
    full = next(ranks for ranks in loads.values() if len(ranks) == 3)
    story.hear(back("node-4"))
    assert set(story.move.ranks) <= set(full)


def test_which_errors_tell_of_memory() -> None:
    assert out_of_memory(MEMORY)
    for text in (
        "AcceleratorError: CUDA error: out of memory at train.py:#",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:#] . DefaultCPUAllocator: can't allocate memory at train.py:#",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED at train.py:#",
    ):
        assert out_of_memory(text)
    assert not out_of_memory("RuntimeError: shapes differ at train.py:#")


def test_a_job_of_one_rank_a_slot_is_as_before() -> None:
    story = on_nodes(2, 1, nproc_per_node=1, nodes=2)
    story.hear(lost())
    story.settle()
    assert not any(worker.guest for worker in story.cluster.workers.values())


# ---------------------------------------------------------------- looking


def test_who_shares_a_slot_and_who_has_one_of_its_own() -> None:
    story = shrunk()
    host, guest, other = (holder_of(story, rank) for rank in (0, 1, 2))
    assert is_shared(story.cluster, host)
    assert is_shared(story.cluster, guest)
    assert not is_shared(story.cluster, other)  # slot 0 of another node
    assert shares_with(story.cluster, guest) == host
    assert shares_with(story.cluster, host) is None
    ending = story.cluster.fence(host.worker)
    assert shares_with(ending, ending.workers[guest.worker]) is None
    assert soon_free(ending, story.job) == 0  # the guest lives there
    assert soon_free(ending.fence(other.worker), story.job) == 1


def test_a_guest_that_is_killed_for_other_reasons_does_not_end_the_sharing() -> None:
    story = shrunk(slot_faults=0)
    for _ in range(CRAMPED_BUDGET + 1):
        story.lose(story.holder(1), signal=SIGKILL)
        story.settle()
        story.train(HERE.after_step())
        assert crowded(story) == [1]


def test_a_worker_that_is_being_ended_shares_nothing() -> None:
    story = shrunk()
    host, guest = holder_of(story, 0), holder_of(story, 1)
    ending = story.cluster.fence(guest.worker)
    assert not is_shared(ending, ending.workers[host.worker])


def test_of_all_workers_those_with_a_slot_of_their_own() -> None:
    story = shrunk()
    host, guest, other = (holder_of(story, rank) for rank in (0, 1, 2))
    assert with_own_slot(story.cluster, [host, guest, other]) == [host, other]


def test_lack_of_memory_is_counted_once_for_each_worker() -> None:
    story = shrunk()
    guest = holder_of(story, 1)
    once = note_cramped(story.cluster, guest, MEMORY)
    assert sum(raised.cramped for raised in once.jobs[JOB].exceptions.raised) == 1
    again = note_cramped(once, once.workers[guest.worker], MEMORY)
    assert again.jobs[JOB].exceptions.raised == once.jobs[JOB].exceptions.raised


def test_a_guest_that_is_being_ended_does_not_keep_another_from_its_node() -> None:
    story = spread(ranks=6, slots=2)
    story.hear(lost("node-1"))
    story.settle()
    guests = [worker for worker in story.cluster.workers.values() if worker.guest]
    assert [guest.place for guest in guests] == ["node-0/0", "node-2/0"]
    ending = story.cluster.fence(guests[0].worker)
    assert slots_to_share(ending, story.job, 1) == [("node-0", 0)]  # one guest less than on node-2
