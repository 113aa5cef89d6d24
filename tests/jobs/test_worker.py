"""Workers whose scripts, agents or fellows misbehave: refused with a remedy, ended with a reason, never hung."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, run_job
from tests.support.stage import Stage
from torchrelay.protocol.messages.events import (
    CollectiveFailed,
    WorkerFinished,
    WorkerRaised,
    WorkerReported,
    WorkerStarted,
    WorkerWarm,
)
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import JobPhase

pytestmark = pytest.mark.timeout(120)

Make = Callable[..., Stage]


@pytest.fixture
def manners(tmp_path: Path) -> Iterator[Make]:
    """Make a stage for one way of tests/scripts/manners.py."""
    stages: list[Stage] = []

    def make(way: str, *, world: int = 2, spares: int = 1, **options: object) -> Stage:
        argv = [str(SCRIPTS / "manners.py"), way, "--marks", str(tmp_path)]
        stage = Stage(tmp_path / f"stage-{len(stages)}", argv, world=world, spares=spares, **options)  # type: ignore[arg-type]
        stages.append(stage)
        return stage

    yield make
    for stage in stages:
        stage.close()


def reason(stage: Stage) -> str:
    assert stage.job.outcome is not None
    return stage.job.outcome.reason


# ---------------------------------------------------------------- what is refused

REFUSALS = {
    "before init": "init_process_group",
    "wrong size": "this worker is rank",
    "no state": "pass model= and optimizer=",
    "twice": "call it once",
    "nested": "a section inside a section",
    "update outside": "outside of any step",
    "update in a section": "in a section",
    "unknown optimizer": "not given to protect",
    "endless": "nothing tells where it is",
    "result": "the result of a section is a builtins.object",
    "large result": "return a summary",
    "once": r"the result of once\('x'\)",
    "collective after the update": "communicates after its first",
    "collective of a group after the update": "communicates after its first",
    "random numbers after the update": "draws random numbers after its first",
}


def test_what_cannot_be_protected_is_refused_with_a_remedy(manners: Make) -> None:
    stage = manners("refusals", spares=0)
    assert stage.end() == 0, stage.all_logs()
    told = dict(line.split(": ", 1) for line in stage.log("rank-0").splitlines() if ": " in line)
    for what, words in REFUSALS.items():
        assert re.search(words, told.get(what, ""), re.IGNORECASE), (what, told.get(what))
        assert re.search(r"\. [A-Z]", told[what]), f"no remedy: {told[what]}"


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("carried", "zero_grad"),
        ("late_refusal", "cannot be entered in the middle"),
        ("differs", r"rank 1 has built something else than rank 0: .*\[4, 5\].*instead of.*\[4, 4\]"),
        ("values_differ", r"rank 1.* other values"),
        ("drifts", r"rank 1 holds, after 4 steps, other values than rank 0: .*adapter.*weight: .* instead of .*shard="),
    ],
)
def test_a_refusal_that_leaves_the_script_ends_the_job(manners: Make, way: str, words: str) -> None:
    stage = manners(way)
    assert stage.end() == 93, stage.all_logs()
    assert re.search(words, reason(stage))


# ---------------------------------------------------------------- errors of the script


def test_a_script_that_swallows_everything_is_redone_all_the_same(manners: Make) -> None:
    stage = manners("swallow")
    assert stage.end() == 0, stage.all_logs()
    assert "swallowed" in stage.log("rank-0")
    assert [incident.resolution for incident in stage.job.accounting.incidents] == [Resolution.CLEAN]
    for rank in (0, 1):
        assert all(len(found) == 1 for found in stage.points(rank).values())


def test_the_scripts_own_error_has_one_signature_on_all_ranks(manners: Make) -> None:
    stage = manners("own_error")
    assert stage.end() == 1
    assert "the script's own error" in reason(stage)
    raised = stage.of(WorkerRaised)
    assert {(event.point, event.signature) for event in raised} == {(raised[0].point, raised[0].signature)}
    assert "ValueError: bad batch on rank # at #.# at manners.py:" in raised[0].signature
    assert 'raise ValueError(f"bad batch' in stage.log("rank-0"), "the traceback is told"
    assert "torchrelay/worker/source/script.py" not in stage.log("rank-0"), "from the script's first line on"


def test_an_error_that_all_ranks_catch_is_nobodys_affair(manners: Make) -> None:
    stage = manners("caught_error", spares=0)
    assert stage.end() == 0, stage.all_logs()
    assert "skipped\ncommitted 6" in stage.log("rank-0")
    assert stage.job.accounting.incidents == ()


def test_a_step_that_was_left_in_the_middle_of_its_update_is_not_gone_on_from(manners: Make) -> None:
    stage = manners("caught_after_update", spares=0)
    assert stage.end() == 1, stage.all_logs()
    assert "caught" in stage.log("rank-0")
    assert "raised ValueError after its optimizer.step(), and the script went on" in reason(stage)


def test_a_collective_that_fails_before_join_without_a_loss_ends_the_job(manners: Make) -> None:
    stage = manners("cut_before_join", spares=0, collective_grace_ms=100)
    assert stage.end() != 0
    assert {event.rank for event in stage.of(CollectiveFailed)} == {0, 1}
    assert "starts ended before anything was committed" in reason(stage)


def test_a_script_that_takes_another_way_on_a_replacement_is_found_out(tmp_path: Path) -> None:
    script = [str(SCRIPTS / "manners.py"), "strays", "--marks", str(tmp_path)]
    job = run_job(tmp_path / "run", script, ["--nproc-per-node", "2", "--spares", "1"], timeout_s=90)
    assert job.code == 91
    assert "the script has taken different ways. Let control flow depend on run.global_step" in job.output


def test_exit_codes_of_the_script_are_its_own(manners: Make) -> None:
    stage = manners("exits")
    assert stage.end() == 7, reason(stage)


@pytest.mark.parametrize("way", ["undeclared", "undeclared_tail"])
def test_a_fault_in_an_undeclared_collective_falls_back_and_names_the_line(manners: Make, way: str) -> None:
    stage = manners(way)
    assert stage.end() == 91, stage.all_logs()
    assert "manners.py:" in reason(stage)
    assert "run.atomic" in reason(stage)
    assert "Traceback" in stage.log("rank-0") + stage.log("rank-1")


# ---------------------------------------------------------------- the end of the script


def test_a_rank_that_dies_when_the_others_have_finished_is_replaced(manners: Make, tmp_path: Path) -> None:
    stage = manners("last_words")
    stage.until(lambda: any(event.rank == 0 for event in stage.of(WorkerFinished)), "rank 0 has finished")
    (tmp_path / "rank-0-finished").touch()
    assert stage.end() == 0, stage.all_logs()
    # All had committed their last point before the fault: nothing that came after could prove it.
    assert [incident.resolution for incident in stage.job.accounting.incidents] == [Resolution.RESUMED]
    lines = [stage.log(f"rank-{rank}").strip().splitlines()[-1] for rank in (0, 1)]
    assert lines == [lines[0]] * 2
    assert "committed 4" in lines[0]


def test_a_rank_that_dies_after_its_own_end_is_replaced(manners: Make) -> None:
    stage = manners("killed_when_finished")
    stage.hold = lambda order: type(order).__name__ == "Leave"
    stage.until(lambda: len({event.worker for event in stage.of(WorkerFinished)}) == 2, "both have finished")
    stage.kill(1)
    # All had finished, and may leave: whoever dies now is not missed.
    stage.hold = lambda _: False
    assert stage.end() == 0, stage.all_logs()


def test_a_script_that_never_joins_runs_and_is_told(manners: Make) -> None:
    stage = manners("joinless", spares=0)
    assert stage.end() == 0, stage.all_logs()
    assert "done" in stage.log("rank-0")
    assert "never called protect()" in stage.log("rank-0")


def test_a_script_sees_itself_as_python_would_show_it(manners: Make) -> None:
    stage = manners("own_files", spares=0)
    assert stage.end() == 0, stage.all_logs()
    log = stage.log("rank-0")
    assert f"name __main__ file {SCRIPTS}/manners.py argv ['own_files', '--marks'" in log
    assert f"path {SCRIPTS}" in log
    assert "main True" in log
    assert "items [[0, 1, 2], [3, 4, 5], [6, 7]]" in log


# ---------------------------------------------------------------- the agent


def finish(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "enough").touch()
    assert stage.end() == 0, stage.all_logs()


def test_a_worker_trains_on_without_its_agent_and_greets_the_next(manners: Make, tmp_path: Path) -> None:
    stage = manners("paced", spares=0)
    stage.until(lambda: stage.step() >= 2, "training")
    before = len(stage.of(WorkerStarted))
    for actor in stage.actors.values():
        assert actor.link is not None
        actor.link.close()
        actor.link = None
    stage.until(lambda: len(stage.of(WorkerStarted)) == before + 2, "both call again")
    assert stage.job.phase is JobPhase.RUNNING
    stage.until(lambda: stage.step() >= stage.step() + 0, "training goes on")
    finish(stage, tmp_path)


def test_a_worker_that_nobody_orders_any_more_ends_with_92(manners: Make) -> None:
    stage = manners("paced", spares=1, patience_s=2.0)
    stage.until(lambda: stage.step() >= 2, "training")
    survivor = stage.actor(0)
    stage.hold = lambda order: type(order).__name__ not in ("Interrupt", "Fence")
    stage.kill(1)
    stage.until(lambda: stage.of(WorkerReported), "the survivor has reported")
    # The stage says nothing more at all, as if agent and orchestrator were away.
    stage.hold, stage.attending = (lambda _: True), False
    survivor.process.join(60)
    assert survivor.process.exitcode == 92
    assert "no sign of the orchestrator for 2 s: this worker ends" in stage.log("rank-0")


def test_a_spare_that_hears_nothing_of_an_orchestrator_ends_with_92(manners: Make) -> None:
    stage = manners("paced", spares=1, patience_s=2.0)
    stage.until(lambda: stage.step() >= 2, "training")
    holders = {seat.worker for seat in stage.job.seats.values()}
    (spare,) = (actor for actor in stage.actors.values() if actor.worker not in holders)
    stage.until(lambda: spare.worker in {told.worker for told in stage.of(WorkerWarm)}, "the spare is warm")
    stage.attending = False
    spare.process.join(60)
    assert spare.process.exitcode == 92


def test_a_survivor_waits_longer_than_its_patience_while_the_orchestrator_is_there(
    manners: Make, tmp_path: Path
) -> None:
    stage = manners("paced", spares=1, patience_s=2.0)
    stage.repeat_s = 0.2
    stage.until(lambda: stage.step() >= 2, "training")
    stage.hold = lambda order: type(order).__name__ == "Reconfigure"  # as if there were no spare yet
    stage.kill(1)
    stage.until(lambda: stage.of(WorkerReported), "the survivor has reported")
    begin = time.monotonic()
    stage.until(lambda: time.monotonic() - begin > 5, "more than twice its patience has gone by")
    stage.hold = lambda _: False
    stage.until(lambda: stage.job.accounting.incidents and stage.job.phase is JobPhase.RUNNING, "recovered")
    finish(stage, tmp_path)


def test_orders_that_come_again_and_again_are_obeyed_once(manners: Make, tmp_path: Path) -> None:
    stage = manners("paced")
    stage.repeat_s = 0.005  # without any pause a busy machine could not read as fast as they come
    stage.until(lambda: stage.step() >= 2, "training")
    stage.kill(1)
    stage.until(lambda: stage.job.accounting.incidents and stage.job.phase is JobPhase.RUNNING, "recovered")
    assert stage.job.generation == 2
    finish(stage, tmp_path)
    for rank in (0, 1):
        assert all(len(found) == 1 for found in stage.points(rank).values())


def test_a_stopped_worker_that_wakes_up_after_it_was_replaced_does_no_harm(manners: Make, tmp_path: Path) -> None:
    stage = manners("paced")
    stage.until(lambda: stage.step() >= 2, "training")
    stopped = stage.actor(1)
    stage.kill(1, signal.SIGSTOP)
    stage.unfenced.add(stopped.worker)
    stage.lose(1, "hangs")
    stage.until(lambda: stage.of(WorkerReported), "the survivor has reported")
    asleep = stage.page(stopped).beat_ns
    stage.send(stopped, signal.SIGCONT)  # it comes back in the middle of the recovery
    stage.until(lambda: stage.page(stopped).beat_ns > asleep, "it is awake")
    stage.unfenced.clear()
    stage.until(lambda: stage.job.phase is JobPhase.RUNNING, "recovered")
    finish(stage, tmp_path)
    for rank in (0, 1):
        assert all(len(found) == 1 for found in stage.points(rank).values())
