"""Moves of real workers as the core orders them: a taint, a target, a boundary, a cutover."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.by_hand import Marks
from tests.support.jobs import SCRIPTS
from tests.support.stage import NODE, Actor, Bits, Stage, bits
from torchrelay.protocol.messages.events import (
    CollectiveFailed,
    StateRestored,
    TaintCleared,
    TaintSet,
    WorkerExited,
    WorkerReconfigured,
)
from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.messages.orders import Order, Replay, Restore
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.moves import MoveState

pytestmark = pytest.mark.timeout(240)

RANKS = range(4)
Staged = tuple[Stage, Marks]


def open_stage(folder: Path, spares: int = 1) -> Staged:
    marks = Marks(folder / "marks")
    argv = [str(SCRIPTS / "halting.py"), "--marks", str(marks.folder)]
    return Stage(folder / "stage", argv, spares=spares), marks


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    stage, _ = open_stage(tmp_path_factory.mktemp("calm"), spares=0)
    try:
        assert stage.end() == 0, stage.all_logs()
        return bits(stage)
    finally:
        stage.close()


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Staged]:
    stage, marks = open_stage(tmp_path)
    yield stage, marks
    stage.close()


def end(stage: Stage, calm: Bits) -> None:
    assert stage.end() == 0, stage.all_logs()
    assert bits(stage) == calm
    assert stage.of(CollectiveFailed) == []


def come_to_the_boundary(stage: Stage, marks: Marks) -> Actor:
    """Rank 1 is to leave its place, and all stop after the step that rank 0 computes. Returns the outgoing worker."""
    there = marks.hold("entry", 3, 0)
    stage.until(there, "training")
    outgoing = stage.actor(1)
    stage.take(TaintSet(node=NODE, slot=outgoing.slot, key="ecc", source="a test"))
    move = stage.until(lambda: stage.job.moving.moves and stage.job.moving.moves[-1], "a move")
    assert move.ranks == (Rank(1),)
    stage.until(lambda: stage.job.phase is JobPhase.HALTING, "the job stops")
    return outgoing


def holds_back(*kinds: type[Order]) -> Callable[[Order], bool]:
    return lambda order: isinstance(order, kinds)


def resolutions(stage: Stage) -> list[Resolution]:
    return [incident.resolution for incident in stage.job.accounting.incidents]


def test_a_rank_leaves_a_tainted_place_to_the_bit(staged: Staged, calm: Bits) -> None:
    stage, marks = staged
    outgoing = come_to_the_boundary(stage, marks)
    marks.release()
    stage.until(lambda: stage.job.moving.moves[-1].state is MoveState.DONE, "moved")
    assert stage.actor(1) is not outgoing
    (restored,) = stage.of(StateRestored)
    assert restored.sources == (1,), "from the outgoing worker"
    end(stage, calm)
    assert resolutions(stage) == [Resolution.CLEAN]
    assert next(event.signal for event in stage.of(WorkerExited) if event.worker == outgoing.worker) == signal.SIGKILL


def test_a_move_that_is_not_wanted_any_more_leaves_no_trace(staged: Staged, calm: Bits) -> None:
    stage, marks = staged
    outgoing = come_to_the_boundary(stage, marks)
    stage.hold = holds_back(Replay)
    marks.release()
    stage.until(lambda: all(seat.ready for seat in stage.job.seats.values()), "all stand at the boundary")
    stage.take(TaintCleared(node=NODE, slot=outgoing.slot, key="ecc", source="a test"))
    stage.until(lambda: stage.job.phase is JobPhase.RUNNING, "all go on")
    assert stage.actor(1) is outgoing
    end(stage, calm)
    assert resolutions(stage) == [Resolution.CALLED_OFF]


def test_a_target_that_is_lost_after_the_cutover_gives_the_rank_back(staged: Staged, calm: Bits) -> None:
    stage, marks = staged
    outgoing = come_to_the_boundary(stage, marks)
    stage.hold = holds_back(Restore)
    marks.release()
    stage.until(lambda: stage.job.phase is JobPhase.RECONFIGURING, "cut over")
    target = stage.actor(1)
    assert target is not outgoing
    stage.until(lambda: stage.of(WorkerReconfigured)[-1].worker == target.worker, "the target has connected")
    stage.kill(1)
    stage.until(lambda: stage.actor(1) is outgoing, "the outgoing worker has the rank again")
    stage.hold = lambda _: False
    stage.until(lambda: stage.job.phase is JobPhase.RUNNING, "all go on")
    assert stage.of(StateRestored) == [], "it has the state still"
    end(stage, calm)


def test_a_outgoing_that_dies_on_the_way_to_the_boundary_is_replaced(staged: Staged, calm: Bits) -> None:
    stage, marks = staged
    outgoing = come_to_the_boundary(stage, marks)
    stage.send(outgoing, signal.SIGKILL)
    stage.until(lambda: outgoing.ended, "its end")
    marks.release()
    stage.until(lambda: stage.job.phase is JobPhase.RUNNING and stage.actor(1) is not outgoing, "replaced")
    assert stage.end() == 0, stage.all_logs()
    assert bits(stage) == calm
    assert resolutions(stage) == [Resolution.CLEAN]
