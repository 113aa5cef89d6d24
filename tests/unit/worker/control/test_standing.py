"""A report is a promise: passing a gate and reporting exclude each other, and then only orders move a worker."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.standing import FIRST, WHO, decide, reconfigure
from torchrelay.protocol.messages.ids import START, Generation, Point, WorkerPhase
from torchrelay.protocol.messages.orders import Decide, Reconfigure, Resume, Verdict
from torchrelay.wire.files.page import Page
from torchrelay.worker.control.standing import OrdersStayedAway, Report, Standing


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    page = Page(tmp_path / "page", create=True)
    yield page
    page.close()


@pytest.fixture
def standing(page: Page) -> Standing:
    """A worker that trains in generation 1 and has committed nothing."""
    standing = Standing(page)
    standing.hear(reconfigure(1))
    assert standing.begin_wiring(Generation(1))
    standing.start(START)
    return standing


def compute(standing: Standing, point: Point = FIRST) -> None:
    standing.enter(WorkerPhase.COMPUTING, point)


@pytest.mark.parametrize("seed", range(12))
def test_poisoned_is_who_has_reported_and_is_not_wired_since_and_never_seems_blocked_while_it_connects(
    standing: Standing, seed: int
) -> None:
    rng = random.Random(seed)
    seen: set[bool] = set()

    class Watched(Standing):
        """The control thread may look between any two words of the main thread."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name in ("wired", "resting", "poisoned"):
                assert not (connecting and self.blocked)

    connecting = False
    standing.__class__ = Watched
    for _ in range(300):
        generation = Generation(standing.heard + rng.choice((0, 0, 1)))
        act = rng.choice(("interrupt", "halt", "wire", "lift", "resume"))
        if act == "interrupt":
            standing.interrupt(generation)
        elif act == "halt":
            standing.halt(generation)
        elif act == "lift":
            standing.lift(generation)
        elif act == "resume":
            standing.hear(resume(generation, START))
        else:
            standing.enter(WorkerPhase.STOPPED)
            connecting = True
            standing.begin_wiring(standing.heard)
            standing.end_wiring()
            connecting = False
            standing.enter(WorkerPhase.BETWEEN)
        report = standing.reported
        assert standing.poisoned is (report is not None and report.generation > standing.wired)
        seen.add(standing.poisoned)
    assert seen == {True, False}


class TestTheGate:
    def test_it_commits(self, standing: Standing, page: Page) -> None:
        compute(standing)
        assert standing.enter_gate()
        assert standing.pass_gate()
        assert (standing.committed, standing.pending, standing.phase) == (Point(1), None, WorkerPhase.UPDATING)
        assert (page.status().step, page.status().phase) == (1, WorkerPhase.UPDATING)

    def test_it_is_closed_to_who_has_reported(self, standing: Standing) -> None:
        compute(standing)
        report = standing.interrupt(Generation(2))
        assert report == Report(Generation(2), START, WorkerPhase.COMPUTING, Point(1), None)
        assert not standing.enter_gate()
        assert standing.committed == START

    def test_who_reports_in_it_does_not_pass(self, standing: Standing) -> None:
        compute(standing)
        assert standing.enter_gate()
        report = standing.interrupt(Generation(2))
        assert report == Report(Generation(2), START, WorkerPhase.GATE, Point(1), None)
        assert not standing.pass_gate()
        assert standing.committed == START

    def test_who_has_passed_reports_the_new_point(self, standing: Standing) -> None:
        compute(standing)
        standing.enter_gate()
        standing.pass_gate()
        assert standing.interrupt(Generation(2)) == Report(Generation(2), Point(1), WorkerPhase.UPDATING, None, None)

    @pytest.mark.parametrize("round_", range(20))
    def test_of_a_report_and_a_commit_at_the_same_time_one_comes_first(self, standing: Standing, round_: int) -> None:
        compute(standing, Point(round_ + 1))
        standing.enter_gate()
        together = threading.Barrier(2)
        passed: list[bool] = []

        def main_thread() -> None:
            together.wait()
            passed.append(standing.pass_gate())

        thread = threading.Thread(target=main_thread)
        thread.start()
        together.wait()
        report = standing.interrupt(Generation(2))
        thread.join()
        assert report is not None
        assert (report.committed == Point(round_ + 1)) == passed[0]


class TestTheVerdict:
    def in_gate(self, standing: Standing) -> None:
        compute(standing)
        standing.enter_gate()
        standing.interrupt(Generation(2))

    def test_roll_forward_commits(self, standing: Standing) -> None:
        self.in_gate(standing)
        standing.hear(decide(2, Verdict.ROLL_FORWARD, Point(1)))
        assert standing.await_verdict(1)
        assert standing.committed == Point(1)

    @pytest.mark.parametrize(
        ("verdict", "point"), [(Verdict.REDO, START), (Verdict.ROLL_FORWARD, Point(0, 1)), (Verdict.REDO, Point(1))]
    )
    def test_anything_else_does_not(self, standing: Standing, verdict: Verdict, point: Point) -> None:
        self.in_gate(standing)
        standing.hear(decide(2, verdict, point))
        assert not standing.await_verdict(1)
        assert (standing.committed, standing.pending) == (START, None)

    def test_one_of_an_older_generation_does_not_count(self, standing: Standing) -> None:
        self.in_gate(standing)
        standing.hear(decide(2, Verdict.ROLL_FORWARD, Point(1)))
        standing.interrupt(Generation(3))
        assert not standing.hear(decide(2, Verdict.ROLL_FORWARD, Point(1)))
        with pytest.raises(OrdersStayedAway):
            standing.await_verdict(0.05)
        assert standing.committed == START

    def test_after_a_redo_a_further_report_tells_of_no_gate(self, standing: Standing) -> None:
        self.in_gate(standing)
        standing.hear(decide(2, Verdict.REDO, START))
        standing.await_verdict(1)
        assert standing.interrupt(Generation(3)) == Report(Generation(3), START, WorkerPhase.STOPPED, None, None)

    def test_after_a_roll_forward_a_further_report_tells_of_the_commit(self, standing: Standing) -> None:
        self.in_gate(standing)
        standing.hear(decide(2, Verdict.ROLL_FORWARD, Point(1)))
        standing.await_verdict(1)
        assert standing.interrupt(Generation(3)) == Report(Generation(3), Point(1), WorkerPhase.UPDATING, None, None)


class TestReports:
    def test_the_same_question_has_the_same_answer(self, standing: Standing) -> None:
        compute(standing)
        first = standing.interrupt(Generation(2))
        standing.enter(WorkerPhase.STOPPED)
        assert standing.interrupt(Generation(2)) == first

    def test_an_older_question_has_none(self, standing: Standing) -> None:
        standing.interrupt(Generation(3))
        assert standing.interrupt(Generation(2)) is None

    def test_wiring_in_the_generation_ends_the_promise(self, standing: Standing) -> None:
        compute(standing)
        standing.interrupt(Generation(2))
        assert standing.poisoned
        assert standing.begin_wiring(Generation(2))
        assert not standing.poisoned
        compute(standing)
        assert standing.enter_gate()
        assert standing.pass_gate()

    def test_a_replacement_says_where_it_has_been_brought(self, page: Page) -> None:
        standing = Standing(page)
        standing.bring_to(Point(7))
        assert standing.interrupt(Generation(4)) == Report(Generation(4), None, WorkerPhase.BOOTING, None, Point(7))
        assert page.status().step == -1


def resume(generation: int, point: Point | None = None) -> Resume:
    return Resume(**WHO, generation=Generation(generation), point=point)  # type: ignore[arg-type]


STEP = WorkerPhase.COMPUTING


class TestAHalt:
    """Nothing is wrong: the call under way is finished, and none is begun behind it."""

    def commit(self, standing: Standing, point: Point = FIRST) -> None:
        assert standing.begin_call(STEP, point)
        assert standing.enter_gate()
        assert standing.pass_gate()
        standing.enter(WorkerPhase.BETWEEN)

    def test_it_is_no_poison_and_the_connections_are_those_of_its_generation(
        self, standing: Standing, page: Page
    ) -> None:
        assert standing.begin_call(STEP, FIRST)
        assert standing.halt(Generation(2)) == Report(Generation(2), START, STEP, FIRST, None)
        assert not standing.poisoned
        assert not standing.blocked
        standing.beat(3)
        assert page.status().generation == 2

    @pytest.mark.parametrize("gates", [0, 1, 2])
    def test_the_call_under_way_is_finished_and_the_next_is_not_begun(self, standing: Standing, gates: int) -> None:
        assert standing.begin_call(STEP, FIRST)
        acts = [standing.enter_gate, standing.pass_gate]
        for act in acts[:gates]:
            assert act()
        report = standing.halt(Generation(2))
        assert report is not None
        assert (report.committed, report.pending) == ((START, FIRST) if gates < 2 else (FIRST, None))
        for act in acts[gates:]:
            assert act()
        standing.enter(WorkerPhase.BETWEEN)
        assert standing.halt(Generation(2)) == report
        assert standing.barred
        assert not standing.begin_call(STEP, Point(2))
        assert standing.phase is WorkerPhase.BETWEEN
        assert standing.stop()
        assert standing.resting

    @pytest.mark.parametrize("round_", range(20))
    def test_of_a_report_and_an_entry_at_the_same_time_one_comes_first(self, standing: Standing, round_: int) -> None:
        together = threading.Barrier(2)
        begun: list[bool] = []

        def main_thread() -> None:
            together.wait()
            begun.append(standing.begin_call(STEP, Point(round_ + 1)))

        thread = threading.Thread(target=main_thread)
        thread.start()
        together.wait()
        report = standing.halt(Generation(2))
        thread.join()
        assert report is not None
        assert (report.pending is not None) == begun[0]

    def test_who_is_before_the_boundary_begins_calls_up_to_it(self, standing: Standing) -> None:
        standing.halt(Generation(2))
        assert standing.stop()
        standing.hear(decide(2, Verdict.GO_ON, Point(1)))
        assert standing.go_further(Generation(2))
        assert not standing.stop()
        assert standing.begin_call(WorkerPhase.SECTION, Point(0, 1))
        assert standing.enter_gate()
        assert standing.pass_gate()
        self.commit(standing)
        assert not standing.begin_call(STEP, Point(2))

    def test_it_is_lifted_at_once_for_who_has_not_stopped(self, standing: Standing) -> None:
        standing.halt(Generation(2))
        standing.hear(resume(2))
        assert standing.lift(Generation(2))
        assert not standing.lift(Generation(2))
        assert standing.wired == 2
        self.commit(standing)
        # What is said again, and late, changes nothing.
        assert standing.halt(Generation(2)) == Report(Generation(2), START, WorkerPhase.BOOTING, None, None)
        standing.hear(resume(2))
        self.commit(standing, Point(2))

    def test_who_stands_still_lifts_it_itself(self, standing: Standing) -> None:
        standing.halt(Generation(2))
        assert standing.stop()
        standing.hear(resume(2))
        assert not standing.lift(Generation(2))
        assert standing.halted == 2
        assert standing.go_on(Generation(2))
        assert standing.halted is None
        self.commit(standing)

    def test_one_that_was_called_off_before_it_was_heard_of_is_over(self, standing: Standing) -> None:
        assert standing.begin_call(STEP, FIRST)
        standing.hear(resume(2))
        assert standing.lift(Generation(2))
        assert standing.wired == 2
        assert standing.halt(Generation(2)) == Report(Generation(2), START, STEP, FIRST, None)
        assert standing.enter_gate()
        assert standing.pass_gate()
        self.commit(standing, Point(2))

    @pytest.mark.parametrize("stopped", [False, True])
    def test_an_interrupt_makes_it_void(self, standing: Standing, stopped: bool) -> None:
        standing.halt(Generation(2))
        if stopped:
            assert standing.stop()
        phase = standing.phase
        assert standing.interrupt(Generation(3)) == Report(Generation(3), START, phase, None, None)
        assert standing.poisoned
        assert standing.halted is None
        assert standing.halt(Generation(2)) is None
        assert standing.stop()
        standing.hear(reconfigure(3))
        assert standing.begin_wiring(Generation(3))
        assert standing.go_on(Generation(3))
        self.commit(standing)

    def test_an_interrupt_in_its_gate_closes_the_gate(self, standing: Standing) -> None:
        assert standing.begin_call(STEP, FIRST)
        standing.halt(Generation(2))
        assert standing.enter_gate()
        assert standing.interrupt(Generation(3)) == Report(Generation(3), START, WorkerPhase.GATE, FIRST, None)
        assert not standing.pass_gate()

    def test_ranks_change_hands_in_the_next_generation(self, standing: Standing) -> None:
        standing.halt(Generation(2))
        assert standing.stop()
        standing.hear(decide(2, Verdict.GO_ON, START))
        standing.hear(reconfigure(3))
        assert not standing.poisoned
        assert standing.begin_wiring(Generation(3))
        assert standing.go_on(Generation(3))
        self.commit(standing)

    def test_who_was_cut_before_stays_cut(self, standing: Standing) -> None:
        compute(standing)
        standing.interrupt(Generation(2))
        report = standing.halt(Generation(3))
        assert report is not None
        assert report.generation == 3
        assert standing.poisoned

    def test_who_holds_no_state_yet_is_to_be_asked_again(self, page: Page) -> None:
        standing = Standing(page)
        assert standing.halt(Generation(2)) is None
        assert standing.heard == 0
        standing.start(START)
        assert standing.halt(Generation(2)) is not None

    def test_where_a_call_has_come_to_nothing_is_no_boundary(self, standing: Standing) -> None:
        assert standing.begin_call(STEP, FIRST)
        standing.stray()
        assert standing.halt(Generation(2)) == Report(Generation(2), START, STEP, FIRST, None)
        assert standing.phase is WorkerPhase.BETWEEN
        assert not standing.begin_call(STEP, FIRST)
        standing.hear(decide(2, Verdict.GO_ON, FIRST))
        assert standing.await_way(1)
        self.commit(standing)
        assert standing.halt(Generation(3)) == Report(Generation(3), FIRST, WorkerPhase.BETWEEN, None, None)

    def test_who_waits_for_its_interrupt_hears_of_a_halt(self, standing: Standing) -> None:
        standing.halt(Generation(2))
        assert not standing.await_poison(Generation(1), 1)
        standing.interrupt(Generation(3))
        assert standing.await_poison(Generation(2), 1)


class TestOrders:
    def test_a_newer_generation_sweeps_the_older_orders_away(self, standing: Standing) -> None:
        standing.hear(decide(2, Verdict.REDO, START))
        standing.hear(reconfigure(3))
        assert standing.order(Decide) is None
        assert standing.order(Reconfigure) == reconfigure(3)

    def test_an_older_order_is_dropped(self, standing: Standing) -> None:
        standing.interrupt(Generation(3))
        assert not standing.hear(reconfigure(2))
        assert standing.order(Reconfigure) is None

    @pytest.mark.parametrize("act", ["begin_wiring", "hold", "go_on"])
    def test_nothing_is_done_for_a_generation_that_is_over(self, standing: Standing, act: str) -> None:
        standing.hear(reconfigure(2))
        standing.interrupt(Generation(3))
        done = {
            "begin_wiring": lambda: standing.begin_wiring(Generation(2)),
            "hold": lambda: standing.hold(Point(9), Generation(2)),
            "go_on": lambda: standing.go_on(Generation(2)),
        }[act]()
        assert not done
        assert (standing.wired, standing.committed, standing.phase) == (1, START, WorkerPhase.BOOTING)

    def test_who_waits_is_woken_by_an_order(self, standing: Standing) -> None:
        found: list[Resume] = []
        order = Resume(**WHO, generation=Generation(1), point=None)  # type: ignore[arg-type]
        thread = threading.Thread(target=lambda: found.append(standing.wait(lambda: standing.order(Resume), 10)))
        thread.start()
        standing.hear(order)
        thread.join(10)
        assert found == [order]

    def test_patience_begins_with_the_wait_and_with_every_word(self, standing: Standing) -> None:
        now = threading.Event()
        ended: list[str] = []

        def wait() -> None:
            try:
                standing.wait(lambda: None, 1.2)
            except OrdersStayedAway:
                ended.append("away")
            now.set()

        thread = threading.Thread(target=wait)
        thread.start()
        for _ in range(8):
            assert not now.wait(0.2)
            standing.word()
        assert now.wait(10)
        thread.join()
        assert ended == ["away"]


class TestWhatIsBroken:
    """Connections are cut as long as the main thread may wait in them, and not when others connect anew."""

    def test_who_computes_may_be_blocked(self, standing: Standing) -> None:
        compute(standing)
        assert not standing.blocked
        standing.interrupt(Generation(2))
        assert standing.blocked

    def test_who_stands_at_the_safepoint_is_not_even_when_an_order_has_woken_it(self, standing: Standing) -> None:
        compute(standing)
        standing.interrupt(Generation(2))
        standing.enter(WorkerPhase.STOPPED)
        standing.hear(reconfigure(2))
        standing.wait(lambda: standing.order(Reconfigure), 1)
        assert standing.poisoned
        assert not standing.blocked

    def test_who_connects_is_when_it_is_interrupted_again(self, standing: Standing) -> None:
        standing.enter(WorkerPhase.STOPPED)
        standing.hear(reconfigure(2))
        standing.begin_wiring(Generation(2))
        standing.interrupt(Generation(3))
        assert standing.blocked
        standing.end_wiring()
        assert not standing.blocked

    def test_who_rolls_forward_is_in_what_follows(self, standing: Standing) -> None:
        compute(standing)
        standing.enter_gate()
        standing.interrupt(Generation(2))
        standing.hear(decide(2, Verdict.ROLL_FORWARD, Point(1)))
        standing.await_verdict(1)
        assert standing.blocked


def test_the_page_tells_the_generation_and_the_collectives(standing: Standing, page: Page) -> None:
    standing.beat(12)
    assert (page.status().collectives, page.status().generation) == (12, 1)
    assert page.status().beat_ns > 0
