"""`torchrelay doctor slurm`: what Slurm here lets a job of ours do, and what a replacement would do now."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import AsyncIterator, Mapping

from torchrelay.schedulers.port import SchedulerError
from torchrelay.schedulers.slurm import abilities, asking, judging
from torchrelay.schedulers.slurm.abilities import Ability, Site
from torchrelay.schedulers.slurm.commands import CommandFailed, Commands
from torchrelay.schedulers.slurm.holdings import Looker
from torchrelay.schedulers.slurm.queries import Queries, user_name
from torchrelay.schedulers.slurm.reading import JobRecord

Row = tuple[str, Ability]
SHORT_S = 900.0  # less time than this is hardly worth a replacement


async def slurm_rows(environ: Mapping[str, str] = os.environ) -> list[Row]:
    """Each thing that was looked at, and how it is. Raises `SchedulerError` where there is no Slurm."""
    queries = Queries(Commands(environ, deadline_s=10.0))
    site = await queries.site()
    level = await queries.admin_level() if site.accounting else ""
    version = abilities.version_text(site.version)
    rows: list[Row] = [("slurm", Ability(able=True, why=f"version {version}, {len(site.partitions)} partitions"))]
    rows.append(("shrinking", abilities.may_shrink(site)))
    rows.append(("bad nodes", ordinary(abilities.may_drain(site, user_name(), os.getuid(), level))))
    rows.append(("expedited requeue", expedited(site)))
    rows += [(f"parking in {each.name}", abilities.may_park(site, each)) for each in abilities.preemptable(site)]
    job = await own_job(queries, environ)
    if isinstance(job, Ability):
        return [*rows, ("allocation", job)]
    rows.append(("allocation", Ability(able=True, why=f"job {job.job} ({job.name}), {len(job.nodes)} nodes")))
    rows += [row async for row in rows_of_job(queries, site, job, environ)]
    return rows


async def own_job(queries: Queries, environ: Mapping[str, str]) -> JobRecord | Ability:
    """The job that we are in; or why there is none."""
    name = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", "")
    if not name.isdigit():
        remedy = "run it inside a job: sbatch, or salloc"
        return Ability(able=None, why="not inside an allocation: what concerns a job cannot be told", remedy=remedy)
    try:
        return await queries.job(int(name))
    except CommandFailed as error:
        return Ability(able=False, why=str(error), remedy="SLURM_JOB_ID names a job that Slurm does not know")


async def rows_of_job(queries: Queries, site: Site, job: JobRecord, environ: Mapping[str, str]) -> AsyncIterator[Row]:
    """What concerns the job that we are in."""
    script = await queries.batch_script(job.job)
    yield "--no-kill", abilities.saw_no_kill(script, job.asked.get("SubmitLine", ""), dict(environ))
    preempt = abilities.may_preempt(site, job.partition)
    if preempt.able:
        preempt = Ability(able=True, why=f"these yield to {job.partition}: {preempt.why}")
    yield "preemption", ordinary(preempt)
    yield "time", time_left(site, job, time.time())
    yield "replacement", await replacement(queries, site, job)


def ordinary(ability: Ability) -> Ability:
    """What an ordinary user can live without is well, with the reason shown."""
    return ability if ability.able else Ability(able=True, why=ability.why)


def expedited(site: Site) -> Ability:
    """Arrays whose lost tasks are started again at once; a native way that we do without."""
    if site.version < abilities.EXPEDITE_FROM:
        return Ability(able=True, why="not before 25.11; satellites are used")
    on = "enable_expedited_requeue" in site.words("SlurmctldParameters")
    return Ability(able=True, why="switched on" if on else "not switched on; satellites are used")


def time_left(site: Site, job: JobRecord, now: float) -> Ability:
    """How long the job may go on, and what it is given between the notice and the end."""
    wait = site.config.get("KillWait", "unknown")
    partition = next((each for each in site.partitions if each.name == job.partition), None)
    grace = f"grace: {partition.grace_s if partition else 0} s when preempted, KillWait {wait} at the time limit"
    left_s = abilities.left_of(job, now)
    if left_s is None:
        return Ability(able=True, why=f"no time limit; {grace}")
    told = f"{left_s / 60:.0f} minutes left; {grace}"
    if left_s < SHORT_S:
        remedy = "submit with more --time: satellites end with the job"
        return Ability(able=False, why=told, remedy=remedy)
    return Ability(able=True, why=told)


async def replacement(queries: Queries, site: Site, job: JobRecord) -> Ability:
    """What would be done now if a node was lost."""
    try:
        sight = await Looker(queries, job.job).see(time.time())
    except SchedulerError as error:
        return Ability(able=None, why=str(error), remedy="see the message")
    mine = [node for node in sight.nodes.values() if job.partition in node.partitions]
    idle = [node.name for node in mine if judging.is_idle(node)]
    if idle:
        name = asking.satellite_name(job.name, job.job, "").rpartition(".")[0]
        words = shlex.join(asking.resources_of(job)) or "nothing special"
        why = f"one of {len(idle)} idle nodes of {job.partition}, as a job named {name}.*, asked for with {words}"
        return Ability(able=True, why=why)
    remedy = "submit with more nodes than --nodes needs: --spares dedicated:1"
    yielding = abilities.may_preempt(site, job.partition)
    if yielding.able:
        why = f"no node of {job.partition} is idle; jobs of {yielding.why} would be stopped, if --spares says so"
        return Ability(able=False, why=why, remedy=f"--spares floating:1,partition=NAME, or {remedy}")
    return Ability(able=False, why=f"no node of {job.partition} is idle, and no partition yields", remedy=remedy)
