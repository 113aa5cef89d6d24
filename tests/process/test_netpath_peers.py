"""A peer's process dies: what the network core says of it, and that the agent blames no path."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from torchrelay.agent.network.paths import LinkState, Paths
from torchrelay.netpath.native.library import NotBuilt, find
from torchrelay.wire.messages.netreport import MAX_REPORT, Report, decode_report

OURS, THEIRS = ("127.0.97.1", "127.0.97.2"), ("127.0.97.3", "127.0.97.4")
LIMIT_S = 20.0

# Both ends run this. One listens and says where; the other is told, and connects. Then nobody has anything to say.
STORY = """
import sys, time
from torchrelay.netpath.native.binding import Connecting, Listener, inject, paths

def until(fact):
    deadline = time.monotonic() + 20
    while not (found := fact()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found

if sys.argv[1] == "listens":
    listener = Listener()
    print(listener.handle.hex(), flush=True)
    comm = until(lambda: listener.accept(0))
else:
    comm = until(Connecting(bytes.fromhex(sys.stdin.readline()), 0).poll)
until(lambda: sum(path.live for path in paths()) == len(paths()))
print("idle", flush=True)
for line in sys.stdin:
    inject(line.strip())
"""


class Pair:
    """Two idle processes, joined by two paths; what the second says of them."""

    def __init__(self, folder: Path, roles: tuple[str, str], count: int) -> None:
        self.reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.reports.bind(str(folder / "reports"))
        self.reports.settimeout(LIMIT_S)
        self.judged = Paths(slow_share=0.5, window_s=3600.0)
        self.now = 0.0
        watched = {"TORCHRELAY_NET_REPORT": str(folder / "reports")}
        self.peer = self._start(roles[0], ",".join(THEIRS[:count]), {})
        self.own = self._start(roles[1], ",".join(OURS[:count]), watched)
        listens, connects = (self.peer, self.own) if roles[0] == "listens" else (self.own, self.peer)
        say(connects, line_of(listens))
        assert [line_of(each) for each in (self.peer, self.own)] == ["idle", "idle"]

    @staticmethod
    def _start(role: str, addresses: str, env: dict[str, str]) -> subprocess.Popen[str]:
        env = {**os.environ, "TORCHRELAY_NET_PATHS": addresses, **env}
        return subprocess.Popen(
            [sys.executable, "-c", STORY, role], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self, what: str) -> Report:
        """Hand the agent what is reported, up to the first of this kind."""
        while True:
            report = decode_report(self.reports.recv(MAX_REPORT))
            self.now += 0.001
            self.judged.heard(report, self.now)
            if report.what == what:
                return report

    def flaps(self) -> int:
        return sum(len(link.flaps) for link in self.judged.links.values())

    def close(self) -> None:
        self.reports.close()
        for process in (self.peer, self.own):
            process.kill()
            process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say(process: subprocess.Popen[str], line: str) -> None:
    to: IO[str] | None = process.stdin
    assert to is not None
    to.write(f"{line}\n")
    to.flush()


@pytest.fixture(params=[("listens", "connects"), ("connects", "listens")], ids=["receiver dies", "sender dies"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    try:
        find()
    except NotBuilt as error:
        pytest.skip(str(error))
    made = Pair(tmp_path, request.param, 2)
    yield made
    made.close()


def test_an_idle_peer_that_is_killed_is_no_fault_of_its_paths(pair: Pair) -> None:
    pair.peer.send_signal(signal.SIGKILL)
    said = pair.hear("peer_unreachable")
    assert set(said.remotes) == set(THEIRS)
    assert pair.flaps() == 0
    assert {link.state for link in pair.judged.links.values()} == {LinkState.UNREACHABLE}


def test_connections_that_end_one_by_one_are_faults_of_their_paths(pair: Pair) -> None:
    """The test of the test."""
    say(pair.own, "path0:reset@0s")
    pair.hear("path_up")
    assert pair.flaps() == 1


def test_a_peer_with_a_single_path_is_gone_when_its_machine_refuses(tmp_path: Path) -> None:
    made = Pair(tmp_path, ("listens", "connects"), 1)
    try:
        made.peer.send_signal(signal.SIGKILL)
        made.hear("peer_unreachable")
        assert made.flaps() == 0
    finally:
        made.close()
