"""The simulator: schedules without a violation, faults everywhere, the same story each time, and checkers that bite."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.simulation import fingerprint
from torchrelay.protocol.health.wait_for_graph import WaitForGraph
from torchrelay.protocol.messages import events
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Point, WorkerPhase
from torchrelay.protocol.model import table
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.placement import boundary, policy
from torchrelay.protocol.recovery import recovery
from torchrelay.protocol.rules import speech
from torchrelay.simulation import __main__ as command
from torchrelay.simulation.__main__ import ENOUGH, missing
from torchrelay.simulation.machine.shell import Shell
from torchrelay.simulation.model.plans import FaultKind, Lack, On, Plan, Strike, draw
from torchrelay.simulation.model.script import RankState
from torchrelay.simulation.worker.processes import Process
from torchrelay.simulation.worker.training import Training
from torchrelay.simulation.worker.wiring import Wiring
from torchrelay.simulation.world import Result, run_plan, run_seed

STORIES = "import sys; from tests.support.simulation import fingerprint; sys.stdout.write(fingerprint(range(25)))"


def run_seeds(seeds: range) -> Counter[str]:
    """Run them all; raises at the first violation."""
    reached: Counter[str] = Counter()
    for seed in seeds:
        result = run_seed(seed)
        assert not result.violation, f"{result.violation}: python -m torchrelay.simulation --seed {seed} --story"
        reached.update(result.coverage)
    return reached


def test_some_schedules_hold_every_invariant() -> None:
    run_seeds(range(100))


def test_many_schedules_hold_every_invariant_and_reach_everything() -> None:
    assert missing(run_seeds(range(ENOUGH)), ENOUGH) == []


def test_a_seed_tells_the_same_story_each_time() -> None:
    assert fingerprint(range(5)) == fingerprint(range(5))
    assert fingerprint(range(5)) != fingerprint(range(1, 6))


def test_stories_do_not_depend_on_how_python_hashes() -> None:
    found = set()
    for seed in ("0", "1", "31337"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            (sys.executable, "-c", STORIES), env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        found.add(done.stdout)
    assert len(found) == 1


def test_stories_do_not_depend_on_how_tables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tables of large jobs are: in blocks, with what is asked of all values counted from version to version."""
    as_dicts = fingerprint(range(30))
    for name, value in (("SMALL", 1), ("BLOCK", 2), ("FEW", 1)):
        monkeypatch.setattr(table, name, value)
    assert fingerprint(range(30)) == as_dicts


def test_plans_differ_in_what_they_know() -> None:
    plans = [draw(seed) for seed in range(2_000)]
    assert {strike.kind for plan in plans for strike in plan.strikes} == set(FaultKind) - {FaultKind.RACK}
    assert {lack for plan in plans for lack in plan.lacks} == set(Lack)
    assert any(not plan.strikes for plan in plans)


def hangs_in_a_mesh(seeds: range) -> Iterator[Plan]:
    """Worlds of three or four ranks that communicate in pairs and among replicas, in which one rank hangs."""
    for plan in filter(lambda plan: plan.script.ranks > 2 and plan.spec.spares, map(draw, seeds)):
        ranks = plan.script.ranks
        script = replace(plan.script, shards=tuple(f"shard-{rank % 2}" for rank in range(ranks)))
        hang = Strike(FaultKind.HANG, On.JOB, JobPhase.RUNNING, delay_ms=300, rank=plan.seed % ranks)
        yield replace(plan, script=script, strikes=(hang,))


def test_who_hangs_in_a_mesh_is_found_and_nobody_who_waits_for_it() -> None:
    results = [run_plan(plan) for plan in hangs_in_a_mesh(range(60))]
    assert [result.violation for result in results if result.violation] == []
    assert sum(result.coverage["event: WorkerHung"] for result in results) > 30


@pytest.mark.parametrize("broken", ["who waits is judged, too", "what is not known is not waited for"])
def test_the_world_knows_who_only_waits(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "who waits is judged, too":
        monkeypatch.setattr(WaitForGraph, "waits", lambda *_: False)
    else:
        monkeypatch.setattr(WaitForGraph, "in_the_way", WaitForGraph.wait_for)
    results = [run_plan(plan) for plan in hangs_in_a_mesh(range(60))]
    assert any("sound" in result.violation for result in results)


# ---------------------------------------------------------------- the checkers bite


def first_violation(limit: int = 600) -> str:
    """The first violation that some seed shows."""
    return next((result.violation for seed in range(limit) if (result := run_seed(seed)).violation), "")


def passing_the_gate_after_the_report(patch: pytest.MonkeyPatch) -> None:
    real = Training.verdict

    def verdict(self: Training) -> Any:
        if self.interrupted and self.process.phase is WorkerPhase.GATE:
            return True
        return (yield from real(self))

    patch.setattr(Training, "verdict", verdict)


def keeping_the_random_state_of_an_attempt(patch: pytest.MonkeyPatch) -> None:
    def call(self: Training) -> Any:
        while True:
            while self.interrupted or self.bound == self.committed != None:  # noqa: E711
                yield from self.stand()
            before = self.state
            if (yield from self.attempt()):
                return
            self.state = RankState(before.model, hash((before.random, 3)))

    patch.setattr(Training, "call", call)


def a_page_that_keeps_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Process, "keep", lambda *_: None)


def going_back_behind_what_was_committed(patch: pytest.MonkeyPatch) -> None:
    def choose(seats: Any, decided: Point | None = None) -> tuple[Point | None, str]:
        del decided
        held = [seat.report.committed for seat in seats.values() if seat.report is not None]
        return min((point for point in held if point is not None), default=None), "the oldest"

    patch.setattr(recovery, "choose_resume_point", choose)


def sources_that_hold_another_shard(patch: pytest.MonkeyPatch) -> None:
    def choose(seats: Any, rank: Any, point: Any, **_: Any) -> Any:
        return (other for other, seat in seats.items() if other != rank and seat.holds == point)

    for module in (policy, recovery):
        patch.setattr(module, "choose_sources", choose)


def orders_to_resume_that_are_not_given(patch: pytest.MonkeyPatch) -> None:
    said: dict[Any, Any] = speech.SAID
    patch.setitem(said, od.Resume, lambda _: None)


def a_cutover_before_all_stand(patch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for but the outgoing workers, not even their targets."""

    def finish_halt(cluster: Any, job: Any) -> Any:
        told = all(boundary.told_where(job, rank) for rank in job.open_move.targets)
        return boundary.cut_over(cluster, job, job.open_move) if told else cluster

    patch.setattr(recovery, "finish_halt", finish_halt)


def outgoing_workers_that_are_not_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "release_outgoing_workers", lambda cluster, job: cluster.with_job(job))


def buddies_that_are_not_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(speech, "recall_orders", lambda *_: iter(()))


def collectives_of_different_calls(patch: pytest.MonkeyPatch) -> None:
    real = Wiring.enter

    def enter(self: Wiring, process: Process, rank: Any, kind: Any, value: int, members: Any) -> None:
        real(self, process, rank, (kind[0], kind[1], rank), value, members)  # type: ignore[arg-type]  # on purpose

    patch.setattr(Wiring, "enter", enter)


def an_orchestrator_that_hides_its_absences(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shell, "_own_up", lambda _: None)


def events_that_do_not_say_how_old_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(events, "age_event", lambda event, _: event)


def requests_that_any_fault_fulfils(patch: pytest.MonkeyPatch) -> None:
    """Whoever has the rank by now, and wherever."""

    def weigh(cluster: Any, job: Any) -> Any:
        del cluster
        mine = {rank: one for rank, one in job.moving.requests.items() if job.seats[rank].worker == one.worker}
        return job.with_moving(requests=Table(mine))

    patch.setattr(recovery, "weigh_requests", weigh)


def requests_that_stay_with_who_held_the_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "weigh_requests", lambda _, job: job)


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (an_orchestrator_that_hides_its_absences, "the ledger says"),
        (events_that_do_not_say_how_old_they_are, "the ledger says"),
        (passing_the_gate_after_the_report, "after its report"),
        (keeping_the_random_state_of_an_attempt, "another state than the undisturbed run"),
        (a_page_that_keeps_nothing, "the world knows no cause"),
        (going_back_behind_what_was_committed, ""),
        (sources_that_hold_another_shard, "another shard"),
        (orders_to_resume_that_are_not_given, ""),
        (a_cutover_before_all_stand, "another state than the undisturbed run"),
        (outgoing_workers_that_are_not_released, ""),
        (buddies_that_are_not_asked, ""),
        (collectives_of_different_calls, "while others are in"),
        (requests_that_any_fault_fulfils, "is forgotten"),
        (requests_that_stay_with_who_held_the_rank, "does not hold it"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_world_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    violation = first_violation()
    assert violation
    assert told in violation


# ---------------------------------------------------------------- the command


def command_line(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["simulation", *words])
    return command.main()


def test_one_seed_tells_its_story(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(monkeypatch, "--seed", "7", "--story") == 0
    told = capsys.readouterr().out
    assert "heard JobSubmitted" in told
    assert "no violation" in told
    assert "replay: python -m torchrelay.simulation --seed 7 --story" in told


def test_a_violation_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(seed: int, *, story: bool = False) -> Result:
        return Result(seed, violation="two owners", story=["a line"] if story else [])

    monkeypatch.setattr(command, "run_seed", fail)
    assert command_line(monkeypatch, "--seed", "9") == 1
    assert "VIOLATION: two owners" in capsys.readouterr().out


def test_nothing_to_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        command_line(monkeypatch, "--seeds", "0")
