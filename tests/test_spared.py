"""Programs that became another user are not ours to end: they are named, left alone, and change nothing else."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.agent_stage import lives
from tests.processes import all_seen
from torchrelay.agent.workers import children
from torchrelay.launcher import sweep as sweeping
from torchrelay.wire.files import procfs
from torchrelay.wire.files.procfs import Process

NOBODY = 65534
SCRIPT = Path(__file__).parent / "scripts" / "becoming.py"
PROGRAM = """
#include <stdio.h>
#include <unistd.h>
int main(void) {
    if (setgid(0) != 0 || setuid(0) != 0) { puts("refused"); } else { puts("0"); }
    fflush(stdout);
    sleep(300);
    return 0;
}
"""
# An ordinary user that may read what root may: Python itself may lie in root's home.
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
READING = ("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Path]:
    """A set-uid program of root that becomes root, as sudo does, and stays."""
    if os.getuid() != 0:
        pytest.skip("only root makes a set-uid program of root")
    compiler = shutil.which("cc")
    if compiler is None or shutil.which("setpriv") is None:
        pytest.skip("needs cc and setpriv")
    if os.statvfs(tmp_path).f_flag & os.ST_NOSUID:
        pytest.skip(f"{tmp_path} is mounted with nosuid")
    source, made = tmp_path / "become.c", tmp_path / "become"
    source.write_text(PROGRAM)
    subprocess.run([compiler, "-o", str(made), str(source)], check=True, timeout=60)
    made.chmod(0o4755)
    yield made
    for process in all_seen():
        with suppress(OSError):  # it has ended, or is hidden
            if os.readlink(f"/proc/{process.pid}/exe") == str(made):
                process.kill()


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.timeout(180)
def test_a_run_of_an_ordinary_user_survives_a_set_uid_child_and_ends_with_0(tmp_path: Path, program: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    mark = home / "mark"
    words = ["run", "--nproc-per-node", "2", "--spares", "1", "--run-dir", str(home / "run"), str(SCRIPT)]
    done = subprocess.run(
        [*AS_NOBODY, *READING, sys.executable, "-P", "-m", "torchrelay.cli.main", *words, str(program), str(mark)],
        cwd=home, env={**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=150,
    )  # fmt: skip
    said = done.stdout + done.stderr
    if mark.exists() and mark.read_text().endswith("refused"):
        pytest.skip("set-uid programs have no effect here")
    assert done.returncode == 0, said
    pid = int(mark.read_text().split()[0])
    assert lives(pid), "it was another user's all the time"
    assert f"left running, as they could not be ended: process {pid} (become, of user root)" in said
    log = (home / "run" / "logs" / "agent-node-0.log").read_text()
    assert f"process {pid} (become) runs as another user and cannot be ended" in log
    assert "forkserver has died" not in log
    assert "1 incident" in said


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
