"""Clean is what was proved: all ranks have committed a point after the one from which they went on."""

from __future__ import annotations

import pytest

from tests.support.migration import asked
from tests.support.proving import HERE, NEXT, finish, recovered, resolutions
from tests.support.telling import JOB, Story, running
from torchrelay.protocol.health.failure_detector import judge
from torchrelay.protocol.health.pulses import Beat, FailureDetector, Sample, hear
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerPhase
from torchrelay.protocol.model.incident import UNSETTLED, Resolution

NODE = NodeId("node-0")


def test_all_go_on_and_it_is_clean_when_they_have_committed_a_point() -> None:
    story = recovered()
    assert resolutions(story) == [Resolution.RESUMED]
    story.prove(HERE)
    assert resolutions(story) == [Resolution.RESUMED], "there they had been before"
    story.prove(NEXT)
    assert resolutions(story) == [Resolution.CLEAN]
    assert story.job.accounting.unproved == 0
    assert story.job.accounting.incidents[0].story[-1][1] == "resolved: clean, as all ranks have committed 4"


def test_it_is_settled_when_it_is_proved_and_not_before() -> None:
    story = running(HERE)
    story.lose(story.holder(1), signal=9)
    assert set(resolutions(story)) <= UNSETTLED
    story.settle()
    assert set(resolutions(story)) <= UNSETTLED
    story.prove(NEXT)
    assert not set(resolutions(story)) & UNSETTLED


def test_points_of_a_job_that_nobody_knows_prove_nothing() -> None:
    story = recovered()
    before = story.cluster
    story.hear(ev.PointCommitted(job=JobId("other"), generation=story.job.generation, point=NEXT))
    assert story.cluster == before


def test_the_next_fault_does_not_prove_the_one_before_and_what_comes_then_proves_both() -> None:
    story = recovered()
    story.train(HERE)
    story.lose(story.holder(0), signal=9)
    assert resolutions(story) == [Resolution.RESUMED, Resolution.OPEN]
    story.settle()
    assert (resolutions(story), story.job.accounting.unproved) == ([Resolution.RESUMED] * 2, 2)
    story.prove(NEXT)
    assert (resolutions(story), story.job.accounting.unproved) == ([Resolution.CLEAN] * 2, 0)


def test_a_point_of_a_generation_that_is_not_there_yet_proves_nothing() -> None:
    story = recovered()
    story.hear(ev.PointCommitted(job=JOB, generation=Generation(99), point=NEXT))
    assert resolutions(story) == [Resolution.RESUMED]


def test_what_was_not_proved_before_all_began_anew_never_is() -> None:
    story = running(HERE, max_restarts=1)
    story.lose(story.holder(1), signal=9)
    story.settle()
    for worker in (story.holder(0), story.holder(1)):
        story.lose(worker, signal=9)
    story.settle()
    assert resolutions(story) == [Resolution.RESUMED, Resolution.FELL_BACK]
    story.prove(Point(50))
    assert resolutions(story) == [Resolution.RESUMED, Resolution.FELL_BACK]


def test_scripts_that_end_have_committed_what_they_say() -> None:
    story = recovered()
    finish(story, NEXT, NEXT)
    assert resolutions(story) == [Resolution.CLEAN]


@pytest.mark.parametrize("points", [(HERE, HERE), (NEXT, HERE), (NEXT, None)])
def test_one_that_has_committed_nothing_since_proves_nothing(points: tuple[Point | None, ...]) -> None:
    story = recovered()
    finish(story, *points)
    assert resolutions(story) == [Resolution.RESUMED]


def test_a_point_of_an_earlier_generation_that_is_heard_late_proves_what_went_on_in_it() -> None:
    story = recovered()
    earlier = story.job.generation
    story.train(HERE)
    story.lose(story.holder(0), signal=9)
    story.settle()
    story.hear(ev.PointCommitted(job=JOB, generation=earlier, point=NEXT))
    assert resolutions(story) == [Resolution.CLEAN, Resolution.RESUMED]
    assert story.job.accounting.unproved == 1
    story.prove(NEXT)
    assert resolutions(story) == [Resolution.CLEAN] * 2


def test_a_point_proves_neither_what_was_called_off_nor_what_was_before_all_began_anew() -> None:
    story = running(HERE, max_restarts=1, spares=3, slots=8)
    story.lose(story.holder(1), signal=9)
    story.settle()
    for worker in (story.holder(0), story.holder(1)):
        story.lose(worker, signal=9)
    story.settle()
    for rank in (0, 1):
        story.train(HERE)
        story.lose(story.holder(rank), signal=9)
        story.settle()
    story.train(HERE)
    story.hear(asked(1))
    story.answer((od.Assign,))
    story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(1),), source="ann"))
    story.settle()
    before = [Resolution.RESUMED, Resolution.FELL_BACK]
    assert resolutions(story) == [*before, Resolution.RESUMED, Resolution.RESUMED, Resolution.CALLED_OFF]
    story.prove(NEXT)
    assert resolutions(story) == [*before, Resolution.CLEAN, Resolution.CLEAN, Resolution.CALLED_OFF]


# ---------------------------------------------------------------- what beats show


def beats(story: Story, *points: Point | None, generation: int | None = None) -> list[ev.Event]:
    samples = tuple(
        Sample(
            worker=story.holder(rank),
            rank=Rank(rank),
            generation=Generation(generation or story.job.generation),
            point=point,
            phase=WorkerPhase.COMPUTING,
            phase_ms=0,
            step_ms=10.0,
            collectives=1,
            beat_ms=0,
            process="S",
            cpu_ms=0,
        )
        for rank, point in enumerate(points)
    )
    failure_detector = hear(FailureDetector(), Beat(node=NODE, incarnation="a", samples=samples), story.cluster.now_ms)
    return list(judge(failure_detector, story.cluster, story.cluster.now_ms))


def test_all_holders_tell_of_the_point() -> None:
    story = recovered()
    assert beats(story, HERE, HERE) == []
    assert beats(story, NEXT, HERE) == [], "rank 1 has not come so far"
    assert beats(story, NEXT) == [], "rank 1 is not heard"
    assert beats(story, NEXT, None) == [], "rank 1 has not joined"
    assert beats(story, NEXT, NEXT, generation=1) == [], "that was before"
    (told,) = beats(story, Point(6), NEXT)
    assert told == ev.PointCommitted(job=JOB, generation=story.job.generation, point=NEXT)
    story.hear(told)
    assert resolutions(story) == [Resolution.CLEAN]
    assert beats(story, Point(9), Point(9)) == [], "one event for an incident, and none for a step"


def test_without_an_incident_nothing_is_told() -> None:
    assert beats(running(HERE), NEXT, NEXT) == []
