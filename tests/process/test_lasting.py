"""Processes of ours that outlive a scheduler's SIGTERM, and how they end all the same."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.agent_stage import lives
from tests.support.forkserver import DEADLINE_S, Server
from tests.support.jobs import wait_until
from torchrelay.agent.workers.forks import Child, Ended, Inventory, Kill, Stop
from torchrelay.api.endpoint import LOGS, read_endpoint
from torchrelay.launcher import keeper
from torchrelay.launcher.keeper import LASTING, answers
from torchrelay.protocol.messages.ids import WorkerId
from torchrelay.schedulers.tether import tethered


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One that lasts, when it is there."""
    server = Server(tmp_path, linger_s=30.0, lasts=True)
    server.hear(Inventory)
    yield server
    server.process.kill()
    server.process.wait(DEADLINE_S)
    server.hang_up()


def told(server: Server) -> Child:
    """A worker that waits; it and its forkserver were told to end, as Slurm does it."""
    server.fork("w", "wait")
    child = server.hear(Child)
    server.says("w", "waiting")
    for pid in (server.process.pid, child.pid) * 2:
        os.kill(pid, signal.SIGTERM)
    server.fork("next", "leave", "3")  # the server serves on
    assert server.hear(Child).worker == "next"
    assert server.hear(Ended).code == 3
    assert lives(child.pid)
    return child


def test_a_worker_that_was_told_ends_by_sigkill(server: Server) -> None:
    told(server)
    server.say(Kill(worker=WorkerId("w"), signal=signal.SIGKILL, reason="fenced"))
    ended = server.hear(Ended)
    assert (ended.worker, ended.signal) == ("w", signal.SIGKILL)


def test_it_ends_with_its_server_when_the_agent_says_so(server: Server) -> None:
    child = told(server)
    server.say(Stop())
    assert server.process.wait(DEADLINE_S) == 0
    wait_until("its end", lambda: not lives(child.pid), deadline_s=DEADLINE_S)


def test_it_ends_with_a_server_that_is_killed(server: Server) -> None:
    child = told(server)
    server.process.kill()
    server.process.wait(DEADLINE_S)
    wait_until("its end", lambda: not lives(child.pid), deadline_s=DEADLINE_S)


def test_a_handler_of_the_script_hears_of_it(server: Server) -> None:
    server.fork("w", "hear")
    child = server.hear(Child)
    server.says("w", "listening")
    os.kill(child.pid, signal.SIGTERM)
    server.says("w", "heard SIGTERM")


def test_an_orchestrator_that_lasts_ends_by_sigint_only(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "torchrelay.orchestrator", "--run-dir", str(tmp_path), "--lasting"]
    process = subprocess.Popen(command)
    try:
        wait_until("it listens", lambda: read_endpoint(tmp_path), deadline_s=DEADLINE_S)
        log = tmp_path / LOGS / "orchestrator.log"
        process.terminate()
        found = read_endpoint(tmp_path)
        assert found is not None
        assert answers(found)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("further", "number"), [((), signal.SIGTERM), ((LASTING,), signal.SIGINT)])
def test_the_launcher_ends_and_ties_its_orchestrator_by_the_signal_that_ends_it(
    tmp_path: Path, further: tuple[str, ...], number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied: list[signal.Signals] = []

    def tie(by: signal.Signals) -> Callable[[], None]:
        tied.append(by)
        return tethered(by)

    monkeypatch.setattr(keeper, "tethered", tie)
    (tmp_path / LOGS).mkdir()

    async def story() -> int:
        kept = keeper.Keeper(tmp_path, 0, further=further)
        await kept.start()
        kept.expect_end()
        await kept.restart()
        await kept.keep()
        assert kept._process is not None
        return kept._process.returncode or 0

    assert asyncio.run(story()) == 0
    assert tied == [number]
