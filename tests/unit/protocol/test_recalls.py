"""Recalls: whom the core asks for the record of a rank that is lost with its node."""

from __future__ import annotations

from msgspec.structs import replace

from tests.support.telling import JOB, Story, say
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId, Point, Rank
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.recovery.records import buddies_to_ask

HERE, NEXT = Point(3), Point(4)
SIGKILL = 9


def recalls(story: Story) -> list[tuple[int, int]]:
    """Who is asked for whose record."""
    return [(order.rank, order.ward) for order in story.orders() if isinstance(order, od.Recall)]


def test_buddies_are_asked_for_one_record_at_a_time_and_not_before_the_target_is_known() -> None:
    story = Story()
    for node in ("node-0", "node-1"):
        story.hear(ev.NodeJoined(node=NodeId(node), incarnation="a", slots=4))
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=4, nproc_per_node=2, nodes=2, spares=4)))
    story.settle()
    story.train(HERE)
    story.lose(story.holder(1), signal=SIGKILL)
    story.settle()
    story.train(NEXT)
    story.hear(ev.NodeLost(node=NodeId("node-1"), incarnation="a", reason="silence"))
    assert (story.job.phase, story.job.resume_point, recalls(story)) == (JobPhase.AGREEING, HERE, [])
    story.answer((od.Interrupt,))
    assert recalls(story) == [(0, 2), (1, 3)], "those to whom the records were sent"
    story.hear(say(story, ev.RecordKept, 0, ward=Rank(2), point=NEXT, private=b""))
    assert recalls(story) == [(1, 2)], "and then all others, each for one at a time"
    story.hear(say(story, ev.RecordKept, 1, ward=Rank(2), point=NEXT, private=b"its record"))
    assert recalls(story) == [(1, 3)]
    story.hear(say(story, ev.RecordKept, 1, ward=Rank(3), point=NEXT, private=b""))
    assert recalls(story) == [(0, 3)]


def alone_on_nodes(ranks: int, spares: int = 1, **fields: int) -> Story:
    """A job of one rank a node that has trained for a while."""
    story = Story()
    story.wait(60_000)
    for number in range(ranks + spares):
        story.hear(ev.NodeJoined(node=NodeId(f"node-{number}"), incarnation="a", slots=1))
    spec = ev.JobSpec(job=JOB, world_size=ranks, nproc_per_node=1, nodes=ranks, spares=spares, **fields)  # type: ignore[arg-type]
    story.hear(ev.JobSubmitted(spec=spec))
    story.settle()
    story.train(HERE)
    return story


def test_one_that_has_left_its_rank_may_have_the_record_of_another() -> None:
    story = alone_on_nodes(3)
    nobody = replace(story.job, keepers=())
    left = replace(nobody.seats[Rank(1)], outgoing=story.holder(1), worker=None)
    job = nobody.with_seat(Rank(1), left)
    cluster = story.cluster.with_job(job)
    assert left.outgoing in [worker.worker for _, worker in buddies_to_ask(cluster, job, Rank(2))]


def lose_node(story: Story, rank: int) -> None:
    node = story.cluster.workers[story.job.seats[Rank(rank)].worker or story.holder(rank)].node
    story.hear(ev.NodeLost(node=node, incarnation="a", reason="silence"))


def test_the_time_to_ask_others_counts_from_the_loss_itself() -> None:
    story = alone_on_nodes(6, spares=3)
    lose_node(story, 0)
    story.answer((od.Interrupt,))
    assert recalls(story) == [(2, 0), (4, 0)]
    story.wait(2_000)
    lose_node(story, 0)  # its replacement, before it held anything: the next spare takes its place
    story.wait(2_499)
    assert recalls(story) == [(2, 0), (4, 0)]
    story.wait(1)
    assert recalls(story) == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)]


def test_to_ask_others_does_not_put_off_the_deadline_of_the_rest() -> None:
    story = alone_on_nodes(6, spares=2, ready_ms=4_000)
    lose_node(story, 0)
    story.answer((od.Interrupt,))
    story.answer((od.Decide,), but=(5,))
    generation = story.job.generation
    story.wait(3_999)
    assert (len(recalls(story)), story.job.generation) == (5, generation), "nobody answers"
    story.wait(1)
    assert story.job.generation > generation
    assert story.job.accounting.incidents[-1].faults[-1].detector == "safepoint deadline"


def test_to_deny_again_wins_no_time_for_others() -> None:
    story = alone_on_nodes(6)
    lose_node(story, 0)
    story.answer((od.Interrupt,))
    denies = say(story, ev.RecordKept, 2, ward=Rank(0), point=HERE, private=b"")
    story.hear(denies)
    story.wait(4_000)
    before = story.cluster
    story.hear(denies)
    assert story.cluster == before
    story.wait(1_000)
    assert story.job.phase in (JobPhase.ENDING, JobPhase.ENDED)


def test_to_say_again_that_one_stands_wins_no_time_for_others() -> None:
    story = alone_on_nodes(6)
    lose_node(story, 0)
    story.answer((od.Interrupt,))
    stands = say(story, ev.WorkerReady, 1, point=HERE)
    story.hear(stands)
    story.wait(4_000)
    before = story.cluster
    story.hear(stands)
    assert story.cluster == before
    story.wait(1_000)
    assert story.job.phase in (JobPhase.ENDING, JobPhase.ENDED)


def test_of_three_generations_it_is_known_who_was_sent_what() -> None:
    story = alone_on_nodes(3, spares=3)
    for kept in (1, 2, 3, 3):
        assert len(story.job.keepers) == kept
        story.lose(story.holder(1), signal=SIGKILL)
        story.settle()
        assert story.job.phase is JobPhase.RUNNING


def test_others_are_asked_as_well_when_those_to_whom_it_was_sent_do_not_answer() -> None:
    """Their node may be silent, too. Former buddies have copies until the next gate."""
    story = Story()
    for number in range(7):
        story.hear(ev.NodeJoined(node=NodeId(f"node-{number}"), incarnation="a", slots=1))
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=6, nproc_per_node=1, nodes=6, spares=1)))
    story.settle()
    story.train(HERE)
    story.hear(ev.NodeLost(node=NodeId("node-0"), incarnation="a", reason="silence"))
    story.answer((od.Interrupt,))
    assert recalls(story) == [(2, 0), (4, 0)]
    story.hear(say(story, ev.RecordKept, 2, ward=Rank(0), point=HERE, private=b""))
    story.wait(2_499)
    assert recalls(story) == [(4, 0)]
    story.wait(1)
    assert recalls(story) == [(1, 0), (3, 0), (4, 0), (5, 0)]
    story.hear(say(story, ev.RecordKept, 3, ward=Rank(0), point=HERE, private=b"its record"))
    assert recalls(story) == []
    story.settle()
    assert story.job.phase is JobPhase.RUNNING
