"""Life: of a simulated process, as its kernel sees it; what its main thread waits for, and how it ends by itself."""

from __future__ import annotations

from collections.abc import Generator
from enum import Enum
from typing import Any, TypeVar

R = TypeVar("R")


class Life(Enum):
    """Of a process, as its kernel sees it."""

    RUNNING = "running"
    STOPPED = "stopped"  # SIGSTOP
    ENDED = "ended"


class Wait(Enum):
    """What a main thread waits for, other than time."""

    BLOCKED = "blocked"
    ORDERED = "ordered"
    IDLE = "idle"


Main = Generator[int | Wait, Any, R]


class Exit(Exception):
    """The process ends by itself."""

    def __init__(self, code: int, cause: str = "") -> None:
        super().__init__(cause)
        self.code = code
        self.cause = cause
