"""The same end of two workers that held a rank, at the same point, is the script's own, whatever came between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.telling import Story, after_an_error, private, raised, running, say
from torchrelay.agent.workers.forks import Ended
from torchrelay.agent.workers.samples import cause_of, mismatch
from torchrelay.api.shown import Exclusion
from torchrelay.orchestrator.views.views import exclusion
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId, Point, Rank, WorkerId
from torchrelay.protocol.model.deaths import MISMATCH, Death, death_of, remember_death, same_death_twice
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.rules.cluster import advance

HERE, NEXT = Point(3), Point(4)
ABORT, SEGV, KILL = 6, 11, 9


def dies(story: Story, rank: int, point: Point = HERE, **how: object) -> None:
    """The holder of a rank ends, and leaves a record of this point."""
    worker = story.holder(rank)
    node = story.cluster.workers[worker].node
    kept = (ev.PrivateRecord(point, private(point)),)
    story.hear(replace(ev.WorkerExited(worker=worker, node=node, private=kept), **how))


def again(story: Story, point: Point = HERE) -> None:
    """All go on, and compute the step after this point."""
    story.settle()
    story.train(point)


@pytest.mark.parametrize(
    ("how", "code"),
    [({"signal": ABORT}, 134), ({"signal": SEGV}, 139), ({"code": 7}, 7), ({"code": 0}, 91)],
)
def test_two_that_end_alike_at_one_point_end_the_job(how: dict[str, Any], code: int) -> None:
    story = running(HERE)
    dies(story, 1, **how)
    again(story)
    story.prove(NEXT)  # whatever was said of the first
    dies(story, 1, **how)
    assert story.job.outcome is not None
    assert story.job.outcome.code == code
    assert "the script's own error, on two workers that held rank 1: both ended alike after 3" in story.job.why
    assert not story.job.accounting.incidents[-1].eligible
    told = exclusion(story.job.accounting.incidents[0], story.job)
    assert told is not None
    assert told.reason is Exclusion.USER_BUG


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"rank": 1, "signal": KILL}, {"rank": 1, "signal": KILL}),  # from outside
        ({"rank": 1, "signal": ABORT}, {"rank": 0, "signal": ABORT}),  # another rank: perhaps the machine
        ({"rank": 1, "signal": ABORT}, {"rank": 1, "signal": SEGV}),
        ({"rank": 1, "signal": ABORT}, {"rank": 1, "signal": ABORT, "point": NEXT}),
        ({"rank": 1, "code": 92}, {"rank": 1, "code": 92}),  # no orders came
    ],
)
def test_others_are_recovered_from(first: dict[str, Any], second: dict[str, Any]) -> None:
    story = running(HERE)
    dies(story, **first)
    again(story)
    dies(story, **second)
    assert story.job.outcome is None


def test_a_replacement_that_ends_on_its_way_like_its_predecessor_is_the_second() -> None:
    story = running(HERE)
    dies(story, 1, signal=ABORT)
    story.answer((od.Interrupt, od.Assign))
    assert story.job.phase is JobPhase.PREPARING
    story.lose(story.holder(1), signal=ABORT)
    assert story.job.outcome is not None
    assert story.job.outcome.code == 134


def test_two_replacements_alone_prove_nothing() -> None:
    story = running(HERE, spares=3)
    dies(story, 1, signal=KILL)
    story.answer((od.Interrupt, od.Assign))
    for _ in range(2):
        story.lose(story.holder(1), signal=SEGV)
        assert story.job.outcome is None


@pytest.mark.parametrize("restarts", [0, 1])
def test_collectives_that_do_not_match_are_named_on_whichever_ranks_they_strike(restarts: int) -> None:
    story = running(HERE, max_restarts=restarts)
    dies(story, 1, signal=ABORT, cause=f"SIGABRT: {MISMATCH}: 164 bytes came (train.py:9)")
    again(story)
    dies(story, 0, signal=ABORT, cause=f"SIGABRT: {MISMATCH}: 4 bytes came (train.py:5)")
    if restarts:
        assert story.job.accounting.incidents[-1].resolution is Resolution.FELL_BACK
        return
    assert story.job.outcome is not None
    assert story.job.outcome.code == 91
    assert "the script's own error, after 3 on ranks 1 and 0: " in story.job.outcome.reason
    assert "train.py:5" in story.job.outcome.reason
    assert "the same collectives, in the same order" in story.job.outcome.reason


def mismatched_twice(restarts: int) -> Story:
    """A job of which the collectives did not match, both times on rank 1."""
    story = running(HERE, spares=2, max_restarts=restarts)
    for _ in range(2):
        again(story)
        dies(story, 1, signal=ABORT, cause=f"SIGABRT: {MISMATCH}")
    return story


def test_if_they_strike_one_rank_twice_that_is_told() -> None:
    assert "the script's own error, after 3 on rank 1, twice: " in mismatched_twice(0).job.why


def test_what_has_made_all_begin_anew_does_not_do_so_when_the_next_process_ends() -> None:
    story = mismatched_twice(2)
    assert (story.job.phase, story.job.attempts.restarts) == (JobPhase.STARTING, 1)
    for spare in story.cluster.fencing(story.job.spec.job):
        story.lose(spare.worker, signal=KILL)
    assert story.job.attempts.restarts == 1


def test_how_a_survivor_ends_on_its_way_to_the_safepoint_says_nothing() -> None:
    story = running(HERE, ranks=3, spares=2)
    dies(story, 1, signal=KILL)
    story.answer((od.Interrupt,))
    assert story.job.phase is JobPhase.PREPARING
    dies(story, 0, code=7)
    assert story.job.exceptions.deaths == ()


def test_nor_how_a_replacement_ends_before_it_is_known_where_to() -> None:
    story = running(HERE, ranks=3, spares=3)
    dies(story, 1, signal=KILL)
    again(story)
    dies(story, 1, signal=KILL)
    assert story.job.phase is JobPhase.AGREEING
    story.lose(story.holder(1), code=7)
    assert story.job.exceptions.deaths == ()


def test_it_counts_as_soon_as_a_rank_is_told_to_go_on() -> None:
    story = running(HERE)
    dies(story, 1, signal=KILL)
    for kinds in ((od.Interrupt, od.Assign), (od.Decide, od.Replay), (od.Reconfigure, od.Restore)):
        story.answer(kinds)
    assert story.job.phase is JobPhase.RESUMING
    dies(story, 0, code=7)
    assert [death.how for death in story.job.exceptions.deaths] == ["exit code 7"]


def test_under_a_freeze_the_job_ends_for_the_freeze() -> None:
    story = running(HERE)
    dies(story, 1, code=7)
    again(story)
    story.hear(ev.FreezeSet(source="ann"))
    dies(story, 1, code=7)
    assert story.job.outcome is not None
    assert story.job.outcome.reason.startswith("frozen, so nothing is done about it")


@pytest.mark.parametrize(("kind", "code"), [("diverged", 91), ("refused", 93)])
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_replacement_that_cannot_go_where_its_rank_was_falls_back(kind: str, code: int, restarts: int) -> None:
    story = running(HERE, max_restarts=restarts)
    dies(story, 1, signal=KILL)
    story.answer((od.Interrupt, od.Assign))
    story.hear(raised(story, 1, kind=kind, point=None, summary="it went on with a loop of epochs"))
    if restarts:
        assert story.job.phase is JobPhase.STARTING
        assert story.job.accounting.incidents[-1].resolution is Resolution.FELL_BACK
    else:
        assert story.job.outcome is not None
        assert story.job.outcome.code == code


@pytest.mark.parametrize("together", [False, True])
def test_a_replacement_that_has_resumed_is_no_replacement_any_more(together: bool) -> None:
    """What it says of the script counts, also when it is heard in one go with what ends the recovery."""
    story = running(HERE, max_restarts=1)
    dies(story, 1, signal=KILL)
    for kinds in ((od.Interrupt, od.Assign), (od.Decide, od.Replay), (od.Reconfigure, od.Restore)):
        story.answer(kinds)
    assert story.job.phase is JobPhase.RESUMING
    resumed = [say(story, ev.WorkerResumed, rank) for rank in story.job.seats]
    story.cluster = hear_all(story, [*resumed, raised(story, 1, kind="refused")], together=together)
    assert story.job.outcome is not None
    assert story.job.outcome.code == 93


def hear_all(story: Story, events: list[ev.Event], *, together: bool) -> Cluster:
    cluster = story.cluster
    for place, event in enumerate(events, 1):
        cluster = advance(cluster, event, story.now_ms, more=together and place < len(events))
    return cluster


def test_a_rank_that_trains_and_is_refused_ends_the_job_as_ever() -> None:
    story = running(HERE, max_restarts=1)
    story.hear(raised(story, 1, kind="refused"))
    assert story.job.outcome is not None
    assert story.job.outcome.code == 93


LOG = """[step 3]
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 164 vs 4. Received data size doesn't match
Fatal Python error: Aborted

Thread 0x00007fb034d7d6c0 (most recent call first):
  File "/home/me/venv/lib/python3.11/site-packages/torchrelay/wire/messages/framing.py", line 127 in _wait

Thread 0x00007fb057fddb80 (most recent call first):
  File "/home/me/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/train.py", line 61 in evaluate
  File "/home/me/train.py", line 65 in main
"""


def test_what_gloo_said_is_found_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "rank-1.log").write_text(LOG)
    ended = Ended(worker=WorkerId("w"), slot=0, pid=1, signal=ABORT, cause="SIGABRT", at_ns=0)
    told = cause_of(ended, [tmp_path / "absent.log", tmp_path / "rank-1.log"])
    assert told == f"SIGABRT: {MISMATCH}: Gloo ended the process as 164 bytes came where it waited for 4 (train.py:61)"
    killed = Ended(worker=WorkerId("w"), slot=0, pid=1, signal=KILL, cause="SIGKILL", at_ns=0)
    assert cause_of(killed, [tmp_path / "rank-1.log"]) == "SIGKILL"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Fatal Python error: Aborted",
        LOG.replace("op.preamble.length <= op.nbytes. 164 vs 4", "Too many open files"),
    ],
)
def test_other_aborts_are_not_explained(text: str) -> None:
    assert mismatch(text) == ""


def test_what_only_a_replacement_raises_for_want_of_what_was_left_is_not_the_scripts_own() -> None:
    story = running(HERE)
    dies(story, 1, signal=KILL)
    again(story)
    story.hear(raised(story, 1, point=HERE, kind="incomplete"))
    assert story.job.outcome is not None
    assert story.job.outcome.code == 91
    assert "own error" not in story.job.why


def test_what_its_predecessor_raised_as_well_it_does_not_raise_for_want_of_anything() -> None:
    story = after_an_error(HERE)
    story.hear(raised(story, 1, point=HERE, kind="incomplete"))
    assert story.job.outcome is not None
    assert story.job.outcome.code == 5
    assert "the script's own error" in story.job.why


def test_what_its_predecessor_raised_is_told_in_its_words() -> None:
    story = after_an_error(HERE)
    story.hear(raised(story, 1, point=HERE, kind="incomplete", summary="what its calls have left is lacking"))
    assert [entry.summary for entry in story.job.exceptions.raised] == ["E", "E"]


@pytest.mark.parametrize(
    "fields", [{"kind": "undeclared"}, {"kind": "incomplete", "point": NEXT}, {"kind": "incomplete", "signature": "F"}]
)
def test_it_must_be_the_same_and_for_want_of_something(fields: dict[str, Any]) -> None:
    story = after_an_error(HERE)
    story.hear(raised(story, 1, **({"point": HERE} | fields)))
    assert story.job.outcome is not None
    assert (story.job.outcome.code, "own error" in story.job.why) == (91, False)


def test_what_it_has_raised_itself_before_is_no_proof() -> None:
    story = running(HERE)
    dies(story, 1, signal=KILL)
    again(story)
    story.hear(raised(story, 1, point=HERE, fatal=False), raised(story, 1, point=HERE, kind="incomplete"))
    assert story.job.outcome is not None
    assert story.job.outcome.code == 91


def test_how_a_worker_ends_that_we_have_killed_says_nothing_of_the_job() -> None:
    story = running(HERE, spares=0)
    worker = story.holder(1)
    story.hear(ev.WorkerHung(worker=worker, evidence="stands still", age_ms=0))
    dies_of_us = ev.WorkerExited(worker=worker, node=story.cluster.workers[worker].node, signal=KILL)
    story.hear(dies_of_us)
    assert story.job.exceptions.last_code == 1


# ---------------------------------------------------------------- one death


def death(*points: int, coming_to: Point | None = None, **how: object) -> Death | None:
    kept = tuple(ev.PrivateRecord(Point(point), b"") for point in points)
    event = ev.WorkerExited(worker=WorkerId("a"), node=NodeId("node-0"), private=kept)
    return death_of(replace(event, **how), Rank(0), "a test", coming_to)


@pytest.mark.parametrize("number", [4, 5, 6, 7, 8, 11, 31])
def test_what_a_process_does_to_itself_is_a_death_of_its_own(number: int) -> None:
    found = death(3, signal=number)
    assert found is not None
    assert found.how == f"signal {number}"


@pytest.mark.parametrize("how", [{"signal": 9}, {"signal": 15}, {"code": 92}, {"code": 94}, {}])
def test_what_comes_from_outside_or_from_us_is_none(how: dict[str, Any]) -> None:
    assert death(3, **how) is None


def test_a_worker_has_died_at_the_newest_point_that_it_has_left() -> None:
    found = death(3, 4, signal=ABORT)
    assert found is not None
    assert found.point == NEXT


def test_one_of_the_two_must_have_trained() -> None:
    trained, coming = death(3, signal=ABORT), death(signal=ABORT, coming_to=Point(3))
    assert trained is not None
    assert coming is not None
    other, coming = replace(trained, worker=WorkerId("b")), replace(coming, worker=WorkerId("c"))
    assert trained.same(other)
    assert trained.same(coming)
    assert coming.same(trained)
    assert not coming.same(replace(coming, worker=WorkerId("d")))


def test_of_a_job_the_last_deaths_are_remembered() -> None:
    last: tuple[Death, ...] = ()
    for point in range(100):
        found = death(point, signal=ABORT)
        assert found is not None
        last = remember_death(last, found)
    assert [each.point.step for each in last] == [*range(36, 100)]
    assert same_death_twice(()) is None
