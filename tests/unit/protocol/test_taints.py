"""Taints in the core: what lies on a place, what it leaves when it is lifted, and how long that lasts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.telling import JOB, Story, running, submitted
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.events import Effect
from torchrelay.protocol.messages.ids import NodeId, Rank
from torchrelay.protocol.model.moves import Move, MoveKind, MoveState, Taint
from torchrelay.protocol.placement.buddies import COPIES, circle, wards_of
from torchrelay.protocol.placement.taints import (
    MEMORY_MS,
    PROBATION,
    QUARANTINE_AFTER,
    effect_on,
    is_closed,
    on_slot,
    taken_last,
)

NODE, OTHER = NodeId("node-0"), NodeId("node-1")
MONTH_MS = 30 * 24 * 3_600_000
WEEK_MS = 604_800_000


def taint(node: NodeId = OTHER, slot: int | None = None, **fields: Any) -> ev.TaintSet:
    return ev.TaintSet(node=node, slot=slot, **({"key": "ecc", "source": "detector"} | fields))


def clear(node: NodeId = OTHER, slot: int | None = None, **fields: Any) -> ev.TaintCleared:
    return ev.TaintCleared(node=node, slot=slot, **({"key": "ecc", "source": "detector"} | fields))


def two_nodes(**fields: Any) -> Story:
    """A job of one rank on node-0; node-1 is there and is not used."""
    story = submitted(ranks=1, spares=0, **fields)
    story.hear(ev.NodeJoined(node=OTHER, incarnation="a", slots=2))
    return story


def fail(story: Story, times: int = 1) -> None:
    """node-1 is tainted for a fault, and repaired."""
    for _ in range(times):
        story.hear(taint(), clear())


def probation(story: Story, slot: int | None = None) -> Taint | None:
    return story.cluster.taints.get((OTHER, slot, PROBATION))


# ---------------------------------------------------------------- looking


def test_the_strongest_effect_counts_and_a_nodes_taint_lies_on_all_its_slots() -> None:
    story = two_nodes()
    cluster = story.cluster
    assert (effect_on(cluster, OTHER, 0), is_closed(cluster, OTHER, 0), taken_last(cluster, OTHER, 0)) == (
        None,
        False,
        False,
    )
    story.hear(taint(effect=Effect.PREFER_NO_SCHEDULE))
    assert taken_last(story.cluster, OTHER, 0)
    assert not is_closed(story.cluster, OTHER, 0)
    story.hear(taint(slot=1, key="b", effect=Effect.NO_SCHEDULE), taint(slot=1, key="c", effect=Effect.NO_EXECUTE))
    assert effect_on(story.cluster, OTHER, 1) is Effect.NO_EXECUTE
    assert effect_on(story.cluster, OTHER, 0) is Effect.PREFER_NO_SCHEDULE
    story.hear(clear(slot=1, key="c"))
    assert (effect_on(story.cluster, OTHER, 1), is_closed(story.cluster, OTHER, 1)) == (Effect.NO_SCHEDULE, True)
    assert not taken_last(story.cluster, OTHER, 1)
    assert [found.key for found in on_slot(story.cluster, OTHER, 1)] == ["ecc", "b", PROBATION]
    assert on_slot(story.cluster, NODE, 1) == []


def test_a_place_is_named_as_operators_write_it() -> None:
    whole = Taint(OTHER, None, "k", "", Effect.NO_EXECUTE, "", "ann", 0)
    part = Taint(OTHER, 0, "k", "", Effect.NO_EXECUTE, "", "ann", 0)
    assert (whole.place, part.place) == ("node-1", "node-1/0")
    assert [part.covers(OTHER, slot) for slot in (0, 1)] == [True, False]
    assert [whole.covers(node, 1) for node in (OTHER, NODE)] == [True, False]


# ---------------------------------------------------------------- set and cleared


def test_a_taint_says_what_was_said_and_since_when() -> None:
    story = two_nodes()
    story.wait(70)
    story.hear(taint(value="9", effect=Effect.NO_SCHEDULE, reason="hot", ttl_ms=30, planned=True, source="ann"))
    assert list(story.cluster.taints.values()) == [
        Taint(OTHER, None, "ecc", "9", Effect.NO_SCHEDULE, "hot", "ann", 70, 100, True)
    ]


def test_the_same_taint_again_lives_anew_and_is_no_second_fault() -> None:
    story = two_nodes()
    story.hear(taint(ttl_ms=100))
    story.wait(60)
    before = story.cluster
    story.hear(taint(ttl_ms=100))
    (lying,) = story.cluster.taints.values()
    assert (lying.since_ms, lying.until_ms) == (0, 160)
    assert story.cluster.failures == before.failures
    assert story.cluster.failures[OTHER, None] == (0,)
    story.hear(taint())
    story.wait(60)
    before = story.cluster
    story.hear(taint())
    assert story.cluster == before


def test_a_plan_is_no_fault_and_neither_is_a_place_that_is_only_closed() -> None:
    for fields in ({"planned": True}, {"effect": Effect.NO_SCHEDULE}, {"effect": Effect.PREFER_NO_SCHEDULE}):
        story = two_nodes()
        story.hear(taint(**fields))
        assert story.cluster.failures == {} or len(story.cluster.failures) == 0
        story.hear(clear())
        assert len(story.cluster.taints) == 0


def test_a_taint_that_becomes_a_warning_is_a_fault_and_one_that_is_lowered_is_as_if_lifted() -> None:
    story = two_nodes(probation_ms=1_000)
    story.hear(taint(effect=Effect.NO_SCHEDULE))
    assert len(story.cluster.failures) == 0
    story.wait(5)
    story.hear(taint(effect=Effect.NO_EXECUTE))
    assert dict(story.cluster.failures) == {(OTHER, None): (5,)}
    story.hear(taint(effect=Effect.NO_SCHEDULE))
    lying = probation(story)
    assert lying is not None
    assert (lying.until_ms, lying.reason) == (1_005, "ecc was lowered; 1 fault within 30 days")
    # What was no warning leaves nothing when it is lowered.
    story = two_nodes(probation_ms=1_000)
    story.hear(taint(effect=Effect.NO_SCHEDULE), taint(effect=Effect.PREFER_NO_SCHEDULE))
    assert probation(story) is None


def test_a_taint_is_over_when_its_time_is_and_not_before() -> None:
    story = two_nodes()
    story.hear(taint(ttl_ms=100, planned=True))
    story.wait(99)
    assert len(story.cluster.taints) == 1
    story.wait(1)
    assert len(story.cluster.taints) == 0


def test_a_detector_that_yields_changes_only_what_it_has_set() -> None:
    mine: dict[str, Any] = {"source": "network", "yields": True}
    for effect in Effect:
        story = two_nodes(probation_ms=1_000)
        story.hear(taint(source="ann", effect=effect, reason="a cable"))
        before = story.cluster
        story.hear(taint(**mine), clear(**mine))
        assert story.cluster == before
        story.hear(clear(source="ben"))
        assert (OTHER, None, "ecc") not in story.cluster.taints, "a person lifts whatever lies there"
        story.hear(taint(**mine))
        story.hear(taint(**mine, value="flapping"))
        assert story.cluster.taints[OTHER, None, "ecc"].value == "flapping", "its own it changes"
        story.hear(clear(**mine))
        assert (OTHER, None, "ecc") not in story.cluster.taints, "and lifts"


def test_what_a_person_has_taken_over_is_a_persons() -> None:
    story = two_nodes()
    story.hear(taint(source="network", yields=True), taint(source="ann"))
    story.hear(clear(source="network", yields=True))
    assert story.cluster.taints[OTHER, None, "ecc"].source == "ann"


# ---------------------------------------------------------------- probation


def test_each_further_fault_doubles_the_probation_and_the_fourth_closes_the_place() -> None:
    story = two_nodes(probation_ms=1_000)
    for faults, length in ((1, 1_000), (2, 2_000), (3, 4_000)):
        fail(story)
        lying = probation(story)
        assert lying is not None
        assert (lying.effect, lying.until_ms, lying.since_ms) == (Effect.PREFER_NO_SCHEDULE, length, 0)
        assert f"{faults} fault" in lying.reason
        assert ("faults" in lying.reason) == (faults > 1)
    fail(story)
    lying = probation(story)
    assert lying is not None
    assert (lying.effect, lying.until_ms, lying.source) == (Effect.NO_SCHEDULE, None, "torchrelay")
    assert QUARANTINE_AFTER == 4


def test_faults_are_forgotten_after_a_month() -> None:
    assert MEMORY_MS == MONTH_MS
    for waited, faults in ((MONTH_MS - 1, 2), (MONTH_MS, 1)):
        story = two_nodes()
        story.wait(7)
        fail(story)
        story.wait(waited)
        fail(story)
        assert len(story.cluster.failures[OTHER, None]) == faults


def test_no_more_faults_are_kept_than_are_useful() -> None:
    story = two_nodes(probation_ms=0)
    for _ in range(20):
        story.wait(1)
        fail(story)
    assert story.cluster.failures[OTHER, None] == tuple(range(5, 21))


def test_a_place_that_is_closed_for_its_faults_stays_so_until_somebody_opens_it() -> None:
    story = two_nodes(probation_ms=1_000)
    fail(story, QUARANTINE_AFTER)
    story.wait(MONTH_MS)
    fail(story)
    lying = probation(story)
    assert lying is not None
    assert (lying.effect, lying.until_ms) == (Effect.NO_SCHEDULE, None)
    story.hear(clear(key=PROBATION))
    assert is_closed(story.cluster, OTHER, 0) is False
    assert len(story.cluster.failures) == 0


def test_a_probation_that_is_over_forgives_nothing_and_one_that_is_cleared_does() -> None:
    story = two_nodes(probation_ms=1_000)
    fail(story)
    story.wait(1_000)
    assert probation(story) is None
    assert story.cluster.failures[OTHER, None] == (0,)
    fail(story)
    story.hear(clear(key=PROBATION))
    assert len(story.cluster.failures) == 0
    # A quarantine has no end: it is cleared by hand only.
    fail(story, QUARANTINE_AFTER)
    story.hear(clear(key=PROBATION))
    assert len(story.cluster.failures) == 0


def test_what_is_healed_does_not_count() -> None:
    story = two_nodes()
    story.hear(taint(), clear(healed=True))
    assert (len(story.cluster.failures), probation(story)) == (0, None)
    assert (OTHER, None) not in story.cluster.failures
    fail(story)
    story.wait(5)
    story.hear(taint(), clear(healed=True))
    assert story.cluster.failures[OTHER, None] == (0,)


def test_the_longest_probation_that_a_job_asks_for_counts_and_none_if_none_does() -> None:
    story = two_nodes(probation_ms=1)
    fail(story)
    lying = probation(story)
    assert lying is not None
    assert lying.until_ms == 1
    spec = ev.JobSpec(job=type(JOB)("other"), world_size=1, nproc_per_node=1, probation_ms=5_000)
    story.hear(ev.JobSubmitted(spec=spec))
    fail(story)
    lying = probation(story)
    assert lying is not None
    assert lying.until_ms == 10_000
    for probation_ms in (0, -1):
        story = two_nodes(probation_ms=probation_ms)
        fail(story, QUARANTINE_AFTER)
        assert probation(story) is None


def test_without_jobs_there_is_no_probation() -> None:
    story = Story()
    story.hear(ev.NodeJoined(node=OTHER, incarnation="a", slots=1))
    fail(story, 5)
    assert probation(story) is None


def test_a_lost_node_that_comes_back_is_on_probation_and_one_that_was_never_lost_is_not() -> None:
    story = two_nodes(probation_ms=1_000)
    story.hear(ev.NodeJoined(node=OTHER, incarnation="b", slots=2))
    assert probation(story) is None
    story.hear(ev.NodeLost(node=OTHER, incarnation="b", reason="silence"))
    story.hear(ev.NodeLost(node=OTHER, incarnation="b", reason="silence"))
    assert probation(story) is None
    story.hear(ev.NodeJoined(node=OTHER, incarnation="c", slots=2))
    lying = probation(story)
    assert lying is not None
    assert (lying.until_ms, lying.reason) == (1_000, "the node was lost; 1 fault within 30 days")


# ---------------------------------------------------------------- what follows for placing


def test_nothing_is_started_on_a_closed_place_and_spares_leave_one_that_is_to_be_left() -> None:
    story = running(slots=4)
    spare = story.cluster.spares(JOB)[0]
    story.hear(taint(NODE, 2, effect=Effect.NO_SCHEDULE))
    assert not any(isinstance(order, od.Fence) for order in story.orders())
    # It is of no use there: another is started elsewhere.
    assert [order.slot for order in story.orders() if isinstance(order, od.StartWorker)] == [3]
    story.hear(taint(NODE, 2, key="other"))
    assert [order.worker for order in story.orders() if isinstance(order, od.Fence)] == [spare.worker]


def test_a_place_on_probation_is_taken_last() -> None:
    story = submitted(ranks=2, spares=0, slots=3)
    assert {worker.slot for worker in story.cluster.workers.values()} == {0, 1}
    story = Story()
    story.hear(ev.NodeJoined(node=NODE, incarnation="a", slots=3))
    story.hear(taint(NODE, 0, effect=Effect.PREFER_NO_SCHEDULE))
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=2, nproc_per_node=2)))
    assert {worker.slot for worker in story.cluster.workers.values()} == {1, 2}


# ---------------------------------------------------------------- moves as values


def test_a_story_keeps_its_newest_lines_and_says_nothing_twice_in_a_row() -> None:
    move = Move(7, MoveKind.PLANNED, (Rank(1),), "a wish", 0)
    for number in range(100):
        move = move.tell(number, f"line {number}").tell(number, f"line {number}")
    assert (len(move.story), move.story[0], move.story[-1]) == (64, (36, "line 36"), (99, "line 99"))
    ended = move.close(MoveState.DONE, 200, "done")
    assert (move.ended_ms, ended.ended_ms, ended.open, move.open, ended.name) == (None, 200, False, True, "M-7")


# ---------------------------------------------------------------- buddies


def places(*nodes: str) -> dict[Rank, NodeId]:
    return {Rank(rank): NodeId(node) for rank, node in enumerate(nodes)}


def test_buddies_of_a_few_nodes_are_on_the_next_two() -> None:
    assert COPIES == 2
    assert circle(places("n-0", "n-0")) == {0: (), 1: ()}
    assert circle(places("n-0", "n-1")) == {0: (1,), 1: (0,)}
    assert circle(places("n-0", "n-1", "n-2", "n-3")) == {0: (1, 2), 1: (2, 3), 2: (3, 0), 3: (0, 1)}
    # As people sort them: node 2 comes before node 10.
    assert circle(places("n-2", "n-10", "n-3", "n-1"))[Rank(0)] == (2, 1)


@pytest.mark.parametrize("nodes", [6, 9, 10, 64])
def test_nodes_that_are_numbered_one_after_another_may_be_lost_at_once(nodes: int) -> None:
    """A third of them, as a rack has, wherever it begins: each record lies on one that is left."""
    keepers = circle(places(*(f"n-{number}" for number in range(nodes))))
    for first in range(nodes):
        lost = {Rank((first + number) % nodes) for number in range(nodes // 3)}
        assert all(set(keepers[rank]) - lost for rank in lost)


def test_ranks_of_a_node_are_spread_over_those_of_the_next() -> None:
    assert circle(places("a", "a", "a", "b", "b")) == {0: (3,), 1: (4,), 2: (3,), 3: (0,), 4: (1,)}
    keepers = circle(places("a", "a", "a", "b", "b"))
    assert [wards_of(keepers).get(Rank(rank), ()) for rank in range(5)] == [(3,), (4,), (), (0, 2), (1,)]
