"""Clean is what was proved: all ranks have committed a point after the one from which they went on."""

from __future__ import annotations

import pytest

from tests.support.telling import JOB, Story, running
from torchrelay.api.shown import Exclusion
from torchrelay.goodput.ledger import Entry, Line, RatioPart, guarantee, line_of, total
from torchrelay.orchestrator.views.scene import Scene
from torchrelay.orchestrator.views.views import tally, view_incident
from torchrelay.protocol.health.failure_detector import judge
from torchrelay.protocol.health.pulses import Beat, FailureDetector, Sample, hear
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Generation, NodeId, Point, Rank, WorkerPhase
from torchrelay.protocol.model.incident import Resolution

HERE, NEXT = Point(3), Point(4)
NODE = NodeId("node-0")


def recovered() -> Story:
    """A job that has lost rank 1 and goes on after `HERE`."""
    story = running(HERE)
    story.lose(story.holder(1), signal=9)
    story.settle()
    return story


def resolutions(story: Story) -> list[Resolution]:
    return [incident.resolution for incident in story.job.accounting.incidents]


def lines(story: Story) -> list[Line]:
    scene = Scene(story.cluster, FailureDetector(), {}, (), story.cluster.now_ms)
    return [line_of(view_incident(scene, incident)) for incident in story.job.accounting.incidents]


def finish(story: Story, *points: Point | None) -> None:
    for rank, point in enumerate(points):
        story.hear(
            ev.WorkerFinished(
                job=JOB, generation=story.job.generation, worker=story.holder(rank), rank=Rank(rank), point=point
            )
        )


class TestProof:
    def test_all_go_on_and_it_is_clean_when_they_have_committed_a_point(self) -> None:
        story = recovered()
        assert resolutions(story) == [Resolution.RESUMED]
        story.prove(HERE)
        assert resolutions(story) == [Resolution.RESUMED], "there they had been before"
        story.prove(NEXT)
        assert resolutions(story) == [Resolution.CLEAN]
        assert story.job.accounting.unproved == 0
        assert story.job.accounting.incidents[0].story[-1][1] == "resolved: clean, as all ranks have committed 4"

    def test_the_next_fault_does_not_prove_the_one_before_and_what_comes_then_proves_both(self) -> None:
        story = recovered()
        story.train(HERE)
        story.lose(story.holder(0), signal=9)
        assert resolutions(story) == [Resolution.RESUMED, Resolution.OPEN]
        story.settle()
        assert (resolutions(story), story.job.accounting.unproved) == ([Resolution.RESUMED] * 2, 2)
        story.prove(NEXT)
        assert (resolutions(story), story.job.accounting.unproved) == ([Resolution.CLEAN] * 2, 0)

    def test_a_point_of_a_generation_that_is_not_there_yet_proves_nothing(self) -> None:
        story = recovered()
        story.hear(ev.PointCommitted(job=JOB, generation=Generation(99), point=NEXT))
        assert resolutions(story) == [Resolution.RESUMED]

    def test_what_was_not_proved_before_all_began_anew_never_is(self) -> None:
        story = running(HERE, max_restarts=1)
        story.lose(story.holder(1), signal=9)
        story.settle()
        for worker in (story.holder(0), story.holder(1)):
            story.lose(worker, signal=9)
        story.settle()
        assert resolutions(story) == [Resolution.RESUMED, Resolution.FELL_BACK]
        story.prove(Point(50))
        assert resolutions(story) == [Resolution.RESUMED, Resolution.FELL_BACK]

    def test_scripts_that_end_have_committed_what_they_say(self) -> None:
        story = recovered()
        finish(story, NEXT, NEXT)
        assert resolutions(story) == [Resolution.CLEAN]

    @pytest.mark.parametrize("points", [(HERE, HERE), (NEXT, HERE), (NEXT, None)])
    def test_one_that_has_committed_nothing_since_proves_nothing(self, points: tuple[Point | None, ...]) -> None:
        story = recovered()
        finish(story, *points)
        assert resolutions(story) == [Resolution.RESUMED]


class TestBeats:
    def beats(self, story: Story, *points: Point, generation: int | None = None) -> list[ev.Event]:
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
        failure_detector = hear(
            FailureDetector(), Beat(node=NODE, incarnation="a", samples=samples), story.cluster.now_ms
        )
        return list(judge(failure_detector, story.cluster, story.cluster.now_ms))

    def test_all_holders_tell_of_the_point(self) -> None:
        story = recovered()
        assert self.beats(story, HERE, HERE) == []
        assert self.beats(story, NEXT, HERE) == [], "rank 1 has not come so far"
        assert self.beats(story, NEXT) == [], "rank 1 is not heard"
        assert self.beats(story, NEXT, NEXT, generation=1) == [], "that was before"
        (told,) = self.beats(story, Point(6), NEXT)
        assert told == ev.PointCommitted(job=JOB, generation=story.job.generation, point=NEXT)
        story.hear(told)
        assert resolutions(story) == [Resolution.CLEAN]
        assert self.beats(story, Point(9), Point(9)) == [], "one event for an incident, and none for a step"

    def test_without_an_incident_nothing_is_told(self) -> None:
        assert self.beats(running(HERE), NEXT, NEXT) == []


class TestLedger:
    def test_one_that_is_to_be_proved_is_under_way_while_the_run_lives(self) -> None:
        story = recovered()
        (line,) = lines(story)
        assert (line.resolution, line.pause_ms is not None, line.eligible) == ("resumed", True, True)
        assert (total([line]).eligible, total([line], live=False).eligible) == (0, 1)
        assert [one.standing for one in guarantee([Entry(line, live=True)]).findings] == [RatioPart.PENDING]
        assert (tally(story.job).open, tally(story.job).clean) == (1, 0)

    def test_the_end_by_another_fault_leaves_it_not_clean(self) -> None:
        story = recovered()
        story.train(HERE)
        for worker in (story.holder(0), story.holder(1)):
            story.lose(worker, signal=9)
        story.settle()
        assert story.job.outcome is not None
        first, _ = guarantee(map(Entry, lines(story))).findings
        assert (first.standing, first.lost) == (RatioPart.NOT_CLEAN, "never proved: nothing was committed after it")

    def test_scripts_that_end_rightly_without_a_further_point_leave_it_not_counted(self) -> None:
        story = recovered()
        finish(story, HERE, HERE)
        story.answer((od.Leave,))
        for worker in list(story.cluster.workers):
            story.lose(worker, code=0)
        assert story.job.outcome is not None
        assert story.job.outcome.code == 0
        (found,) = guarantee(map(Entry, lines(story))).findings
        assert (found.standing, found.reason) == (RatioPart.EXCLUDED, Exclusion.UNPROVED)
        assert "all went on after 3, and nothing was committed before the job ended with 0" in found.why
