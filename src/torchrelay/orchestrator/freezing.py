"""Freezing by file: while RUN_DIR/FREEZE, or FREEZE in the folder of all runs, is there, the orchestrator looks on.

A file works without an API, a token, or a living orchestrator, and who comes back looks for it before anything else.
Its first line says why; the second, if there is one, who made it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from torchrelay.orchestrator.clock import wall_clock_ms
from torchrelay.orchestrator.endpoint import FREEZE, LIFTED
from torchrelay.orchestrator.journal import Call, JournalUnavailable
from torchrelay.orchestrator.service import Orchestrator
from torchrelay.protocol.events import FreezeCleared, FreezeSet

log = logging.getLogger("torchrelay.orchestrator")

LOOK_S = 0.5
LIFTED_S = 30.0
PREFIX = "file "  # of a source; what other sources say is not ours to lift
MAX_TEXT = 1_000  # bytes read of a file

Change = tuple[FreezeSet | FreezeCleared, Call]


def freeze_files(run_dir: Path) -> tuple[Path, Path]:
    """Where the file may lie: for this run, and for all runs of the folder it is in."""
    own = run_dir.absolute()
    return own / FREEZE, own.parent / FREEZE


def read_freezes(run_dir: Path) -> dict[str, tuple[str, str]]:
    """The files that are there, as sources, with the reason and who made them.

    One that belongs to somebody else (but root) is not heeded: folders of runs may lie where anybody may write.
    """
    found = {}
    for path in freeze_files(run_dir):
        try:
            owner = path.stat().st_uid
            lines = read_lines(path)
        except FileNotFoundError:
            continue
        except OSError as error:  # it is there, and that is what counts
            owner, lines = os.getuid(), [f"({path.name} cannot be read: {error.strerror})"]
        if owner in (os.getuid(), 0):
            reason, who = ((*lines, "", "")[:2]) if lines else ("", "")
            found[f"{PREFIX}{path}"] = (reason, who or f"uid {owner}")
    return found


def read_lines(path: Path) -> list[str]:
    """The first lines of a file, without what a terminal would take for an order."""
    if path.is_dir():
        return []
    with path.open("rb") as file:
        text = file.read(MAX_TEXT).decode("utf-8", "replace")
    return ["".join(c for c in line if c.isprintable()).strip() for line in text.splitlines()]


def changes(known: Mapping[str, str], found: Mapping[str, tuple[str, str]]) -> list[Change]:
    """What the files say that the state does not know yet."""
    now = wall_clock_ms()
    said: list[Change] = []
    for source, (reason, who) in found.items():
        if known.get(source) != reason:
            call = Call(wall_ms=now, who=who, call="freeze", what=f"{source}{': ' if reason else ''}{reason}")
            said.append((FreezeSet(source=source, reason=reason), call))
    for source in known:
        if source.startswith(PREFIX) and source not in found:
            who = lifted_by(Path(source.removeprefix(PREFIX)))
            call = Call(wall_ms=now, who=who, call="unfreeze", what=source)
            said.append((FreezeCleared(source=source), call))
    return said


def lifted_by(path: Path) -> str:
    """Who removed a file, if it was `torchrelay unfreeze` and just now: that leaves its name beside it."""
    note = path.with_name(LIFTED)
    try:
        if time.time() - note.stat().st_mtime < LIFTED_S:
            return read_lines(note)[0]
    except (OSError, IndexError):
        pass  # somebody else did
    return "whoever removed the file"


def look_for_freezes(service: Orchestrator, run_dir: Path) -> None:
    """Look once, before anything is done. Raises `JournalUnavailable`, `Superseded`."""
    for event, call in changes(service.cluster.freezes, read_freezes(run_dir)):
        service.hear(event, call)


async def watch_freezes(service: Orchestrator, run_dir: Path) -> None:
    """Look every half second, for ever."""
    while True:
        try:
            for event, call in changes(service.cluster.freezes, read_freezes(run_dir)):
                await service.put(event, call)
        except JournalUnavailable as error:
            log.warning("a freeze could not be noted: %s", error)
        await asyncio.sleep(LOOK_S)
