"""The orchestrator's port is held while none runs: whoever binds or connects meanwhile can neither take it nor wait."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.brain import until
from tests.support.jobs import wait_until
from torchrelay.api.endpoint import Endpoint, read_endpoint
from torchrelay.client.runs import NotPossible
from torchrelay.launcher import keeper as keepers
from torchrelay.launcher.keeper import Keeper, answers, bind, bound
from torchrelay.orchestrator.http.door import Door, Strangers


class Thief(threading.Thread):
    """Wants the port, as any connection that the system gives it to, and connects to it: until it is told to stop."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.over = threading.Event()
        self.stolen = self.refused = self.kept_waiting = 0

    def run(self) -> None:
        while not self.over.wait(0.002):  # or it would fill the backlog itself
            with socket.socket() as thief, suppress(OSError):
                thief.bind(("127.0.0.1", self.port))
                self.stolen += 1
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except (ConnectionRefusedError, ConnectionResetError):
                self.refused += 1
            except TimeoutError:
                self.kept_waiting += 1


def folder(run_dir: Path) -> Path:
    (run_dir / "logs").mkdir(parents=True)
    return run_dir


def another(run_dir: Path, former: Endpoint) -> Endpoint | None:
    found = read_endpoint(run_dir)
    return found if found is not None and found.pid != former.pid else None


@pytest.mark.timeout(120)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_stays_the_orchestrators_while_it_is_started_again(host: str, tmp_path: Path) -> None:
    async def story() -> None:
        keeper = Keeper(folder(tmp_path), 0, host)
        first = endpoint = await keeper.start()
        port = int(first.url.rpartition(":")[2])
        keeping = asyncio.create_task(keeper.keep())
        thief = Thief(port)
        thief.start()
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            former = endpoint
            os.kill(former.pid, number)
            endpoint = await asyncio.to_thread(
                wait_until, "the next one", lambda former=former: another(tmp_path, former), deadline_s=30
            )
            assert endpoint.url == first.url
            assert await asyncio.to_thread(answers, endpoint), "who connects there is heard"
        thief.over.set()
        await asyncio.to_thread(thief.join)
        await asyncio.gather(keeper.stop(0), keeping)
        if host == "127.0.0.1":
            assert (thief.stolen, thief.kept_waiting) == (0, 0)
            assert thief.refused, "they looked while nobody listened"
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass  # the next run may have it at once

    asyncio.run(story())


def test_what_cannot_be_started_now_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor, no memory: training goes on, and somebody may make room."""
    start = asyncio.create_subprocess_exec
    failed: list[object] = []

    async def fails_once(*words: Any, **flags: Any) -> Any:
        if not failed:
            failed.append(words)
            raise OSError(errno.EMFILE, "Too many open files")
        return await start(*words, **flags)

    async def story() -> None:
        keeper = Keeper(folder(tmp_path), 0)
        former = await keeper.start()
        monkeypatch.setattr(asyncio, "create_subprocess_exec", fails_once)
        keeping = asyncio.create_task(keeper.keep())
        os.kill(former.pid, signal.SIGKILL)
        await until("it has failed", lambda: keeper.trouble)
        assert "Too many open files" in str(keeper.trouble)
        await until("the next one", lambda: another(tmp_path, former))
        await asyncio.gather(keeper.stop(0), keeping)

    monkeypatch.setattr(keepers, "SELDOM_S", 0.1)
    asyncio.run(story())


def test_a_door_that_is_closed_leaves_its_port_to_nobody() -> None:
    """In order: whoever has opened it may take seconds to end."""

    async def story(lent: socket.socket) -> None:
        door = Door(asyncio.Protocol, Strangers())
        assert await door.open("127.0.0.1", 0, lent.fileno()) == lent.getsockname()[1]
        await door.close()

    with bind("127.0.0.1", 0) as lent:
        asyncio.run(story(lent))
        with pytest.raises(OSError, match="in use"):
            bound("127.0.0.1", lent.getsockname()[1])


def test_a_port_that_somebody_else_has_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(NotPossible, match=f"port {port} on 127.0.0.1 cannot be used .* choose another --port"):
            asyncio.run(Keeper(tmp_path, port).start())


def test_two_runs_cannot_have_one_port(tmp_path: Path) -> None:
    """Not even while the orchestrator of the first is away."""

    async def story() -> None:
        first = Keeper(folder(tmp_path / "first"), 0)
        endpoint = await first.start()
        keeping = asyncio.create_task(first.keep())
        os.kill(endpoint.pid, signal.SIGKILL)
        with pytest.raises(NotPossible, match="cannot be used"):
            await Keeper(tmp_path / "second", int(endpoint.url.rpartition(":")[2])).start()
        await asyncio.gather(first.stop(0), keeping)

    asyncio.run(story())
