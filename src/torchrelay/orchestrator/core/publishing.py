"""Publishing: each new roster is written into the scheduler's own record, apart from the path of a recovery."""

from __future__ import annotations

import asyncio
import logging

from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.protocol.messages.ids import JobId
from torchrelay.protocol.model.job import Job
from torchrelay.protocol.model.state import Cluster
from torchrelay.schedulers.port import Place, Roster, Scheduler, SchedulerError

log = logging.getLogger("torchrelay.orchestrator")

RETRY_S = 5.0


def roster_of(cluster: Cluster, job: Job) -> Roster:
    """Who holds which rank of a job now."""
    places = []
    for rank, seat in sorted(job.seats.items()):
        worker = None if seat.worker is None else cluster.workers.get(seat.worker)
        places.append(Place(rank=rank, worker=seat.worker, node=None if worker is None else worker.node))
    return Roster(job=job.spec.job, generation=job.generation, places=tuple(places))


async def publish_rosters(service: Orchestrator, scheduler: Scheduler) -> None:
    """Publish whatever is new, for ever. A scheduler that cannot take it is asked again: nothing waits for it."""
    published: dict[JobId, Roster] = {}
    while True:
        news = service.news
        try:
            for name, job in service.cluster.jobs.items():
                roster = roster_of(service.cluster, job)
                if published.get(name) != roster:
                    await scheduler.publish(roster)
                    published[name] = roster
        except (SchedulerError, OSError) as error:
            log.warning("the roster could not be published: %s", error)
            await asyncio.sleep(RETRY_S)
        else:
            await news.wait()
