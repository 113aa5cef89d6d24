"""Forwarding: what workers print on a machine of their own is shown to the launcher, too, bounded in rate.

The files stay where they are and hold all of it. What is sent is read from them, so that a print waits for nobody: who
prints faster than `CHUNK` every `LOOK_S` is cut short on the way, and the lines say by how much.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

from torchrelay.wire.files.tails import Tail

LOOK_S = 0.25
CHUNK = 64 << 10  # bytes of one log at a time
BEHIND = 1 << 20
MOST_LINE = 16 << 10  # characters
LAST_S = 2.0  # for what stands there at the end
LOG = re.compile(r"(?!agent-)[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.log")

Show = Callable[[str, tuple[str, ...]], None]


class Forwarder:
    """Follows all workers' logs in a folder. `show` takes a log's name and lines; `heard`: whether anybody listens."""

    def __init__(self, folder: Path, show: Show, heard: Callable[[], bool]) -> None:
        self._folder = folder
        self._show = show
        self._heard = heard
        self._tails: dict[str, Tail] = {}

    async def run(self) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._heard():  # what comes meanwhile is read later
                self.look()

    def look(self, *, last: bool = False) -> bool:
        """Show what has come since. Returns whether there was anything."""
        for path in self._folder.glob("*.log"):
            if LOG.fullmatch(path.name):
                self._tails.setdefault(path.name, Tail(path, chunk=CHUNK, behind=BEHIND))
        found = False
        for name, tail in self._tails.items():
            if lines := tail.read(last):
                self._show(name, tuple(line[:MOST_LINE] for line in lines))
                found = True
        return found

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
