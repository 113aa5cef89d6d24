"""Many losses at once: a rack, a switch, a power feed. They are one fault, however many ranks it takes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.support.telling import JOB, Story, running
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId, Point, Rank
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.placement.policy import GENERATION_BUDGET, START_BUDGET
from torchrelay.protocol.recovery.ending import NO_STATE

HERE = Point(3)
SLOTS = 4
LOST = 7  # nodes: more ranks than there are attempts
SIGKILL = 9


def large(nodes: int = 24) -> Story:
    """A job on many nodes, with as many spares as are lost."""
    story = Story()
    ranks = nodes * SLOTS
    spec = ev.JobSpec(
        job=JOB, world_size=ranks, nproc_per_node=SLOTS, nodes=nodes, spares=LOST * SLOTS, slot_faults=0, refill=False
    )
    story.hear(ev.JobSubmitted(spec=spec))
    for number in range(nodes + LOST):
        story.hear(ev.NodeJoined(node=NodeId(f"node-{number}"), incarnation="a", slots=SLOTS))
    return story


def training() -> Story:
    story = large()
    story.settle()
    story.train(HERE)
    for worker, stand in story.stands.items():
        story.stands[worker] = replace(stand, keeps=True)
    return story


def used(story: Story) -> list[NodeId]:
    """The nodes on which ranks run, the last one first: the first rank's stays."""
    nodes = [story.cluster.workers[seat.worker].node for seat in story.job.seats.values() if seat.worker is not None]
    return list(dict.fromkeys(reversed(nodes)))


AFTER: dict[str, tuple[tuple[type[od.Order], ...], ...]] = {
    "at once": (),
    "when all have reported": ((od.Interrupt,),),
    "on the way to the safepoint": ((od.Interrupt,), (od.Decide,)),
    "while all connect": ((od.StartWorker,), (od.Interrupt,), (od.Assign, od.Decide), (od.Recall,), (od.Replay,)),
    "when all have connected": (
        (od.StartWorker,), (od.Interrupt,), (od.Assign, od.Decide), (od.Recall,), (od.Replay,),
        (od.Reconfigure, od.Restore),
    ),
}  # fmt: skip


@pytest.mark.parametrize("rounds", AFTER.values(), ids=AFTER.keys())
def test_a_job_outlives_more_losses_than_it_has_attempts(rounds: tuple[tuple[type[od.Order], ...], ...]) -> None:
    """Nodes are given up one after another, wherever the recovery from the one before has come."""
    story = training()
    assert LOST * SLOTS > GENERATION_BUDGET
    for node in used(story)[:LOST]:
        story.hear(ev.NodeLost(node=node, incarnation="a", reason="no beat"))
        for kinds in rounds:
            story.answer(kinds)
        assert story.job.outcome is None, story.job.why
    story.settle()
    assert story.job.phase is JobPhase.RUNNING, story.job.why
    assert story.job.resume_point == HERE
    story.train(HERE.after_step())
    story.prove(HERE.after_step())
    assert all(one.resolution is Resolution.CLEAN for one in story.job.accounting.incidents)


def test_workers_that_end_together_make_one_generation() -> None:
    """Nobody has answered yet: there is nothing to ask anew."""
    story = training()
    before = story.job.generation
    for rank in range(SLOTS, SLOTS + GENERATION_BUDGET + 1):
        story.lose(story.holder(rank), signal=SIGKILL)
    assert story.job.generation == before + 1
    assert len(story.job.accounting.incidents[-1].faults) == GENERATION_BUDGET + 1
    story.settle()
    assert story.job.phase is JobPhase.RUNNING


def test_a_loss_after_somebody_has_answered_makes_another() -> None:
    """What the others said may depend on who was there."""
    story = training()
    story.lose(story.holder(SLOTS), signal=SIGKILL)
    before = story.job.generation
    story.answer((od.Interrupt,), but=range(SLOTS + 1, 24 * SLOTS))
    assert story.job.phase is JobPhase.AGREEING
    story.lose(story.holder(SLOTS + 1), signal=SIGKILL)
    assert story.job.generation == before + 1
    assert story.job.seats[Rank(0)].report is None
    assert story.job.attempts.fruitless == 1, "nothing was tried in between"


def test_replacements_that_are_lost_again_and_again_are_no_progress() -> None:
    story = training()
    attempts = 0
    while story.job.outcome is None:
        attempts += 1
        assert attempts <= GENERATION_BUDGET + 2, "it never gives up"
        story.lose(story.holder(SLOTS), signal=SIGKILL)
        story.settle()
        if story.job.outcome is None:
            story.train(HERE)
    assert "in a row committed nothing" in story.job.outcome.reason
    assert attempts >= GENERATION_BUDGET


def test_a_start_survives_more_lost_nodes_than_it_has_attempts() -> None:
    """That a node is lost says nothing about the script."""
    story = large()
    story.answer((od.StartWorker,))
    for node in used(story)[: START_BUDGET + 1]:
        story.hear(ev.NodeLost(node=node, incarnation="a", reason="no beat"))
        story.answer((od.StartWorker,))
    assert story.job.outcome is None, story.job.why
    story.settle()
    assert story.job.phase is JobPhase.RUNNING


# ---------------------------------------------------------------- deadlines: what is silent together is not lost sooner


def agreeing(silent: range) -> Story:
    """A job of eight ranks that has lost rank 0; these have not reported."""
    story = running(ranks=8, spares=4, slot_faults=0)
    story.lose(story.holder(0), signal=SIGKILL)
    story.answer((od.Interrupt,), but=silent)
    return story


def gone(story: Story) -> set[Rank | None]:
    """Ranks that were lost by the deadline."""
    return {fault.rank for fault in story.job.accounting.incidents[-1].faults if fault.detector == "report deadline"}


def test_nobody_is_lost_when_nobody_answers_for_a_while() -> None:
    """A switch fails over: all are silent, and well."""
    story = agreeing(range(1, 8))
    generation = story.job.generation
    story.wait(29_999)
    assert (gone(story), story.job.generation, story.job.outcome) == (set(), generation, None)
    story.settle()
    assert story.job.phase is JobPhase.RUNNING


def test_the_last_to_come_back_is_not_late_because_all_were_away() -> None:
    """Each has its time from when others were heard: they come back one after the other."""
    story = agreeing(range(1, 8))
    generation = story.job.generation
    story.wait(20_000)
    story.answer((od.Interrupt,), but=range(2, 8))
    story.wait(9_999)
    assert gone(story) == set()
    story.answer((od.Interrupt,), but=range(7, 8))
    story.wait(4_999)
    assert (gone(story), story.job.generation) == (set(), generation)
    story.settle()
    assert story.job.phase is JobPhase.RUNNING


def test_when_nobody_ever_answers_the_state_is_lost() -> None:
    story = agreeing(range(1, 8))
    story.wait(30_000)
    assert len(gone(story)) == 7
    assert story.job.outcome is not None
    assert story.job.outcome.code == NO_STATE


def test_some_that_are_silent_together_have_longer_and_are_lost_together() -> None:
    story = agreeing(range(4, 8))
    generation = story.job.generation
    story.wait(9_999)
    assert gone(story) == set()
    story.wait(1)
    assert gone(story) == {Rank(4), Rank(5), Rank(6), Rank(7)}
    assert (story.job.generation, story.job.attempts.fruitless) == (generation + 1, 2), "and that was an attempt"
    story.settle()
    assert story.job.phase is JobPhase.RUNNING


def test_one_that_alone_is_silent_is_lost_soon() -> None:
    story = agreeing(range(4, 5))
    story.wait(4_999)
    assert gone(story) == set()
    story.wait(1)
    assert gone(story) == {Rank(4)}


def test_all_that_do_not_come_to_the_safepoint_are_lost_together() -> None:
    story = agreeing(range(0))
    assert story.job.phase is JobPhase.PREPARING
    story.answer((od.Assign, od.Decide), but=range(3, 7))
    story.wait(599_999)
    assert story.job.phase is JobPhase.PREPARING
    before = story.job
    story.wait(1)
    late = {one.rank for one in story.job.accounting.incidents[-1].faults if one.detector == "safepoint deadline"}
    assert late == {Rank(0), Rank(3), Rank(4), Rank(5), Rank(6)}, "the replacement, too"
    assert story.job.generation == before.generation + 1
    assert story.job.attempts.fruitless == before.attempts.fruitless + 1


def test_starts_that_nodes_end_are_not_tried_for_ever() -> None:
    story = Story()
    spec = ev.JobSpec(job=JOB, world_size=1, nproc_per_node=1, nodes=1, spares=0, slot_faults=0, probation_ms=0)
    story.hear(ev.JobSubmitted(spec=spec))
    for number in range(35):
        story.hear(ev.NodeJoined(node=NodeId(f"node-{number}"), incarnation="a", slots=1))
        story.answer((od.StartWorker,))
        if story.job.outcome is None:
            story.hear(ev.NodeLost(node=NodeId(f"node-{number}"), incarnation="a", reason="no beat"))
    assert story.job.outcome is not None
    assert "30 starts ended before anything was committed" in story.job.outcome.reason


def test_nobody_has_less_time_because_the_only_one_that_had_reported_is_lost() -> None:
    story = agreeing(range(2, 8))
    story.lose(story.holder(1), signal=SIGKILL)
    generation = story.job.generation
    story.wait(29_999)
    assert (gone(story), story.job.generation) == (set(), generation)
    story.wait(1)
    assert len(gone(story)) == 6


def test_who_is_silent_is_not_waited_for_because_others_report_now_and_then() -> None:
    story = agreeing(range(1, 8))
    for rank in range(1, 7):
        story.wait(9_500)
        story.answer((od.Interrupt,), but=set(range(1, 8)) - {rank})
    assert gone(story) == set()
    story.wait(60_000 - 6 * 9_500)
    assert gone(story) == {7}
