"""Giving back: all satellites of a main job are cancelled, whoever asked for them; also by a process that knows no more."""

from __future__ import annotations

import asyncio

from msgspec import Struct

from torchrelay.schedulers.port import SchedulerError
from torchrelay.schedulers.slurm.asking import is_satellite
from torchrelay.schedulers.slurm.judging import HELD, WAITING
from torchrelay.schedulers.slurm.queries import Queries

ALIVE = (*HELD, *WAITING)


class Patience(Struct, frozen=True, kw_only=True):
    """How long the end may take, and how far apart two looks are, in seconds."""

    deadline_s: float = 30.0
    between_s: float = 0.5


async def give_back_satellites(queries: Queries, main: int, patience: Patience) -> None:
    """Cancel the satellites of a main job until two looks in a row show none.

    Two, as a request of a killed process of ours may still be on its way to slurmctld. Raises `SchedulerError`, with
    the line to type, if some are left.
    """
    left, quiet, said = list[int](), 0, ""
    try:
        async with asyncio.timeout(patience.deadline_s):
            while quiet < 2:
                try:
                    left = [row.job for row in await queries.queue() if is_satellite(row, main) and row.state in ALIVE]
                    if left:
                        await queries.commands.run("scancel", *(str(job) for job in left))
                    quiet = 0 if left else quiet + 1
                except SchedulerError as error:
                    said, quiet = f" ({error})", 0
                if quiet < 2:
                    await asyncio.sleep(patience.between_s)
    except TimeoutError:
        what = f"type `scancel {' '.join(map(str, left))}`" if left else f"look for jobs named *+spare.{main}.*"
        raise SchedulerError(f"satellites of job {main} may be left{said}: {what}") from None
