"""What tests of service share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


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
