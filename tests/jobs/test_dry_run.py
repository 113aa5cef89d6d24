"""The target of a move rehearses a step while the others train, and leaves no trace of it."""

from __future__ import annotations

import multiprocessing.connection
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.run import WORLD, digests, script, undisturbed
from tests.support.stage import JOB, NODE
from tests.support.targets import TargetStage
from torchrelay.protocol.messages.events import WorkerReported
from torchrelay.protocol.messages.ids import Generation, Rank
from torchrelay.protocol.messages.orders import Interrupt, Source
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import JobPhase
from torchrelay.worker.hardware.niceness import LOWEST, STEPS, may_return
from torchrelay.worker.transfer.request import STALL_S

pytestmark = pytest.mark.timeout(120)

Make = Callable[..., TargetStage]
FEATURES = {
    "plain": "rehearsed a step in",
    "scaler": "no rehearsal: .*the step asks for run.global_step",
    "two_optimizers": "rehearsed 2 steps in",
    "accumulate": "rehearsed a step in",
    "stream": "rehearsed a step in",
    "saved": "rehearsed a step in",
    "sections": "rehearsed a step in",
}


def soaked(names: Iterable[str], *some: str) -> list[object]:
    """These names, some of them for `make soak`: others go the same way."""
    return [pytest.param(name, marks=pytest.mark.soak) if name in some else name for name in names]


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[Make]:
    """Make stages whose replacements are prepared as targets are."""
    stages: list[TargetStage] = []

    def make(*argv: str, world: int = WORLD, spares: int = 1, **options: object) -> TargetStage:
        stage = TargetStage(tmp_path / f"stage-{len(stages)}", argv, world=world, spares=spares, **options)  # type: ignore[arg-type]
        stages.append(stage)
        return stage

    yield make
    for stage in stages:
        stage.close()


@pytest.mark.parametrize("feature", soaked(FEATURES, "two_optimizers", "accumulate", "sections"))
def test_a_rehearsal_leaves_no_trace_in_the_bits(feature: str, targets: Make, tmp_path: Path) -> None:
    calm = undisturbed(feature)
    stage = targets(script("features"), feature, "--die", "1:4:between", "--marks", str(tmp_path))
    assert stage.end() == 0, stage.all_logs()
    (note,) = stage.notes().values()
    assert re.match(FEATURES[feature], note), note
    assert [incident.resolution for incident in stage.job.accounting.incidents] == [Resolution.CLEAN]
    assert digests(stage) == calm


WAYS = {
    "dict": "rehearsed a step in",
    "named": "rehearsed a step in",
    "own": r"no rehearsal: .*train_step: argument 0 is a __main__\.Own",
    "raises": r"no rehearsal: .*train_step: it raised ValueError: a batch of zeros",
    "exits": r"no rehearsal: .*train_step: it raised SystemExit: 3",
    "late": "no rehearsal: no step function is defined before",
    "skips": "rehearsed a step in",
    "once": "rehearsed a step in",
    "asks": "rehearsed a step in",
    "static": "rehearsed a step in",
    "unused": "rehearsed a step in",
    "hook": "no rehearsal: .*train_step: it raised ",
    "counts": r"no rehearsal: .*train_step: the step is called with plain values \(argument 0\['n'\]\[0\]\)",
    "wanted": "rehearsed a step in",
    "unwanted": r"no rehearsal: Options\(rehearse=False\)",
    "place": "no rehearsal: .*train_step: the step asks for run.global_step",
}
UNTRIED = ("own", "late", "counts", "unwanted")


@pytest.mark.parametrize("way", soaked(WAYS, "named", "exits", "static", "unused", "wanted", "late"))
def test_what_was_rehearsed_or_why_not_is_told(way: str, targets: Make, tmp_path: Path) -> None:
    stage = targets(script("targets"), way, "--marks", str(tmp_path))
    stage.until(lambda: stage.step() >= 3, "training")
    stage.kill(1)
    stage.until(lambda: stage.notes(), "prepared")
    assert stage.job.phase is not JobPhase.RUNNING
    target = stage.actor(1)
    stage.until(lambda: stage.job.phase is JobPhase.RUNNING, "recovered")
    (tmp_path / "enough").touch()
    assert stage.end() == 0, stage.all_logs()
    (note,) = stage.notes().values()
    assert re.match(WAYS[way], note), note
    assert "between join and loops" in stage.log_of(target), "until it takes over its output is its own"
    assert ("trying" in stage.log_of(target)) == (way not in UNTRIED)
    assert "trying" not in stage.log("rank-1")
    assert stage.log("rank-1").count("between join and loops") == 1
    assert stage.log("rank-1").rstrip().endswith("end")
    if way == "place":
        assert (tmp_path / "at 0").read_text().split().count("1") == 1, "not by a target that has no place yet"
    for rank in (0, 1):
        assert all(len(found) == 1 for found in stage.points(rank).values())
    assert sorted((tmp_path / "once").read_text().split()) == ["0", "1"], "what is done once is done once"


def test_a_target_without_an_example_waits_all_the_same(targets: Make, tmp_path: Path) -> None:
    stage = targets(script("targets"), "dict", "--marks", str(tmp_path))
    stage.until(lambda: stage.step() >= 3, "training")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen; as long as it is open the port is nobody else's
        stage.shown_by = (Source(Rank(0), f"127.0.0.1:{nobody.getsockname()[1]}"),)
        stage.kill(1)
        stage.until(lambda: stage.notes(), "prepared")
    (tmp_path / "enough").touch()
    assert stage.end() == 0, stage.all_logs()
    (note,) = stage.notes().values()
    assert re.match("no rehearsal: rank 0 did not deliver: .* cannot be reached", note)


def test_a_target_that_is_called_for_stops_preparing(targets: Make, tmp_path: Path) -> None:
    """It waits for an example from somebody who says nothing; then the rank is its own."""
    stage = targets(script("targets"), "dict", "--marks", str(tmp_path), spares=1)
    stage.until(lambda: stage.step() >= 3, "training")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        stage.shown_by = (Source(Rank(0), f"127.0.0.1:{silent.getsockname()[1]}"),)
        stage.kill(1)
        stage.until(lambda: multiprocessing.connection.wait([silent], 0), "it asks")
        target = stage.actor(1)
        generation = stage.job.generation
        interrupt = Interrupt(
            node=NODE, worker=target.worker, job=JOB, generation=Generation(generation + 1), rank=Rank(1), reason="test"
        )
        stage.tell(target, interrupt)
        begin = time.monotonic()
        stage.until(lambda: stage.notes(), "prepared")
        assert time.monotonic() - begin < STALL_S - 1  # who says nothing is given up after that
    (note,) = stage.notes().values()
    assert note == "no rehearsal: rank 0 did not deliver: the transfer was cancelled"
    reported = [event for event in stage.of(WorkerReported) if event.worker == target.worker]
    assert [(event.committed, event.caught_up) for event in reported] == [(None, None)]


def test_a_spare_lets_ranks_go_first_until_it_is_one(targets: Make, tmp_path: Path) -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    if not may_return(here):
        pytest.skip("an ordinary user may not raise a priority again")
    stage = targets(script("targets"), "dict", "--marks", str(tmp_path))
    stage.until(lambda: stage.step() >= 3, "training")
    ranks = [stage.actor(rank) for rank in range(WORLD)]
    (spare,) = (actor for actor in stage.actors.values() if actor not in ranks)
    assert [os.getpriority(os.PRIO_PROCESS, actor.pid) for actor in ranks] == [here] * WORLD
    lower = min(here + STEPS, LOWEST)
    stage.until(lambda: os.getpriority(os.PRIO_PROCESS, spare.pid) == lower, "the spare has given way")
    stage.kept_waiting = True
    stage.kill(1)
    stage.until(lambda: stage.notes(), "prepared")
    assert os.getpriority(os.PRIO_PROCESS, spare.pid) == min(here + STEPS, LOWEST), "a target is no rank yet"
    stage.kept_waiting = False
    (tmp_path / "enough").touch()
    stage.until(lambda: stage.job.phase is JobPhase.RUNNING, "recovered")
    assert os.getpriority(os.PRIO_PROCESS, spare.pid) == here
    assert stage.end() == 0, stage.all_logs()
