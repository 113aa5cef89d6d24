"""The bench `compare` at work: it finds and ends a system's processes, reads what ranks write, and makes faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "bench"))  # its files import one another by their names

import compare
from compare_environments import NotInstalled, run
from compare_figures import Line, Struck
from compare_processes import all_of, cpu_s, is_alive, is_stopped, kill_all
from compare_schedule import Fault, What
from compare_systems import Hung, Job, System, entries, free_ports, is_free
from compare_trial import Tail, Trial
from tests.jobs import wait_until

SLEEP = "import sys, time; print('up', flush=True); time.sleep(60)"
ORDER = {"steps": 60, "early": 5}


def sleeper(**environment: str) -> subprocess.Popen[bytes]:
    """A process that has begun, and does nothing."""
    words = [sys.executable, "-c", SLEEP]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, **environment}, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    child.stdout.close()
    return child


def test_processes_are_found_by_their_mark_and_ended_though_they_are_stopped(tmp_path: Path) -> None:
    mark = {"TEST_COMPARE": str(tmp_path)}
    known, stray, other = sleeper(**mark), sleeper(**mark), sleeper(TEST_COMPARE="another")
    try:
        assert set(all_of("TEST_COMPARE", str(tmp_path))) == {known.pid, stray.pid}
        stray.send_signal(signal.SIGSTOP)
        wait_until("stray stands", lambda: is_stopped(stray.pid), deadline_s=10)
        kill_all([known], lambda: all_of("TEST_COMPARE", str(tmp_path)))
        assert all_of("TEST_COMPARE", str(tmp_path)) == []
        assert known.returncode == -signal.SIGTERM
        assert stray.wait(10) == -signal.SIGKILL
        assert is_alive(other.pid)
        assert cpu_s(os.getpid()) > 0.0
        assert cpu_s(known.pid) == 0.0
    finally:
        for child in (known, stray, other):
            child.kill()
            child.wait()


def test_only_who_has_been_stopped_for_long_is_taken_for_hung() -> None:
    child, hung, patient = sleeper(), Hung(0.0), Hung(3600.0)
    try:
        assert not hung.is_due(child.pid)
        child.send_signal(signal.SIGSTOP)
        wait_until("it stands", lambda: is_stopped(child.pid), deadline_s=10)
        assert hung.is_due(child.pid)
        assert not patient.is_due(child.pid)
    finally:
        child.kill()
        child.wait()


def test_a_torn_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    tail = Tail(path)
    assert tail.read(Line) == []
    path.write_text("[1, 10, 20, 0, 4, 77, 1]\n[2, 30,")
    assert tail.read(Line) == [Line(1, 10, 20, 0, 4, 77, 1)]
    with path.open("a") as file:
        file.write(" 40, 4, 4, 77, 1]\n")
    assert tail.read(Line) == [Line(2, 30, 40, 4, 4, 77, 1)]
    assert tail.read(Line) == []


def test_a_rival_that_cannot_be_installed_says_why() -> None:
    with pytest.raises(NotInstalled, match=r"nvrx: -c .*: no wheel for this machine"):
        run([sys.executable, "-c", "raise SystemExit('no wheel for this machine')"], "nvrx")
    with pytest.raises(NotInstalled, match="No such file"):
        run(["/nowhere/python", "-m", "venv", "x"], "torchft")


def test_free_ports_are_in_a_row() -> None:
    first = free_ports(5)
    assert all(is_free(first + at) for at in range(5))


class Puppet(System):
    """A system whose ranks are moved by hand: each look at it is a step of all, in processes of the wished numbers."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, Path(sys.executable))
        self.step, self.away, self.hits = 0, set[int](), list[tuple[int, What]]()
        (self.folder / "log").mkdir()

    def start(self) -> None: ...

    def ended(self) -> int | None:
        if self.step == self.job.order["steps"]:
            return 0
        self.step += 1
        for rank in {0, 1, 2, 3} - self.away:
            line = [self.step, self.step * 10**6, 0, (self.step - 1) * 4 + rank, 4 - len(self.away), 100 + rank, 1]
            with (self.folder / "log" / f"rank-{rank}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        return None

    def pid_of(self, rank: int) -> int | None:
        return None if rank in self.away else 100 + rank

    def hit(self, what: What, pid: int) -> None:
        self.hits.append((pid, what))


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


@pytest.mark.slow
def test_faults_come_at_their_steps_and_wait_for_their_victim_at_the_same_distance(tmp_path: Path) -> None:
    faults = (Fault(10, What.KILL, 1), Fault(20, What.STOP, 2), Fault(30, What.LEAVE, 3), Fault(55, What.KILL, 1))
    found, missed = struck(tmp_path, faults, {18: {2}, 26: set()})
    assert [(one.what, one.step) for one in found] == [(What.KILL, 10), (What.STOP, 27), (What.LEAVE, 37)]
    assert missed == 1  # its distance would have led beyond the end


def test_who_is_asked_for_nothing_sensible_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    old = sys.argv
    sys.argv = ["compare.py", "--steps", "50"]
    try:
        with pytest.raises(SystemExit) as refused:
            compare.arguments()
    finally:
        sys.argv = old
    assert refused.value.code == 2
    assert "50 steps are too few for 6.6 faults: at least 265" in capsys.readouterr().err


def test_all_systems_have_names_of_their_own_and_say_who_ends_a_hang() -> None:
    found = entries()
    assert len({entry.name for entry in found}) == len(found)
    assert all(entry.hang for entry in found[1:])
    assert {entry.needs for entry in found} == {"", "torchft", "nvrx"}
