"""What workers print: no print fails because of our files, logs are bounded, and what is left out is said."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from tests.support.brain import wait_for
from tests.support.cli_local_run import TWO, LocalRun
from tests.support.jobs import SCRIPTS
from tests.support.mounts import kept_full, needs_mounts, seen_by, within


class OnASmallDisk(LocalRun):
    """A run whose folder is on a disk of 3 MB."""

    def command(self) -> list[str]:
        (self.folder / "disk").mkdir()
        self.run_dir = self.folder / "disk" / "run"
        return within(self.folder / "disk", "3m", super().command(), mode="0700")

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        process = super().start(*words, **environment)
        self.disk = seen_by(process.pid, self.folder / "disk")
        self.run_dir = self.disk / "run"
        return process

    def steps_printed(self) -> int:
        """Of rank 0, whose orchestrator cannot tell it."""
        first: int = struct.unpack_from("<q", (self.run_dir / "logs" / "gates").read_bytes())[0]
        return first


def both_at(folder: Path, step: str) -> bool:
    return all((folder / f"at-{step}-{rank}").exists() for rank in (0, 1))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[OnASmallDisk]:
    run = OnASmallDisk(tmp_path)
    yield run
    run.tidy()


@pytest.mark.timeout(180)
@needs_mounts
class TestFullDisk:
    def test_ranks_that_print_train_on_and_what_is_missing_is_said(self, run: OnASmallDisk) -> None:
        run.start(*TWO, "300", "0.01", "loud")
        run.until_spare()
        run.until_step(3)
        with kept_full(run.disk):
            step = run.steps_printed()
            wait_for("steps on a full disk", lambda: run.steps_printed() >= step + 50, 60)
        code, _, err = run.end(120)
        assert code == 0, err
        assert "ended with 0 after 300 steps" in err
        assert "rank-0.log cannot be written (No space left on device): output is left out, training goes on" in err
        assert re.search(r"[\d,]+ bytes of output could not be written to \S+/rank-0.log: No space left on device", err)

    def test_a_real_job_ends_with_the_bits_of_an_undisturbed_one(self, tmp_path: Path) -> None:
        bits = []
        for disturbed in (True, False):
            work = tmp_path / str(disturbed)
            (work / "disk").mkdir(parents=True)
            (work / "out").mkdir()
            script = [str(SCRIPTS / "loud.py"), str(work / "out"), str(work / "out" / "go")]
            words = ["--nproc-per-node", "2", "--run-dir", str(work / "disk" / "run"), *script]
            command = [sys.executable, "-m", "torchrelay.cli.main", "run", *words]
            command = within(work / "disk", "3m", command, mode="0700")
            job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            try:
                wait_for("ten steps", partial(both_at, work / "out", "ten"), 120)
                with kept_full(seen_by(job.pid, work / "disk")) if disturbed else nullcontext():
                    (work / "out" / "go").touch()
                    wait_for("forty steps", partial(both_at, work / "out", "forty"), 120)
                (work / "out" / "end").touch()
                told, _ = job.communicate(timeout=120)
            finally:
                job.kill()
            assert job.returncode == 0, told
            assert ("rank-0.log: No space left on device" in told) == disturbed
            bits.append([(work / "out" / f"bits-{rank}").read_text() for rank in (0, 1)])
        assert bits[0] == bits[1]


@pytest.mark.timeout(180)
def test_a_flood_is_bounded_and_its_last_lines_are_shown(tmp_path: Path) -> None:
    run = LocalRun(tmp_path)
    try:
        run.start(*TWO, "3", "0.01", "flood=40", TORCHRELAY_LOG_MB="8", TORCHRELAY_LOG_RATE_MB="2")
        code, out, err = run.end()
    finally:
        run.tidy()
    assert code == 0, err
    for rank in (0, 1):
        assert [line for line in out.splitlines() if line.startswith(f"[{rank}]")][-1] == f"[{rank}] LAST LINE"
        files = list((run.run_dir / "logs").glob(f"rank-{rank}.log*"))
        assert sum(path.stat().st_size for path in files) <= 10_000_000
    assert "bytes are left out here: more than 2 MB in a second, for long" in out
