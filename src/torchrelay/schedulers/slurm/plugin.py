"""Plugin: the scheduler port over Slurm, for the job that we run in.

The *main* job is what the user submitted. It can be shrunk and never grown, so each further node is a job of its own, a
*satellite* (`asking`). What must survive us is in Slurm itself, under names that are known beforehand; the file
`slurm.json` in the run's folder keeps which nodes are held for bad.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers.local import read_file, write_file
from torchrelay.schedulers.port import (
    Caps,
    ClusterView,
    Grant,
    Health,
    NodeView,
    Roster,
    SchedulerError,
    SchedulerEvent,
    SpareRequest,
    SpareSource,
)
from torchrelay.schedulers.slurm import abilities, asking, judging
from torchrelay.schedulers.slurm.abilities import Site
from torchrelay.schedulers.slurm.asking import Need, Wishes
from torchrelay.schedulers.slurm.commands import CommandFailed, Commands, Said
from torchrelay.schedulers.slurm.holdings import Looker, Patience, give_back_satellites
from torchrelay.schedulers.slurm.hostlists import compress
from torchrelay.schedulers.slurm.judging import Leave, Sight
from torchrelay.schedulers.slurm.queries import GONE, Queries, user_name
from torchrelay.schedulers.slurm.reading import JobRecord, NodeRecord

RECORD = "slurm.json"
OTHERS = "others"  # the grant of nodes that other people's jobs are on
SLOWEST_POLL_S = 30.0
LOOK_S = 1.0  # between two looks at what salloc waits for
WAIT_S = 0.5  # between two looks at a satellite that somebody else has asked for
UPDATE_S = 10.0  # for a change of a job: 22.05 tries one that it cannot make again and again
MORE_S = 5.0  # salloc ends its own waiting; so much later we do
NOT_ALLOWED = ("user id", "permission", "not permitted", "privilege")
NOT_SUPPORTED = ("not supported", "disabled", "not permitted")

StartAgent = Callable[[Grant, Sequence[NodeId]], Awaitable[None]]
log = logging.getLogger("torchrelay.slurm")


class Remembered(Struct, frozen=True, kw_only=True):
    """`RUN_DIR/slurm.json`: nodes that are held for bad, and why."""

    bad: dict[NodeId, str]


class SlurmScheduler:
    """The port, for one main job. Made by `open_slurm`."""

    def __init__(
        self, queries: Queries, site: Site, job: JobRecord, folder: Path, wishes: Wishes, start_agent: StartAgent | None
    ) -> None:
        self._queries, self._site, self._job = queries, site, job
        self._folder, self._wishes, self._start_agent = folder, wishes, start_agent
        self.caps = Caps(shrink=False, native_replace=False, preempt=False, hold_drain=True, report_bad=False,
                         watch=False, gpu_granular=False)  # fmt: skip
        remembered = read_file(folder / RECORD, Remembered)
        self._bad: dict[NodeId, str] = {} if remembered is None else dict(remembered.bad)
        self._sight = Sight(nodes={}, grants=(), leaves={})
        self._looking, self._turns = asyncio.Lock(), dict[str, asyncio.Lock]()
        self._listeners = list[asyncio.Queue[SchedulerEvent | None]]()
        self._poller: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._looker = Looker(queries, job.job, site.graces)
        self._released, self._started = set[NodeId](), set[str]()
        self._unwanted, self._asking = set[str](), set[asyncio.Task[object]]()
        self._roster: Roster | None = None
        self._written = ""  # the comment as it is in Slurm
        self._unchangeable = False  # 22.05 takes no change of the main job any more
        self._closed = False

    async def find_out(self) -> None:
        """What is possible here, and a first look. Raises `SchedulerError`."""
        site, wishes = self._site, self._wishes
        level = await self._queries.admin_level() if site.accounting else ""
        drain = abilities.may_drain(site, user_name(), os.getuid(), level)
        preempt = abilities.may_preempt(site, self._job.partition, wishes.yields)
        shrink = abilities.may_shrink(site, at_our_risk=wishes.shrink_risk)
        self.caps = msgspec.structs.replace(
            self.caps,
            shrink=bool(shrink.able),
            report_bad=bool(drain.able),
            preempt=bool(wishes.yields) and preempt.able is not False,
        )
        self._sight = await self._looker.see(time.time(), self._unwanted)

    # ------------------------------------------------------------ the port: looking

    async def snapshot(self) -> ClusterView:
        """Nodes of our partition and of the one that yields, and ours wherever they are. Raises `SchedulerError`."""
        await self._look()
        held, ours = self._sight.held, {self._job.partition, self._wishes.yields} - {""}
        shown = [
            self._view(record, held.get(NodeId(name)))
            for name, record in sorted(self._sight.nodes.items())
            if NodeId(name) in held or not record.partitions or ours & set(record.partitions)
        ]
        return ClusterView(nodes=tuple(shown), grants=self._sight.grants)

    async def notice(self) -> Leave | None:
        """How long the main job has, whose processes were told to end just now; None: that is not known.

        Raises `SchedulerError`.
        """
        job = await self._queries.job(self._job.job)
        grace_s = self._site.graces.get(job.partition, 0.0)
        return judging.notice_of(job, grace_s, abilities.kill_wait_of(self._site), time.time())

    async def watch(self) -> AsyncIterator[SchedulerEvent]:
        """What happens from now on, by polling while anybody listens. Ends when the plugin is closed."""
        inbox: asyncio.Queue[SchedulerEvent | None] = asyncio.Queue()
        self._listeners.append(inbox)
        if self._poller is None and not self._closed:
            self._poller = asyncio.create_task(self._poll())
        try:
            while not self._closed and (event := await inbox.get()) is not None:
                yield event
        finally:
            self._listeners.remove(inbox)
            if not self._listeners:
                self._end_polling()

    async def _poll(self) -> None:
        """Look again and again, the less often the slower slurmctld answers. What fails is said once."""
        loop, told, rest_s = asyncio.get_running_loop(), "", self._wishes.poll_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._wake.wait()
            self._wake.clear()
            begun_s = loop.time()
            try:
                await self._look()
            except (SchedulerError, OSError) as error:
                if str(error) != told:
                    log.warning("Slurm cannot be looked at: %s", error)
                told = str(error)
                rest_s = min(SLOWEST_POLL_S, 2 * rest_s)
            else:
                told = ""
                rest_s = min(SLOWEST_POLL_S, max(self._wishes.poll_s, self._wishes.rest * (loop.time() - begun_s)))

    async def _look(self) -> Sight:
        """One look: what has changed is told, and what must not be is cancelled."""
        async with self._looking:
            before, after = self._sight, await self._looker.see(time.time(), self._unwanted)
            self._sight = after
            self._released &= set(before.held) | set(after.held)
            for event in judging.differences(before, after, time.time(), frozenset(self._released)):
                for listener in self._listeners:
                    listener.put_nowait(event)
            for node in judging.resumed(before, after, self._bad):
                self._bad.pop(node)
                self._note()
        for job in after.surplus:
            await self._cancel(job)
        return after

    def _view(self, record: NodeRecord, grant: str | None) -> NodeView:
        node = NodeId(record.name)
        health, reason = judging.health_of(record)
        whole = False
        if node in self._sight.leaves and health is not Health.LOST:
            leave = self._sight.leaves[node]
            health, reason, whole = Health.LEAVING, leave.reason, leave.whole
        if health is Health.HEALTHY and node in self._bad:
            health, reason = Health.LEAVING, self._bad[node]  # we may not drain it; for us it is no good all the same
        taken = grant or (None if "IDLE" in record.states else OTHERS)
        slots = self._wishes.slots or record.gpus or 1
        return NodeView(node=node, slots=slots, health=health, reason=reason, grant=taken, whole=whole)

    # ------------------------------------------------------------ the port: asking

    async def acquire(self, request: SpareRequest) -> Grant:
        """A satellite with an agent. Asking again with its key never makes a second one. Raises `SchedulerError`."""
        if request.source is SpareSource.DEDICATED:
            raise SchedulerError("dedicated spares are in the job from the start: submit it with more --nodes")
        name = asking.satellite_name(self._job.name, self._job.job, request.key)
        task = asyncio.current_task()
        assert task is not None, "this is a coroutine"
        self._asking.add(task)
        try:
            async with self._turns.setdefault(request.key, asyncio.Lock()):
                self._must_be_open()
                self._unwanted.discard(name)
                grant, fresh = await self._find_or_ask(request, name)
                await self._ensure_agent(grant, fresh=fresh)
                return grant
        finally:
            self._asking.discard(task)

    def _must_be_open(self) -> None:
        if self._closed:
            raise SchedulerError("everything is being given back: nothing more can be asked for")

    async def _find_or_ask(self, request: SpareRequest, name: str) -> tuple[Grant, bool]:
        """The grant, and whether it was asked for just now. What waits in the queue under our name is waited for."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + request.deadline_s
        while True:
            sight = await self._look()
            held = self._held(request.key)
            if held is not None and not set(held.nodes) & {*request.exclude, *self._bad}:
                return held, False
            if held is not None:
                # It was asked for before its node was known to be bad. The next one starts when it has gone.
                self._released |= set(held.nodes)
                await self._cancel(int(held.grant))
            if name not in sight.waiting:
                break
            if loop.time() >= until_s:
                await self._take_back(name)
                raise SchedulerError(self._too_few(request, "Slurm has given none in time"))
            await asyncio.sleep(WAIT_S)
        return await self._ask(request, name), True

    async def _ask(self, request: SpareRequest, name: str) -> Grant:
        """Ask by salloc. Raises `SchedulerError`; nothing of the request is left then."""
        need = self._need(request, name)
        asked = asyncio.create_task(self._queries.commands.run(*asking.salloc(need), deadline_s=need.wait_s + MORE_S))
        try:
            held = await self._answer(asked, request.key)
        except BaseException:
            # Whatever happened, a cancelled task included: a request that nobody waits for must not become a job.
            asked.cancel()
            await asyncio.shield(self._take_back(name))
            raise
        if held is not None:
            return held
        await self._take_back(name)
        error = asked.exception()
        if error is None:
            raise SchedulerError(f"Slurm gave a node for {request.key} and lists no job {name}: it ended at once")
        raise SchedulerError(self._too_few(request, str(error))) from error

    async def _answer(self, asked: asyncio.Task[Said], key: str) -> Grant | None:
        """The grant of a need, once salloc has ended or it is there: another process may have asked for the same.

        Our own request then waits behind that one, and is taken back. None: there is none.
        """
        while not (await asyncio.wait({asked}, timeout=LOOK_S))[0]:
            await self._look()
            held = self._held(key)
            if held is not None:
                # If it is our own, salloc is about to end by itself, and must not be disturbed.
                await asyncio.wait({asked}, timeout=LOOK_S)
                asked.cancel()
                await asyncio.wait({asked})
                return held
        if isinstance(error := asked.exception(), BaseException) and not isinstance(error, CommandFailed):
            raise error
        await self._look()
        return self._held(key)

    def _need(self, request: SpareRequest, name: str) -> Need:
        """What exactly is asked for. Raises `SchedulerError` if there cannot be enough."""
        preempt = request.source is SpareSource.PREEMPT
        if preempt and not self.caps.preempt:
            told = abilities.may_preempt(self._site, self._job.partition, self._wishes.yields)
            raise SchedulerError(
                f"nothing can be preempted: {told.why}; {told.remedy or 'name one: --spares ,partition='}"
            )
        barred = {*request.exclude, *self._bad}
        mine = [record for record in self._sight.nodes.values() if self._job.partition in record.partitions]
        able = [record.name for record in mine if record.name not in barred and self._can_be_had(record, preempt)]
        if len(able) < request.count:
            kind = f"idle or held by {self._wishes.yields}" if preempt else "idle"
            raise SchedulerError(self._too_few(request, f"{len(able)} are {kind} in {self._job.partition}"))
        preferred = [node for node in request.prefer if node in able][: request.count]
        left_s = abilities.left_of(self._job, time.time())
        resources = self._wishes.resources
        return Need(
            name=name,
            key=request.key,
            main=self._job.job,
            count=request.count,
            partition=self._job.partition,
            resources=asking.resources_of(self._job) if resources is None else resources,
            exclude=tuple(sorted({record.name for record in mine} - set(able))),
            nodes=tuple(preferred),
            minutes=None if left_s is None else math.ceil(left_s / 60),
            wait_s=request.deadline_s,
        )

    def _can_be_had(self, record: NodeRecord, preempt: bool) -> bool:
        if judging.is_idle(record):
            return True
        well = judging.health_of(record)[0] is Health.HEALTHY
        return (
            preempt
            and well
            and self._wishes.yields in record.partitions
            and NodeId(record.name) not in self._sight.held
        )

    def _too_few(self, request: SpareRequest, why: str) -> str:
        return f"{request.count} nodes wanted ({request.source}): {why}; submit with more nodes, or change --spares"

    def _held(self, key: str) -> Grant | None:
        return next((grant for grant in self._sight.grants if grant.key == key), None)

    async def _ensure_agent(self, grant: Grant, *, fresh: bool) -> None:
        """Start the agent of a satellite, unless it has one: a step of ours runs there."""
        if self._start_agent is None or grant.grant in self._started:
            return
        if fresh or not await self._queries.has_step(int(grant.grant)):
            await self._start_agent(grant, grant.nodes)
        self._started.add(grant.grant)

    # ------------------------------------------------------------ the port: giving back

    async def release(self, nodes: Sequence[NodeId], *, bad: bool, reason: str = "") -> None:
        """Cancel satellites, shrink the main job. Raises `SchedulerError` for nodes that must stay in a job."""
        sight = await self._look()
        wanted = [node for node in dict.fromkeys(nodes) if node in sight.held]
        if bad:
            for node in wanted:
                self._bad[node] = reason or "released as bad"
            self._note()
            for node in wanted:
                await self.report_bad(node, self._bad[node])
        for grant in sight.grants:
            leaving = [node for node in grant.nodes if node in wanted]
            if not leaving:
                continue
            self._released |= set(leaving)
            if len(leaving) == len(grant.nodes) and grant.grant != str(self._job.job):
                await self._cancel(int(grant.grant))
            else:
                await self._shrink(grant, leaving)
        if wanted:
            await self._look()

    async def _shrink(self, grant: Grant, leaving: list[NodeId]) -> None:
        """Give nodes of a job back. Nothing else in it is disturbed."""
        staying = f"{compress(leaving)} stays in job {grant.grant}, unused"
        if not self.caps.shrink:
            told = abilities.may_shrink(self._site, at_our_risk=self._wishes.shrink_risk)
            raise SchedulerError(f"{staying}: {told.why}; {told.remedy}")
        record = await self._queries.job(int(grant.grant))
        # Slurm keeps the node of the batch script; a satellite has none.
        fixed = [node for node in leaving if node == record.batch_host and grant.grant == str(self._job.job)]
        going = [node for node in leaving if node not in fixed]
        keep = [node for node in grant.nodes if node not in going]
        if going and keep:
            await self._publish_last()  # 22.05 takes no comment afterwards
            try:
                await self._update(int(grant.grant), f"NodeList={compress(keep)}")
            except CommandFailed as error:
                raise SchedulerError(f"{staying}: {self._why_not_shrunk(error)}") from error
            self._unchangeable |= abilities.is_changed_once(self._site)
        if fixed or not keep:
            why = "the batch script runs there" if fixed else "a job has one node at least"
            raise SchedulerError(f"{compress(fixed or leaving)} stays in job {grant.grant}, unused: {why}")

    def _why_not_shrunk(self, error: CommandFailed) -> str:
        said = error.said.lower()
        if any(mark in said for mark in NOT_SUPPORTED):
            self.caps = msgspec.structs.replace(self.caps, shrink=False)
            return f"this site does not let jobs shrink ({error.said})"
        if "invalid node name" in said:
            return "Slurm does not give the node of the batch script back"
        return str(error)

    async def _update(self, job: int, change: str) -> None:
        """Change a job of ours."""
        main = job == self._job.job
        if main and self._unchangeable:
            raise CommandFailed(abilities.CHANGED_ONCE, command="scontrol", said=abilities.CHANGED_ONCE)
        try:
            await self._queries.commands.run("scontrol", "update", f"JobId={job}", change, deadline_s=UPDATE_S)
        except CommandFailed as error:
            if error.hung and main and abilities.is_changed_once(self._site):
                self._unchangeable = True
            raise

    async def _cancel(self, job: int) -> None:
        """Cancel a satellite. One that has ended is let be."""
        try:
            await self._queries.commands.run("scancel", str(job))
        except CommandFailed as error:
            if GONE not in error.said.lower():
                raise

    async def _take_back(self, name: str) -> None:
        """Cancel a request, by its name, also if it only now arrives at slurmctld: each look cancels it again."""
        self._unwanted.add(name)
        try:
            await self._queries.commands.run("scancel", f"--name={name}", f"--user={user_name()}")
        except CommandFailed as error:
            log.warning("the request %s is cancelled at the next look: %s", name, error)
        self._wake.set()

    # ------------------------------------------------------------ the port: telling

    async def publish(self, roster: Roster) -> None:
        """Write the roster into the main job's comment: `squeue -o %k` shows it. Raises `SchedulerError`."""
        self._roster = roster
        await self._publish_last()

    async def _publish_last(self) -> None:
        comment = "" if self._roster is None else asking.roster_comment(self._roster)
        if not comment or comment == self._written:
            return
        if self._unchangeable:
            log.warning("the roster is not written into Slurm's record any more: %s", abilities.CHANGED_ONCE)
            self._written = comment  # said once for each roster; nothing would change it
            return
        await self._update(self._job.job, f"Comment={comment}")
        self._written = comment

    async def report_bad(self, node: NodeId, reason: str) -> bool:
        """Drain a node, so that nobody is given it. False if we may not, or if Slurm does not take it."""
        why = asking.plain_reason(reason)
        try:
            await self._queries.commands.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={why}")
        except CommandFailed as error:
            if any(mark in error.said.lower() for mark in NOT_ALLOWED):
                self.caps = msgspec.structs.replace(self.caps, report_bad=False)
            else:
                log.warning("%s could not be drained: %s", node, error)
            return False
        await self._look()
        return True

    # ------------------------------------------------------------ the end

    async def give_everything_back(self, patience: Patience | None = None) -> None:
        """Cancel all satellites, those included that are being asked for. Raises `SchedulerError` with what is left."""
        self._closed = True
        for task in self._asking:
            task.cancel()
        if self._asking:
            await asyncio.wait(set(self._asking))
        self._released |= {node for node, grant in self._sight.held.items() if grant != str(self._job.job)}
        await give_back_satellites(self._queries, self._job.job, patience or Patience())

    async def close(self) -> None:
        """Watch no longer. Satellites stay: see `give_everything_back`."""
        self._closed = True
        self._end_polling()
        for listener in self._listeners:
            listener.put_nowait(None)

    def _end_polling(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
            self._poller = None

    def _note(self) -> None:
        write_file(self._folder / RECORD, Remembered(bad=self._bad))


@asynccontextmanager
async def open_slurm(
    main: int,
    folder: Path,
    wishes: Wishes | None = None,
    start_agent: StartAgent | None = None,
    commands: Commands | None = None,
) -> AsyncIterator[SlurmScheduler]:
    """The plugin for a job that runs.

    main          its id (SLURM_JOB_ID)
    folder        the run's folder
    start_agent   starts an agent on each of some nodes of a grant, by `asking.agent_argv`, and returns
    Raises `SchedulerError`: no Slurm here, another user's job, a version that is too old.
    """
    queries = Queries(commands or Commands())
    site = await queries.site()
    job = await queries.job(main)
    scheduler = SlurmScheduler(queries, site, job, folder, wishes or Wishes(), start_agent)
    await scheduler.find_out()
    try:
        yield scheduler
    finally:
        await scheduler.close()
