"""Jobs that are parked and go on: how tests start them, park them, and find out what they computed in all."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.jobs import SCRIPTS, Finished, ask_until, end_job, read_digests, start_job, torchrelay
from torchrelay.client.client import Client
from torchrelay.wire.files.procfs import ProcessGone, living_below

RANKS = 4
STEPS = 30
PACED = ("--pace", "0.04")


def script(layout: str = "ddp", steps: int = STEPS, ballast_mb: int = 0) -> list[str]:
    """What trains: with everything that makes resuming hard, and slowly, so that there is time to park it."""
    size = ["--ballast", str(ballast_mb)] if ballast_mb else []
    return [str(SCRIPTS / "faulty.py"), "--layout", layout, "--steps", str(steps), *PACED, *size]


class Parked:
    """One job in several runs, which write the digests of all their points into one folder."""

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self.folder = folder
        self.words = list(words)
        self.place = folder / "parked"
        self.digests = folder / "digests"
        self.digests.mkdir()
        self.runs = 0

    def start(self, *flags: str, nodes: int = 1) -> tuple[subprocess.Popen[str], Path]:
        """The next run."""
        self.runs += 1
        run_dir = self.folder / f"run-{self.runs}"
        shape = ["--nodes", str(nodes), "--nproc-per-node", str(RANKS // nodes)]
        env = {"TORCHRELAY_DIGESTS": str(self.digests)}
        return start_job(run_dir, self.words, [*shape, *flags], env), run_dir

    def run(self, *flags: str, nodes: int = 1) -> Finished:
        """The same, to its end."""
        process, run_dir = self.start(*flags, nodes=nodes)
        return self.end(process, run_dir)

    def end(self, process: subprocess.Popen[str], run_dir: Path) -> Finished:
        """Wait for its end; with what all runs so far have computed."""
        done = end_job(process, run_dir, timeout_s=120)
        return Finished(done.code, done.output, run_dir, read_digests(self.digests))

    def until_step(self, process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
        def trains(client: Client) -> bool:
            job = client.job()
            return job.phase == "running" and job.step is not None and job.step >= step

        ask_until(process, run_dir, f"step {step}", trains, deadline_s=60)

    def park(self, run_dir: Path) -> str:
        """By hand; returns what was said."""
        said = torchrelay("park", "--yes", "--reason", "a test", "--run-dir", str(run_dir))
        assert said.returncode == 0, said.stderr
        return said.stdout

    def parked_at(self, step: int, *flags: str, nodes: int = 1) -> Finished:
        """A run that is parked when it has come so far."""
        process, run_dir = self.start("--park-dir", str(self.place), *flags, nodes=nodes)
        self.until_step(process, run_dir, step)
        self.park(run_dir)
        done = self.end(process, run_dir)
        assert done.code == 75, done.output[-3000:]
        return done


def holder(run_dir: Path, rank: int) -> int:
    """The process that holds a rank."""
    found = next(one.pid for one in Client.of(run_dir).view_ranks().ranks if one.rank == rank)
    assert found is not None
    return found


def ask_to_park(run_dir: Path) -> subprocess.Popen[bytes]:
    """The same beside what the test does."""
    words = [sys.executable, "-m", "torchrelay.cli.main", "park", "--yes", "--run-dir", str(run_dir)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_phase(process: subprocess.Popen[str], run_dir: Path, phases: Sequence[str], deadline_s: float) -> str:
    """Look as often as possible until the job is in one of these phases, or the process has ended."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until and process.poll() is None:
        phase = str(Client.of(run_dir).job().phase)
        if phase in phases:
            return phase
    return ""


def kill_all(process: subprocess.Popen[str]) -> None:
    """The power is cut: the launcher and all that it has started."""
    below = living_below(process.pid)
    process.kill()
    for one in below:
        with suppress(ProcessGone):
            one.send(signal.SIGKILL)
    process.wait(30)
