"""Clean is what was proved: what the ledger makes of it."""

from __future__ import annotations

from tests.support.proving import HERE, finish, recovered
from tests.support.telling import Story
from torchrelay.api.shown import Exclusion
from torchrelay.goodput.ledger import Entry, Line, RatioPart, guarantee, line_of, total
from torchrelay.orchestrator.views.scene import Scene
from torchrelay.orchestrator.views.views import tally, view_incident
from torchrelay.protocol.health.pulses import FailureDetector
from torchrelay.protocol.messages import orders as od


def lines(story: Story) -> list[Line]:
    scene = Scene(story.cluster, FailureDetector(), {}, (), story.cluster.now_ms)
    return [line_of(view_incident(scene, incident)) for incident in story.job.accounting.incidents]


def test_one_that_is_to_be_proved_is_under_way_while_the_run_lives() -> None:
    story = recovered()
    (line,) = lines(story)
    assert (line.resolution, line.pause_ms is not None, line.eligible) == ("resumed", True, True)
    assert (total([line]).eligible, total([line], live=False).eligible) == (0, 1)
    assert [one.standing for one in guarantee([Entry(line, live=True)]).findings] == [RatioPart.PENDING]
    assert (tally(story.job).open, tally(story.job).clean) == (1, 0)


def test_the_end_by_another_fault_leaves_it_not_clean() -> None:
    story = recovered()
    story.train(HERE)
    for worker in (story.holder(0), story.holder(1)):
        story.lose(worker, signal=9)
    story.settle()
    assert story.job.outcome is not None
    first, _ = guarantee(map(Entry, lines(story))).findings
    assert (first.standing, first.lost) == (RatioPart.NOT_CLEAN, "never proved: nothing was committed after it")


def test_scripts_that_end_rightly_without_a_further_point_leave_it_not_counted() -> None:
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
