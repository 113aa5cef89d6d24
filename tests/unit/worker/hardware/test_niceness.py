"""Niceness: all threads of a target but the one that listens step back, and come forward again."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from torchrelay.worker.hardware.niceness import LOWEST, STEPS, Niceness, may_return


def priorities(*, but: int) -> set[int]:
    """Of all threads of this process but one."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            if int(task.name) != but:
                found.add(os.getpriority(os.PRIO_PROCESS, int(task.name)))
        except ProcessLookupError:
            pass  # one of another test, that has just ended
    return found


def on_a_control_thread(what: Callable[[], None]) -> None:
    thread = threading.Thread(target=what)
    thread.start()
    thread.join()


def test_all_others_step_back_and_come_forward_again() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if not may_return(before):
        pytest.skip("an ordinary user may not raise a priority again")
    seen: list[set[int]] = []

    def control() -> None:
        me = threading.get_native_id()
        niceness = Niceness()
        for act in (niceness.give_way, niceness.give_way, niceness.take_turn, niceness.take_turn, niceness.give_way):
            act()
            seen.append(priorities(but=me))
        seen.append({os.getpriority(os.PRIO_PROCESS, me)})

    on_a_control_thread(control)
    back, forth = {min(before + STEPS, LOWEST)}, {before}
    assert seen == [back, back, forth, forth, forth, forth], "an order that is repeated does not send it back again"


def test_what_was_started_meanwhile_comes_forward_too() -> None:
    """Loader workers, say, and what they start; who has stepped back by itself stays there."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if not may_return(before):
        pytest.skip("an ordinary user may not raise a priority again")
    seen: list[tuple[list[int], int]] = []

    def control() -> None:
        niceness = Niceness()
        niceness.give_way()
        os.setpriority(os.PRIO_PROCESS, 0, before + STEPS)  # as that of the thread that starts processes
        with subprocess.Popen(
            ["sh", "-c", "sleep 60 & nice -n 3 sleep 60 & echo $$; wait"],
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as shell:
            assert shell.stdout is not None
            shell.stdout.readline()
            try:
                until(lambda: len(family(shell.pid)) == 3 and max(family(shell.pid)) == before + STEPS + 3)
                assert family(shell.pid) == [before + STEPS, before + STEPS, before + STEPS + 3]
                niceness.take_turn()
                seen.append((family(shell.pid), os.getpriority(os.PRIO_PROCESS, 0)))
            finally:
                os.killpg(shell.pid, signal.SIGKILL)
                os.setpriority(os.PRIO_PROCESS, 0, before)  # it may be seen for a moment after its end

    on_a_control_thread(control)
    assert seen == [([before, before, before + STEPS + 3], before + STEPS)]


def family(pid: int) -> list[int]:
    """The priorities of a process and its children, which are there for a while."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(os.getpriority(os.PRIO_PROCESS, one) for one in (pid, *map(int, children)))


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_a_way_back_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    before = priorities(but=0)

    def refuse(*_: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "setpriority", refuse)
    niceness = Niceness()
    niceness.give_way()
    assert priorities(but=0) == before
    niceness.take_turn()


def test_a_thread_that_has_chosen_a_priority_of_its_own_keeps_it() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if not may_return(before):
        pytest.skip("an ordinary user may not raise a priority again")
    ready, done = threading.Event(), threading.Event()
    chosen: list[int] = []

    def modest() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, before + 2)
        ready.set()
        done.wait(30)
        chosen.append(os.getpriority(os.PRIO_PROCESS, 0))

    def control() -> None:
        niceness = Niceness()
        niceness.give_way()
        niceness.take_turn()

    thread = threading.Thread(target=modest)
    thread.start()
    assert ready.wait(30)
    on_a_control_thread(control)
    done.set()
    thread.join()
    assert chosen == [before + 2]


def test_who_has_given_up_the_right_to_a_priority_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if not may_return(before):
        pytest.skip("an ordinary user may not raise a priority again")

    def control() -> None:
        niceness = Niceness()
        niceness.give_way()
        allowed = os.setpriority
        with monkeypatch.context() as patch:
            patch.setattr(os, "setpriority", refuse)
            niceness.take_turn()
        for task in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # a thread of another test, which has just ended
                allowed(os.PRIO_PROCESS, int(task.name), before)
        came_through.append(True)

    def refuse(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    came_through: list[bool] = []
    on_a_control_thread(control)
    assert came_through
