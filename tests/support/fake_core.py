"""Stands in for the network core of a process (native/netpath): keeps its page, sends its reports, as told by a file.

`follow(wishes)` runs in a thread of a worker; `tests.support.fake_core:work` is a worker that does nothing else. The
file holds, as JSON, what the core is to pretend:

    links   those that are used: [path, interface, local, remote]
    lost    [local, remote] of those that are lost
    reason  why
    rate    bytes a second over each link that is there
    raw     texts that are sent as they are, each once
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrelay.wire.messages.netreport import NetPage, Row, RowState, encode_page

EVERY_S = 0.05
AT_ONCE = 4  # the kernel keeps ten datagrams for a reader, mostly (net.unix.max_dgram_qlen)


def now_us() -> int:
    return time.time_ns() // 1000


@dataclass
class Link:
    path: int
    interface: str
    local: str
    remote: str
    lost_us: int = 0
    bytes: float = 0.0


class FakeCore:
    """One process's core."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.page = Path(os.environ["TORCHRELAY_NET_STATS"]) / f"net-{os.getpid()}"
        self.file = os.open(self.page, os.O_RDWR | os.O_CREAT, 0o600)
        self.links: dict[tuple[str, str], Link] = {}
        self.sequence = 0
        self.raw = 0
        self.looked = time.monotonic()

    def report(self, what: str, link: Link, **more: Any) -> None:
        rank = os.environ.get("RANK", "")
        self.send(
            json.dumps(
                {
                    "v": 1,
                    "what": what,
                    "ts": time.time(),
                    "pid": os.getpid(),
                    "rank": int(rank) if rank else None,
                    "path": link.path,
                    "interface": link.interface,
                    "local": link.local,
                    "remote": link.remote,
                    **more,
                }
            )
        )

    def send(self, text: str) -> bool:
        """Whether it was taken: where nobody listens, or has no time, it is dropped."""
        try:
            self.socket.sendto(text.encode(), os.environ["TORCHRELAY_NET_REPORT"])
        except OSError:
            return False
        return True

    def pretend(self, wish: dict[str, Any]) -> None:
        """Become what is wished, and tell of what changes by that."""
        wanted = {(local, remote): Link(path, name, local, remote) for path, name, local, remote in wish["links"]}
        self.links = {key: self.links.get(key, link) for key, link in wanted.items()}
        lost = {tuple(each) for each in wish.get("lost", ())}
        passed = time.monotonic() - self.looked
        self.looked += passed
        for key, link in self.links.items():
            if key in lost and not link.lost_us:
                link.lost_us = now_us()
                self.report("path_down", link, reason=wish.get("reason", "silent"), under_way=4)
            elif key not in lost and link.lost_us:
                self.report("path_up", link, outage_ms=(now_us() - link.lost_us) // 1000)
                link.lost_us = 0
            link.bytes += 0 if link.lost_us else wish.get("rate", 0) * passed
        for text in wish.get("raw", ())[self.raw : self.raw + AT_ONCE]:
            if not self.send(text.replace("PID", str(os.getpid()))):
                break
            self.raw += 1

    def write(self) -> None:
        """The page, as the core writes it: its sequence is odd meanwhile."""
        rows = tuple(
            Row(
                interface=link.interface,
                local=link.local,
                remote=link.remote,
                path=link.path,
                live=0 if link.lost_us else 2,
                state=RowState.DOWN if link.lost_us else RowState.UP,
                round_trip_us=180,
                sent_bytes=round(link.bytes),
                received_bytes=round(link.bytes),
                sent_again=3,
                duplicates=1,
                downs=0,
                ups=0,
                corrupt=0,
                down_since_us=link.lost_us,
            )
            for link in self.links.values()
        )
        rank = os.environ.get("RANK", "")
        page = NetPage(pid=os.getpid(), rank=int(rank) if rank else None, updated_us=now_us(), rows=rows)
        self.sequence += 2
        data = encode_page(page, self.sequence)
        os.pwrite(self.file, (self.sequence - 1).to_bytes(8, "little"), 8)
        os.pwrite(self.file, data[64:], 64)
        os.pwrite(self.file, data[:8] + (self.sequence - 1).to_bytes(8, "little") + data[16:64], 0)
        os.pwrite(self.file, self.sequence.to_bytes(8, "little"), 8)


def follow(wishes: Path, section: str | None = None) -> None:
    """Pretend for ever what stands in the file, or in one section of it."""
    core = FakeCore()
    while True:
        try:
            wish = json.loads(wishes.read_text())
        except FileNotFoundError:
            wish = {}
        found = wish if section is None else wish.get(section)
        if found:
            core.pretend(found)
            core.write()
        time.sleep(EVERY_S)


def follow_beside(wishes: Path) -> None:
    """The same in a thread, for this process's node: in a worker that has something else to do."""
    threading.Thread(target=follow, args=(wishes, os.environ["TORCHRELAY_NODE"]), daemon=True).start()


def work() -> None:
    """A worker that does nothing else; its file is `<worker>.json` in the working folder."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("ready", os.environ["TORCHRELAY_NET_REPORT"], os.environ["TORCHRELAY_NET_STATS"], flush=True)
    follow(Path(f"{os.environ['TORCHRELAY_WORKER']}.json"))


def wish(path: Path, **fields: Any) -> None:
    """Write the file, whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(fields))
    draft.replace(path)
