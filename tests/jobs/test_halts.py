"""A halt is no fault: all stop at one boundary, and if it is called off nobody can tell that it was there."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.by_hand import ByHand, Marks, boundary_of
from tests.support.jobs import SCRIPTS
from tests.support.stage import Bits, bits
from torchrelay.protocol.messages.events import CollectiveFailed, WorkerFinished, WorkerReady, WorkerReported
from torchrelay.protocol.messages.ids import Point, WorkerPhase
from torchrelay.protocol.messages.orders import Decide, Halt, Restore, Verdict
from torchrelay.wire.files.page import Page
from torchrelay.worker.state.record import decode_private

pytestmark = pytest.mark.timeout(240)

RANKS = range(4)
PHASE = WorkerPhase
Staged = tuple[ByHand, Marks]


def open_stage(folder: Path, *arguments: str) -> Staged:
    marks = Marks(folder / "marks")
    return ByHand(folder / "stage", [str(SCRIPTS / "halting.py"), "--marks", str(marks.folder), *arguments]), marks


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    """What an undisturbed run computes."""
    stage, _ = open_stage(tmp_path_factory.mktemp("calm"))
    try:
        stage.train()
        stage.finish()
        return bits(stage)
    finally:
        stage.close()


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Staged]:
    stage, marks = open_stage(tmp_path)
    yield stage, marks
    stage.close()


def phase(stage: ByHand, rank: int) -> WorkerPhase:
    status = stage.status(rank)
    assert status is not None
    return status.phase


def await_phase(stage: ByHand, expected: WorkerPhase, *ranks: int) -> None:
    stage.until(lambda: all(phase(stage, rank) is expected for rank in ranks), f"{ranks} are {expected}", 20)


def stop_all_between(stage: ByHand, marks: Marks, step: int) -> None:
    """All stand after this step, at the safepoint, and wait for what is next."""
    there = marks.hold("between", step, *RANKS)
    stage.until(there, "all are between two calls")
    reports = stage.halt()
    assert {(report.committed, report.phase, report.pending) for report in reports.values()} == {
        (Point(step), PHASE.BETWEEN, None)
    }
    marks.release()
    await_phase(stage, PHASE.STOPPED, *RANKS)


# ---------------------------------------------------------------- called off


def test_halts_in_every_phase_that_are_called_off_change_nothing(staged: Staged, calm: Bits) -> None:
    stage, marks = staged
    places = {
        place: marks.hold(place, step, 1)
        for place, step in [("entry", 1), ("gate", 2), ("update", 4), ("section", 6), ("between", 7)]
    }

    def go_to(place: str) -> None:
        stage.until(places[place], f"rank 1 is at {place}")

    stage.train()
    go_to("entry")  # nobody comes to a safepoint: it is called off before
    await_phase(stage, PHASE.COMPUTING, *RANKS)
    reports = stage.halt()
    assert {(report.committed, report.pending) for report in reports.values()} == {(Point(1), Point(2))}
    stage.resume(None)
    release(marks, "entry")

    go_to("gate")
    await_phase(stage, PHASE.GATE, 0, 2, 3)
    reports = stage.halt()
    assert [reports[rank].phase for rank in RANKS] == [PHASE.GATE, PHASE.COMPUTING, PHASE.GATE, PHASE.GATE]
    stage.order_all(Decide, verdict=Verdict.GO_ON, point=Point(3))
    release(marks, "gate")
    assert {ready.point for ready in stage.await_answers(WorkerReady).values()} == {Point(3)}
    stage.resume(Point(3))

    go_to("update")  # one step behind the others
    await_phase(stage, PHASE.COMPUTING, 0, 2, 3)
    ahead(stage, marks, "update", PHASE.UPDATING, Point(4))

    go_to("section")
    await_phase(stage, PHASE.SECTION, *RANKS)
    assert boundary_of(stage.halt()) == Point(6, 1)
    release(marks, "section")
    stage.stand_at(Point(6, 1))
    stage.resume(None)

    go_to("between")
    await_phase(stage, PHASE.COMPUTING, 0, 2, 3)
    ahead(stage, marks, "between", PHASE.BETWEEN, Point(7))
    assert [status.generation for rank in RANKS if (status := stage.status(rank))] == [6] * 4
    stage.finish()
    assert bits(stage) == calm
    assert stage.of(CollectiveFailed) == []


def ahead(stage: ByHand, marks: Marks, place: str, expected: WorkerPhase, before: Point) -> None:
    """A halt with the boundary ahead of rank 1, which is to stop twice: at its next entry, and at the boundary."""
    reports = stage.halt()
    assert (reports[1].committed, reports[1].phase, reports[1].pending) == (before, expected, None)
    boundary = boundary_of(reports)
    assert boundary == before.after_step()
    release(marks, place)
    await_phase(stage, PHASE.STOPPED, 1)
    assert {ready.private for ready in stage.stand_at(boundary).values()} == {b""}
    stage.resume(boundary)


def release(marks: Marks, place: str) -> None:
    for path in marks.folder.glob(f"hold-{place}-*"):
        path.unlink()


def test_a_halt_that_some_never_heard_of_is_called_off_for_all(staged: Staged, calm: Bits) -> None:
    stage, marks = staged
    there = marks.hold("entry", 4, 3)
    stage.train()
    stage.until(there, "rank 3 computes")
    stage.new_generation()
    for rank in (0, 1, 2):
        stage.order(Halt, rank, reason="a test")
    stage.await_answers(WorkerReported, [stage.holders[rank] for rank in (0, 1, 2)])
    stage.resume(None)
    marks.release()
    stage.order(Halt, 3, reason="a test")  # late, and again and again
    stage.await_answers(WorkerReported)
    stage.finish()
    assert bits(stage) == calm


def test_halts_at_the_end_of_the_script(staged: Staged, calm: Bits) -> None:
    stage, marks = staged
    there = marks.hold("end", 9, 1)
    stage.train()
    stage.until(there, "rank 1 is about to end")
    await_phase(stage, PHASE.FINISHED, 0, 2, 3)
    reports = stage.halt()
    last = Point(9, 2)
    assert [reports[rank].phase for rank in RANKS] == [PHASE.FINISHED, PHASE.BETWEEN, PHASE.FINISHED, PHASE.FINISHED]
    marks.release()
    assert set(stage.stand_at(last)) == set(RANKS)
    assert phase(stage, 1) is PHASE.STOPPED
    stage.resume(last)
    stage.await_answers(WorkerFinished)
    stage.halt()
    stage.resume(None)  # at once: most have not left their place
    stage.finish()
    assert bits(stage) == calm


# ---------------------------------------------------------------- a rank changes hands


def hand_over(stage: ByHand, rank: int, boundary: Point) -> None:
    """Up to the moment at which the new holder has connected; the old one stands at the boundary, and serves."""
    target = stage.prepare(rank)
    outgoing = stage.holders[rank]
    readies = stage.stand_at(boundary, outgoing=rank)
    assert all((ready.private != b"") == (at == rank) for at, ready in readies.items())
    private = readies[rank].private
    assert decode_private(private).returned
    page = Page(outgoing.page)
    assert private == next(record.data for record in page.records() if record.point == boundary)
    page.close()
    stage.bring(target, rank, boundary, private, (stage.source(outgoing, rank),))
    stage.new_generation()
    stage.holders[rank] = target
    stage.order(Decide, rank, outgoing, verdict=Verdict.REDO, point=boundary)
    stage.reconfigure()
    stage.await_answers(WorkerReady, [outgoing])


def test_a_rank_changes_hands_to_the_bit(staged: Staged, calm: Bits) -> None:
    stage, marks = staged
    stage.train()
    stop_all_between(stage, marks, 4)
    outgoing = stage.actor(1)
    hand_over(stage, 1, Point(4))
    restored = stage.restore(1, Point(4), (stage.source(outgoing, 1),))
    assert restored.sources == (1,)
    stage.resume(Point(4))
    stage.send(outgoing, signal.SIGKILL)
    stage.await_end(outgoing)
    stage.finish()
    assert bits(stage) == calm
    assert stage.of(CollectiveFailed) == []


def test_who_has_taken_over_leaves_a_record_before_it_commits_anything(staged: Staged, calm: Bits) -> None:
    stage, marks = staged
    stage.train()
    stop_all_between(stage, marks, 4)
    outgoing = stage.actor(1)
    hand_over(stage, 1, Point(4))
    stage.restore(1, Point(4), (stage.source(outgoing, 1),))
    there = marks.hold("entry", 4, 1)
    stage.resume(Point(4))
    stage.until(there, "the new holder computes")
    private = private_of(stage, 1, Point(4))
    marks.release()
    assert decode_private(private).returned
    assert {report.committed for report in stage.interrupt(but=[1]).values()} == {Point(4)}
    stage.order_all(Decide, but=[1], verdict=Verdict.REDO, point=Point(4))
    recover(stage, 1, Point(4), private)
    stage.finish()
    assert bits(stage) == calm


def test_a_outgoing_that_dies_while_it_serves_is_not_needed(staged: Staged, calm: Bits) -> None:
    stage, marks = staged
    stage.train()
    stop_all_between(stage, marks, 4)
    outgoing = stage.actor(1)
    hand_over(stage, 1, Point(4))
    stage.send(outgoing, signal.SIGSTOP)  # it is asked, and gives nothing
    stage.order(Restore, 1, point=Point(4), sources=(stage.source(outgoing, 1), stage.source(stage.actor(2), 2)))
    stage.pump(0.2)
    stage.send(outgoing, signal.SIGKILL)
    stage.await_end(outgoing)
    assert stage.restore(1, Point(4), (stage.source(stage.actor(2), 2),)).sources == (2,)
    stage.resume(Point(4))
    stage.finish()
    assert bits(stage) == calm


def test_the_rank_goes_back_to_its_outgoing_when_its_target_is_lost(staged: Staged, calm: Bits) -> None:
    stage, marks = staged
    stage.train()
    stop_all_between(stage, marks, 4)
    outgoing = stage.actor(1)
    hand_over(stage, 1, Point(4))
    target = stage.holders[1]
    stage.send(target, signal.SIGKILL)
    stage.await_end(target)
    stage.holders[1] = outgoing
    reports = stage.interrupt()
    assert {(report.committed, report.phase, report.pending) for report in reports.values()} == {
        (Point(4), PHASE.STOPPED, None)
    }
    stage.order_all(Decide, verdict=Verdict.REDO, point=Point(4))
    stage.await_answers(WorkerReady)
    stage.reconfigure()
    stage.resume(Point(4))
    stage.finish()
    assert bits(stage) == calm


def test_all_go_past_a_call_that_has_come_to_nothing_before_a_rank_changes_hands(tmp_path: Path) -> None:
    found = []
    for name in ("calm", "moved"):
        (tmp_path / name).mkdir()
        stage, marks = open_stage(tmp_path / name, "--astray", "4")
        there = marks.hold("astray", 4, *RANKS) if name == "moved" else None
        try:
            stage.train()
            if there is not None:
                stage.until(there, "all have caught an error")
                reports = stage.halt()
                assert {(report.committed, report.pending) for report in reports.values()} == {(Point(4), Point(5))}
                marks.release()
                outgoing = stage.actor(1)
                hand_over(stage, 1, Point(5))
                stage.restore(1, Point(5), (stage.source(outgoing, 1),))
                stage.resume(Point(5))
            stage.finish()
            found.append({rank: stage.points(rank) for rank in RANKS})
        finally:
            stage.close()
    assert found[0] == found[1]


# ---------------------------------------------------------------- a fault comes on top


def recover(stage: ByHand, rank: int, point: Point, private: bytes) -> None:
    """The rank gets a new holder, which is brought to the point that all others stand after."""
    target = stage.prepare(rank)
    source = stage.source(stage.actor(0), 0)
    stage.bring(target, rank, point, private, (source,))
    stage.holders[rank] = target
    stage.reconfigure()
    stage.restore(rank, point, (source,))
    stage.resume(point)


def private_of(stage: ByHand, rank: int, point: Point) -> bytes:
    """Kill a rank; what its page holds of the point."""
    stage.kill(rank)
    ended = stage.await_end(stage.actor(rank))
    return next(record.data for record in ended.private if record.point == point)


def test_a_rank_that_dies_while_the_others_are_in_the_gate_of_a_halt(staged: Staged, calm: Bits) -> None:
    stage, marks = staged
    there = marks.hold("gate", 3, 1)
    stage.train()
    stage.until(there, "rank 1 is before the gate")
    await_phase(stage, PHASE.GATE, 0, 2, 3)
    stage.halt()
    stage.order_all(Decide, verdict=Verdict.GO_ON, point=Point(4))
    # The point before: its gate has been passed, and two sections after it.
    here = Point(3, 2)
    private = private_of(stage, 1, here)
    failed = stage.until(lambda: stage.of(CollectiveFailed), "the gate has failed for a neighbour")
    assert {event.generation for event in failed} == {2}
    marks.release()
    reports = stage.interrupt(but=[1])
    assert {(report.committed, report.phase, report.pending) for report in reports.values()} == {
        (here, PHASE.GATE, Point(4))
    }
    stage.order_all(Decide, but=[1], verdict=Verdict.REDO, point=here)
    recover(stage, 1, here, private)
    stage.finish()
    assert bits(stage) == calm


def test_a_rank_that_dies_at_the_safepoint_of_a_halt(staged: Staged, calm: Bits) -> None:
    stage, marks = staged
    stage.train()
    stop_all_between(stage, marks, 4)
    private = private_of(stage, 1, Point(4))
    reports = stage.interrupt(but=[1])
    assert {(report.committed, report.phase) for report in reports.values()} == {(Point(4), PHASE.STOPPED)}
    stage.order_all(Decide, but=[1], verdict=Verdict.REDO, point=Point(4))
    recover(stage, 1, Point(4), private)
    stage.finish()
    assert bits(stage) == calm
    assert stage.of(CollectiveFailed) == []


def test_a_failure_that_was_told_before_a_halt_is_told_again_in_its_generation(staged: Staged) -> None:
    stage, marks = staged
    there = marks.hold("gate", 3, 1)
    stage.train()
    stage.until(there, "rank 1 is before the gate")
    await_phase(stage, PHASE.GATE, 0, 2, 3)
    stage.kill(1)
    stage.await_end(stage.actor(1))

    def told(generation: int) -> set[int]:
        return {event.rank for event in stage.of(CollectiveFailed) if event.generation == generation}

    neighbours = stage.until(lambda: told(1), "the gate has failed")
    stage.new_generation()
    stage.order_all(Halt, but=[1], reason="a test")
    stage.until(lambda: neighbours <= told(2), "the gate has failed in this generation")
