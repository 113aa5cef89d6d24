"""Aborts: what Gloo said before it ended a process.

Gloo aborts in a thread of its own when data of another size comes than it waits for: two ranks make collectives that
do not match. Its words, and the stack that `faulthandler` prints behind them, are the last of the rank's log.
"""

from __future__ import annotations

import re
from pathlib import Path

from torchrelay.agent.workers.forks import Ended
from torchrelay.protocol.model.deaths import MISMATCH

LAST = 64 << 10  # bytes of a log that are looked at
_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_ABORT = "gloo::EnforceNotMet"
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in \w+')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/torchrelay/", "<")
SIGABRT = 6


def cause_of(ended: Ended, logs: list[Path]) -> str:
    """How a worker ended, in words; with Gloo's reason if that stands in one of these logs."""
    if ended.signal != SIGABRT:
        return ended.cause
    for log in logs:
        found = mismatch(last_of(log))
        if found:
            return f"{ended.cause}: {found}"
    return ended.cause


def last_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def mismatch(text: str) -> str:
    """What the last abort in a log says of collectives that do not match; empty if it says nothing of that."""
    _, abort, last = text.rpartition(_ABORT)
    sizes = _SIZES.search(last) if abort else None
    if sizes is None:
        return ""
    told = f"{MISMATCH}: Gloo ended the process as {sizes[1]} bytes came where it waited for {sizes[2]}"
    line = line_in(last)
    return f"{told} ({line})" if line else told


def line_in(text: str) -> str:
    """The innermost line of the script, in the stacks that `faulthandler` has printed."""
    for name, line in _FRAME.findall(text):
        if not any(part in name for part in _LIBRARIES):
            return f"{Path(name).name}:{line}"
    return ""
