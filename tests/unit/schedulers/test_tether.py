"""Tests of the tether, with real processes."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from torchrelay.schedulers.tether import signal_child, tethered

HANDLED = """
import os, signal, subprocess
from torchrelay.schedulers.tether import tethered
signal.signal(signal.SIGTERM, lambda *_: None)
tie = tethered()
if os.fork() == 0:  # a child of another process than the one that meant to start it
    code = subprocess.call(["sleep", "60"], preexec_fn=tie)
    os._exit(7 if code == -signal.SIGTERM else 8)
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_child_whose_parent_has_ended_already_does_not_run_though_the_parent_handles_the_signal() -> None:
    assert subprocess.call([sys.executable, "-c", HANDLED], timeout=30) == 7


def test_a_child_ends_with_its_parent() -> None:
    script = (
        "import subprocess, sys; from torchrelay.schedulers.tether import tethered\n"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=tethered())\n"
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    watched = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.kill()
        parent.wait()
        assert ended_within(watched, 30)
    finally:
        os.close(watched)
        parent.communicate()


def test_a_child_runs_while_its_parent_does() -> None:
    assert subprocess.call(["true"], preexec_fn=tethered(signal.SIGKILL)) == 0


def test_a_child_that_is_signalled_as_it_ends_keeps_its_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    signalled, wait = threading.Event(), os.waitpid

    def slow(pid: int, options: int) -> tuple[int, int]:
        """What asyncio waits with: here it comes last, as it may on a busy machine."""
        assert signalled.wait(30)
        return wait(pid, options)

    async def end() -> int:
        monkeypatch.setattr(os, "waitpid", slow)
        child = await asyncio.create_subprocess_exec("sleep", "60")
        os.kill(child.pid, signal.SIGTERM)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        signal_child(child, signal.SIGKILL)
        signalled.set()
        return await child.wait()

    assert asyncio.run(end()) == -signal.SIGTERM


def ended_within(watched: int, deadline_s: float) -> bool:
    return bool(select.select([watched], [], [], deadline_s)[0])
