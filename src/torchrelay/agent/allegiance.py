"""Allegiance: which orchestrator an agent obeys. The one whose journal it knows, with the highest lease it has heard.

An orchestrator that has lost its journal, or an old one that was stopped and woke up, would give orders without knowing
what is so: its orders are refused. A file in the node's folder remembers it for the next agent of this node.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
from msgspec import Struct

from torchrelay.wire.messages.codec import WireError

logger = logging.getLogger(__name__)

FILE = "allegiance.json"


class Known(Struct, frozen=True):
    """The journal's name, and the highest lease under which orders were taken."""

    journal: str = ""
    lease: int = 0


class Allegiance:
    """Raises `WireError` for whoever is not to be obeyed. Without a folder nothing is remembered."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = None if folder is None else folder / FILE
        self.known = self._read()

    def accept(self, journal: str, lease: int) -> None:
        """An orchestrator says who it is: from now on it is the one, or it is refused."""
        if self.known.journal and journal != self.known.journal:
            raise WireError("this orchestrator has another journal than the one that our workers run by: not obeyed")
        self.check(lease)
        known = Known(journal, lease)
        if known != self.known:
            self.known = known
            self._write()

    def check(self, lease: int) -> None:
        if lease < self.known.lease:
            raise WireError(f"the orchestrator's lease {lease} is over: we were attached to {self.known.lease}")

    def _read(self) -> Known:
        try:
            return Known() if self._path is None else msgspec.json.decode(self._path.read_bytes(), type=Known)
        except (OSError, msgspec.DecodeError):
            return Known()

    def _write(self) -> None:
        if self._path is None:
            return
        draft = self._path.with_name(f".{FILE}")
        try:
            draft.write_bytes(msgspec.json.encode(self.known))
            draft.replace(self._path)
        except OSError as error:
            logger.warning("which orchestrator is obeyed cannot be kept for the next agent: %s", error)
