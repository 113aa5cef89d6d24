"""Solitude: as long as no orchestrator hears this agent, it writes down how its workers are; see `wire.files.alone`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from torchrelay.agent.workers.forks import Ended
from torchrelay.protocol.health.failure_detector import Sample
from torchrelay.protocol.messages.events import WorkerSeen
from torchrelay.wire.files.alone import FILE, WRITE_S, Alone, Lone, write_alone

logger = logging.getLogger(__name__)


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
        worker=seen.worker, job=seen.job, rank=seen.rank, generation=sample.generation, point=sample.point,
        phase=sample.phase,
    )  # fmt: skip
