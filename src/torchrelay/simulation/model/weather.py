"""Weather: how messages travel, and what becomes of some on the way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Weather:
    """How messages travel. Times in ms, chances from 0 to 1."""

    latency_ms: tuple[int, int] = (1, 3)
    late: float = 0.0  # chance that a message takes up to late_ms
    late_ms: int = 600
    lost: float = 0.0
    doubled: float = 0.0
    reordered: bool = False
