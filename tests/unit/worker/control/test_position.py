"""A report is a promise: passing a gate and reporting exclude each other, and then only orders move a worker."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.position import FIRST, WHO, decide, reconfigure
from torchrelay.protocol.messages.ids import START, Generation, Point, WorkerPhase
from torchrelay.protocol.messages.orders import Decide, Reconfigure, Resume, Verdict
from torchrelay.wire.files.page import Page
from torchrelay.worker.control.position import OrdersStayedAway, Position, Report


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    page = Page(tmp_path / "page", create=True)
    yield page
    page.close()


@pytest.fixture
def position(page: Page) -> Position:
    """A worker that trains in generation 1 and has committed nothing."""
    position = Position(page)
    position.hear(reconfigure(1))
    assert position.begin_wiring(Generation(1))
    position.start(START)
    return position


def compute(position: Position, point: Point = FIRST) -> None:
    position.enter(WorkerPhase.COMPUTING, point)


@pytest.mark.parametrize("seed", range(12))
def test_poisoned_is_who_has_reported_and_is_not_wired_since_and_never_seems_blocked_while_it_connects(
    position: Position, seed: int
) -> None:
    rng = random.Random(seed)
    seen: set[bool] = set()

    class Watched(Position):
        """The control thread may look between any two words of the main thread."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name in ("wired", "resting", "poisoned"):
                assert not (connecting and self.blocked)

    connecting = False
    position.__class__ = Watched
    for _ in range(300):
        generation = Generation(position.heard + rng.choice((0, 0, 1)))
        act = rng.choice(("interrupt", "halt", "wire", "lift", "resume"))
        if act == "interrupt":
            position.interrupt(generation)
        elif act == "halt":
            position.halt(generation)
        elif act == "lift":
            position.lift(generation)
        elif act == "resume":
            position.hear(resume(generation, START))
        else:
            position.enter(WorkerPhase.STOPPED)
            connecting = True
            position.begin_wiring(position.heard)
            position.end_wiring()
            connecting = False
            position.enter(WorkerPhase.BETWEEN)
        report = position.reported
        assert position.poisoned is (report is not None and report.generation > position.wired)
        seen.add(position.poisoned)
    assert seen == {True, False}


class TestTheGate:
    def test_it_commits(self, position: Position, page: Page) -> None:
        compute(position)
        assert position.enter_gate()
        assert position.pass_gate()
        assert (position.committed, position.pending, position.phase) == (Point(1), None, WorkerPhase.UPDATING)
        assert (page.status().step, page.status().phase) == (1, WorkerPhase.UPDATING)

    def test_it_is_closed_to_who_has_reported(self, position: Position) -> None:
        compute(position)
        report = position.interrupt(Generation(2))
        assert report == Report(Generation(2), START, WorkerPhase.COMPUTING, Point(1), None)
        assert not position.enter_gate()
        assert position.committed == START

    def test_who_reports_in_it_does_not_pass(self, position: Position) -> None:
        compute(position)
        assert position.enter_gate()
        report = position.interrupt(Generation(2))
        assert report == Report(Generation(2), START, WorkerPhase.GATE, Point(1), None)
        assert not position.pass_gate()
        assert position.committed == START

    def test_who_has_passed_reports_the_new_point(self, position: Position) -> None:
        compute(position)
        position.enter_gate()
        position.pass_gate()
        assert position.interrupt(Generation(2)) == Report(Generation(2), Point(1), WorkerPhase.UPDATING, None, None)

    @pytest.mark.parametrize("round_", range(20))
    def test_of_a_report_and_a_commit_at_the_same_time_one_comes_first(self, position: Position, round_: int) -> None:
        compute(position, Point(round_ + 1))
        position.enter_gate()
        together = threading.Barrier(2)
        passed: list[bool] = []

        def main_thread() -> None:
            together.wait()
            passed.append(position.pass_gate())

        thread = threading.Thread(target=main_thread)
        thread.start()
        together.wait()
        report = position.interrupt(Generation(2))
        thread.join()
        assert report is not None
        assert (report.committed == Point(round_ + 1)) == passed[0]


class TestTheVerdict:
    def in_gate(self, position: Position) -> None:
        compute(position)
        position.enter_gate()
        position.interrupt(Generation(2))

    def test_roll_forward_commits(self, position: Position) -> None:
        self.in_gate(position)
        position.hear(decide(2, Verdict.ROLL_FORWARD, Point(1)))
        assert position.await_verdict(1)
        assert position.committed == Point(1)

    @pytest.mark.parametrize(
        ("verdict", "point"), [(Verdict.REDO, START), (Verdict.ROLL_FORWARD, Point(0, 1)), (Verdict.REDO, Point(1))]
    )
    def test_anything_else_does_not(self, position: Position, verdict: Verdict, point: Point) -> None:
        self.in_gate(position)
        position.hear(decide(2, verdict, point))
        assert not position.await_verdict(1)
        assert (position.committed, position.pending) == (START, None)

    def test_one_of_an_older_generation_does_not_count(self, position: Position) -> None:
        self.in_gate(position)
        position.hear(decide(2, Verdict.ROLL_FORWARD, Point(1)))
        position.interrupt(Generation(3))
        assert not position.hear(decide(2, Verdict.ROLL_FORWARD, Point(1)))
        with pytest.raises(OrdersStayedAway):
            position.await_verdict(0.05)
        assert position.committed == START

    def test_after_a_redo_a_further_report_tells_of_no_gate(self, position: Position) -> None:
        self.in_gate(position)
        position.hear(decide(2, Verdict.REDO, START))
        position.await_verdict(1)
        assert position.interrupt(Generation(3)) == Report(Generation(3), START, WorkerPhase.STOPPED, None, None)

    def test_after_a_roll_forward_a_further_report_tells_of_the_commit(self, position: Position) -> None:
        self.in_gate(position)
        position.hear(decide(2, Verdict.ROLL_FORWARD, Point(1)))
        position.await_verdict(1)
        assert position.interrupt(Generation(3)) == Report(Generation(3), Point(1), WorkerPhase.UPDATING, None, None)


class TestReports:
    def test_the_same_question_has_the_same_answer(self, position: Position) -> None:
        compute(position)
        first = position.interrupt(Generation(2))
        position.enter(WorkerPhase.STOPPED)
        assert position.interrupt(Generation(2)) == first

    def test_an_older_question_has_none(self, position: Position) -> None:
        position.interrupt(Generation(3))
        assert position.interrupt(Generation(2)) is None

    def test_wiring_in_the_generation_ends_the_promise(self, position: Position) -> None:
        compute(position)
        position.interrupt(Generation(2))
        assert position.poisoned
        assert position.begin_wiring(Generation(2))
        assert not position.poisoned
        compute(position)
        assert position.enter_gate()
        assert position.pass_gate()

    def test_a_replacement_says_where_it_has_been_brought(self, page: Page) -> None:
        position = Position(page)
        position.bring_to(Point(7))
        assert position.interrupt(Generation(4)) == Report(Generation(4), None, WorkerPhase.BOOTING, None, Point(7))
        assert page.status().step == -1


def resume(generation: int, point: Point | None = None) -> Resume:
    return Resume(**WHO, generation=Generation(generation), point=point)  # type: ignore[arg-type]


STEP = WorkerPhase.COMPUTING


class TestAHalt:
    """Nothing is wrong: the call under way is finished, and none is begun behind it."""

    def commit(self, position: Position, point: Point = FIRST) -> None:
        assert position.begin_call(STEP, point)
        assert position.enter_gate()
        assert position.pass_gate()
        position.enter(WorkerPhase.BETWEEN)

    def test_it_is_no_poison_and_the_connections_are_those_of_its_generation(
        self, position: Position, page: Page
    ) -> None:
        assert position.begin_call(STEP, FIRST)
        assert position.halt(Generation(2)) == Report(Generation(2), START, STEP, FIRST, None)
        assert not position.poisoned
        assert not position.blocked
        position.beat(3)
        assert page.status().generation == 2

    @pytest.mark.parametrize("gates", [0, 1, 2])
    def test_the_call_under_way_is_finished_and_the_next_is_not_begun(self, position: Position, gates: int) -> None:
        assert position.begin_call(STEP, FIRST)
        acts = [position.enter_gate, position.pass_gate]
        for act in acts[:gates]:
            assert act()
        report = position.halt(Generation(2))
        assert report is not None
        assert (report.committed, report.pending) == ((START, FIRST) if gates < 2 else (FIRST, None))
        for act in acts[gates:]:
            assert act()
        position.enter(WorkerPhase.BETWEEN)
        assert position.halt(Generation(2)) == report
        assert position.barred
        assert not position.begin_call(STEP, Point(2))
        assert position.phase is WorkerPhase.BETWEEN
        assert position.stop()
        assert position.resting

    @pytest.mark.parametrize("round_", range(20))
    def test_of_a_report_and_an_entry_at_the_same_time_one_comes_first(self, position: Position, round_: int) -> None:
        together = threading.Barrier(2)
        begun: list[bool] = []

        def main_thread() -> None:
            together.wait()
            begun.append(position.begin_call(STEP, Point(round_ + 1)))

        thread = threading.Thread(target=main_thread)
        thread.start()
        together.wait()
        report = position.halt(Generation(2))
        thread.join()
        assert report is not None
        assert (report.pending is not None) == begun[0]

    def test_who_is_before_the_boundary_begins_calls_up_to_it(self, position: Position) -> None:
        position.halt(Generation(2))
        assert position.stop()
        position.hear(decide(2, Verdict.GO_ON, Point(1)))
        assert position.go_further(Generation(2))
        assert not position.stop()
        assert position.begin_call(WorkerPhase.SECTION, Point(0, 1))
        assert position.enter_gate()
        assert position.pass_gate()
        self.commit(position)
        assert not position.begin_call(STEP, Point(2))

    def test_it_is_lifted_at_once_for_who_has_not_stopped(self, position: Position) -> None:
        position.halt(Generation(2))
        position.hear(resume(2))
        assert position.lift(Generation(2))
        assert not position.lift(Generation(2))
        assert position.wired == 2
        self.commit(position)
        # What is said again, and late, changes nothing.
        assert position.halt(Generation(2)) == Report(Generation(2), START, WorkerPhase.BOOTING, None, None)
        position.hear(resume(2))
        self.commit(position, Point(2))

    def test_who_stands_still_lifts_it_itself(self, position: Position) -> None:
        position.halt(Generation(2))
        assert position.stop()
        position.hear(resume(2))
        assert not position.lift(Generation(2))
        assert position.halted == 2
        assert position.go_on(Generation(2))
        assert position.halted is None
        self.commit(position)

    def test_one_that_was_called_off_before_it_was_heard_of_is_over(self, position: Position) -> None:
        assert position.begin_call(STEP, FIRST)
        position.hear(resume(2))
        assert position.lift(Generation(2))
        assert position.wired == 2
        assert position.halt(Generation(2)) == Report(Generation(2), START, STEP, FIRST, None)
        assert position.enter_gate()
        assert position.pass_gate()
        self.commit(position, Point(2))

    @pytest.mark.parametrize("stopped", [False, True])
    def test_an_interrupt_makes_it_void(self, position: Position, stopped: bool) -> None:
        position.halt(Generation(2))
        if stopped:
            assert position.stop()
        phase = position.phase
        assert position.interrupt(Generation(3)) == Report(Generation(3), START, phase, None, None)
        assert position.poisoned
        assert position.halted is None
        assert position.halt(Generation(2)) is None
        assert position.stop()
        position.hear(reconfigure(3))
        assert position.begin_wiring(Generation(3))
        assert position.go_on(Generation(3))
        self.commit(position)

    def test_an_interrupt_in_its_gate_closes_the_gate(self, position: Position) -> None:
        assert position.begin_call(STEP, FIRST)
        position.halt(Generation(2))
        assert position.enter_gate()
        assert position.interrupt(Generation(3)) == Report(Generation(3), START, WorkerPhase.GATE, FIRST, None)
        assert not position.pass_gate()

    def test_ranks_change_hands_in_the_next_generation(self, position: Position) -> None:
        position.halt(Generation(2))
        assert position.stop()
        position.hear(decide(2, Verdict.GO_ON, START))
        position.hear(reconfigure(3))
        assert not position.poisoned
        assert position.begin_wiring(Generation(3))
        assert position.go_on(Generation(3))
        self.commit(position)

    def test_who_was_cut_before_stays_cut(self, position: Position) -> None:
        compute(position)
        position.interrupt(Generation(2))
        report = position.halt(Generation(3))
        assert report is not None
        assert report.generation == 3
        assert position.poisoned

    def test_who_holds_no_state_yet_is_to_be_asked_again(self, page: Page) -> None:
        position = Position(page)
        assert position.halt(Generation(2)) is None
        assert position.heard == 0
        position.start(START)
        assert position.halt(Generation(2)) is not None

    def test_where_a_call_has_come_to_nothing_is_no_boundary(self, position: Position) -> None:
        assert position.begin_call(STEP, FIRST)
        position.stray()
        assert position.halt(Generation(2)) == Report(Generation(2), START, STEP, FIRST, None)
        assert position.phase is WorkerPhase.BETWEEN
        assert not position.begin_call(STEP, FIRST)
        position.hear(decide(2, Verdict.GO_ON, FIRST))
        assert position.await_way(1)
        self.commit(position)
        assert position.halt(Generation(3)) == Report(Generation(3), FIRST, WorkerPhase.BETWEEN, None, None)

    def test_who_waits_for_its_interrupt_hears_of_a_halt(self, position: Position) -> None:
        position.halt(Generation(2))
        assert not position.await_poison(Generation(1), 1)
        position.interrupt(Generation(3))
        assert position.await_poison(Generation(2), 1)


class TestOrders:
    def test_a_newer_generation_sweeps_the_older_orders_away(self, position: Position) -> None:
        position.hear(decide(2, Verdict.REDO, START))
        position.hear(reconfigure(3))
        assert position.order(Decide) is None
        assert position.order(Reconfigure) == reconfigure(3)

    def test_an_older_order_is_dropped(self, position: Position) -> None:
        position.interrupt(Generation(3))
        assert not position.hear(reconfigure(2))
        assert position.order(Reconfigure) is None

    @pytest.mark.parametrize("act", ["begin_wiring", "hold", "go_on"])
    def test_nothing_is_done_for_a_generation_that_is_over(self, position: Position, act: str) -> None:
        position.hear(reconfigure(2))
        position.interrupt(Generation(3))
        done = {
            "begin_wiring": lambda: position.begin_wiring(Generation(2)),
            "hold": lambda: position.hold(Point(9), Generation(2)),
            "go_on": lambda: position.go_on(Generation(2)),
        }[act]()
        assert not done
        assert (position.wired, position.committed, position.phase) == (1, START, WorkerPhase.BOOTING)

    def test_who_waits_is_woken_by_an_order(self, position: Position) -> None:
        found: list[Resume] = []
        order = Resume(**WHO, generation=Generation(1), point=None)  # type: ignore[arg-type]
        thread = threading.Thread(target=lambda: found.append(position.wait(lambda: position.order(Resume), 10)))
        thread.start()
        position.hear(order)
        thread.join(10)
        assert found == [order]

    def test_patience_begins_with_the_wait_and_with_every_word(self, position: Position) -> None:
        now = threading.Event()
        ended: list[str] = []

        def wait() -> None:
            try:
                position.wait(lambda: None, 1.2)
            except OrdersStayedAway:
                ended.append("away")
            now.set()

        thread = threading.Thread(target=wait)
        thread.start()
        for _ in range(8):
            assert not now.wait(0.2)
            position.word()
        assert now.wait(10)
        thread.join()
        assert ended == ["away"]


class TestWhatIsBroken:
    """Connections are cut as long as the main thread may wait in them, and not when others connect anew."""

    def test_who_computes_may_be_blocked(self, position: Position) -> None:
        compute(position)
        assert not position.blocked
        position.interrupt(Generation(2))
        assert position.blocked

    def test_who_stands_at_the_safepoint_is_not_even_when_an_order_has_woken_it(self, position: Position) -> None:
        compute(position)
        position.interrupt(Generation(2))
        position.enter(WorkerPhase.STOPPED)
        position.hear(reconfigure(2))
        position.wait(lambda: position.order(Reconfigure), 1)
        assert position.poisoned
        assert not position.blocked

    def test_who_connects_is_when_it_is_interrupted_again(self, position: Position) -> None:
        position.enter(WorkerPhase.STOPPED)
        position.hear(reconfigure(2))
        position.begin_wiring(Generation(2))
        position.interrupt(Generation(3))
        assert position.blocked
        position.end_wiring()
        assert not position.blocked

    def test_who_rolls_forward_is_in_what_follows(self, position: Position) -> None:
        compute(position)
        position.enter_gate()
        position.interrupt(Generation(2))
        position.hear(decide(2, Verdict.ROLL_FORWARD, Point(1)))
        position.await_verdict(1)
        assert position.blocked


def test_the_page_tells_the_generation_and_the_collectives(position: Position, page: Page) -> None:
    position.beat(12)
    assert (page.status().collectives, page.status().generation) == (12, 1)
    assert page.status().beat_ns > 0
