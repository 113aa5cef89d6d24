"""Buddies hold the private records of the last two points of their wards, whatever becomes of those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.buddies import (
    circle,
    make,  # noqa: F401  a fixture
)
from tests.support.run import digests, script, undisturbed
from tests.support.stage import JOB, NODE, Actor, Stage
from torchrelay.protocol.messages.events import Event, RecordKept, WorkerReady, WorkerReconfigured
from torchrelay.protocol.messages.ids import Point, Rank
from torchrelay.protocol.messages.orders import Recall, Reconfigure, Replay, WorkerOrder
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import JobPhase
from torchrelay.wire.files.page import Page
from torchrelay.wire.messages.codec import encode
from torchrelay.worker.state.record import decode_private

# ---------------------------------------------------------------- real workers


class BuddyStage(Stage):
    """A stage whose ranks are each other's buddies, as if each were on a node of its own."""

    copies = 1

    def _pass_on(self, order: WorkerOrder, again: bool) -> None:
        if isinstance(order, Reconfigure):
            world = self.job.spec.world_size
            turn = 1 if order.generation % 2 else world - self.copies
            after, before = circle(order.rank, world, self.copies, turn)
            order = msgspec.structs.replace(order, buddies=after, wards=before)
        super()._pass_on(order, again)

    def take(self, event: Event) -> None:
        if isinstance(event, RecordKept):
            self.events.append(event)  # nobody of the core has asked
        else:
            super().take(event)

    def recall(self, rank: int, ward: int, point: Point) -> bytes:
        """What a rank keeps of another."""
        actor = self.actor(rank)
        before = len(self.of(RecordKept))
        generation = self.job.generation
        order = Recall(
            node=NODE,
            worker=actor.worker,
            job=JOB,
            generation=generation,
            rank=Rank(rank),
            ward=Rank(ward),
            point=point,
        )
        self._tell(actor, encode(order))
        self.until(lambda: len(self.of(RecordKept)) > before, "an answer")
        answer = self.of(RecordKept)[-1]
        assert (answer.rank, answer.ward, answer.point, answer.generation) == (rank, ward, point, generation)
        return answer.private

    def records(self, actor: Actor) -> dict[Point, bytes]:
        """What a worker's page holds."""
        page = Page(actor.page)
        try:
            return {record.point: record.data for record in page.records()}
        finally:
            page.close()


Staged = Callable[..., BuddyStage]
slow = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Staged]:
    stages: list[BuddyStage] = []

    def make(*argv: str, world: int = 3, copies: int = 2, spares: int = 1) -> BuddyStage:
        stage = BuddyStage(
            tmp_path / f"stage-{len(stages)}", [*argv, "--marks", str(tmp_path)], world=world, spares=spares
        )
        stage.copies = copies
        stages.append(stage)
        return stage

    yield make
    for stage in stages:
        stage.close()


def same_gate(kept: bytes, page: bytes) -> None:
    """A buddy has what was in the page at the gate; the page may have the call's return behind it."""
    assert kept
    assert page.startswith(kept)
    mine, theirs = decode_private(kept), decode_private(page)
    assert (mine.rng, mine.place) == (theirs.rng, theirs.place)


class TestReal:
    pytestmark = slow

    @pytest.mark.parametrize("way", ["dict", "wide"])
    def test_a_lost_ranks_records_are_with_its_buddies(self, way: str, staged: Staged, tmp_path: Path) -> None:
        stage = staged(script("targets"), way)
        stage.until(lambda: stage.step() >= 3, "training")
        stage.hold = lambda order: isinstance(order, Reconfigure | Recall)
        lost = stage.actor(1)
        stage.kill(1)
        stage.until(
            lambda: {event.rank for event in stage.of(WorkerReady) if event.generation == 2} == {0, 1, 2}, "all stand"
        )
        (point,) = {event.point for event in stage.of(WorkerReady) if event.generation == 2}
        assert point is not None
        for buddy in (0, 2):
            same_gate(stage.recall(buddy, 1, point), stage.records(lost)[point])
            assert stage.recall(buddy, 1, Point(point.step + 7)) == b""
        same_gate(stage.recall(0, 2, point), stage.records(stage.actor(2))[point])
        stage.hold = lambda _: False
        stage.until(lambda: stage.job.phase is JobPhase.RUNNING, "recovered")
        (tmp_path / "enough").touch()
        assert stage.end() == 0, stage.all_logs()

    def test_after_a_reconfigure_the_new_buddies_have_it_before_anybody_goes_on(
        self, staged: Staged, tmp_path: Path
    ) -> None:
        stage = staged(script("targets"), "dict", copies=1)
        stage.until(lambda: stage.step() >= 3, "training")
        stage.hold = lambda order: type(order).__name__ == "Resume" and order.generation > 1  # type: ignore[attr-defined]
        stage.kill(1)
        stage.until(
            lambda: {e.rank for e in stage.of(WorkerReconfigured) if e.generation == 2} == {0, 1, 2}, "connected"
        )
        told = next(order for order in stage.orders if isinstance(order, Replay))
        for ward in range(3):
            before, now = (ward + 1) % 3, (ward + 2) % 3  # the former buddy, and the one of this generation
            kept = stage.recall(now, ward, told.point)
            assert kept == stage.records(stage.actor(ward))[told.point]
            if ward == 1:  # the replacement's page holds what it was brought to
                inherited, left = decode_private(kept), decode_private(told.private)
                assert (inherited.rng, inherited.place) == (left.rng, left.place)
            if before != 1:
                same_gate(stage.recall(before, ward, told.point), kept)
        stage.hold = lambda _: False
        stage.until(lambda: stage.job.phase is JobPhase.RUNNING, "recovered")
        (tmp_path / "enough").touch()
        assert stage.end() == 0, stage.all_logs()

    @pytest.mark.parametrize("phase", ["forward", "gate", "update", "between"])
    def test_a_rank_that_dies_while_others_wait_for_its_record_is_replaced(
        self, phase: str, staged: Staged, tmp_path: Path
    ) -> None:
        stage = staged(script("features"), "plain", "--die", f"1:4:{phase}", world=2, copies=1)
        assert stage.end() == 0, stage.all_logs()
        assert (tmp_path / f"died 4:{phase}").exists()
        assert [incident.resolution for incident in stage.job.accounting.incidents] == [Resolution.CLEAN]
        assert digests(stage) == undisturbed("plain")

    def test_two_that_die_one_after_the_other_are_replaced(self, staged: Staged) -> None:
        stage = staged(script("features"), "plain", "--die", "1:4:gate,0:5:between", world=2, copies=1, spares=2)
        assert stage.end() == 0, stage.all_logs()
        assert [incident.resolution for incident in stage.job.accounting.incidents] == [Resolution.CLEAN] * 2
        assert digests(stage) == undisturbed("plain")
