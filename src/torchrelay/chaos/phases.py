"""Phases: waits until a worker does what it is to be hit in, as its page tells."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchrelay.chaos.faults import Fault, Gone, Victim, held
from torchrelay.chaos.whereabouts import Refusal
from torchrelay.chaos.wishes import Phase
from torchrelay.protocol.messages.ids import WorkerPhase
from torchrelay.wire.files.page import BadPage, Page, Status

WITHIN_S = 60.0
IN = {
    Phase.BACKWARD: WorkerPhase.COMPUTING,
    Phase.GATE: WorkerPhase.GATE,
    Phase.UPDATE: WorkerPhase.UPDATING,
    Phase.SECTION: WorkerPhase.SECTION,
}


def await_phase(path: Path, phase: Phase, within_s: float = WITHIN_S) -> None:
    """Return the moment the worker is in the phase. Raises `Refusal` if that does not come."""
    if phase is not Phase.ANY:
        with _page(path) as page:
            _await(page, phase, time.monotonic() + within_s, within_s)


def catch(path: Path, phase: Phase, victim: Victim, within_s: float = WITHIN_S) -> None:
    """Stop the worker (SIGSTOP) in the midst of the phase. Raises `Refusal` if that does not come, `Gone` if it ends.

    A phase may be over between a look at it and a signal: then the worker goes on, and is caught another time.
    """
    until = time.monotonic() + within_s
    with _page(path) as page, held(victim) as hit:
        while True:
            _await(page, phase, until, within_s)
            hit(Fault.STOP)
            caught = False
            try:
                while not has_stopped(victim.pid):
                    if time.monotonic() >= until:
                        raise Refusal(f"the worker did not stop within {within_s:g} s (a thread waits in the kernel)")
                    time.sleep(0.0005)
                caught = is_in(page.status(), phase, time.monotonic_ns())
            finally:
                if not caught:
                    hit(Fault.CONTINUE)
            if caught:
                return


def has_stopped(pid: int) -> bool:
    """Whether all threads of a process stand still by a signal. Raises `Gone` if it has ended."""
    states = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread ends
            states[task.name] = (task / "stat").read_text().rpartition(")")[2].split()[0]
    if states.get(str(pid), "Z") in "ZX":
        raise Gone(f"process {pid} has ended")
    return all(state in "TtZX" for state in states.values())


@contextmanager
def _page(path: Path) -> Iterator[Page]:
    try:
        page = Page(path)
        page.status()
    except (FileNotFoundError, BadPage) as error:
        raise Refusal(f"the worker has no page yet ({path}): --phase any hits it all the same") from error
    try:
        yield page
    finally:
        page.close()


def _await(page: Page, phase: Phase, until: float, within_s: float) -> None:
    # Without a pause: a gate may last as little as a tenth of a millisecond.
    while not is_in(page.status(), phase, time.monotonic_ns()):
        if time.monotonic() >= until:
            raise Refusal(f"the worker was not in {phase} within {within_s:g} s; nothing was done")


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
    except (FileNotFoundError, BadPage):
        return ""
    return told
