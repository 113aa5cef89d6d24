"""What processes do that should have ended: the stacks of all threads, and what the kernel says they wait for."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from torchrelay.wire.files.procfs import living_below

_SIGNAL = signal.SIGUSR2
_TOLD_S = 3.0  # a process that does not get to its handler by then is stopped, or its file is full


def tell_when_asked(path: Path) -> None:
    """In a process of a test: on SIGUSR2, the stacks go into this file. Its forked children do the same."""
    faulthandler.register(_SIGNAL, file=path.open("a"), all_threads=True)


def stacks(pids: Iterable[int], folder: Path) -> str:
    """Stacks and wait channels of these processes and their children, those that told by then."""
    processes = [one for pid in pids for one in (pid, *(each.pid for each in living_below(pid)))]
    files = {path: path.stat().st_size for path in folder.glob("*.stacks")}
    for one in processes:
        if _catches(one):
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(one, _SIGNAL)
    deadline = time.monotonic() + _TOLD_S
    while time.monotonic() < deadline and not all(path.stat().st_size > size for path, size in files.items()):
        time.sleep(0.05)
    told = [f"--- {path.name}\n{path.read_text()[-8000:]}" for path in sorted(files)]
    return "\n".join([*(_waits(one) for one in processes), *told])


def _catches(pid: int) -> bool:
    """Whether the process has a handler: without one, the signal would end it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")), 0)
    return bool(caught >> (_SIGNAL - 1) & 1)


def _waits(pid: int) -> str:
    rows = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        try:
            words = (task / "stat").read_text().rsplit(")", 1)[1].split()
            name, where = (task / "comm").read_text().strip(), (task / "wchan").read_text()
            rows.append(f"{task.name} {name!r} {words[0]} {where}")
        except OSError:
            continue  # it has ended
    return f"process {pid}: " + "; ".join(rows)
