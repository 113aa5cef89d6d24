"""Programs that became another user are not ours to end: they are named, left alone, and change nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.agent_stage import lives
from tests.support.processes import all_seen

NOBODY = 65534
SCRIPT = Path(__file__).parents[1] / "scripts" / "becoming.py"
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


@pytest.mark.timeout(180)
def test_a_run_of_an_ordinary_user_survives_a_set_uid_child_and_ends_with_0(tmp_path: Path, program: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    mark = home / "mark"
    words = ["run", "--nproc-per-node", "2", "--spares", "1", "--run-dir", str(home / "run"), str(SCRIPT)]
    done = subprocess.run(
        [*AS_NOBODY, *READING, sys.executable, "-P", "-m", "torchrelay.cli.main", *words, str(program), str(mark)],
        cwd=home,
        env={**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
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
