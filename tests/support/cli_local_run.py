"""What tests of cli local run share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.support.brain import wait_for
from tests.support.patience import longer
from tests.support.processes import Seen, all_seen
from torchrelay.client.client import Away, Client, Denied
from torchrelay.wire.files.procfs import ProcessGone
from torchrelay.wire.trust.trust import TrustError

ROOT = Path(__file__).parents[2]
MARK = "TORCHRELAY_TEST_RUN"  # in the environment of every process of a run, and of no other


def heeds_sighup() -> None:
    """As on a terminal: what is started under nohup inherits that the signal is ignored, and a run keeps to that."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class LocalRun:
    """A run as a user starts it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.mark = uuid4().hex
        self.process: subprocess.Popen[str] | None = None
        (folder / "train.py").write_text("")

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.support.fake_run", "--run-dir", str(self.run_dir)]

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, MARK: self.mark, "PYTHONPATH": path, **environment}
        self.process = subprocess.Popen(
            [*self.command(), *words],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heeds_sighup,
        )
        return self.process

    def end(self, deadline_s: float = 60) -> tuple[int, str, str]:
        """Its exit code and what it printed; nothing of it may be left."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=longer(deadline_s))
        assert [process.words() for process in self.left()] == []
        return self.process.returncode, out, err

    def left(self) -> list[Seen]:
        """Living processes of this run."""
        return [each for each in all_seen() if each.variables().get(MARK) == self.mark and each.is_alive()]

    def status(self) -> dict[str, Any]:
        try:
            return Client.of(self.run_dir).status()
        except (Away, Denied, TrustError):
            return {}

    def rank(self, rank: int) -> Seen:
        ranks = Client.of(self.run_dir).ranks()["ranks"]
        return Seen(next(row["pid"] for row in ranks if row["rank"] == rank))

    def until_step(self, step: int) -> None:
        wait_for(f"step {step}", lambda: (self.status().get("step") or 0) >= step, 60)

    def until_spare(self) -> None:
        wait_for("a warm spare", lambda: self.status().get("spares", {}).get("warm"), 60)

    def orchestrator(self) -> Seen:
        return Seen(json.loads((self.run_dir / "endpoint.json").read_text())["pid"])

    def agent(self, node: str = "node-0") -> Seen:
        return next(p for p in self.left() if "torchrelay.agent" in p.words() and node in p.words())

    def ledger(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "ledger.jsonl").read_text().splitlines()]

    def until_said(self, text: str) -> str:
        """Read what it says, up to the line with this text."""
        assert self.process is not None
        assert self.process.stderr is not None
        while text not in (line := self.process.stderr.readline()):
            assert line or self.process.poll() is None
        return line

    def stop_twice(self) -> None:
        """Ctrl-C, and again when it was heard: two at once could arrive as one."""
        assert self.process is not None
        assert self.process.stderr is not None
        self.process.send_signal(signal.SIGINT)
        while "stopping" not in self.process.stderr.readline():
            assert self.process.poll() is None
        self.process.send_signal(signal.SIGINT)

    def tidy(self) -> None:
        for process in self.left():
            with suppress(ProcessGone):
                process.kill()
        if self.process is not None:
            self.process.communicate()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    run = LocalRun(tmp_path)
    yield run
    run.tidy()


TWO = ("--nproc-per-node", "2", "--spares", "1", "train.py")
