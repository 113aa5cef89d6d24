"""Autogroup: a worker's session steps back, and comes forward again, also where the kernel wants to be asked twice."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from torchrelay.worker.hardware import niceness
from torchrelay.worker.hardware.niceness import SESSION_STEPS, SessionPriority, read_priority

DEADLINE_S = 20.0
ON = Path("/proc/sys/kernel/sched_autogroup_enabled")
STORY = """
from torchrelay.worker.hardware.niceness import FILE, read_priority
from torchrelay.worker.hardware.niceness import Niceness
niceness, seen = Niceness(), [read_priority()]
for act in (niceness.give_way, niceness.give_way, niceness.take_turn, niceness.give_way):
    act()
    seen.append(read_priority())
print(*seen, *FILE.read_text().split()[-1:])
"""


class Kernel:
    """Takes a priority after so many refusals."""

    def __init__(self, refusals: int, error: type[OSError] = BlockingIOError) -> None:
        self.refusals, self.error = refusals, error
        self.taken: list[int] = []
        self.asked = 0
        self.settled = threading.Event()

    def write(self, priority: int) -> None:
        self.asked += 1
        if self.asked <= self.refusals:
            raise self.error(11, "not now")
        self.taken.append(priority)
        self.settled.set()


def run_alone(story: str, *, alone: bool) -> list[str]:
    """What a process says, in a session of its own or in ours."""
    done = subprocess.run(
        [sys.executable, "-c", story], capture_output=True, text=True, check=True, timeout=60, start_new_session=alone
    )
    return done.stdout.split()


def grouped() -> bool:
    return ON.exists() and ON.read_text().strip() == "1"


@pytest.mark.skipif(not grouped(), reason="this kernel does not group tasks by session")
@pytest.mark.skipif(os.getuid() != 0, reason="an ordinary user is asked to come again: see the tests below")
def test_the_session_of_a_spare_steps_back_and_comes_forward_again() -> None:
    before, *seen = run_alone(STORY, alone=True)
    low = str(int(before) + SESSION_STEPS)
    assert seen == [low, low, before, before, before], "once its turn has come it does not step back again"


@pytest.mark.skipif(not grouped(), reason="this kernel does not group tasks by session")
def test_a_session_that_is_shared_with_others_is_left_alone() -> None:
    ours = niceness.FILE.read_text().split()[-1:]  # nothing, where no session was begun since the start
    assert run_alone(STORY, alone=False) == ["None"] * 5 + ours


def test_without_such_groups_there_is_nothing_to_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    monkeypatch.setattr(niceness, "FILE", tmp_path / "absent")
    assert read_priority() is None
    (tmp_path / "absent").write_text("/autogroup-12 nice -3\n")
    assert read_priority() == -3


def test_who_is_asked_to_come_again_does_and_its_last_wish_counts() -> None:
    kernel = Kernel(refusals=10**9)
    session = SessionPriority(kernel.write, again_s=0.001)
    session.want(10)
    session.want(0)
    kernel.refusals = 0
    assert kernel.settled.wait(DEADLINE_S)
    assert kernel.taken == [0]


def test_a_wish_after_the_last_one_was_settled_is_asked_for_again() -> None:
    kernel = Kernel(refusals=1)
    session = SessionPriority(kernel.write, again_s=0.001)
    session.want(10)
    assert kernel.settled.wait(DEADLINE_S)
    session.want(0)
    until = time.monotonic() + DEADLINE_S
    while kernel.taken != [10, 0]:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_what_is_not_allowed_is_said_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    kernel = Kernel(refusals=9, error=PermissionError)
    SessionPriority(kernel.write, again_s=0.001).want(10)
    assert kernel.asked == 1
    assert "stays as it is" in caplog.text


def test_a_kernel_that_never_takes_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(niceness, "LIMIT_S", 0.0)
    kernel = Kernel(refusals=10**6)
    SessionPriority(kernel.write, again_s=0.0).want(10)
    until = time.monotonic() + DEADLINE_S
    while "does not take priority 10" not in caplog.text:
        assert time.monotonic() < until
        time.sleep(0.001)
