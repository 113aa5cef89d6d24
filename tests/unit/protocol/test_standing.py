"""Standing orders: what is kept from state to state is what each state says, and only what is new is said."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

from tests.support.migration import SIGKILL, asked, on_nodes
from tests.support.telling import JOB, Story, answers, running, submitted
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId, Point, Rank, WorkerId
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.moves import MoveState
from torchrelay.protocol.model.table import SMALL
from torchrelay.protocol.rules.cluster import orders
from torchrelay.protocol.rules.speech import rank_orders
from torchrelay.protocol.rules.standing import StandingOrders

LARGE = SMALL + 12


class Heard:
    """A story, and the orders that are kept beside it."""

    def __init__(self, story: Story) -> None:
        self.story, self.kept = story, StandingOrders()
        self.look()

    def look(self) -> list[od.Order]:
        """Whether what is kept is what the state says, and what is new in it."""
        before = frozenset(self.kept)
        fresh = list(od.singly(self.kept.follow(self.story.cluster)))
        expected = orders(self.story.cluster)
        assert frozenset(self.kept) == expected
        assert frozenset(fresh) == expected - before
        for node in self.story.cluster.nodes:
            assert frozenset(self.kept.of_node(node)) == {order for order in expected if order.node == node}
        return fresh

    def hear(self, *some: ev.Event) -> None:
        for event in some:
            self.story.hear(event)
            self.look()

    def settle(self) -> None:
        self.story.settle_by(self.hear)


def phase_of(heard: Heard) -> JobPhase:
    return heard.story.job.phase


@pytest.mark.parametrize("ranks", [4, pytest.param(LARGE, marks=pytest.mark.slow)])
def test_a_job_starts_loses_two_ranks_and_moves_one(ranks: int) -> None:
    heard = Heard(submitted(ranks=ranks, spares=3))
    heard.settle()
    heard.story.train(Point(3))
    for rank in (1, ranks - 1):
        worker = heard.story.holder(rank)
        records = heard.story.stands[worker].records(worker)
        heard.hear(ev.WorkerExited(worker=worker, node=NodeId("node-0"), signal=SIGKILL, private=records))
    heard.settle()
    assert phase_of(heard) is JobPhase.RUNNING
    heard.story.train(Point(4))
    heard.hear(ev.MoveAsked(job=JOB, ranks=(Rank(2),), reason="a test", source="a test"))
    heard.settle()
    assert heard.story.move.moved == (2,)
    heard.hear(ev.JobCancelled(job=JOB, reason="enough"))
    heard.settle()
    assert phase_of(heard) is JobPhase.ENDED
    assert not list(heard.kept)


@pytest.mark.parametrize("ranks", [4, pytest.param(LARGE, marks=pytest.mark.slow)])
def test_one_fault_after_another(ranks: int) -> None:
    """Whoever has come to its rank meanwhile is asked with the others; an order a node for all of them."""
    heard = Heard(submitted(ranks=ranks, spares=3))
    heard.settle()
    for point, rank in ((3, 1), (4, 1), (5, 2), (6, 0)):
        heard.story.train(Point(point))
        worker = heard.story.holder(rank)
        records = heard.story.stands[worker].records(worker)
        before = heard.story.cluster
        node = before.workers[worker].node
        heard.hear(ev.WorkerExited(worker=worker, node=node, signal=SIGKILL, private=records))
        asked = [order for order in heard.story.orders() if isinstance(order, od.Interrupt)]
        assert len(asked) == ranks - 1
        heard.settle()
        assert phase_of(heard) is JobPhase.RUNNING


@pytest.mark.parametrize("ranks", [4, pytest.param(LARGE, marks=pytest.mark.slow)])
def test_a_fault_after_a_move_was_called_off(ranks: int) -> None:
    heard = Heard(submitted(ranks=ranks, spares=3))
    heard.settle()
    heard.story.train(Point(3))
    heard.hear(ev.MoveAsked(job=JOB, ranks=(Rank(2),), reason="a test", source="a test"))
    for _ in range(50):
        if phase_of(heard) is JobPhase.QUIESCING:
            break
        for order in heard.story.orders():
            heard.hear(*answers(order, heard.story.stands))
    assert phase_of(heard) is JobPhase.QUIESCING
    heard.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(2),), source="a test"))
    heard.settle()
    assert phase_of(heard) is JobPhase.RUNNING
    heard.story.train(Point(4))
    heard.hear(ev.WorkerExited(worker=heard.story.holder(0), node=NodeId("node-0"), signal=SIGKILL))
    assert sum(isinstance(order, od.Interrupt) for order in heard.story.orders()) == ranks - 1


def test_what_all_are_asked_is_said_once_a_node() -> None:
    heard = Heard(submitted(ranks=LARGE, spares=1))
    heard.settle()
    heard.story.train(Point(3))
    event = ev.WorkerExited(worker=heard.story.holder(5), node=NodeId("node-0"), signal=SIGKILL)
    heard.story.hear(event)
    fresh = [order for order in heard.kept.follow(heard.story.cluster) if "Interrupt" in type(order).__name__]
    assert all(isinstance(order, od.Interrupts) for order in fresh)
    assert len({order.node for order in fresh}) == len(fresh)


def test_what_was_just_said_is_not_said_again_yet() -> None:
    heard = Heard(submitted(ranks=4, spares=1))
    heard.settle()
    heard.story.train(Point(3))
    assert not list(heard.kept.due())
    heard.hear(ev.WorkerExited(worker=heard.story.holder(1), node=NodeId("node-0"), signal=SIGKILL))
    asked = {order for order in heard.kept if isinstance(order, od.Interrupt)}
    assert asked
    assert not asked & set(heard.kept.due())
    assert asked <= set(heard.kept.due()) == set(heard.kept)
    first, second = sorted(asked, key=lambda order: order.rank)[:2]
    heard.hear(*answers(first, heard.story.stands))
    assert second in set(heard.kept.due()) == set(heard.kept), "an answer makes nothing new of the rest"


def test_in_a_large_job_it_is_said_again_once_soon_and_then_with_the_rest() -> None:
    heard = Heard(submitted(ranks=4, spares=1))
    heard.settle()
    heard.story.train(Point(3))
    heard.hear(ev.WorkerExited(worker=heard.story.holder(1), node=NodeId("node-0"), signal=SIGKILL))
    rounds = [{type(order) for order in heard.kept.due(every=5)} for _ in range(12)]
    asked = [number for number, kinds in enumerate(rounds, 1) if od.Interrupt in kinds]

    assert asked == [2, 5, 10]


def test_what_agents_are_to_do_is_said_again_with_each_repetition() -> None:
    kept = StandingOrders()
    fresh = kept.follow(submitted(ranks=2, spares=1).cluster)
    starts = {order for order in fresh if isinstance(order, od.StartWorker)}
    rounds = [set(kept.due(every=3)) for _ in range(7)]
    assert len(starts) == 3
    assert [number for number, some in enumerate(rounds, 1) if starts <= some] == [3, 6]


def test_of_an_answer_only_what_it_changes_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(submitted(ranks=LARGE, spares=1))
    heard.settle()
    heard.story.train(Point(3))
    heard.hear(ev.WorkerExited(worker=heard.story.holder(5), node=NodeId("node-0"), signal=SIGKILL))
    read: list[Rank] = []

    def reading(cluster: object, job: object, rank: Rank, *rest: object) -> object:
        read.append(rank)
        return rank_orders(cluster, job, rank, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("torchrelay.protocol.rules.standing.rank_orders", reading)
    interrupts = [order for order in heard.story.orders() if isinstance(order, od.Interrupt)]
    for order in interrupts[:-1]:
        heard.hear(*answers(order, heard.story.stands))
    assert sorted(read) == sorted(order.rank for order in interrupts[:-1])


def test_nothing_stands_when_it_was_cleared() -> None:
    heard = Heard(submitted())
    assert list(heard.kept)
    heard.kept.clear()
    assert not list(heard.kept)
    assert not list(heard.kept.of_node(NodeId("node-0")))


def test_survivors_are_not_asked_anew_because_the_job_waits_for_a_spare() -> None:
    story = running(spares=0, refill=False, report_ms=60_000)
    story.lose(story.holder(1), signal=SIGKILL)
    asked = {order for order in story.orders() if isinstance(order, od.Interrupt)}
    story.wait(1_000)
    assert "waiting for one" in story.job.why
    assert all(order.reason.endswith("where they stand (ended by signal 9)") for order in asked)
    assert {order for order in story.orders() if isinstance(order, od.Interrupt)} == asked


def test_one_that_has_left_its_rank_in_a_move_is_not_asked_when_another_is_lost_then() -> None:
    heard = Heard(on_nodes(4, 1, nproc_per_node=1, spares=2))
    heard.hear(asked(1, to="node-3"))
    left = heard.story.holder(1)
    for kind in (od.StartWorker, od.Assign, od.Halt, od.Decide, od.Replay):
        for order in [order for order in heard.story.orders() if isinstance(order, kind)]:
            heard.hear(*answers(order, heard.story.stands))
    assert (heard.story.move.state, heard.story.job.phase) == (MoveState.CUT_OVER, JobPhase.RECONFIGURING)
    heard.hear(ev.WorkerExited(worker=heard.story.holder(0), node=NodeId("node-0"), signal=SIGKILL))
    interrupted = [order.worker for order in heard.story.orders() if isinstance(order, od.Interrupt)]
    assert left in heard.story.cluster.workers
    assert left not in interrupted


def test_one_agent_is_told_all_that_concerns_its_node_and_nothing_else() -> None:
    story = Story()
    for number in range(3):
        story.hear(ev.NodeJoined(node=NodeId(f"node-{number}"), incarnation="a", slots=2))
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=2, nproc_per_node=1, nodes=2, spares=2)))
    heard = Heard(story)
    heard.settle()
    story.train(Point(3))
    stranger = ev.WorkerSeen(worker=WorkerId("stranger"), slot=1, pid=9)
    heard.hear(ev.NodeJoined(node=NodeId("node-2"), incarnation="b", slots=2, workers=(stranger,)))
    assert [type(order) for order in heard.kept.of_node(NodeId("node-2"))].count(od.Fence) >= 1
    heard.hear(ev.MoveAsked(job=JOB, ranks=(Rank(0), Rank(1)), reason="a test", source="a test"))
    heard.settle()


def test_a_loss_in_a_large_job_is_told_to_all_without_a_look_at_every_seat() -> None:
    """All survivors wait for it: what is asked of every seat was counted, and whom to tell found out, before."""
    story = submitted(ranks=10 * LARGE, spares=1)
    kept = StandingOrders()
    kept.follow(story.cluster)
    while story.job.phase is not JobPhase.RUNNING:
        story.answer()
        kept.follow(story.cluster)
    story.train(Point(3))
    facts_of = Path(facts.__file__).name
    asked = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal asked
        asked += event == "call" and Path(frame.f_code.co_filename).name == facts_of

    event = ev.WorkerExited(worker=story.holder(5), node=NodeId("node-0"), signal=SIGKILL)
    sys.setprofile(count)
    try:
        story.hear(event)
        fresh = kept.follow(story.cluster)
    finally:
        sys.setprofile(None)
    assert sum(len(order.holders) for order in fresh if isinstance(order, od.Interrupts)) == 10 * LARGE - 1
    assert asked < LARGE
