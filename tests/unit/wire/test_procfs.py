"""What the kernel tells of processes: who is meant, who is below whom, who has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support.brain import wait_for
from torchrelay.wire.files import procfs
from torchrelay.wire.files.procfs import (
    Process,
    ProcessGone,
    Stat,
    command_line,
    describe,
    is_alive,
    living_below,
    read_stat,
    started_at,
)

# A child with a child; it says both ids, and waits.
PARENT = """
import os, subprocess, sys
below = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(below.pid, flush=True)
input()
"""
NOT_THERE = 1 << 30  # above the kernel's largest id


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A child of ours, and its own child's id."""
    words = [sys.executable, "-c", PARENT]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        yield parent, int(parent.stdout.readline())
        parent.kill()


def below_us() -> set[int]:
    return {process.pid for process in living_below(os.getpid())}


def test_all_below_are_found_and_a_zombie_is_none_of_them(family: tuple[subprocess.Popen[str], int]) -> None:
    parent, child = family
    assert {parent.pid, child} <= below_us()
    assert {process.pid for process in living_below(parent.pid)} == {child}
    os.kill(child, signal.SIGKILL)
    wait_for("a zombie", lambda: read_stat(child).state == "Z")
    assert not is_alive(child)
    assert child not in below_us()
    assert command_line(child) == []
    assert Process.of(child).pid == child, "its id is still its own"


def test_ids_that_lead_back_to_one_another_do_not_hold_us_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they can seem to, if an id is given to another process while we read."""
    stats = {pid: Stat("S", parent, 1, 0, pid) for pid, parent in ((2, 1), (3, 2), (1, 3), (9, 8))}
    monkeypatch.setattr(procfs, "all_processes", lambda: iter(stats.items()))
    assert [process.pid for process in living_below(1)] == [2, 3, 1]


def test_one_with_the_same_id_that_was_started_later_is_another(family: tuple[subprocess.Popen[str], int]) -> None:
    found = Process.of(family[0].pid)
    with pytest.raises(ProcessGone):
        Process(found.pid, found.started - 1).send(signal.SIGKILL)
    assert family[0].poll() is None
    found.send(signal.SIGKILL)
    assert family[0].wait(10) == -signal.SIGKILL
    with pytest.raises(ProcessGone):
        found.send(signal.SIGKILL)


def test_what_is_not_there_is_gone() -> None:
    for ask in (read_stat, Process.of, command_line, started_at):
        with pytest.raises(ProcessGone):
            ask(NOT_THERE)
    with pytest.raises(ProcessGone):
        Process(NOT_THERE, 1).send(0)
    assert not is_alive(NOT_THERE)
    assert describe(NOT_THERE) == f"process {NOT_THERE}"
    assert living_below(NOT_THERE) == []


def test_a_process_is_hidden_as_if_it_were_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ProcessGone):
        read_stat(1)


def test_words_and_start_are_as_it_was_started() -> None:
    begun = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()", "a b", ""], stdin=subprocess.PIPE) as process:
        wait_for("its words", lambda: command_line(process.pid))  # there are none for a moment after exec
        assert command_line(process.pid) == [sys.executable, "-c", "input()", "a b", ""]
        assert begun - 2 < started_at(process.pid) < time.time() + 2
        assert describe(process.pid).startswith(f"process {process.pid} (")
        process.kill()
