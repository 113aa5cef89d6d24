"""Plans of changes: what they foresee is what the core does; what cannot be asked for is refused with what there is."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.support.plans import WHO, scene, taint, two_nodes
from tests.support.telling import JOB, Story, answers, running
from torchrelay.orchestrator.views.plans import (
    DRAIN,
    MigrateAsk,
    Planned,
    PlanRefused,
    UntaintAsk,
    plan_migrate,
    plan_untaint,
)
from torchrelay.orchestrator.views.scene import Ways, note_ways
from torchrelay.orchestrator.views.why import why
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.events import Effect, JobCancelled
from torchrelay.protocol.messages.ids import NodeId, Rank
from torchrelay.protocol.model.table import Table


def migrate(story: Story, *ranks: int, **words: object) -> Planned:
    return plan_migrate(scene(story), story.job, MigrateAsk(ranks=ranks, **words), WHO)  # type: ignore[arg-type]


def carried_out(story: Story, planned: Planned) -> None:
    assert planned.event is not None
    story.hear(planned.event)


class TestMigrate:
    def test_a_plan_says_from_where_to_where_and_the_core_does_just_that(self) -> None:
        story = two_nodes()
        planned = migrate(story, 2, to="node-0")
        (leg,) = planned.change.legs
        assert (leg.from_text, leg.to_text, leg.to_worker) == ("node-1/0", "node-0/2", "node-0.2.4")
        assert planned.change.move == "M-1"
        assert not planned.change.waits
        assert "rank 2 on node-1/0 (node-1.0.2) moves to node-0/2 (warm spare node-0.2.4)" in planned.change.plan
        carried_out(story, planned)
        move = story.job.open_move
        assert move is not None
        assert (move.name, move.targets[Rank(2)]) == ("M-1", "node-0.2.4")

    def test_a_plan_changes_nothing(self) -> None:
        story = two_nodes()
        before = story.cluster
        migrate(story, 2)
        assert story.cluster == before

    def test_without_room_it_is_accepted_and_says_what_it_waits_for(self) -> None:
        planned = migrate(two_nodes(spares=0, slots=2), 0, 1)
        assert planned.event is not None
        assert "room for 0" in planned.change.waits

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            ({"ranks": (9,)}, "no rank 9: job has ranks 0 to 3"),
            ({"ranks": (2,), "to": "node-1"}, "rank 2 is on node-1 already"),
            ({"ranks": (2, 3, 0), "to": "node-1"}, "ranks 2, 3 are on node-1 already"),
            ({"ranks": (2,), "to": "node-7"}, "no node 'node-7'; there are: node-0, node-1"),
            ({"node": "node-7"}, "no node 'node-7'"),
            ({}, "which ranks"),
            ({"ranks": (1,), "node": "node-0"}, "not both"),
        ],
    )
    def test_what_cannot_be_asked_for_is_refused_in_words(self, words: dict[str, object], told: str) -> None:
        story = two_nodes()
        with pytest.raises(PlanRefused, match=told):
            plan_migrate(scene(story), story.job, MigrateAsk(**words), WHO)  # type: ignore[arg-type]

    def test_a_lost_node_takes_nothing(self) -> None:
        story = two_nodes()
        story.hear(ev.NodeLost(node=NodeId("node-1"), incarnation="a", reason="gone"))
        with pytest.raises(PlanRefused, match="node-1 is lost"):
            migrate(story, 0, to="node-1")

    def test_a_finished_job_takes_no_orders(self) -> None:
        story = two_nodes()
        story.hear(JobCancelled(job=JOB, reason="enough"))
        with pytest.raises(PlanRefused, match=r"job is ending with 130: enough"):
            migrate(story, 2)
        with pytest.raises(PlanRefused, match="enough"):
            taint(story, node="node-1", verb="drain")

    def test_all_ranks_of_a_node_are_meant_by_its_name(self) -> None:
        planned = migrate(two_nodes(spares=4, slots=4), node="node-1")
        assert [leg.rank for leg in planned.change.legs] == [2, 3]

    def test_what_was_asked_for_is_taken_back(self) -> None:
        story = two_nodes()
        assert migrate(story, 2, cancel=True).event is None
        carried_out(story, migrate(story, 2))
        planned = migrate(story, 2, cancel=True)
        assert any("M-1 called off" in line for line in planned.change.plan)
        carried_out(story, planned)
        assert story.job.open_move is None

    @pytest.mark.parametrize(("key", "remedy"), [(DRAIN, "undrain it"), ("gpu/ecc", "untaint that")])
    def test_what_a_taint_asks_for_is_not_taken_back_and_the_remedy_is_said(self, key: str, remedy: str) -> None:
        story = two_nodes()
        carried_out(story, taint(story, node="node-1", key=key))
        planned = migrate(story, 2, cancel=True)
        assert planned.event is None
        assert f"is tainted {key}: {remedy}" in planned.change.plan[-1]

    def test_a_second_wish_says_that_it_waits_for_the_first(self) -> None:
        story = two_nodes()
        carried_out(story, migrate(story, 2))
        planned = migrate(story, 3)
        assert planned.change.move == ""
        assert "M-1 is under way" in planned.change.waits


class TestTaints:
    def test_a_drain_moves_all_ranks_of_the_node_and_is_a_wish(self) -> None:
        story = two_nodes(spares=4, slots=4)
        planned = taint(story, node="node-1", verb="drain", reason="new disks")
        assert isinstance(planned.event, ev.TaintSet)
        assert (planned.event.key, planned.event.planned, planned.event.source) == ("torchrelay/drain", True, WHO)
        assert {leg.to_node for leg in planned.change.legs} == {"node-0"}
        assert any("is not used any more" in line for line in planned.change.plan)

    def test_a_drain_without_room_waits_and_says_for_what(self) -> None:
        planned = taint(two_nodes(), node="node-1", verb="drain")
        assert planned.event is not None
        assert planned.change.waits == "waits: 2 workers needed, there is room for 1"

    def test_the_same_again_changes_nothing_and_says_so(self) -> None:
        story = two_nodes()
        carried_out(story, taint(story, node="node-1", slot=0, key="gpu/ecc", value="63", reason="row remap"))
        again = taint(story, node="node-1", slot=0, key="gpu/ecc", value="63")
        assert again.event is None
        assert not again.change.changes
        assert "node-1/0 has the taint gpu/ecc already" in again.change.plan[0]
        assert taint(story, node="node-1", slot=0, key="gpu/ecc", value="64").event is not None
        assert taint(story, node="node-1", slot=0, key="gpu/ecc", value="63", ttl_ms=5_000).event is not None

    def test_a_drained_node_is_not_drained_again(self) -> None:
        story = two_nodes()
        carried_out(story, taint(story, node="node-1", verb="drain"))
        assert "node-1 is drained already" in taint(story, node="node-1", verb="drain").change.plan[0]

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            ({"node": "node-7"}, "there are: node-0, node-1"),
            ({"node": "node-1", "slot": 3}, "no slot 3 on node-1; there are: node-1/0 to node-1/2"),
            ({"node": "node-1", "key": "a b"}, "cannot be used"),
            ({"node": "node-1", "ttl_ms": 0}, "gone at once"),
        ],
    )
    def test_what_is_not_there_is_refused_with_what_is(self, words: dict[str, object], told: str) -> None:
        with pytest.raises(PlanRefused, match=told):
            taint(two_nodes(), **words)

    def test_a_weaker_effect_moves_nothing(self) -> None:
        planned = taint(two_nodes(), node="node-1", key="noisy", effect=Effect.NO_SCHEDULE)
        assert planned.change.legs == ()
        assert "what runs there stays" in planned.change.plan[0]

    def test_lifting_a_taint_that_is_not_there_says_what_is(self) -> None:
        story = two_nodes()
        carried_out(story, taint(story, node="node-1", slot=1, key="gpu/ecc"))
        planned = plan_untaint(scene(story), UntaintAsk(node="node-1", key="gpu/ecc"), WHO)
        assert planned.event is None
        assert planned.change.plan == ("node-1 has no taint gpu/ecc; there are: node-1/1 gpu/ecc",)
        assert (
            "is not drained"
            in plan_untaint(scene(story), UntaintAsk(node="node-0", verb="undrain"), WHO).change.plan[0]
        )

    def test_a_repaired_place_is_on_probation_a_mistake_is_not(self) -> None:
        story = two_nodes()
        carried_out(story, taint(story, node="node-1", slot=1, key="gpu/ecc"))
        repaired = plan_untaint(scene(story), UntaintAsk(node="node-1", slot=1, key="gpu/ecc"), WHO)
        assert any("on probation (PreferNoSchedule)" in line for line in repaired.change.plan)
        assert any("M-1 called off" in line for line in repaired.change.plan)
        healed = plan_untaint(scene(story), UntaintAsk(node="node-1", slot=1, key="gpu/ecc", healed=True), WHO)
        assert not any("probation" in line for line in healed.change.plan)


def settle_noting(story: Story, ways: Ways) -> None:
    """All do what they are told, and the ways of moves are noted."""
    for _ in range(10):
        for order in story.orders():
            for event in answers(order, story.stands):
                before = story.cluster
                story.hear(event)
                note_ways(ways, before, story.cluster)


class TestWhy:
    def lines(self, story: Story, about: str) -> str:
        return "\n".join(why(scene(story), story.job, about).lines)

    def test_a_rank_that_nothing_moves(self) -> None:
        assert "nothing asks it to move" in self.lines(two_nodes(), "rank 3")

    def test_a_rank_that_a_freeze_holds(self) -> None:
        story = two_nodes()
        story.hear(ev.FreezeSet(source="file /runs/FREEZE", reason="the switch"))
        carried_out(story, migrate(story, 2))
        told = self.lines(story, "rank-2")
        assert "it should move (planned): asked for by ann@desk" in told
        assert "frozen by file /runs/FREEZE: the switch" in told

    def test_a_rank_that_the_limit_holds(self) -> None:
        story = two_nodes()
        story.cluster = story.cluster.with_job(story.job.with_moving(cutovers=tuple(range(60))))
        carried_out(story, migrate(story, 2))
        assert "--moves-per-hour" in self.lines(story, "rank 2")

    def test_a_spare_that_a_taint_refuses_and_one_that_nobody_needs(self) -> None:
        story = two_nodes()
        assert "no rank needs it" in self.lines(story, "node-0/2")
        carried_out(story, taint(story, node="node-0", key="noisy", effect=Effect.NO_SCHEDULE, reason="fan"))
        told = self.lines(story, "node-0")
        assert "node-0 is tainted noisy (NoSchedule) by ann@desk: fan" in told

    def test_a_node_that_takes_nothing(self) -> None:
        story = two_nodes(spares=0)
        assert "slot 2: free: no worker is started there, as all 0 spares" in self.lines(story, "node-1")
        story.hear(ev.NodeLost(node=NodeId("node-1"), incarnation="a", reason="gone"))
        assert "lost: nothing is put there" in self.lines(story, "node-1")

    def test_a_node_that_is_to_be_left_and_cannot_be(self) -> None:
        story = two_nodes()
        assert "should move" not in self.lines(story, "node-1")
        carried_out(story, taint(story, node="node-1", verb="drain"))
        told = self.lines(story, "node-1")
        assert told.count("M-1 moves it, and waits: 2 workers needed, there is room for 1") == 2
        assert "waits: 2 workers needed" in self.lines(story, "rank 2")

    def test_a_move_with_its_story(self) -> None:
        story = two_nodes()
        carried_out(story, migrate(story, 2, reason="try it"))
        found = why(scene(story), story.job, "m-1")
        assert "M-1 of job (planned): preparing" in found.lines
        assert WHO in found.story[0].text
        assert "try it" in found.story[0].text

    def test_its_target_and_its_outgoing_are_explained(self) -> None:
        story = two_nodes()
        carried_out(story, migrate(story, 2, to="node-0"))
        assert "target of rank 2 in M-1" in self.lines(story, "node-0.2.4")

    def test_what_a_fault_has_done_before_its_turn_is_explained(self) -> None:
        story, ways = running(spares=1, moves_per_hour=0), Ways()
        for rank in (0, 1):
            carried_out(story, migrate(story, rank, reason=f"wish {rank}"))
        holder = story.holder(1)
        story.lose(holder, signal=9)
        told = self.lines(story, "rank 1")
        assert f"{WHO} asked for it to leave node-0/1, and then a fault came" in told
        assert "nothing asks it to move" not in told
        settle_noting(story, ways)
        assert story.job.phase == "running"
        told = self.lines(story, "rank 1")
        assert "nothing asks it to move" in told
        assert "before: M-2 recovered: a fault came first: rank 1 has gone from node-0/1 to node-0/2" in told
        (leg,) = ways[(JOB, 2)]
        assert (leg.worker, leg.from_text, leg.to_text) == (holder, "node-0/1", "?")
        lines = why(scene(story, ways), story.job, "M-2").lines
        assert lines[1:3] == ("because wish 1", f"rank 1 was to go from node-0/1 ({holder}) to elsewhere")
        assert "M-1 moves it, and waits" in self.lines(story, "rank 0")

    def test_the_way_of_a_move_begins_where_the_rank_was_before_a_fault_took_it(self) -> None:
        story, ways = running(spares=1, moves_per_hour=0), Ways()
        carried_out(story, migrate(story, 1))
        before = story.cluster
        story.wait(1)
        note_ways(ways, replace(before, jobs=Table()), story.cluster)
        story.lose(story.holder(1), signal=9)
        settle_noting(story, ways)
        assert (story.move.state, story.holder(1)) == ("recovered", "node-0.2.2")
        assert [leg.from_text for leg in ways[(JOB, 1)]] == ["node-0/1"]

    def test_a_rank_that_a_fault_has_taken_out_of_a_move_is_explained(self) -> None:
        story = running(ranks=3, spares=2, moves_per_hour=0)
        carried_out(story, migrate(story, 0, 1))
        story.lose(story.holder(1), signal=9)
        story.settle()
        assert "before: M-1 was to move it, and a fault came first" in self.lines(story, "rank 1")
        assert "before" not in self.lines(story, "rank 0")

    @pytest.mark.parametrize("about", ["M-9", "rank 9", "node-9", "node-1/9", "nonsense", ""])
    def test_what_is_not_there(self, about: str) -> None:
        with pytest.raises(PlanRefused):
            self.lines(two_nodes(), about)


def test_the_way_of_a_move_is_kept_when_the_core_has_forgotten_it() -> None:
    story, ways = two_nodes(), Ways()
    planned = migrate(story, 2, to="node-0")
    before = story.cluster
    carried_out(story, planned)
    note_ways(ways, before, story.cluster)
    carried_out(story, migrate(story, 2, cancel=True))
    (move,) = story.job.moving.moves
    assert not move.targets
    (leg,) = scene(story, ways).way(story.job, move)
    assert (leg.from_text, leg.to_text) == ("node-1/0", "node-0/2")


def test_a_machine_whose_name_is_like_a_moves_is_explained_as_a_machine() -> None:
    story = two_nodes()
    with pytest.raises(PlanRefused, match="no move M-3"):
        why(scene(story), story.job, "m3")
    story.hear(ev.NodeJoined(node=NodeId("m3"), incarnation="a", slots=1))
    assert why(scene(story), story.job, "m3").about == "m3"
