"""What a worker says before its agent is told of it is heard, in order; what a stranger says is not."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrelay.agent.network.network import MOST, Network
from torchrelay.agent.network.paths import LinkState
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.wire.files.launch import PathLimits
from torchrelay.wire.messages.netreport import NetPage, encode_page

NEAR, FAR = "127.0.91.1", "127.0.91.2"


class Ear:
    """An agent's ear, and this process as one that may be its worker."""

    def __init__(self, folder: Path) -> None:
        self.slots: dict[int, int] = {}
        self.network = Network(
            folder,
            NodeId("node-0"),
            PathLimits(down_s=60.0),
            slot_of=self.slots.get,
            tell=lambda _: None,
            show=lambda _: None,
            sysfs=folder / "sysfs",
        )
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    async def say(self, what: str) -> None:
        """Say it, and give the agent its turn: it reads all that lies there before it yields."""
        report: dict[str, Any] = {"v": 1, "what": what, "ts": 1.0, "pid": os.getpid(), "local": NEAR, "remote": FAR}
        self.socket.sendto(json.dumps(report).encode(), str(self.network.socket_path))
        for _ in range(3):
            await asyncio.sleep(0)

    def leave_page(self) -> None:
        page = NetPage(pid=os.getpid(), rank=None, updated_us=1, rows=())
        (self.network.stats_folder / f"net-{os.getpid()}").write_bytes(encode_page(page))

    def claim(self) -> None:
        """The agent is told that this process is its worker."""
        self.slots[os.getpid()] = 0

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.network.reports, self.network.malformed, self.network.strangers

    def state(self) -> LinkState:
        (link,) = self.network.judge.paths.links.values()
        return link.state


def with_ear(folder: Path, story: Callable[[Ear], Any]) -> None:
    async def play() -> None:
        ear = Ear(folder)
        ear.network.open()
        try:
            await story(ear)
        finally:
            ear.network.close()
            ear.socket.close()

    asyncio.run(play())


def test_what_a_worker_said_before_it_was_known_is_heard_at_the_next_look(tmp_path: Path) -> None:
    async def story(ear: Ear) -> None:
        await ear.say("path_down")
        assert ear.counts == (0, 0, 0)
        ear.claim()
        ear.network.look()
        assert ear.counts == (1, 0, 0)
        assert ear.state() is LinkState.DOWN

    with_ear(tmp_path, story)


def test_a_look_between_does_not_make_a_stranger_of_it(tmp_path: Path) -> None:
    async def story(ear: Ear) -> None:
        ear.network.look()
        ear.leave_page()
        await ear.say("path_down")
        ear.network.look()
        await ear.say("path_up")
        assert ear.counts == (0, 0, 0)
        ear.claim()
        ear.network.look()
        assert ear.counts == (2, 0, 0)
        assert ear.state() is LinkState.UP

    with_ear(tmp_path, story)


def test_it_is_heard_before_what_the_worker_says_later(tmp_path: Path) -> None:
    async def story(ear: Ear) -> None:
        await ear.say("path_down")
        ear.network.look()
        await ear.say("path_down")
        ear.claim()
        await ear.say("path_up")
        assert ear.counts == (3, 0, 0)
        assert ear.state() is LinkState.UP
        ear.network.look()
        assert ear.counts == (3, 0, 0)
        assert ear.state() is LinkState.UP

    with_ear(tmp_path, story)


def test_a_process_that_nobody_claims_is_a_stranger_at_the_second_look(tmp_path: Path) -> None:
    async def story(ear: Ear) -> None:
        ear.leave_page()
        await ear.say("path_down")
        ear.network.look()
        assert ear.counts == (0, 0, 0)
        ear.network.look()
        assert ear.counts == (0, 0, 2), "its report, and its page"
        ear.network.look()
        assert ear.counts == (0, 0, 2), "a page is counted once"
        assert not ear.network.judge.paths.links

    with_ear(tmp_path, story)


def test_strangers_do_not_fill_the_memory(tmp_path: Path) -> None:
    async def story(ear: Ear) -> None:
        for _ in range(MOST + 3):
            await ear.say("path_down")
        assert ear.counts == (0, 0, 3)
        ear.network.look()
        ear.network.look()
        assert ear.counts == (0, 0, MOST + 3)
        await ear.say("path_down")
        assert ear.counts == (0, 0, MOST + 3), "there is room again"

    with_ear(tmp_path, story)
