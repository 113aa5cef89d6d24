"""The bench `compare` at work: it finds and ends a system's processes, reads what ranks write, and makes faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import compare
import compare_environments
import compare_trial
from compare_environments import NotInstalled, run
from compare_figures import Line, Plain, Seen
from compare_processes import all_of, cpu_s, is_alive, is_stopped, kill_all
from compare_results import Outcome
from compare_schedule import Fault, What
from compare_systems import Hung, Job, entries, free_ports, is_free
from compare_trial import Tail, Trial
from tests.support.bench_trials import ORDER, Puppet
from tests.support.jobs import wait_until

SLEEP = "import sys, time; print('up', flush=True); time.sleep(60)"


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


class Halted(Puppet):
    """It ends by itself at this step, with this code; or raises as it starts."""

    def __init__(self, job: Job, step: int, code: int) -> None:
        super().__init__(job)
        self.last, self.code, self.stopped = step, code, 0

    def start(self) -> None:
        if self.last == 0:
            raise OSError("no such file")

    def ended(self) -> int | None:
        over = super().ended()
        return self.code if self.step == self.last else over

    def stop(self) -> None:
        self.stopped += 1
        super().stop()


def test_who_ends_with_a_code_has_not_come_to_the_end_though_a_rank_did_the_last_step(tmp_path: Path) -> None:
    order = {"steps": 3, "early": 1}
    for code, reason in ((0, ""), (90, "ended with code 90 after step 3 of 3: ")):
        puppet = Halted(Job(folder=tmp_path / str(code), order=order, losses=0), 3, code)
        assert Trial(puppet, (), 60, lambda _: None).run().reason == reason


def test_what_a_start_that_fails_has_begun_is_ended(tmp_path: Path) -> None:
    puppet = Halted(Job(folder=tmp_path / "puppet", order=ORDER, losses=0), 0, 0)
    with pytest.raises(OSError, match="no such file"):
        Trial(puppet, (), 60, lambda _: None).run()
    assert puppet.stopped == 1


class Clock:
    """A time in which each look takes a second, and nobody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)

    time_ns = monotonic_ns

    def sleep(self, seconds: float) -> None: ...


@pytest.mark.parametrize("limit_s", [20.0, 150.0, 300.0])
def test_the_limit_counts_from_the_first_step_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    clock = Clock()
    monkeypatch.setattr(compare_trial, "time", clock)
    puppet = Puppet(Job(folder=tmp_path / "puppet", order={"steps": 10_000, "early": 5}, losses=0))
    begun: list[float] = []
    usual = puppet.ended

    def ended() -> int | None:
        if clock.now < 1100:  # a slow start
            return None
        if not begun:
            begun.append(clock.now)
            usual()
        return None

    puppet.ended = ended  # type: ignore[method-assign]
    seen = Trial(puppet, (), limit_s, lambda _: None).run()
    assert seen.reason == f"given up after {limit_s:.0f} s, at step 1 of 10000"
    assert clock.now - begun[0] == pytest.approx(limit_s, abs=6)


def test_half_an_environment_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: list[str], name: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        if "pip" in words:
            raise NotInstalled(f"{name}: no wheel")

    monkeypatch.setattr(compare_environments, "run", fail)
    with pytest.raises(NotInstalled, match="no wheel"):
        compare_environments.python_of("nvrx", tmp_path, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_the_results_of_one_model_outlast_the_next_and_a_signal_ends_it_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[list[str]] = []

    def run_model(setting: compare.Setting, chosen: object, held: object) -> object:
        del chosen, held
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        if setting.model == "small":
            raise KeyboardInterrupt
        return setting.model

    def write(out: Path, runs: list[str], about: object, flags: str) -> dict[str, object]:
        del out, about, flags
        written.append(list(runs))
        return {}

    monkeypatch.setattr(compare, "run_model", run_model)
    monkeypatch.setattr(compare, "write", write)
    monkeypatch.setattr(compare, "write_corpus", lambda path: path)
    monkeypatch.setattr(sys, "argv", ["compare.py", "--out", str(tmp_path / "out")])
    known = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            compare.main()
    finally:
        signal.signal(signal.SIGTERM, known)
    assert ended.value.code == 130
    assert written == [["gpt"]]
    capsys.readouterr()


def test_nobody_is_given_up_for_timeouts_that_are_its_own(tmp_path: Path) -> None:
    schedule = tuple(Fault(step, What.STOP, 1) for step in range(100, 700, 100))
    setting = compare.Setting(
        model="gpt", steps=700, per_job=6.6, schedule=schedule, corpus=tmp_path, work=tmp_path, rivals=tmp_path
    )
    plain = Plain(jct_s=42.0, step_s=0.06, cpu_a_step_s=0.1, digest="d", early_digest="e")
    longest = 90.0  # hard timeout of NVRx as it comes
    assert compare.limit_s(setting, plain) > 2 * plain.jct_s + longest * len(schedule)


def outcome_of(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, ends: list[str | OSError]) -> Outcome:
    """What `compare` makes of a system whose tries end so: "" is a whole job, any other text its reason.

    A reason in capitals is of a try in which not all ranks made a step.
    """
    made: list[str] = []

    def try_out(*given: object) -> Seen:
        made.append(str(given[3]))
        end = ends[len(made) - 1]
        if isinstance(end, OSError):
            raise end
        lines = {0: [] if end.isupper() else [Line(5 if end else 10, 1, 1, 0, 4, 1, 1)]}
        return Seen(ranks=4, steps=10, early=5, lines=lines, marks={}, struck=[], reason=end, spawned_ns=len(made))

    monkeypatch.setattr(compare, "try_out", try_out)
    monkeypatch.setattr(compare, "python_of", lambda *_: Path(sys.executable))
    monkeypatch.setattr(compare, "packages", lambda _: [])
    setting = compare.Setting(
        model="small", steps=10, per_job=1.0, schedule=(), corpus=folder, work=folder, rivals=folder
    )
    plain = Plain(jct_s=1.0, step_s=0.1, cpu_a_step_s=0.1, digest="", early_digest="")
    entry = next(one for one in entries() if one.name == name)
    found = compare.outcome(entry, setting, plain, {"tuned": 5, "naive": 9})
    assert made == [name, f"{name}-again"][: len(ends)]
    return found


@pytest.mark.parametrize(
    ("name", "ends", "reason", "before", "shown"),
    [
        ("nvrx-tuned", [""], "", "", 1),
        ("nvrx-tuned", ["code 1", ""], "", "code 1", 2),
        ("restart-naive", ["code 1", "code 2"], "code 2", "code 1", 2),
        ("nvrx-tuned", ["code 1", OSError("disk full")], "code 1; the second try: disk full", "", 1),
        ("nvrx-tuned", ["code 1", "NO STEP"], "code 1; the second try: NO STEP", "", 1),
        ("nvrx-tuned", ["NO STEP", "code 2"], "code 2", "NO STEP", 2),
        ("nvrx-tuned", [OSError("no port"), ""], "", "no port", 2),
        ("torchrelay-spares", ["code 91"], "code 91", "", 1),
    ],
)
def test_who_does_not_come_to_its_end_has_a_second_try_but_for_torchrelay(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    ends: list[str | OSError],
    reason: str,
    before: str,
    shown: int,
) -> None:
    found = outcome_of(monkeypatch, tmp_path, name, ends)
    assert (found.reason, found.before) == (reason, before)
    assert found.seen is not None
    assert found.seen.spawned_ns == shown  # the figures are of this try
    assert compare.has_steps(found)
    assert found.title.endswith(", second try") == (shown == 2)


def test_nothing_that_a_system_says_names_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compare_trial.plainly(f"in {tmp_path}/venv/bin\nfailed {tmp_path}") == "in ~/venv/bin / failed ~"
    for other in (f"{tmp_path}2/venv", f"/mnt{tmp_path}/venv"):
        assert compare_trial.plainly(other) == other
    found = outcome_of(monkeypatch, tmp_path, "nvrx-tuned", [OSError(f"no {tmp_path}/a"), OSError("nor this")])
    assert (found.before, found.reason) == ("no ~/a", "nor this")
    assert found.seen is None
    monkeypatch.setenv("HOME", "/")
    assert compare_trial.plainly("/usr/lib") == "/usr/lib"


def test_by_default_nobody_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py"])
    options = compare.arguments()
    assert [entry.name for entry in compare.chosen_of(options)] == [entry.name for entry in entries()[1:]]
    assert compare.flags_of(options) == "--seed 7"


def test_a_rank_leaves_by_a_move_only_where_there_is_room_for_one(tmp_path: Path) -> None:
    made = {
        entry.name: entry.make(Job(folder=tmp_path / entry.name, order=ORDER, losses=0), Path(sys.executable))
        for entry in entries()
        if entry.name.startswith("torchrelay")
    }
    leave, gone = Fault(5, What.LEAVE, 1), sleeper()

    def there(rank: int) -> int | None:
        return gone.pid if rank == 1 else None

    def nowhere(rank: int) -> int | None:
        del rank
        return None

    try:
        shrink = made["torchrelay-shrink"]
        shrink.pid_of = there  # type: ignore[method-assign]
        assert shrink.strike(leave) == (1,)
        assert gone.wait(10) == -signal.SIGTERM
        spares = made["torchrelay-spares"]
        spares.pid_of = nowhere  # type: ignore[method-assign]
        with pytest.raises(ProcessLookupError, match="orchestrator"):  # it asks one, and there is none
            spares.strike(leave)
    finally:
        gone.kill()
        gone.wait()
        for system in made.values():
            system.stop()


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
