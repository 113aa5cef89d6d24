"""Faults hit the process that was meant and no other; stories wait for facts."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs import wait_until
from tests.support.processes import is_stopped
from torchrelay.chaos.faults import Fault, Gone, Victim, observe, strike
from torchrelay.chaos.story import Facts, Strike, parse

READY = "print('ready', flush=True); "


def start(code: str) -> subprocess.Popen[str]:
    """A Python process that has said that it is ready to be hit."""
    process = subprocess.Popen([sys.executable, "-c", READY + code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    process = start("import time; time.sleep(60)")
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("fault", "signum"),
    [
        (Fault.KILL, signal.SIGKILL),
        (Fault.CRASH, signal.SIGSEGV),
        (Fault.ABORT, signal.SIGABRT),
        (Fault.TERMINATE, signal.SIGTERM),
    ],
)
def test_a_deadly_fault_ends_its_victim(sleeper: subprocess.Popen[str], fault: Fault, signum: int) -> None:
    strike(observe(sleeper.pid), fault)
    assert sleeper.wait(10) == -signum


def test_a_stop_halts_its_victim_until_it_goes_on(sleeper: subprocess.Popen[str]) -> None:
    victim = observe(sleeper.pid)
    strike(victim, Fault.STOP)
    wait_until("the stop", lambda: is_stopped(sleeper.pid), deadline_s=5)
    strike(victim, Fault.CONTINUE)
    wait_until("going on", lambda: not is_stopped(sleeper.pid), deadline_s=5)
    assert sleeper.poll() is None


@pytest.mark.parametrize(
    ("fault", "attempt", "error"),
    [
        (Fault.STARVE, "bytearray(1 << 30)", "MemoryError"),
        (Fault.QUOTA, "file.write('more'); file.flush()", "OSError"),
    ],
)
def test_who_gets_no_more_meets_an_exception(tmp_path: Path, fault: Fault, attempt: str, error: str) -> None:
    code = f"""
import sys
file = open({str(tmp_path / "file")!r}, "w")
print("ready", flush=True)
sys.stdin.readline()
try:
    {attempt}
except {error}:
    sys.exit(7)
"""
    words = [sys.executable, "-c", code]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    strike(observe(process.pid), fault)
    process.communicate("go\n", timeout=10)
    assert process.returncode == 7


def test_a_later_process_with_the_same_id_is_spared(sleeper: subprocess.Popen[str]) -> None:
    earlier = Victim(sleeper.pid, observe(sleeper.pid).started - 1)
    with pytest.raises(Gone, match="another one"):
        strike(earlier, Fault.KILL)
    assert sleeper.poll() is None


def test_who_has_ended_is_gone(sleeper: subprocess.Popen[str]) -> None:
    victim = observe(sleeper.pid)
    sleeper.kill()
    sleeper.wait(10)
    with pytest.raises(Gone):
        strike(victim, Fault.KILL)
    with pytest.raises(Gone):
        observe(sleeper.pid)


@pytest.mark.parametrize("pid", [0, 1, -1])
def test_ids_that_mean_many_processes_are_refused(pid: int) -> None:
    with pytest.raises(ValueError, match="no victim"):
        observe(pid)


# ---------------------------------------------------------------- stories


def facts(step: int | None, *, phase: str = "running", training: bool = True, spares: int = 1) -> Facts:
    return Facts(step=step, phase=phase, training=training, spares=spares, pids={0: 100, 1: 101})


def test_a_story_is_told_in_order_and_each_strike_once() -> None:
    story = parse("kill rank=0 step>=3\n\n# then\nstop rank=1 step>=2\n")
    assert story.advance(facts(None)) is None
    assert story.advance(facts(2)) is None
    assert story.advance(facts(3)) == Strike(Fault.KILL, (0,), step=3)
    assert story.advance(facts(3)) == Strike(Fault.STOP, (1,), step=2)
    assert story.next is None
    assert story.advance(facts(9)) is None


@pytest.mark.parametrize(
    ("line", "seen", "due"),
    [
        ("kill rank=0", facts(1), True),
        ("kill rank=0", facts(1, training=False), False),
        ("kill rank=0 spares>=2", facts(1), False),
        ("kill rank=0 spares>=2", facts(1, spares=2), True),
        ("kill rank=2", facts(1), False),
        ("kill rank=0,1", facts(1), True),
        ("kill rank=0 at=reconfiguring", facts(1), False),
        ("kill rank=0 at=reconfiguring", facts(1, phase="reconfiguring", training=False), True),
    ],
)
def test_a_strike_waits_for_all_its_conditions(line: str, seen: Facts, due: bool) -> None:
    assert (parse(line).advance(seen) is not None) is due


def test_a_strike_waits_until_what_those_before_it_have_led_to_is_over() -> None:
    story = parse("stop rank=1\norchestrator\ntaint of=1\nkill rank=0 at=agreeing\nkill rank=0")
    seen = dataclasses.replace(facts(9), places={1: "node-0/1"}, resolved=0)
    assert str(story.advance(seen)) == "stop rank=1"
    assert story.advance(seen) is None
    seen = dataclasses.replace(seen, resolved=1)
    assert str(story.advance(seen)) == "orchestrator"
    assert str(story.advance(seen)) == "taint of=1", "the orchestrator's end is no incident"
    agreeing = dataclasses.replace(seen, phase="agreeing", training=False)
    assert str(story.advance(agreeing)) == "kill rank=0 at=agreeing", "it is meant to come within another's incident"
    assert story.advance(seen) is None
    assert story.advance(dataclasses.replace(seen, resolved=2)) is None
    assert str(story.advance(dataclasses.replace(seen, resolved=3))) == "kill rank=0"


def test_what_was_drained_is_undrained_when_the_move_is_over() -> None:
    (strike,) = parse("undrain step>=3").strikes
    under_way = Facts(step=9, phase="running", training=True, spares=0, pids={}, moving=True)
    assert not strike.due(under_way)
    assert strike.due(dataclasses.replace(under_way, moving=False))
    (kill,) = parse("kill rank=0").strikes
    assert kill.due(dataclasses.replace(under_way, pids={0: 1}))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("explode rank=0", "no fault 'explode'"),
        ("kill", "say whom it hits"),
        ("kill rank=x", "invalid literal"),
        ("kill rank=0 moon=full", "none of rank="),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(line: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refusal:
        parse("kill rank=1\n" + line)
    assert "line 2" in str(refusal.value)


def test_a_strike_reads_as_it_is_written() -> None:
    line = "kill rank=0,3 step>=180 spares>=2 at=running"
    assert str(parse(line).next) == line
