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

from torchrelay.api.endpoint import FREEZE, LIFTED, TOKEN
from torchrelay.orchestrator.core.clock import wall_clock_ms
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.store.journal import Call, JournalUnavailable, Unwritable
from torchrelay.protocol.messages.events import FreezeCleared, FreezeSet
from torchrelay.wire.files.owned import Foreign, read_owned
from torchrelay.wire.trust.trust import TrustError, read_token, redact

log = logging.getLogger("torchrelay.orchestrator")

LOOK_S = 0.5
LIFTED_S = 30.0
PREFIX = "file "  # of a source; what other sources say is not ours to lift
DROPPED = "(not shown: it holds what looks like a secret)"

Change = tuple[FreezeSet | FreezeCleared, Call]
_told: dict[Path, str] = {}  # what is not heeded, and why: told once


def freeze_files(run_dir: Path) -> tuple[Path, Path]:
    """Where the file may lie: for this run, and for all runs of the folder it is in."""
    own = run_dir.absolute()
    return own / FREEZE, own.parent / FREEZE


def read_freezes(run_dir: Path) -> dict[str, tuple[str, str]]:
    """The files that are there, as sources, with the reason and who made them.

    What is not a plain file of ours (or of root) is not heeded: folders of runs may lie where anybody may write.
    """
    found = {}
    for path in freeze_files(run_dir):
        try:
            file = read_owned(path)
            lines, owner = lines_of(without_secrets(file.text, run_dir)), file.uid
        except FileNotFoundError:
            _told.pop(path, None)
            continue
        except Foreign as error:
            if _told.get(path) != str(error):
                log.warning("%s is not heeded: %s", path, error)
                _told[path] = str(error)
            continue
        except OSError as error:  # it is there, and that is what counts
            owner, lines = os.getuid(), [f"({path.name} cannot be read: {error.strerror})"]
        _told.pop(path, None)
        reason, who = (*lines, "", "")[:2]
        found[f"{PREFIX}{path}"] = (reason, who or f"uid {owner}")
    return found


def lines_of(text: str) -> list[str]:
    """The lines of a text, without what a terminal would take for an order."""
    return ["".join(c for c in line if c.isprintable()).strip() for line in text.splitlines()]


def without_secrets(text: str, run_dir: Path) -> str:
    """What a file says is journalled and shown: no secret may get there, however it came into the file."""
    try:
        token = read_token(run_dir / TOKEN)
    except TrustError:
        token = ""
    return DROPPED if redact(text) != text or (token and token in text) else text


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
    try:
        note = read_owned(path.with_name(LIFTED))
        if time.time() - note.changed_s < LIFTED_S:
            return lines_of(without_secrets(note.text, path.parent))[0]
    except (OSError, Foreign, IndexError):
        pass  # somebody else did
    return "whoever removed the file"


def look_for_freezes(service: Orchestrator, run_dir: Path) -> None:
    """Look once, before anything is done. Raises `JournalUnavailable`, `Superseded`."""
    for event, call in changes(service.cluster.freezes, read_freezes(run_dir)):
        try:
            service.hear(event, call)
        except Unwritable as error:
            log.warning("a freeze could not be noted: %s", error)


async def watch_freezes(service: Orchestrator, run_dir: Path) -> None:
    """Look every half second, for ever."""
    while True:
        try:
            for event, call in changes(service.cluster.freezes, read_freezes(run_dir)):
                await service.put(event, call)
        except (JournalUnavailable, Unwritable) as error:
            log.warning("a freeze could not be noted: %s", error)
        await asyncio.sleep(LOOK_S)
