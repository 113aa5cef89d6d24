"""Waiting for facts of machines, with a deadline."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from tests.support.patience import longer

DEADLINE_S = 30.0
PAUSE_S = 0.005


class MachineError(Exception):
    """Something that a machine was to do, and why it was not done."""


def wait_for(what: str, fact: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Raises `MachineError` with its name if it does not come about."""
    until = time.monotonic() + longer(deadline_s)
    while not fact():
        if time.monotonic() > until:
            raise MachineError(f"{what}: not within {deadline_s:g} s")
        time.sleep(PAUSE_S)


def wait_readable(fd: int, what: str, deadline_s: float = DEADLINE_S) -> None:
    """Raises `MachineError` if nothing is to be read there in time."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if not poll.poll(longer(deadline_s) * 1000):
        raise MachineError(f"{what}: not within {deadline_s:g} s")
