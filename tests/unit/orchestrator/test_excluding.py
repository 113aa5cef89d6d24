"""What is not counted in the clean ratio, and what shows it: user bugs, operators' stops, storage, moves called off."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.support.telling import JOB, Story, raised, running
from torchrelay.api.shown import Exclusion, IncidentTally, IncidentView
from torchrelay.cli.view.explain import explain
from torchrelay.goodput.ledger import Line, line_of
from torchrelay.orchestrator.views.scene import Scene
from torchrelay.orchestrator.views.views import Excluded, exclusion, is_storage, tally, view_incident
from torchrelay.protocol.health.pulses import FailureDetector
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import Generation, Point
from torchrelay.protocol.model.incident import Incident, Resolution

SIGKILL = 9
FULL = "OSError: [Errno 28] No space left on device: '/ckpt/17.pt' (train.py:40)"


def views(story: Story) -> list[IncidentView]:
    scene = Scene(story.cluster, FailureDetector(), {}, (), story.cluster.now_ms)
    return [view_incident(scene, incident) for incident in story.job.accounting.incidents]


def lines(story: Story) -> list[Line]:
    return [line_of(view) for view in views(story)]


def raise_and_end(story: Story, rank: int, **fields: object) -> None:
    """A rank's script raises, and its process ends with 5."""
    worker = story.holder(rank)
    story.hear(raised(story, rank, **fields))
    story.lose(worker, code=5)


def test_a_lost_worker_counts() -> None:
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    story.settle()
    (found,) = lines(story)
    assert (found.resolution, found.eligible, found.excluded, found.evidence) == ("resumed", True, "", "")


def test_an_exception_that_does_not_come_again_counts() -> None:
    story = running()
    raise_and_end(story, 1)
    story.wait(300)
    story.settle()
    (found,) = lines(story)
    assert (found.resolution, found.eligible) == ("resumed", True)


def test_the_same_exception_on_two_ranks_is_a_users_bug() -> None:
    story = running()
    holders = [story.holder(0), story.holder(1)]
    story.hear(raised(story, 0, summary="ValueError: nan"), raised(story, 1, summary="ValueError: nan"))
    for worker in holders:
        story.lose(worker, code=5)
    (found,) = lines(story)
    assert (found.eligible, found.excluded) == (False, Exclusion.USER_BUG)
    told = "the job ended with 5: the script's own error, on ranks 0 and 1: ValueError: nan"
    assert found.evidence == told


def test_what_was_resolved_is_a_users_bug_too_if_it_comes_again() -> None:
    story = running()
    raise_and_end(story, 1, summary="ValueError: nan")
    story.wait(300)
    story.settle()
    assert lines(story)[0].eligible, "so far nothing shows it"
    raise_and_end(story, 1, summary="ValueError: nan")
    (found,) = lines(story)  # the end itself was no interruption: nothing was to be recovered
    assert (found.resolution, found.excluded) == ("resumed", Exclusion.USER_BUG)
    assert "ValueError: nan" in found.evidence
    assert "raised the same there, and the job ended" in found.evidence
    assert tally(story.job) == IncidentTally(total=1, eligible=0, clean=0, open=0)


def test_an_earlier_exception_of_another_kind_counts_as_ever() -> None:
    story = running(spares=2)
    raise_and_end(story, 0, summary="RuntimeError: ecc", signature="ecc")
    story.wait(300)
    story.settle()
    raise_and_end(story, 1, summary="ValueError: nan")
    story.wait(300)
    story.settle()
    raise_and_end(story, 1, summary="ValueError: nan")
    assert [found.excluded for found in lines(story)] == ["", Exclusion.USER_BUG]


def test_the_same_exception_at_an_earlier_point_is_not_shown_to_be_the_scripts() -> None:
    story = running(spares=2)
    raise_and_end(story, 0)
    story.wait(300)
    story.settle()
    story.train(Point(4))
    for _ in range(2):
        raise_and_end(story, 1, point=Point(4))
        story.wait(300)
        story.settle()
    assert [found.excluded for found in lines(story)] == ["", Exclusion.USER_BUG]


def test_an_operators_stop_says_what_it_cut_short_and_how_late_it_came() -> None:
    story = running(spares=0, refill=False)
    story.wait(1_000)
    story.lose(story.holder(1), signal=SIGKILL)
    story.settle()
    story.wait(7_500)
    story.hear(ev.JobCancelled(job=JOB, reason="Ctrl-C"))
    (found,) = lines(story)
    assert (found.resolution, found.excluded) == ("ended", Exclusion.OPERATOR)
    told = "the job ended with 130: Ctrl-C; it had begun 7.5 s before with: ended by signal 9"
    assert found.evidence == told


def test_a_refused_script_is_told_with_what_it_was_refused_for() -> None:
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    story.hear(raised(story, 0, kind="refused", summary="models differ"))
    (found,) = lines(story)
    assert found.excluded == Exclusion.REFUSED
    assert found.evidence.startswith("the job ended with 93: models differ; it had begun")


def test_a_storage_that_fails_is_no_fault_of_ours_whatever_came_of_it() -> None:
    story = running()
    raise_and_end(story, 1, summary=FULL)
    story.wait(300)
    story.settle()
    (found,) = lines(story)
    assert (found.resolution, found.eligible, found.excluded) == ("resumed", False, Exclusion.STORAGE)
    assert FULL in found.evidence


def test_a_fault_counts_although_a_storage_fails_after_it() -> None:
    story = running(ranks=3, spares=2)
    story.lose(story.holder(2), signal=SIGKILL)
    raise_and_end(story, 1, summary=FULL)
    assert lines(story)[0].eligible


@pytest.mark.parametrize(
    ("text", "storage"),
    [
        (FULL, True),
        ("OSError: [Errno 5] Input/output error (train.py:3)", True),
        ("OSError: [Errno 116] Stale file handle: '/data' (train.py:3)", True),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/torch_1' (train.py:3)", False),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data' (train.py:3)", False),
        ("RuntimeError: No space left on device (train.py:3)", False),
        ("ConnectionError: [Errno 111] Connection refused (train.py:3)", False),
    ],
)
def test_storage_is_what_the_operating_system_calls_so(text: str, storage: bool) -> None:
    assert is_storage(text) is storage


def test_a_move_that_was_called_off_says_why() -> None:
    told = ((5, "all stop after 4"), (7, "called off: target node-0.2.2 of rank 1 is lost"), (8, "training, as before"))
    called_off = Incident(1, JOB, Generation(2), story=told, resolution=Resolution.CALLED_OFF, eligible=False)
    found = exclusion(called_off, running().job)
    assert found == Excluded(Exclusion.CALLED_OFF, "called off: target node-0.2.2 of rank 1 is lost")


def test_an_orchestrator_of_an_older_version_tells_only_that_it_does_not_count() -> None:
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    story.hear(ev.JobCancelled(job=JOB, reason="Ctrl-C"))
    (view,) = views(story)
    assert view.evidence
    old = replace(view, excluded="", evidence="")
    assert line_of(old).excluded == Exclusion.UNTOLD


def test_explain_says_why_it_does_not_count() -> None:
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    story.hear(ev.JobCancelled(job=JOB, reason="Ctrl-C"))
    told = "\n".join(explain(views(story)[0]))
    assert "ended (not counted: operator stop)" in told
    assert "since: the job ended with 130: Ctrl-C" in told


def test_a_rank_is_named_where_a_storage_failed() -> None:
    story = running()
    raise_and_end(story, 1, summary=FULL, point=Point(3))
    assert lines(story)[0].evidence.startswith("rank 1 on node-0: ")
