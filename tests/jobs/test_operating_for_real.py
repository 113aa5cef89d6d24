"""Operating a job that really trains: a drain, a restart of torchrelay itself, and the way back, in one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchrelay.client.client import Away, Client, Denied

pytestmark = pytest.mark.timeout(280)

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0


class RealRun:
    """`torchrelay run` of the script with everything that makes resuming hard, on two nodes of one rank each."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.live = folder / "live"
        self.live.mkdir()
        (self.live / "plan.json").write_text("[]")
        script = [str(ROOT / "tests" / "scripts" / "faulty.py"), "--live", str(self.live)]
        script += ["--steps", "100000", "--pace", "0.05"]
        words = ["--run-dir", str(self.run_dir), "--nodes", "2", "--nproc-per-node", "1", "--spares", "2", *script]
        command = [sys.executable, "-m", "torchrelay.cli.main", "run", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def torchrelay(self, *words: str) -> Any:
        """A verb's answer."""
        command = [sys.executable, "-m", "torchrelay.cli.main", *words, "-o", "json", "--run-dir", str(self.run_dir)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert said.returncode == 0, said.stderr
        return json.loads(said.stdout)

    def until(self, what: str, fact: Callable[[Client], bool]) -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < DEADLINE_S:
            assert self.process.poll() is None, self.process.communicate()[1]
            try:
                if fact(Client.of(self.run_dir)):
                    return
            except (Away, Denied, ValueError):
                pass  # it is being started
            time.sleep(0.1)
        raise AssertionError(f"{what}: not within {DEADLINE_S} s")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RealRun]:
    run = RealRun(tmp_path)
    yield run
    if run.process.poll() is None:
        run.process.terminate()
        try:
            run.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.communicate()


def is_done(name: str) -> Callable[[Client], bool]:
    return lambda client: any((move.name, move.state) == (name, "done") for move in client.view_moves().moves)


def node_of(client: Client, rank: int) -> str | None:
    return next(row.node for row in client.view_ranks().ranks if row.rank == rank)


def test_drained_restarted_and_back_again_it_trains_to_its_end(run: RealRun) -> None:
    run.until("training with two warm spares", lambda c: (c.job().step or 0) > 3 and c.job().spares.warm == 2)
    drained = run.torchrelay("drain", "node-1", "--reason", "new disks")
    assert (drained["applied"], drained["move"]) == (True, "M-1")
    run.until("the drain", is_done("M-1"))
    client = Client.of(run.run_dir)
    assert node_of(client, 1) == "node-0"
    (move,) = client.view_moves().moves
    assert [(leg.from_text, leg.to_node) for leg in move.legs] == [("node-1/0", "node-0")]
    assert move.pause_ms is not None
    holder = next(row.pid for row in client.view_ranks().ranks if row.rank == 1)

    assert run.torchrelay("restart-services")["applied"]
    client = Client.of(run.run_dir)
    assert client.job().lease == 2
    assert next(row.pid for row in client.view_ranks().ranks if row.rank == 1) == holder, "nobody was disturbed"
    # The way of the move outlives the orchestrator that made it.
    assert client.view_moves().moves[0].legs == move.legs

    run.torchrelay("undrain", "node-1")
    run.until("a spare on node-1", lambda c: any(one.node == "node-1" for one in c.view_spares().spares))
    run.torchrelay("migrate", "1", "--to", "node-1")
    run.until("the way back", is_done("M-2"))
    assert node_of(Client.of(run.run_dir), 1) == "node-1"

    (run.live / "stop").touch()
    told = run.process.communicate(timeout=150)[1]
    assert run.process.returncode == 0, told
    found = run.torchrelay("report")
    assert [(line["kind"], line["move"], line["resolution"]) for line in found["lines"]] == [
        ("planned", "M-1", "clean"),
        ("planned", "M-2", "clean"),
    ]
    assert all(0 < line["pause_ms"] == sum(line["phases"].values()) for line in found["lines"])
    assert [call["call"] for call in run.torchrelay("audit")] == [
        "submit",
        "drain",
        "restart-services",
        "undrain",
        "migrate",
        "shutdown",
    ]
