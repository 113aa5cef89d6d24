"""What tests of service share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from torchrelay.orchestrator.store.journal import read_history
from torchrelay.protocol.messages import events as ev


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30))


class FakeTime:
    """A clock's source that a test moves on."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns

    def sleep(self, seconds: float) -> None:
        """Time passes in which the orchestrator runs: in small pieces."""
        self.ns += int(seconds * 1e9)


def told(folder: Path) -> list[int]:
    """What the journal says was left out, one after the other."""
    entries = read_history(folder / "journal.db").entries
    return [entry.event.ms for entry in entries if isinstance(entry.event, ev.TimeLeftOut)]


class Deaf:
    """Heirs that have nothing of what was written, until they do."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def when_safe(self, action: Callable[[], None]) -> None:
        self.waiting.append(action)
