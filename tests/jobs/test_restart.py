"""`torchrelay restart-services`, and orchestrators that are stuck or replaced, while fake workers train on."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.brain import listening, start_process, wait_for
from tests.support.cli_local_run import LocalRun
from torchrelay.api.endpoint import read_endpoint
from torchrelay.client.client import Client
from torchrelay.launcher import keeper

pytestmark = pytest.mark.timeout(120)

FOUR = ("--nodes", "2", "--nproc-per-node", "2", "--spares", "2", "train.py", "100000", "0.02")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    run = LocalRun(tmp_path)
    yield run
    run.tidy()


def torchrelay(run: LocalRun, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchrelay.cli.main", *words, "--run-dir", str(run.run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def pids(run: LocalRun) -> dict[int | None, int]:
    return {row["rank"]: row["pid"] for row in Client.of(run.run_dir).ranks()["ranks"] if row["rank"] is not None}


def brain(run: LocalRun) -> int:
    """The orchestrator's process id, alive or not."""
    endpoint = read_endpoint(run.run_dir)
    assert endpoint is not None
    return endpoint.pid


def agents(run: LocalRun) -> dict[str, str]:
    return {str(node.node): node.incarnation for node in Client.of(run.run_dir).view_nodes().nodes}


def trains_on(run: LocalRun) -> None:
    run.until_step(1)  # a new orchestrator knows none until the first beats have come
    run.until_step(run.status()["step"] + 5)
    assert run.status()["incidents"]["total"] == 0


class TestRestart:
    def test_orchestrator_and_agents_are_new_and_the_workers_the_same(self, run: LocalRun) -> None:
        run.start(*FOUR)
        run.until_step(3)
        workers, first, nodes = pids(run), brain(run), agents(run)
        said = torchrelay(run, "restart-services")
        assert said.returncode == 0, said.stderr
        assert "the agent of node-1 is back" in said.stderr
        assert brain(run) != first
        now = agents(run)
        assert {node for node in nodes if now[node] != nodes[node]} == {"node-0", "node-1"}
        trains_on(run)
        assert pids(run) == workers
        assert run.status()["lease"] == 2
        assert "restart-services" in torchrelay(run, "audit").stdout
        # One alone: the agents stay as they are.
        assert torchrelay(run, "restart-services", "--orchestrator").returncode == 0
        assert agents(run) == now
        assert torchrelay(run, "restart-services", "--agents").returncode == 0
        assert run.status()["lease"] == 3
        trains_on(run)

    def test_during_a_move_it_is_refused_unless_forced(self, run: LocalRun) -> None:
        run.start(*FOUR)
        run.until_step(3)
        run.until_spare()
        assert torchrelay(run, "migrate", "0").returncode == 0
        assert wait_for("targets", lambda: (run.status().get("move") or {}).get("state") == "preparing")
        said = torchrelay(run, "restart-services", "--orchestrator")
        assert (said.returncode, "M-1 of train is preparing" in said.stderr) == (2, True)
        assert torchrelay(run, "restart-services", "--orchestrator", "--force").returncode == 0
        move = run.status()["move"]
        assert (move["name"], move["state"]) == ("M-1", "preparing")


class TestReplaced:
    def test_another_one_takes_over_and_the_run_follows_it(self, run: LocalRun) -> None:
        process = run.start(*FOUR)
        run.until_step(3)
        first = run.orchestrator()
        first.send_signal(signal.SIGSTOP)
        second = start_process(run.run_dir, "--take-over")
        try:
            listening(second, run.run_dir)
            first.send_signal(signal.SIGCONT)
            wait_for("the end of the first", lambda: not first.is_alive())
            wait_for("agents", lambda: {n.alive for n in Client.of(run.run_dir).view_nodes().nodes} == {True})
            trains_on(run)
            assert brain(run) == second.pid, "it is left alone"
            process.send_signal(signal.SIGINT)
            code, _, told = run.end()
            assert code == 130
            assert "stopped by the operator" in told
        finally:
            second.kill()
            second.communicate()

    @pytest.mark.soak
    def test_one_that_answers_nobody_is_killed_and_started_again(self, run: LocalRun) -> None:
        run.start(*FOUR)
        run.until_step(3)
        first = run.orchestrator()
        first.send_signal(signal.SIGSTOP)
        wait_for("another one", lambda: brain(run) != first.pid, keeper.STUCK_S + 30)
        wait_for("its answer, and a beat", lambda: run.status()["step"])
        trains_on(run)
        assert run.status()["lease"] == 2
