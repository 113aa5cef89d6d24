"""Real workers, real scripts: a rank is killed, and what follows is what would have followed, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor

from tests.support.run import WORLD, digests, script, undisturbed
from tests.support.stage import Stage
from torchrelay.protocol.messages.events import Answer, Event, StateRestored, WorkerFinished
from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.messages.orders import Source
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import JobPhase
from torchrelay.worker.transfer.transfer import TransferFailed, fetch_state

pytestmark = pytest.mark.timeout(180)
FEATURES = {
    "plain": ("forward", "gate", "update", "between"),
    "scaler": ("forward", "update"),
    "two_optimizers": ("forward", "update", "between"),
    "accumulate": ("forward", "update"),
    "loader_workers": ("forward", "between"),
    "stream": ("forward", "update"),
    "saved": ("forward", "update"),
    "saved_by_path": ("between",),
    "sections": ("forward", "section", "between"),
    "tracker": ("forward",),
    "tracker_cut": ("tracker",),
}
# Others go the same way: these are for `make soak`.
SOAKED = {
    ("scaler", "update"), ("two_optimizers", "update"), ("two_optimizers", "between"), ("accumulate", "update"),
    ("stream", "update"), ("saved", "update"), ("loader_workers", "between"),
}  # fmt: skip
CASES = [
    pytest.param(*case, marks=[pytest.mark.soak] if case in SOAKED else [], id="-".join(case))
    for case in [(feature, phase) for feature, phases in FEATURES.items() for phase in phases]
]
# A step whose update is skipped, one in the middle of a loop, one after which sections follow.
STEPS = {"scaler": 3, "sections": 6}

Staged = Callable[..., Stage]


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Staged]:
    """Make stages that are cleaned up after the test."""
    stages: list[Stage] = []

    def make(name: str, *argv: str, world: int = WORLD, spares: int = 1, **options: object) -> Stage:
        stage = Stage(tmp_path / name, argv, world=world, spares=spares, **options)  # type: ignore[arg-type]
        stages.append(stage)
        return stage

    yield make
    for stage in stages:
        stage.close()


@pytest.mark.parametrize(("feature", "phase"), CASES)
def test_a_killed_rank_leaves_no_trace_in_the_bits(feature: str, phase: str, staged: Staged, tmp_path: Path) -> None:
    calm = undisturbed(feature)
    assert all(len(found) == 1 for found in calm.values())
    die = f"1:{STEPS.get(feature, 4)}:{phase}"
    stage = staged("run", script("features"), feature, "--die", die, "--marks", str(tmp_path))
    assert stage.end() == 0, stage.all_logs()
    assert (tmp_path / die.replace("1:", "died ", 1)).exists()
    assert [incident.resolution for incident in stage.job.accounting.incidents] == [Resolution.CLEAN]
    assert digests(stage) == calm


def test_a_redone_call_stands_once_in_the_record(staged: Staged, tmp_path: Path) -> None:
    # Rank 0 was in the gate when the first fault came; the record that it then leaves is another's way.
    die = "1:4:gate,0:5:between"
    stage = staged("run", script("features"), "plain", "--die", die, "--marks", str(tmp_path), spares=2)
    assert stage.end() == 0, stage.all_logs()
    assert [incident.resolution for incident in stage.job.accounting.incidents] == [Resolution.CLEAN] * 2
    assert digests(stage) == undisturbed("plain")


def test_answers_that_get_lost_are_given_again(staged: Staged, tmp_path: Path) -> None:
    lost: set[tuple[str, str]] = set()

    def deaf(event: Event) -> bool:
        """To the first answer of each kind of each worker, but for the last one, which no order asks for."""
        key = (type(event).__name__, str(getattr(event, "worker", "")))
        first = isinstance(event, Answer) and not isinstance(event, WorkerFinished) and key not in lost
        lost.add(key)
        return first

    stage = staged("run", script("features"), "plain", "--die", "1:4:forward", "--marks", str(tmp_path))
    stage.deaf, stage.repeat_s = deaf, 0.1
    assert stage.end() == 0, stage.all_logs()
    assert {kind for kind, _ in lost} >= {"WorkerReported", "WorkerReady", "WorkerReconfigured", "StateRestored"}
    assert digests(stage) == undisturbed("plain")


class Taker:
    """Would take a state."""

    def receive(self, data: bytes | bytearray | memoryview) -> list[Tensor]:
        raise AssertionError(f"{len(data)} bytes of a state came")

    def commit_received(self) -> None:
        raise AssertionError("a state came")


def test_a_worker_that_trains_serves_nothing(staged: Staged, tmp_path: Path) -> None:
    stage = staged("run", script("manners"), "paced", "--marks", str(tmp_path))
    stage.until(lambda: stage.step() >= 2, "training")
    stage.kill(1)
    stage.until(lambda: stage.of(StateRestored), "the replacement is restored")
    restored = stage.of(StateRestored)[0]
    stage.until(lambda: stage.job.phase is JobPhase.RUNNING, "recovered")
    source = Source(Rank(0), stage.cluster.workers[stage.actor(0).worker].address)
    with pytest.raises(TransferFailed):
        fetch_state([source], stage.secret, restored.generation, restored.point, Taker(), timeout_s=1.0)
    (tmp_path / "enough").touch()
    assert stage.end() == 0, stage.all_logs()
