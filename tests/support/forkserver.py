"""What tests of forkserver share."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.agent_stage import ROOT, lives, offspring
from torchrelay.agent.workers.forks import (
    Fork,
    FromForkserver,
    Inventory,
    ToForkserver,
    from_forkserver,
)
from torchrelay.protocol.messages.ids import JobId, WorkerId
from torchrelay.wire.messages.codec import encode
from torchrelay.wire.messages.framing import FrameSocket

DEADLINE_S = 20.0
M = TypeVar("M", bound=FromForkserver)


class Server:
    """A forkserver and our connection to it."""

    def __init__(self, folder: Path, *preload: str, linger_s: float = 0.0, lasts: bool = False) -> None:
        self.folder = folder
        self.path = folder / "forkserver"
        self._connections: list[FrameSocket] = []
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.path))
            listener.listen(4)
            self.agent = self.connect()
            command = [sys.executable, "-P", "-m", "torchrelay.agent.workers.forkserver"]
            command += ["--listener", str(listener.fileno()), "--linger", str(linger_s)]
            command += ["--lasting"] * lasts
            for module in preload or ("tests.support.fake_workers",):
                command += ["--preload", module]
            self.process = subprocess.Popen(command, env=env, pass_fds=(listener.fileno(),), start_new_session=True)

    def connect(self) -> FrameSocket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self.path))
        self._connections.append(FrameSocket(connection))
        return self._connections[-1]

    def hang_up(self) -> None:
        for connection in self._connections:
            connection.close()

    def say(self, request: ToForkserver) -> None:
        self.agent.send(encode(request))

    def hear(self, kind: type[M], agent: FrameSocket | None = None) -> M:
        """The next report, which must be of this kind."""
        data = (agent or self.agent).receive(DEADLINE_S)
        assert data is not None, f"waited for {kind.__name__} in vain"
        report = from_forkserver.decode(data)
        assert isinstance(report, kind), report
        return report

    def fork(self, worker: str, function: str, *args: str, cwd: str = "/", log: str | None = None) -> None:
        self.say(
            Fork(
                worker=WorkerId(worker),
                job=JobId("j"),
                slot=1,
                function=f"tests.support.fake_workers:{function}",
                argv=("script", *args),
                env={"PYTHONPATH": str(ROOT)},
                cwd=cwd,
                log=log or str(self.log(worker)),
            )
        )

    def log(self, worker: str) -> Path:
        return self.folder / f"{worker}.log"

    def says(self, worker: str, text: str) -> str:
        deadline = time.monotonic() + DEADLINE_S
        while not self.log(worker).exists() or text not in self.log(worker).read_text():
            assert time.monotonic() < deadline, f"{worker} does not say {text!r}"
            time.sleep(0.002)
        return self.log(worker).read_text()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    yield from serving(Server(tmp_path, linger_s=30.0))


def serving(server: Server) -> Iterator[Server]:
    """The server; afterwards it is ended, and nothing of it may be left."""
    server.hear(Inventory)
    yield server
    left = list(offspring(server.process.pid))
    server.process.terminate()
    assert server.process.wait(DEADLINE_S) == 0
    server.hang_up()
    assert [pid for pid in left if lives(pid)] == []
