"""Alone: what an agent writes down of its workers as long as no orchestrator hears it, in its node's folder.

Whoever started the run reads it there: a run whose orchestrator cannot come back is followed to its end by it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from torchrelay.protocol.messages.ids import Generation, JobId, Point, Rank, WorkerId, WorkerPhase

FILE = "alone.json"
WRITE_S = 1.0  # between two writings


class Lone(Struct, frozen=True, kw_only=True):
    """A worker: where it is, or how it ended. An end that an orchestrator has heard of is not among them."""

    worker: WorkerId
    job: JobId | None = None
    rank: Rank | None = None
    generation: Generation = Generation(0)
    point: Point | None = None
    phase: WorkerPhase = WorkerPhase.BOOTING
    ended: str = ""  # how, in words; empty as long as it runs
    code: int | None = None  # its exit code, if it has ended by itself

    @property
    def done(self) -> bool:
        """Whether its rank's script has ended with 0."""
        if self.rank is None:
            return False
        return self.code == 0 if self.ended else self.phase is WorkerPhase.FINISHED


class Alone(Struct, frozen=True, kw_only=True):
    """All workers of a node."""

    workers: tuple[Lone, ...] = ()


def write_alone(folder: Path, alone: Alone) -> None:
    """Write it whole or not at all. Raises OSError."""
    draft = folder / f".{FILE}"
    draft.write_bytes(msgspec.json.encode(alone))
    draft.replace(folder / FILE)


def read_alone(folder: Path) -> Alone | None:
    """What stands there; None if the agent is not alone."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Alone)
    except (OSError, msgspec.DecodeError):
        return None
