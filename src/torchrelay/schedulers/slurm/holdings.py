"""Holdings: what of ours is in Slurm, as one look shows it, and how all of it is given back."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Mapping

from msgspec import Struct

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers.local import FIRST_KEY
from torchrelay.schedulers.port import Grant, SchedulerError
from torchrelay.schedulers.slurm.asking import is_satellite, key_of, sorted_out
from torchrelay.schedulers.slurm.commands import CommandFailed
from torchrelay.schedulers.slurm.judging import HELD, WAITING, Leave, Sight, end_of, leaves_of
from torchrelay.schedulers.slurm.queries import GONE, Queries
from torchrelay.schedulers.slurm.reading import JobRow, Reservation

RESERVATIONS_S = 60.0  # between two questions for maintenance ahead
ALIVE = (*HELD, *WAITING)

log = logging.getLogger("torchrelay.slurm")


class Looker:
    """Looks at Slurm for one main job."""

    def __init__(self, queries: Queries, main: int, graces: Mapping[str, float] | None = None) -> None:
        """`graces`: GraceTime of partitions, by their names."""
        self._queries, self._main, self._graces = queries, main, graces or {}
        self._reservations, self._asked_at = list[Reservation](), -math.inf

    async def see(self, now: float, unwanted: Collection[str] = ()) -> Sight:
        """Ask for nodes, our jobs, notices to them, and now and then reservations. Raises `SchedulerError`.

        now        in seconds since 1970
        unwanted   names of satellites that nobody waits for any more: they are surplus
        """
        nodes = {record.name: record for record in await self._queries.nodes()}
        rows = await self._queries.queue()
        own = [row for row in rows if row.job == self._main and row.state in HELD]
        if not own:
            await self._must_have_ended()
        late = [row for row in rows if row.name in unwanted and is_satellite(row, self._main) and row.state in ALIVE]
        satellites, waiting, surplus = sorted_out((row for row in rows if row not in late), self._main)
        running = [*own, *satellites]
        notices = await self._queries.notices(row.job for row in running) if running else {}
        await self._look_ahead(now)
        grants, leaves = list[Grant](), dict[NodeId, Leave]()
        for row in running:
            grant = self._grant(row)
            grants.append(grant)
            end = end_of(row, notices.get(row.job), self._graces.get(row.partition, 0.0), now)
            leaves |= leaves_of(grant, nodes, end, self._reservations, now)
        surplus = (*surplus, *(row.job for row in late))
        return Sight(nodes=nodes, grants=tuple(grants), leaves=leaves, waiting=waiting, surplus=surplus)

    def _grant(self, row: JobRow) -> Grant:
        key = FIRST_KEY if row.job == self._main else key_of(row)
        return Grant(grant=str(row.job), key=key, nodes=tuple(NodeId(node) for node in row.nodes))

    async def _must_have_ended(self) -> None:
        """The queue does not list our own job: that is true only if Slurm says of the job itself that it has ended."""
        try:
            record = await self._queries.job(self._main)
        except CommandFailed as error:
            if GONE in error.said.lower():
                return
            raise
        if record.state in HELD:
            told = f"`squeue` does not list job {self._main}, and `scontrol show job` says {record.state}"
            raise SchedulerError(f"{told}: one of them is wrong; try both by hand")

    async def _look_ahead(self, now: float) -> None:
        if now - self._asked_at < RESERVATIONS_S:
            return
        self._asked_at = now
        try:
            self._reservations = await self._queries.reservations()
        except SchedulerError as error:
            log.warning("maintenance ahead cannot be seen: %s", error)


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
