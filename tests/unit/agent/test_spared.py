"""Programs that became another user are not ours to end: they are named, left alone, and change nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from torchrelay.agent.workers import children
from torchrelay.launcher import sweep as sweeping
from torchrelay.wire.files import procfs
from torchrelay.wire.files.procfs import Process

# ---------------------------------------------------------------- one by one


def not_ours(monkeypatch: pytest.MonkeyPatch, pid: int) -> None:
    """The kernel lets nobody signal this process."""
    kill = os.kill

    def refuse(target: int, number: int) -> None:
        if target == pid:
            raise PermissionError(1, "Operation not permitted")
        kill(target, number)

    monkeypatch.setattr(os, "kill", refuse)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as process:
        handle = os.pidfd_open(process.pid)  # tests change `os.kill`
        yield process
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


def test_a_forkserver_names_whom_it_cannot_end_and_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], sleeper: subprocess.Popen[bytes]
) -> None:
    not_ours(monkeypatch, sleeper.pid)
    monkeypatch.setattr(children, "children_of", lambda _: iter([sleeper.pid]))
    children.Children().end_all(deadline_s=3600)
    assert capfd.readouterr().err.count(f"process {sleeper.pid} ") == 1
    assert children.kill_sessions([os.getsid(sleeper.pid)]) == [], "the leader itself is for its parent to reap"


def test_a_sweep_names_whom_it_cannot_end_and_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    found = Process.of(sleeper.pid)
    monkeypatch.setattr(sweeping, "living_below", lambda _: [found])

    def denied(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(signal, "pidfd_send_signal", denied)
        assert [told.partition(" (")[0] for told in sweeping.sweep(deadline_s=3600)] == [f"process {found.pid}"]
        patch.setattr(procfs, "read_proc", hidden(found.pid, "status"))
        assert sweeping.sweep(deadline_s=3600) == [f"process {found.pid}"]


def hidden(pid: int, name: str) -> Callable[[str], str | None]:
    """Reads what the kernel tells, but for one file."""
    read = procfs.read_proc
    return lambda path: None if path == f"/proc/{pid}/{name}" else read(path)


def test_a_sweep_ends_what_is_ours_and_not_what_has_taken_its_id(sleeper: subprocess.Popen[bytes]) -> None:
    pid, started = Process.of(sleeper.pid)
    assert sweeping.killed(Process(pid, started - 1)), "that one has ended"
    assert sleeper.poll() is None
    assert sweeping.killed(Process(pid, started))
    assert sleeper.wait(10) == -signal.SIGKILL
    assert sweeping.killed(Process(pid, started)), "it has ended"


def test_a_folder_of_memory_is_never_there_without_its_lock_being_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that begins may find another one at any moment of its beginning."""
    seen = []
    rename = Path.rename

    def looked_at(path: Path, target: Path) -> Path:
        sweeping.clear_leftovers(tmp_path)
        done = rename(path, target)
        sweeping.clear_leftovers(tmp_path)
        seen.append(target.exists())
        return done

    monkeypatch.setattr(Path, "rename", looked_at)
    sweeping.PrivateFolder(tmp_path).remove()
    assert seen == [True]
