"""The bench `compare` at work: it finds and ends a system's processes, reads what ranks write, and makes faults."""

from __future__ import annotations

from pathlib import Path

from compare_figures import Struck
from compare_schedule import Fault, What
from compare_systems import Job
from compare_trial import Trial
from tests.support.bench_trials import ORDER, Puppet


def struck(tmp_path: Path, faults: tuple[Fault, ...], away: dict[int, set[int]]) -> tuple[list[Struck], int]:
    """The faults that were made, and how many were not; `away`: who is not there from this step on."""
    puppet = Puppet(Job(folder=tmp_path / "puppet", order=ORDER, losses=0))
    usual = puppet.ended

    def ended() -> int | None:
        puppet.away = away.get(puppet.step, puppet.away)
        return usual()

    puppet.ended = ended  # type: ignore[method-assign]
    seen = Trial(puppet, faults, 60, lambda _: None).run()
    assert seen.reason == ""
    assert puppet.hits == [(100 + one.ranks[0], one.what) for one in seen.struck]
    assert len(seen.lines[0]) == 60
    return seen.struck, seen.missed


def test_faults_come_at_their_steps_and_wait_for_their_victim_at_the_same_distance(tmp_path: Path) -> None:
    faults = (Fault(10, What.KILL, 1), Fault(20, What.STOP, 2), Fault(30, What.LEAVE, 3), Fault(55, What.KILL, 1))
    found, missed = struck(tmp_path, faults, {18: {2}, 26: set()})
    assert [(one.what, one.step) for one in found] == [(What.KILL, 10), (What.STOP, 27), (What.LEAVE, 37)]
    assert missed == 1  # its distance would have led beyond the end
