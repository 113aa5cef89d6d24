"""Scheduling: what a scheduler says of our nodes becomes taints, and it is told who is where."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from pathlib import Path

from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.protocol.messages.events import Event, ParkAsked, TaintCleared, TaintSet
from torchrelay.protocol.messages.ids import JobId, NodeId
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.moves import Taint
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.placement.taints import TOLD
from torchrelay.schedulers.local import FIRST_KEY
from torchrelay.schedulers.port import (
    Health,
    NodeLeaving,
    NodeReturned,
    Place,
    Roster,
    Scheduler,
    SchedulerError,
)
from torchrelay.schedulers.slurm.judging import Leave
from torchrelay.schedulers.slurm.plugin import SlurmScheduler, open_slurm

log = logging.getLogger("torchrelay.orchestrator")

# ---------------------------------------------------------------- rosters for the scheduler

# Each new roster is written into the scheduler's own record, apart from the path of a recovery.

RETRY_S = 5.0
SLURM = "slurm"  # key and source of its taints


def roster_of(cluster: Cluster, job: Job) -> Roster:
    """Who holds which rank of a job now."""
    places = []
    for rank, seat in sorted(job.seats.items()):
        worker = None if seat.worker is None else cluster.workers.get(seat.worker)
        places.append(Place(rank=rank, worker=seat.worker, node=None if worker is None else worker.node))
    return Roster(job=job.spec.job, generation=job.generation, places=tuple(places))


def is_held_otherwise(before: Job, now: Job) -> bool:
    """Whether ranks have other holders, or another generation; most events change neither."""
    if before.generation != now.generation or (now.phase is JobPhase.ENDED) != (before.phase is JobPhase.ENDED):
        return True
    changed = now.seats.differences(before.seats)
    return any(one is None or other is None or one.worker != other.worker for _, one, other in changed)


async def publish_rosters(service: Orchestrator, scheduler: Scheduler) -> None:
    """Publish whatever is new, for ever. A scheduler that cannot take it is asked again: nothing waits for it."""
    published: dict[JobId, Job] = {}  # each job as it was then
    while True:
        news = service.news
        try:
            for name, job in service.cluster.jobs.items():
                known = published.get(name)
                if known is None or is_held_otherwise(known, job):
                    await scheduler.publish(roster_of(service.cluster, job))
                    published[name] = job
        except (SchedulerError, OSError) as error:
            log.warning("the roster could not be published: %s", error)
            await asyncio.sleep(RETRY_S)
        else:
            await news.wait()


# ---------------------------------------------------------------- what Slurm does with the nodes

SLURM_RETRY_S = 10.0


async def under_slurm(service: Orchestrator, job: int, run_dir: Path) -> None:
    """What Slurm says of our nodes becomes taints, and it is told who is where. Never returns.

    Without Slurm training goes on: it is asked again, and what it said before holds.
    """
    told = ""
    while True:
        try:
            async with open_slurm(job, run_dir) as scheduler:
                log.info("Slurm job %d: %s", job, scheduler.caps)
                told = ""
                beside = [
                    asyncio.create_task(publish_rosters(service, scheduler)),
                    asyncio.create_task(answer_notices(service, scheduler)),
                ]
                try:
                    await heed(service, scheduler)
                finally:
                    for task in beside:
                        task.cancel()
                    await asyncio.gather(*beside, return_exceptions=True)
        except (SchedulerError, OSError) as error:
            if str(error) != told:
                log.warning("Slurm cannot be asked: %s; drains are not seen meanwhile", error)
            told = str(error)
        await asyncio.sleep(SLURM_RETRY_S)


async def heed(service: Orchestrator, scheduler: Scheduler) -> None:
    """Taints for nodes that are to be left, and no more for those that are well again."""
    watching = scheduler.watch()
    view = await scheduler.snapshot()
    held = {node: grant for grant in view.grants for node in grant.nodes}
    for node in view.nodes:
        if node.node in held:
            stays = node.health is not Health.LEAVING or (node.whole and held[node.node].key == FIRST_KEY)
            settle_node(service, node.node, "" if stays else node.reason)
    async for event in watching:
        match event:
            case NodeLeaving(node=name, reason=reason, whole=True) if await is_of_the_first(scheduler, name):
                # There is nowhere to go, and taints would keep ranks and spares off all nodes until then.
                log.warning("the whole job is to end: %s", reason)
                settle_node(service, name, "")
                ask_to_park(service, reason, event.deadline_s)
            case NodeLeaving(node=name, reason=reason):
                settle_node(service, name, reason)
            case NodeReturned(node=name):
                settle_node(service, name, "")
            case _:
                log.info("Slurm: %s", event)


async def is_of_the_first(scheduler: Scheduler, node: NodeId) -> bool:
    """Whether a node is of the job that we run in."""
    view = await scheduler.snapshot()
    return any(node in grant.nodes for grant in view.grants if grant.key == FIRST_KEY)


def settle_node(service: Orchestrator, node: NodeId, reason: str) -> None:
    """A taint with this reason, or none."""
    lies = (node, None, SLURM) in service.cluster.taints
    if reason:
        event: Event = TaintSet(node=node, key=SLURM, reason=reason, source=SLURM)
    elif lies:
        event = TaintCleared(node=node, key=SLURM, source=SLURM)
    else:
        return
    log.info("Slurm: %s: %s", node, reason or "well again")
    service.take(event, note_refusal)


def ask_to_park(service: Orchestrator, reason: str, deadline_s: float | None) -> None:
    """Where jobs may be parked: all their nodes are to be left."""
    grace_ms = None if deadline_s is None else max(0, round(1000 * deadline_s))
    for name, job in service.cluster.jobs.items():
        if job.spec.park_dir and not job.parking.asked:
            service.take(ParkAsked(job=name, reason=reason, source=SLURM, grace_ms=grace_ms), note_refusal)


def note_refusal(told: int | Exception) -> None:
    if isinstance(told, Exception):
        log.warning("what Slurm said could not be noted: %s", told)


# ---------------------------------------------------------------- when Slurm has told our processes to end


async def answer_notices(service: Orchestrator, scheduler: SlurmScheduler) -> None:
    """When a node was told to end, ask Slurm how long there is, and whether the whole job is meant. Never returns.

    Without an answer the rules go by the nodes that were told, and by the grace time of the job.
    """
    known: list[Taint] = []
    while True:
        news = service.news
        told = [taint for taint in service.cluster.taints.values() if taint.key == TOLD and taint.source != SLURM]
        if any(taint not in known for taint in told):
            known = told
            try:
                leave = await scheduler.notice()
            except (SchedulerError, OSError) as error:
                log.warning("how long there is until the end cannot be asked: %s", error)
            else:
                log.info("nodes were told to end; Slurm says: %s", leave or "nothing of the whole job")
                if leave is not None:
                    tell_all(service, leave, told[0].value)
        else:
            await news.wait()


def tell_all(service: Orchestrator, leave: Leave, number: str) -> None:
    """All nodes are taken away then: with the job its launcher ends, and further nodes are given back."""
    gone_in_ms = None if leave.at is None else max(0, round(1000 * (leave.at - time.time())))
    told = partial(TaintSet, key=TOLD, value=number, reason=leave.reason, source=SLURM, gone_in_ms=gone_in_ms)
    for name, node in service.cluster.nodes.items():
        if node.alive:
            service.take(told(node=name), note_refusal)
