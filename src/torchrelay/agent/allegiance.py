"""Allegiance: which orchestrator an agent obeys, and what it writes down as long as none hears it.

It obeys the one whose journal it knows, with the highest lease that it has heard.

An orchestrator that has lost its journal, or an old one that was stopped and woke up, would give orders without knowing
what is so: its orders are refused. A file in the node's folder remembers it for the next agent of this node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from torchrelay.agent.workers.forks import Ended
from torchrelay.protocol.health.pulses import Sample
from torchrelay.protocol.messages.events import WorkerSeen
from torchrelay.wire.files.alone import FILE, WRITE_S, Alone, Lone, write_alone
from torchrelay.wire.messages.codec import WireError

logger = logging.getLogger(__name__)

OBEYED = "allegiance.json"


class Known(Struct, frozen=True):
    """The journal's name, and the highest lease under which orders were taken."""

    journal: str = ""
    lease: int = 0


class Allegiance:
    """Raises `WireError` for whoever is not to be obeyed. Without a folder nothing is remembered."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = None if folder is None else folder / OBEYED
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
        draft = self._path.with_name(f".{OBEYED}")
        try:
            draft.write_bytes(msgspec.json.encode(self.known))
            draft.replace(self._path)
        except OSError as error:
            logger.warning("which orchestrator is obeyed cannot be kept for the next agent: %s", error)


# ---------------------------------------------------------------- while no orchestrator is heard

# As long as no orchestrator hears this agent, it writes down how its workers are; see `wire.files.alone`.


async def write_while_alone(folder: Path, heard: Callable[[], bool], tell: Callable[[], Alone]) -> None:
    """Write, now and then, for ever. `heard`: whether an orchestrator is there; then nothing stands there."""
    trouble = ""
    while True:
        try:
            if heard():
                (folder / FILE).unlink(missing_ok=True)
            else:
                write_alone(folder, tell())
            trouble = ""
        except OSError as error:
            if str(error) != trouble:
                logger.warning("how the workers are cannot be written down: %s", error)
            trouble = str(error)
        await asyncio.sleep(WRITE_S)


def all_of(
    running: Iterable[tuple[WorkerSeen, Sample | None]], ended: Iterable[tuple[WorkerSeen, Ended | None]]
) -> Alone:
    """Those that run, with what can be seen of them, and those whose ends no orchestrator has heard of."""
    lone = [one_of(seen, sample) for seen, sample in running]
    for seen, end in ended:
        how, code = ("gone", None) if end is None else (end.cause, end.code)
        lone.append(Lone(worker=seen.worker, job=seen.job, rank=seen.rank, ended=how or "ended", code=code))
    return Alone(workers=tuple(lone))


def one_of(seen: WorkerSeen, sample: Sample | None) -> Lone:
    if sample is None:  # it is ending just now
        return Lone(worker=seen.worker, job=seen.job, rank=seen.rank)
    return Lone(
        worker=seen.worker,
        job=seen.job,
        rank=seen.rank,
        generation=sample.generation,
        point=sample.point,
        phase=sample.phase,
    )
