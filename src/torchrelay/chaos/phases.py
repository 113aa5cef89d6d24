"""Phases: waits until a worker does what it is to be hit in, as its page tells."""

from __future__ import annotations

import time
from pathlib import Path

from torchrelay.chaos.whereabouts import Refusal
from torchrelay.chaos.wishes import Phase
from torchrelay.protocol.ids import WorkerPhase
from torchrelay.wire.page import Page, Status

WITHIN_S = 60.0
IN = {
    Phase.BACKWARD: WorkerPhase.COMPUTING,
    Phase.GATE: WorkerPhase.GATE,
    Phase.UPDATE: WorkerPhase.UPDATING,
    Phase.SECTION: WorkerPhase.SECTION,
}


def await_phase(path: Path, phase: Phase, within_s: float = WITHIN_S) -> None:
    """Return the moment the worker is in the phase. Raises `Refusal` if that does not come."""
    if phase is Phase.ANY:
        return
    try:
        page = Page(path)
    except (FileNotFoundError, ValueError) as error:
        raise Refusal(f"the worker has no page yet ({path}): --phase any hits it all the same") from error
    until = time.monotonic() + within_s
    try:
        # Without a pause: a gate may last as little as a tenth of a millisecond.
        while not is_in(page.status(), phase, time.monotonic_ns()):
            if time.monotonic() >= until:
                raise Refusal(f"the worker was not in {phase} within {within_s:g} s; nothing was done")
    finally:
        page.close()


def is_in(status: Status, phase: Phase, now_ns: int) -> bool:
    """Whether it is in the phase now."""
    if status.phase is not IN[phase]:
        return False
    return phase is not Phase.BACKWARD or now_ns - status.entered_ns >= status.step_ns // 2


def last_phase(path: Path) -> str:
    """What the worker was in when it was last seen; empty if its page is gone."""
    try:
        page = Page(path)
        told = str(page.status().phase)
        page.close()
    except (FileNotFoundError, ValueError):
        return ""
    return told
