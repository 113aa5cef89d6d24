"""Forwarder: what workers print on a machine of its own goes to the launcher's.

The files stay where they are and hold all of it. What is sent is read from them: a print waits for nobody. What comes
faster than `CHUNK` every `LOOK_S` is cut short on the way, and the lines say by how much.

No line is sent twice, and none is lost with a connection: the orchestrator says what has come of each log, and an agent
that is started again goes on there. If the orchestrator has been started anew, too, the agent's own record counts: what
was under way at that moment is then in the log only.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.wire.files.tails import Tail
from torchrelay.wire.messages.channel import OutputFrame, Printed

LOOK_S = 0.25
CHUNK = 64 << 10  # bytes of one log at a time
BEHIND = 1 << 20
MOST_LINE = 16 << 10  # characters
RECORD = "printed"  # a file in the node's folder


class Forwarder:
    """Follows the logs of a node's workers, in a folder with others.

    record    the node's own folder, in which it is noted how far they have been read
    show      takes what is to be sent
    heard     whether anybody takes it
    pause_s   how long to wait between two looks, at least: as long as between two beats, which are few in a large job
    """

    def __init__(
        self,
        folder: Path,
        node: NodeId,
        record: Path,
        *,
        show: Callable[[OutputFrame], None],
        heard: Callable[[], bool],
        pause_s: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._names = names_of(node)
        self._record = record / RECORD
        self._show = show
        self._heard = heard
        self._pause_s = pause_s
        self._tails: dict[str, Tail] = {}
        self._unread: set[str] = set()
        self.go_on(self._recorded())

    async def run(self) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(max(LOOK_S, self._pause_s()))
            if self._heard():  # what comes meanwhile is read later
                self.look()

    def go_on(self, printed: Iterable[Printed]) -> None:
        """Of these logs so much is known to have come."""
        for one in printed:
            if self._names.fullmatch(one.log) and self._tail(one.log).position() != (one.file, one.end):
                with suppress(OSError):  # reading it says so
                    self._tail(one.log).seek(one.file, one.end)

    def look(self, *, last: bool = False) -> bool:
        """Show what has come since. Returns whether there was anything."""
        for path in self._folder.glob("*.log"):
            if self._names.fullmatch(path.name):
                self._tail(path.name)
        found = False
        for name, tail in self._tails.items():
            try:
                lines = tail.read(last)
            except OSError as error:  # somebody has taken its rights away, say: the others are read all the same
                lines = [] if name in self._unread else [f"torchrelay: {name} cannot be read: {error.strerror}"]
                self._unread.add(name)
            if lines:
                self._show(OutputFrame(Printed(name, *tail.position()), tuple(map(shortened, lines))))
                found = True
        if found:
            self._note()
        return found

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()

    def _tail(self, name: str) -> Tail:
        if name not in self._tails:
            self._tails[name] = Tail(self._folder / name, chunk=CHUNK, behind=BEHIND)
        return self._tails[name]

    def _note(self) -> None:
        printed = [Printed(name, *tail.position()) for name, tail in self._tails.items()]
        draft = self._record.with_name(f".{RECORD}")
        with suppress(OSError):  # without it, a line may be sent twice
            draft.write_bytes(msgspec.json.encode(printed))
            draft.replace(self._record)

    def _recorded(self) -> list[Printed]:
        """What an agent before this one has noted."""
        try:
            return msgspec.json.decode(self._record.read_bytes(), type=list[Printed])
        except (OSError, msgspec.DecodeError):
            return []


def names_of(node: NodeId) -> re.Pattern[str]:
    """Names of the logs of workers: of their ranks, and of a node's workers before they have one."""
    return re.compile(rf"(rank-\d{{1,9}}|{re.escape(node)}\.\d{{1,9}}\.\d{{1,19}})\.log")


def shortened(line: str) -> str:
    """A line as it is sent. How much of it is left out is said."""
    if len(line) <= MOST_LINE:
        return line
    return f"{line[:MOST_LINE]} ... ({len(line) - MOST_LINE:,} more characters stand in the log)"
