"""The ledger says what happened, and how sure the clean ratio is."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from tests.support.ledger_lines import BEGUN, CLUSTER, FAULT, MARKS, WALL, line, view
from torchrelay.goodput.ledger import Line, line_of, total, wilson
from torchrelay.orchestrator.store.journal import Anchor
from torchrelay.orchestrator.views.scene import Scene
from torchrelay.orchestrator.views.views import view_incident
from torchrelay.protocol.health.pulses import FailureDetector
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank, WorkerId
from torchrelay.protocol.model.incident import Fault, Incident, Mark, Resolution
from torchrelay.protocol.model.table import Table


def test_a_line_holds_what_the_protocol_promises() -> None:
    found = line_of(view())
    assert (found.id, found.job, found.generation) == ("I-3", "job", 4)
    assert (found.cause, found.detector) == ("SIGKILL", "agent: process exit")
    assert (found.ranks, found.nodes) == ((2,), ("node-1",))
    assert (found.kind, found.verdict, found.resume_point) == ("unplanned", "redo the step after 41", "41")
    assert (found.source, found.bytes, found.digest_equal) == ("rank 0", 8_000, True)
    assert (found.resolution, found.eligible, found.steps_lost) == ("clean", True, 0)
    assert found.at.startswith("2027-")


def test_a_line_says_how_much_of_the_state_each_of_several_sources_has_brought() -> None:
    one = replace(view(), sources=(Rank(0), Rank(1), Rank(3)), shares={Rank(0): 34, Rank(1): 33, Rank(3): 33})
    found = line_of(one)
    assert found.source == "rank 0 (34%), 1 (33%), 3 (33%)"
    assert found.shares == {0: 34, 1: 33, 3: 33}
    assert line_of(replace(one, shares={})).source == "rank 0, 1, 3", "of an older journal"


def test_phases_follow_one_another_and_add_up_to_the_pause() -> None:
    found = line_of(view())
    assert found.phases == {
        "detect": 5,
        "interrupt": 1,
        "agree": 4,
        "acquire": 40,
        "reconfigure": 30,
        "restore": 0,
        "resume": 10,
    }
    assert sum(found.phases.values()) == found.pause_ms == 90


def test_a_phase_that_did_not_happen_is_absent_and_its_time_belongs_to_the_next() -> None:
    marks = dict(MARKS)
    del marks[Mark.RESTORED], marks[Mark.INTERRUPTED]
    found = line_of(view(marks=marks, restored=False))
    assert "restore" not in found.phases
    assert found.phases["agree"] == 5
    assert sum(found.phases.values()) == found.pause_ms


def test_an_incident_that_is_not_over_has_no_pause_yet() -> None:
    marks = {mark: at for mark, at in MARKS.items() if at <= BEGUN + 10}
    found = line_of(view(Resolution.OPEN, marks=marks))
    assert found.pause_ms is None
    assert found.steps_lost is None


def test_a_fault_that_is_dated_later_than_it_was_heard_does_not_make_time_negative() -> None:
    found = line_of(view(marks={**MARKS, Mark.HEARD: BEGUN - 20}))
    assert found.phases["detect"] == 0


@pytest.mark.parametrize(
    ("resolution", "lost", "source"),
    [
        (Resolution.CLEAN, 0, "in place"),
        (Resolution.RESTARTED, 0, ""),
        (Resolution.FELL_BACK, None, "the script's own checkpoint"),
        (Resolution.ENDED, None, ""),
        (Resolution.CALLED_OFF, 0, "in place"),
    ],
)
def test_steps_lost_and_source_without_a_restore(resolution: Resolution, lost: int | None, source: str) -> None:
    found = line_of(view(resolution, restored=False))
    assert (found.steps_lost, found.source) == (lost, source)
    assert found.digest_equal is None


def test_what_was_tried_is_in_the_line() -> None:
    second = Fault("stopped for 2.0 s", "hang", BEGUN + 20, Rank(1), WorkerId("w"), NodeId("node-0"))
    story = ((BEGUN + 60, "rank 2 could not be restored from rank 0: the digest differs"), (BEGUN, "all is well"))
    found = line_of(view(faults=(FAULT, second), story=story))
    assert found.tried == ("hang: stopped for 2.0 s", story[0][1])
    assert found.ranks == (1, 2)
    assert found.nodes == ("node-0", "node-1")


def test_a_broken_collective_is_a_symptom_if_its_cause_is_known() -> None:
    broken = Fault("its collective failed", "collective", BEGUN, Rank(3), WorkerId("w"))
    found = line_of(view(faults=(broken, FAULT)))
    assert (found.cause, found.detector, found.ranks, found.tried) == ("SIGKILL", "agent: process exit", (2,), ())
    alone = line_of(view(faults=(broken,)))
    assert (alone.cause, alone.ranks) == ("its collective failed", (3,))


MOVE_MARKS = {
    Mark.FAULT: BEGUN, Mark.HEARD: BEGUN, Mark.AGREED: BEGUN + 400, Mark.STOOD: BEGUN + 450,
    Mark.READY: BEGUN + 470, Mark.CUTOVER: BEGUN + 471, Mark.RECONFIGURED: BEGUN + 500, Mark.RESTORED: BEGUN + 520,
    Mark.RESUMED: BEGUN + 530,
}  # fmt: skip


class TestMoves:
    """An interruption that was made by a move."""

    WISH = Fault("node-1 is drained", "move M-4", BEGUN, Rank(2), WorkerId("node-1.0.5"), NodeId("node-1"))

    def line(self, resolution: Resolution = Resolution.CLEAN, *without: Mark, kind: str = "planned") -> Line:
        marks = Table({mark: at for mark, at in MOVE_MARKS.items() if mark not in without})
        incident = Incident(
            5,
            JobId("job"),
            Generation(6),
            (self.WISH,),
            marks,
            ((BEGUN, "asked for by ann"),),
            resolution=resolution,
            kind=kind,
            move=4,
        )
        scene = Scene(CLUSTER, FailureDetector(), {}, (Anchor(0, WALL, 1),), 5_000)
        return line_of(view_incident(scene, incident))

    def test_its_pause_begins_when_the_first_stands_and_its_phases_add_up_to_it(self) -> None:
        found = self.line()
        assert (found.kind, found.move, found.cause, found.ranks) == ("planned", "M-4", "node-1 is drained", (2,))
        assert found.pause_ms == 80
        assert found.phases == {"stand": 20, "cutover": 1, "reconfigure": 29, "restore": 20, "resume": 10}
        assert total([found]).phases_p50_ms["cutover"] == 1

    def test_one_that_was_called_off_is_listed_and_not_counted(self) -> None:
        found = self.line(Resolution.CALLED_OFF)
        assert (found.resolution, found.eligible, found.steps_lost, found.pause_ms) == ("called off", False, 0, 80)
        assert (total([found]).incidents, total([found]).eligible) == (1, 0)

    def test_one_that_was_called_off_before_anybody_stood_has_no_pause(self) -> None:
        assert self.line(Resolution.CALLED_OFF, Mark.STOOD).pause_ms is None

    def test_what_a_fault_has_ended_begins_with_the_fault(self) -> None:
        assert self.line(Resolution.CLEAN, kind="unplanned").pause_ms == 530

    def test_tables_show_the_kind(self) -> None:
        from torchrelay.cli.view.report import report_page

        told = report_page([self.line(kind="pre-emptive"), line()])
        assert "pre-emptive (M-4)" in told
        assert "unplanned" in told


class TestTotals:
    def test_only_eligible_incidents_that_are_over_count(self) -> None:
        lines = [
            line(),
            line(Resolution.FELL_BACK),
            line(Resolution.OPEN),
            line(Resolution.ENDED, eligible=False),
        ]
        found = total(lines)
        assert (found.incidents, found.eligible, found.clean) == (4, 2, 1)
        assert found.clean_ratio is not None
        assert found.clean_ratio.share == 0.5
        assert found.steps_unknown == 1

    def test_what_is_open_in_a_run_that_is_gone_was_never_resolved(self) -> None:
        found = total([line(), line(Resolution.OPEN)], live=False)
        assert (found.eligible, found.clean) == (2, 1)

    def test_pauses_and_phases_are_summed_up(self) -> None:
        found = total([line(), line()])
        assert (found.pause_p50_ms, found.pause_max_ms) == (90, 90)
        assert found.phases_p50_ms["reconfigure"] == 30

    def test_without_incidents_there_is_nothing_to_say(self) -> None:
        found = total([])
        assert found.clean_ratio is None
        assert found.pause_p50_ms is None


class TestWilson:
    def test_a_few_clean_ones_prove_little(self) -> None:
        found = wilson(4, 4)
        assert found is not None
        assert found.share == 1.0
        assert found.low == pytest.approx(0.5101, abs=1e-4)
        assert found.high == 1.0

    def test_it_is_wilsons_interval(self) -> None:
        # 81 of 263, the textbook's example: 0.2553 to 0.3662.
        found = wilson(81, 263)
        assert found is not None
        assert found.low == pytest.approx(0.2553, abs=1e-4)
        assert found.high == pytest.approx(0.3662, abs=1e-4)

    @pytest.mark.parametrize("eligible", [1, 2, 7, 50])
    def test_it_holds_the_share_and_stays_within_0_and_1(self, eligible: int) -> None:
        for clean in range(eligible + 1):
            found = wilson(clean, eligible)
            assert found is not None
            assert 0 <= found.low <= found.share <= found.high <= 1
            assert not math.isnan(found.low)

    def test_it_solves_the_equation_it_comes_from(self) -> None:
        found = wilson(13, 20)
        assert found is not None
        for bound in (found.low, found.high):
            # |share - bound| is 1.96 standard deviations of a share of `bound`.
            deviation = math.sqrt(bound * (1 - bound) / 20)
            assert abs(found.share - bound) == pytest.approx(1.959964 * deviation, rel=1e-6)
