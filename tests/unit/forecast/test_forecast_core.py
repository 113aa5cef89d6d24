"""Forecast, core: migration is what the protocol core decides, so another policy gives another forecast."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.forecast_core import OFTEN, job
from tests.support.telling import submitted
from torchrelay.forecast.inputs.faults import Cause, Fault
from torchrelay.forecast.inputs.layouts import layout_of
from torchrelay.forecast.inputs.phases import Phases, Span
from torchrelay.forecast.inputs.settings import Settings, Strategy
from torchrelay.forecast.play.cutout import CutOut, node_name
from torchrelay.forecast.play.driving import Driving
from torchrelay.forecast.play.engine import World
from torchrelay.forecast.results import Outcome, outcome_of, simulate
from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.placement import policy
from torchrelay.protocol.recovery import rollback


def struck(settings: Settings, *faults: tuple[float, int] | tuple[float, int, Cause]) -> tuple[Outcome, Driving]:
    """A run in which these faults happen, of (hour, node, cause); repairs take 10 hours."""
    world = World(settings, 0)
    world._coming = iter([Fault(at, node, rest[0] if rest else Cause.NODE, 10.0) for at, node, *rest in faults])
    world.draw_next()
    handling = world.handling = Driving(world)
    world.run()
    return outcome_of(world, 0), handling


def longest(got: Outcome) -> float:
    """The longest pause, in seconds."""
    assert got.pause_max_s is not None, "training has stood"
    return got.pause_max_s


# ---------------------------------------------------------------- the cut-out


def test_a_job_that_was_made_is_like_one_that_was_started() -> None:
    """What the cut-out says of a rank that trains is what the core itself would say after a start."""
    story = submitted(ranks=2, spares=1)
    story.settle()
    started = story.job.seats[Rank(1)]
    cut = CutOut(job().spec(1), layout_of("ddp", 64), range(8), range(8, 10))
    cut.show([1])
    made = cut.job.seats[Rank(1)]
    assert (made.joined, made.replacement, made.finished, made.private) == (started.joined, False, False, ())
    assert cut.job.phase is story.job.phase is JobPhase.RUNNING
    assert story.cluster.workers[story.holder(1)].life is cut.cluster.workers[made.worker].life  # type: ignore[index]


def test_ranks_come_into_view_and_go_out_of_it() -> None:
    _, handling = struck(job(gpus=1024, spares=20), *[(float(at), 7 * at) for at in range(1, 16)])
    cut = handling.cut
    assert len(cut.shown) < 20
    places = cut.places()
    assert sorted(places) == list(range(128))
    assert len(set(places.values())) == 128, "no two ranks are on one node"
    assert all(places[7 * at] >= 128 for at in range(1, 16)), "the lost ones are on spares"


# ---------------------------------------------------------------- what the core decides


def test_a_lost_node_is_replaced_by_a_spare_and_nothing_is_lost() -> None:
    got, handling = struck(job(), (5.0, 3))
    assert (got.interruptions, got.clean, got.rollbacks, got.spares_taken) == (1, 1, 0, 1)
    assert handling.cut.places()[3] == 8
    assert longest(got) == pytest.approx(120, rel=0.5)


@pytest.mark.parametrize("cause", [Cause.NODE, Cause.PROCESS], ids=str)
@pytest.mark.parametrize("acquire", [0.0, 0.03, 33.0])
def test_a_pause_is_as_long_as_its_phases(acquire: float, cause: Cause) -> None:
    """Also if a buddy is asked for the record of a node that is lost: `acquire` begins before that."""
    spans = {"detect": 0.02, "interrupt": 0.003, "agree": 0.001, "acquire": acquire, "reconfigure": 0.01,
        "restore": 0.012,
             "resume": 0.005}  # fmt: skip
    phases = Phases({name: Span(span, 0.0) for name, span in spans.items()})
    for nodes in ((3,), (3, 4)):
        got, _ = struck(job(phases=phases), *((5.0, node, cause) for node in nodes))
        assert got.clean == 1
        assert longest(got) == pytest.approx(sum(spans.values()), abs=0.002)


@pytest.mark.parametrize(
    ("layout", "nodes", "clean"),
    [
        ("ddp", (3,), True),
        ("hsdp=2", (3,), True),
        ("hsdp=2", (3, 7), False),  # both holders of part 3
        ("hsdp=4", (3, 7), True),  # parts of 2 nodes: 1, 3, 5 and 7 hold the same
        ("ddp", (3, 6), True),
        ("fsdp", (3,), False),
        ("tp=8,pp=8", (3,), False),  # one copy: nobody else has this stage
        ("tp=8,pp=4", (3,), True),
    ],
)
def test_coverage_comes_from_the_layout(layout: str, nodes: tuple[int, ...], clean: bool) -> None:
    settings = job(layout=layout)
    got, _ = struck(settings, *[(5.0 + 0.001 * number, node) for number, node in enumerate(nodes)])
    assert settings.placed.covered(set(nodes)) is clean
    assert (got.rollbacks == 0) is clean
    assert (got.clean > 0) is clean


def test_a_fault_in_the_middle_of_a_recovery_is_part_of_it() -> None:
    got, handling = struck(job(), (5.0, 3), (5.0 + 60 / 3600, 6))
    assert (got.interruptions, got.clean, got.spares_taken) == (2, 1, 2), "two faults, one incident"
    assert longest(got) > longest(struck(job(), (5.0, 3))[0]) + 15
    assert {handling.cut.places()[3], handling.cut.places()[6]} == {8, 9}


def test_both_buddies_of_a_lost_node_lost_with_it_take_its_record_along() -> None:
    """Found by the simulator: buddies are the next nodes, so one switch may have all three behind it."""
    together = [(5.0, node, Cause.SWITCH) for node in (3, 4, 5)]
    assert struck(job(spares=4), *together)[0].rollbacks == 1
    assert struck(job(spares=4), *[(5.0, node) for node in (1, 3, 5)])[0].rollbacks == 0


def test_snapshots_turn_a_checkpoint_into_a_few_steps() -> None:
    without, _ = struck(job(layout="fsdp"), (5.0, 3))
    with_them, _ = struck(job(layout="fsdp", snapshot_steps=60), (5.0, 3))
    assert (without.rollbacks, without.back_to_snapshots) == (1, 0)
    assert (with_them.rollbacks, with_them.back_to_snapshots) == (0, 1)
    wasted = "wasted progress from disruption"
    assert 0 < with_them.bad_h[wasted] <= 61 * 10 / 3600
    assert without.bad_h[wasted] > with_them.bad_h[wasted]


def test_a_crashed_process_starts_again_where_it_was() -> None:
    got, handling = struck(job(spares=0), (5.0, 3, Cause.PROCESS))
    assert (got.clean, got.spares_taken) == (1, 0)
    assert got.waited_h < 0.1
    assert handling.cut.places()[3] == 3


def test_a_warned_node_is_left_before_it_fails() -> None:
    settings = job()
    world = World(settings, 0)
    world._coming = iter([Fault(5.0, 3, Cause.NODE, 10.0, lead_h=0.5)])
    world.draw_next()
    world.handling = Driving(world)
    world.run()
    got = outcome_of(world, 0)
    assert (got.faults, got.interruptions, got.moves) == (1, 0, 1)
    assert 0 < longest(got) < 100


def test_a_false_alarm_costs_a_move_and_the_node_is_used_again() -> None:
    world = World(job(check_h=1.0), 0)
    handling = world.handling = Driving(world)
    world.after(5.0, world.false_alarm, 3)
    world.run()
    got = outcome_of(world, 0)
    assert (got.alarms, got.moves, got.interruptions) == (1, 1, 0)
    assert node_name(3) in handling.cut.cluster.nodes
    assert not handling.cut.cluster.taints


def test_floating_spares_come_when_the_core_waits() -> None:
    got, _ = struck(job(spares=0, floating=1), (5.0, 3))
    assert (got.preempted, got.clean, got.rollbacks) == (1, 1, 0)
    assert longest(got) == pytest.approx(300 + 120, rel=0.3)
    assert got.borrowed_node_h == pytest.approx(10, abs=0.2), "until the own node is repaired"


def test_a_node_that_is_well_again_before_others_have_given_it_up_comes_once() -> None:
    world = World(job(spares=0, floating=1), 0)
    handling = world.handling = Driving(world)
    handling.preempt(1)
    (node,) = handling.under_way
    handling.repaired(node)
    assert (handling.lent, world.usage.in_use) == ([], 1)
    handling.arrive(node)
    assert (handling.lent, handling.incarnations[node]) == ([], 1)


def test_a_job_that_ended_is_submitted_again_when_there_are_nodes() -> None:
    got, _ = struck(job(spares=0), (5.0, 3))
    assert (got.ended, got.clean) == (1, 0)
    assert longest(got) == pytest.approx(10 * 3600 + 20 * 60, rel=0.05)


def test_a_path_that_is_lost_makes_its_node_be_left() -> None:
    got, handling = struck(job(failover=True), (5.0, 3, Cause.PATH))
    assert (got.interruptions, got.moves) == (0, 1)
    assert 0 < got.bad_h["custom"] < 0.1
    assert handling.cut.places()[3] == 8


def test_the_limit_of_faults_of_a_slot_changes_the_forecast() -> None:
    crashes = [(5.0 + 0.1 * number, 3, Cause.PROCESS) for number in range(2)]
    patient, strict = (
        struck(job(spares=0, policy={"slot_faults": limit, "slot_window_ms": 36_000_000}), *crashes)[0]
        for limit in (3, 1)
    )
    assert (patient.clean, patient.ended) == (2, 0)
    assert strict.ended == 1
    assert strict.ettr < patient.ettr - 0.01


def test_how_long_a_spare_is_waited_for_changes_the_forecast() -> None:
    """Ten minutes, and then from the checkpoint; or as long as it takes, with all that was done."""
    short, long = (struck(job(spares=0, policy={"spare_wait_ms": wait}), (5.0, 3))[0] for wait in (600_000, 10**9))
    assert (short.clean, long.clean) == (0, 1)
    assert long.ettr > short.ettr


def test_a_change_in_the_core_itself_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only its settings: other code in the core is another forecast."""
    before, _ = struck(job(layout="fsdp", snapshot_steps=60), (5.0, 3))
    monkeypatch.setattr(rollback, "ROLL_BUDGET", 0)
    after, _ = struck(job(layout="fsdp", snapshot_steps=60), (5.0, 3))
    assert (before.back_to_snapshots, after.back_to_snapshots) == (1, 0)
    assert after.rollbacks == 1
    assert policy.ROLL_BUDGET > 0


def test_all_strategies_meet_the_same_faults() -> None:
    settings = job(faults=OFTEN, hours=300.0, gpus=128, spares=8)
    found = {one: simulate(replace(settings, strategy=one), 4).faults for one in Strategy}
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("policy", [{}, {"spare_wait_ms": 100 * 3_600_000}], ids=["ended", "waits"])
def test_a_node_of_others_is_asked_for_as_soon_as_it_is_repaired(policy: dict[str, object]) -> None:
    """It is there again at 11 h, an hour before the job's own; until it is given up, 5 minutes pass."""
    got, _ = struck(job(spares=0, floating=1, policy=policy), (1.0, 8), (2.0, 0))
    assert got.preempted == 1
    assert got.waited_h == pytest.approx(9.25, abs=0.25), "and 20 minutes of bring-up if it has ended"
