"""A node whose agent begins anew has to load what workers are forked from: others are waited for in its place."""

from __future__ import annotations

from msgspec.structs import replace

from tests.support.migration import HERE, SIGKILL
from tests.support.sharing import back, crowded, holder_of, lost, place, spread
from tests.support.telling import Story, answers
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.moves import MoveState
from torchrelay.protocol.recovery.sharing import slots_to_share


def settle_but(story: Story, node: str) -> None:
    """All is done that is ordered, but no worker comes up on this node: it loads."""
    for _ in range(50):
        before = story.cluster
        for order in story.orders():
            if not (isinstance(order, od.StartWorker) and order.node == node):
                story.hear(*answers(order, story.stands))
        if story.cluster == before:
            return
    raise AssertionError("it never comes to rest")


def test_a_node_that_begins_anew_is_not_waited_for_while_it_loads() -> None:
    story = spread()
    story.hear(back())  # its agent was ended with all that ran there
    settle_but(story, "node-1")
    assert (story.job.phase, crowded(story), place(story, 1)) == (JobPhase.RUNNING, [1], "node-0/0")
    story.train(HERE.after_step())
    story.settle()
    assert (story.move.state, crowded(story), place(story, 1)) == (MoveState.DONE, [], "node-1/0")


def test_a_node_on_which_workers_have_come_up_is_waited_for() -> None:
    story = spread(slots=2, ranks=4)
    story.lose(story.holder(3), signal=SIGKILL)
    settle_but(story, "node-1")
    assert (story.job.phase, holder_of(story, 3).place) == (JobPhase.PREPARING, "node-1/1")
    assert not any(worker.guest for worker in story.cluster.workers.values())


def test_an_agent_that_begins_anew_beside_its_workers_has_loaded() -> None:
    story = spread(slots=2, ranks=4)
    seen = [
        ev.WorkerSeen(worker=w.worker, slot=w.slot, pid=w.pid)
        for w in story.cluster.workers.values()
        if w.node == "node-1"
    ]
    story.hear(ev.NodeJoined(node=NodeId("node-1"), incarnation="b", slots=2, workers=tuple(seen)))
    story.lose(story.holder(3), signal=SIGKILL)
    settle_but(story, "node-1")
    assert not any(worker.guest for worker in story.cluster.workers.values())


def test_guests_are_rather_invited_where_workers_have_come_up_than_where_a_replica_is_apart() -> None:
    cluster, node = (story := spread()).cluster, NodeId("node-1")

    def invited(*, proven: bool) -> list[NodeId]:
        nodes = cluster.nodes.put(node, replace(cluster.nodes[node], proven=proven))
        return [at for at, _ in slots_to_share(replace(cluster, nodes=nodes), story.job, 1, lambda at: at == node)]

    assert invited(proven=True) == [node]
    assert node not in invited(proven=False) != []


def test_without_leave_to_share_a_node_that_loads_is_waited_for() -> None:
    story = spread(ranks_per_slot=1)
    story.hear(back())
    settle_but(story, "node-1")
    assert (story.job.phase, holder_of(story, 1).node) == (JobPhase.PREPARING, "node-1")


def test_a_spare_starts_where_others_have_come_up_rather_than_where_none_has() -> None:
    story = spread(ranks=3, ranks_per_slot=1)
    story.hear(ev.NodeJoined(node=NodeId("node-9"), incarnation="a", slots=1), lost("node-2"))
    assert holder_of(story, 2).node == "node-9", "the only one"
    story = spread(ranks=3, ranks_per_slot=1)
    for node in ("node-8", "node-9"):
        story.hear(ev.NodeJoined(node=NodeId(node), incarnation="a", slots=1))
    story.cluster = replace(
        story.cluster,
        nodes=story.cluster.nodes.put(NodeId("node-9"), replace(story.cluster.nodes[NodeId("node-9")], proven=True)),
    )
    story.hear(lost("node-1"), lost("node-2"))
    assert [holder_of(story, rank).node for rank in (1, 2)] == ["node-9", "node-8"]
