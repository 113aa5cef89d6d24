"""Agent: one per node. Starts, watches and ends workers, and carries words between them and the orchestrator.

It decides nothing: what it does was ordered, and what it sees it reports. Without an orchestrator the workers go on,
and the agent tries to reach it for ever.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from torchrelay.agent.allegiance import Allegiance, HeirProcess, Voting, Whereabouts, all_of, write_while_alone
from torchrelay.agent.connections import WorkerConnections
from torchrelay.agent.joining import facts_of
from torchrelay.agent.network.network import Network
from torchrelay.agent.notice import Notice
from torchrelay.agent.output.forwarder import Forwarder
from torchrelay.agent.uplink import Rejected, Uplink
from torchrelay.agent.workers.forks import Child, Ended, Fork
from torchrelay.agent.workers.processes import CannotFork, Processes, base_environment, worker_environment
from torchrelay.agent.workers.samples import Sampler, cause_of
from torchrelay.protocol.health.pulses import Beat, Sample
from torchrelay.protocol.messages.events import Event, WorkerExited, WorkerSeen
from torchrelay.protocol.messages.ids import SAFE_ID, JobId, NodeId, WorkerId, WorkerPhase
from torchrelay.protocol.messages.orders import AnyOrder, Fence, Leave, PassOn, StartWorker, WorkerOrder
from torchrelay.protocol.succession.succession import Succession, VoterId
from torchrelay.wire.files.alone import Alone
from torchrelay.wire.files.launch import Launch
from torchrelay.wire.files.snapshot_store import snapshot_store_in
from torchrelay.wire.messages.channel import (
    Appoint,
    Attach,
    Attached,
    JobTerms,
    NetworkFrame,
    OrderFrame,
    Shutdown,
    ToAgent,
)
from torchrelay.wire.messages.worker_frames import ATTENDED_S, FromWorker, Welcome
from torchrelay.wire.trust.passes import client_context

logger = logging.getLogger(__name__)

ENDED_WELL = 0
CANNOT_START = 94
LAST_WORDS_S = 0.2
FLUSH_S = 2.0
LEAVE_S = 5.0  # how long workers that have finished may take to end
LEAVE_LOOK_S = 0.02
AWAY = "away"  # a file in the node's folder
GRACE_S = 5.0
FORSAKEN_LOOK_S = 5.0
BIDE_S = 20.0  # how long workers outlive a defect of their agent, whatever its linger is


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where an agent is and what it may use."""

    node: NodeId
    slots: int
    host: str  # address on which this node's workers listen
    folder: Path  # 0700, of this node alone, in memory: sockets and pages
    logs: Path
    linger_s: float = 0.0  # how long workers outlive an agent that dies
    forsaken_s: float = 0.0  # without an orchestrator, and without a step, before it ends; 0: never
    held: Path | None = None  # the run's pass for agents, on a machine of its own: what workers print is sent, too
    lasts: bool = False  # what is here outlives a scheduler's SIGTERM, as the job may park


class Agent:
    """The agent of one node; to be made inside a running event loop.

    where, token   the orchestrator's URL and our token, asked before each attempt to connect
    """

    def __init__(self, site: Site, launch: Launch, *, where: Callable[[], str], token: Callable[[], str]) -> None:
        self.site = site
        self.launch = launch
        self.incarnation = uuid4().hex
        self._env = base_environment(launch, site.host)
        self._facts = None if site.held is None else facts_of(launch)
        loop = asyncio.get_running_loop()
        self._terms: defaultdict[JobId, asyncio.Future[JobTerms]] = defaultdict(loop.create_future)
        self._leaving: dict[WorkerId, WorkerSeen] = {}  # ended, and the orchestrator has not acknowledged it
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop: asyncio.Future[Shutdown] = loop.create_future()
        self._defect = False  # an exception of ours ends this agent
        self._back: asyncio.TimerHandle | None = None  # the end of a partition that chaos asked for
        self.sampler = Sampler(site.folder)
        self.snapshot_store = snapshot_store_in(site.folder)
        self.processes = Processes(
            site.folder,
            preload=launch.preload,
            env=self._env,
            cwd=launch.cwd,
            linger_s=site.linger_s,
            lasts=site.lasts,
            on_ended=self._on_ended,
        )
        self.connections = WorkerConnections(
            site.folder / "agent", self.processes, welcome=self._welcome, on_event=self._on_worker_event
        )
        # A node on a machine of its own takes part when the head's is lost.
        self._voting = None if site.held is None else Voting(site.folder, site.node)
        self._whereabouts = Whereabouts(where, self._noted, loop.time)
        own_dir = site.logs.parent
        self._heir = (
            None if site.held is None else HeirProcess(site.held, site.node, site.host, own_dir, lasts=site.lasts)
        )
        self.uplink = self._make_uplink(token)
        self.forwarder = self._forwarder()
        self.network = (
            None
            if launch.paths is None
            else Network(
                site.folder,
                site.node,
                launch.paths,
                slot_of=self._slot_of,
                tell=self.uplink.tell,
                show=lambda news: self.uplink.show(NetworkFrame(news)),
                adapters=launch.env.get("NCCL_IB_HCA", ""),
            )
        )

    async def run(self) -> int:
        """Serve until told to end. Returns the process's exit code; nothing of ours is left running.

        An exception is a defect of ours. Then the workers train on for `BIDE_S` at least, for a next agent to adopt;
        whoever calls this must end the process at once, as its event loop would kill the forkserver when it is closed.
        """
        loop = asyncio.get_running_loop()
        notice = Notice(self.site.node, lasts=self.site.lasts, tell=self.uplink.tell, stop=self.stop)
        loop.add_signal_handler(signal.SIGTERM, notice.hear)
        loop.add_signal_handler(signal.SIGINT, self.stop, "received SIGINT")
        loop.add_signal_handler(signal.SIGUSR1, self._be_away)
        await self.processes.open()
        await self.connections.open()
        if self.network is not None:
            self.network.open()
        hearing = asyncio.create_task(self.processes.run())
        talking = asyncio.create_task(self.uplink.run())
        attending = asyncio.create_task(self._attend())
        looking = asyncio.create_task(self._look())
        writing = asyncio.create_task(write_while_alone(self.site.folder, self._is_heard, self._alone))
        printing = asyncio.create_task(self._print())
        minding = asyncio.create_task(self._mind_being_forsaken())
        try:
            await asyncio.wait((hearing, talking, looking, self._stop), return_when=asyncio.FIRST_COMPLETED)
            order, code = self._why(hearing, talking, looking)
            logger.info("ending: %s", order.reason)
            await self._end_workers(order, hearing)
            if self.forwarder is not None:
                self.forwarder.look(last=True)
            await self.uplink.flush(FLUSH_S)
        finally:
            beside = (hearing, talking, attending, looking, writing, printing, minding)
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            if self._heir is not None:
                await self._heir.end()
            if self.network is not None:
                self.network.close()
            if self._defect:
                await self.processes.leave(BIDE_S)
            else:
                await self.processes.close()
                await self.connections.close()
        return code

    def stop(self, reason: str, grace_s: float = GRACE_S) -> None:
        """End in order: workers first. The first reason counts."""
        if not self._stop.done():
            self._stop.set_result(Shutdown(reason=reason, grace_s=grace_s))

    async def _mind_being_forsaken(self) -> None:
        """End when nobody has been heard and nothing has been trained for long: on another machine nobody else ends it.

        As long as the ranks make steps they train on; whoever takes the orchestrator's place finds them.
        """
        loop = asyncio.get_running_loop()
        since, before = loop.time(), None
        while self.site.forsaken_s and not self._stop.done():
            await asyncio.sleep(min(FORSAKEN_LOOK_S, self.site.forsaken_s / 4))
            samples = (self._sample(child) for child in self.processes.running.values())
            now = tuple((sample.generation, sample.point) for sample in samples if sample is not None)
            if self._is_heard() or now != before:
                since, before = loop.time(), now
            elif loop.time() - since > self.site.forsaken_s:
                self.stop(f"no orchestrator was heard, and no step was made, for {self.site.forsaken_s:g} s")
        await loop.create_future()

    def _be_away(self) -> None:
        """Chaos asks for a partition: deaf and dumb towards the orchestrator for so many seconds as a file says."""
        try:
            seconds = float((self.site.folder / AWAY).read_text())
        except (OSError, ValueError) as error:
            logger.warning("SIGUSR1 without a number of seconds in %s: %s", self.site.folder / AWAY, error)
            return
        logger.warning("deaf and dumb for %g s, as chaos asks", seconds)
        self.uplink.open.clear()
        if self._back is not None:
            self._back.cancel()
        self._back = asyncio.get_running_loop().call_later(seconds, self.uplink.open.set)

    def _why(self, *tasks: asyncio.Task[None]) -> tuple[Shutdown, int]:
        """Why it ends, and with which exit code."""
        if self._stop.done():
            return self._stop.result(), ENDED_WELL
        for task in tasks:
            error = task.exception() if task.done() else None
            if isinstance(error, CannotFork | Rejected):
                logger.error("%s", error)
                return Shutdown(reason=str(error)), CANNOT_START
            if error is not None:
                self._defect = True
                raise error
        raise AssertionError("it ends for one of these reasons")

    async def _end_workers(self, order: Shutdown, hearing: asyncio.Task[None]) -> None:
        """Who has finished may go; SIGTERM, and after the grace SIGKILL; then their ends are reported."""
        await self._let_go()
        for number, wait_s in ((signal.SIGTERM, order.grace_s), (signal.SIGKILL, GRACE_S)):
            if hearing.done():
                break  # no forkserver, no workers
            for worker in list(self.processes.running):
                self.processes.kill(worker, number, f"ended by its agent: {order.reason}")
                self._let_end(PassOn(node=self.site.node, worker=worker, number=number, nth=0))
            if await self.processes.none_left(wait_s):
                break
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2 * LAST_WORDS_S)

    def _let_end(self, order: PassOn) -> None:
        """A worker that outlives SIGTERM ends by one of ours, if its script has no handler for it."""
        if self.site.lasts:
            self.connections.say(order)

    async def _let_go(self) -> None:
        """Workers whose script has ended wait for an order to leave. Without it their last output would be lost."""
        finished = set()
        for child in self.processes.running.values():
            sample = self._sample(child)
            if sample is not None and sample.phase is WorkerPhase.FINISHED:
                seen = self.connections.seen(child)
                newest = max(seen.generation, sample.generation)
                order = Leave(
                    node=self.site.node, worker=child.worker, job=child.job, generation=newest, code=ENDED_WELL
                )
                if self.connections.pass_on(order):
                    finished.add(child.worker)
        until = asyncio.get_running_loop().time() + LEAVE_S
        while finished & self.processes.running.keys() and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(LEAVE_LOOK_S)

    # ------------------------------------------------------------ to the orchestrator

    def _noted(self) -> Succession | None:
        return None if self._voting is None else self._voting.noted

    def _is_heard(self) -> bool:
        return self.uplink.connected

    def _sample(self, child: Child) -> Sample | None:
        return self.sampler.sample(child.worker, child.pid, self.connections.rank_of(child.worker))

    def _alone(self) -> Alone:
        """How the workers are, for whoever follows this run without an orchestrator."""
        running = [(self.connections.seen(child), self._sample(child)) for child in self.processes.running.values()]
        ended = [(seen, self.processes.ended.get(worker)) for worker, seen in self._leaving.items()]
        return all_of(running, ended)

    def _attach(self) -> Attach:
        running = tuple(self.connections.seen(child) for child in self.processes.running.values())
        workers = running + tuple(seen for seen in self._leaving.values() if seen.pid)
        return Attach(
            node=self.site.node,
            incarnation=self.incarnation,
            slots=self.site.slots,
            workers=workers,
            facts=self._facts,
            voter=VoterId("") if self._voting is None else self._voting.voter,
        )

    def _beat(self) -> Beat:
        samples = (self._sample(child) for child in self.processes.running.values())
        found = tuple(sample for sample in samples if sample is not None)
        return Beat(node=self.site.node, incarnation=self.incarnation, samples=found)

    def _on_worker_event(self, event: FromWorker) -> None:
        self.uplink.tell(event)

    def _on_ended(self, ended: Ended) -> None:
        """A worker has ended: report it, unless the same report is still on its way."""
        if ended.worker in self._leaving:
            return
        child = Child(worker=ended.worker, job=JobId(""), slot=ended.slot, pid=ended.pid or 0)
        self._leaving[ended.worker] = self.connections.seen(child)
        task = asyncio.create_task(self._report_end(ended))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report_end(self, ended: Ended) -> None:
        await self.connections.last_words(ended.worker, LAST_WORDS_S)
        private = self.sampler.records(ended.worker)
        cause = cause_of(ended, self._logs_of(ended.worker))
        logger.info("worker %s (process %s): %s", ended.worker, ended.pid, cause)
        self.uplink.tell(
            WorkerExited(
                worker=ended.worker,
                node=self.site.node,
                code=ended.code,
                signal=ended.signal,
                cause=cause,
                private=private,
                kept=self.snapshot_store.kept(),
            ),
            at_ns=ended.at_ns,
        )

    def _logs_of(self, worker: WorkerId) -> list[Path]:
        """Where a worker's output is: its rank's log, or its own before it has a rank."""
        rank = self.connections.rank_of(worker)
        names = [f"{worker}.log"] if rank is None else [f"rank-{rank}.log", f"{worker}.log"]
        return [self.site.logs / name for name in names]

    async def _look(self) -> None:
        """See to the network paths, if this run's processes tell of them; never ends by itself."""
        if self.network is None:
            await asyncio.get_running_loop().create_future()
        else:
            await self.network.run()

    def _make_uplink(self, token: Callable[[], str]) -> Uplink:
        """The connection to whichever orchestrator is the head."""
        return Uplink(
            where=self._whereabouts.next,
            token=token,
            attach=self._attach,
            beat=self._beat,
            on_message=self._on_message,
            on_acked=self._on_acked,
            allegiance=Allegiance(self.site.folder),
            tls=None if self.site.held is None else client_context(self.site.held),
            vote=None if self._voting is None else self._voting.hear,
            found=self._whereabouts.found,
            silent=self._whereabouts.silent,
            told=self._whereabouts.told,
            may_move=lambda: self._whereabouts.may_move,
            handshake_s=lambda: self._whereabouts.handshake_s,
            door_s=lambda: self._whereabouts.door_s,
        )

    def _forwarder(self) -> Forwarder | None:
        """Who sends on what workers print; None on the launcher's machine, where it can be read."""
        uplink = self.uplink
        if self.site.held is None:
            return None
        site = self.site
        return Forwarder(
            site.logs, site.node, site.folder, show=uplink.print, heard=uplink.takes_output, pause_s=uplink.beat_s
        )

    async def _print(self) -> None:
        """Send on what workers print, from a machine of its own; never ends by itself."""
        if self.forwarder is None:
            await asyncio.get_running_loop().create_future()
        else:
            await self.forwarder.run()

    def _slot_of(self, pid: int) -> int | None:
        """The slot of the worker with this process id."""
        return next((child.slot for child in self.processes.running.values() if child.pid == pid), None)

    def _on_acked(self, event: Event) -> None:
        """It is in the journal. Only now the private state of an ended worker may go."""
        if self.network is not None:
            self.network.register.acked(event)
        if isinstance(event, WorkerExited):
            self._leaving.pop(event.worker, None)
            self.sampler.remove(event.worker)
            self.connections.forget(event.worker)
            self.processes.forget(event.worker)

    # ------------------------------------------------------------ from the orchestrator

    def _on_message(self, message: ToAgent) -> None:
        match message:
            case Attached(jobs=jobs, tainted=tainted, printed=printed):
                if self.forwarder is not None:
                    self.forwarder.go_on(printed)
                for terms in jobs:
                    self._agree(terms)
                if self.network is not None:
                    self.network.register.compare(tainted)
            case JobTerms():
                self._agree(message)
            case OrderFrame():
                for order in message.each():
                    self._obey(order)
            case Appoint():
                if self._heir is not None:
                    self._heir.appoint(message, self._whereabouts.here)
            case Shutdown(reason=reason, grace_s=grace_s):
                self.stop(reason, grace_s)
            case _:
                logger.warning("the orchestrator said %s out of turn", type(message).__name__)

    async def _attend(self) -> None:
        """As long as the orchestrator is there, whoever waits for its orders waits on."""
        while True:
            await asyncio.sleep(ATTENDED_S)
            if self.uplink.connected:
                self.connections.attend()

    def _agree(self, terms: JobTerms) -> None:
        """Take a job's terms; the newest count."""
        job = terms.spec.job
        if self._terms[job].done():
            del self._terms[job]
        self._terms[job].set_result(terms)

    def _obey(self, order: AnyOrder) -> None:
        if order.node != self.site.node or not SAFE_ID.fullmatch(order.worker):
            logger.error("refused an order that is not for this node: %s", type(order).__name__)
            return
        match order:
            case StartWorker():
                self._start(order)
            case Fence(worker=worker):
                self.processes.kill(worker, signal.SIGKILL, "fenced")
            case PassOn(worker=worker, number=number, nth=nth):
                self.processes.pass_on(worker, number, nth)
                self._let_end(order)
            case WorkerOrder():
                self.connections.pass_on(order)

    def _start(self, order: StartWorker) -> None:
        terms = self._terms[order.job]
        if self._stop.done() or not terms.done():
            return  # it is repeated, or soon meant for another node
        if not 0 <= order.slot < self.site.slots:
            logger.error("%s has no slot %d", self.site.node, order.slot)
            return
        env = worker_environment(
            self._env,
            self.launch,
            terms.result().spec,
            node=self.site.node,
            worker=order.worker,
            slot=order.slot,
            agent_socket=self.connections.path,
            page=self.sampler.path(order.worker),
            logs=self.site.logs,
            guest=order.guest,
            network=None if self.network is None else self.network.environment(),
        )
        self.processes.start(
            Fork(
                worker=order.worker,
                job=order.job,
                slot=order.slot,
                function=self.launch.function,
                argv=self.launch.argv,
                env=env,
                cwd=self.launch.cwd,
                log=str(self.site.logs / f"{order.worker}.log"),
            )
        )

    async def _welcome(self, child: Child) -> Welcome:
        """What a worker is told first. After a restart of the agent it waits here until the orchestrator is back."""
        terms = await asyncio.shield(self._terms[child.job])
        return Welcome(
            job=child.job,
            worker=child.worker,
            node=self.site.node,
            slot=child.slot,
            host=self.site.host,
            secret=terms.secret,
            patience_s=terms.patience_s,
            logs=str(self.site.logs),
            world_size=terms.spec.world_size,
            nproc_per_node=terms.spec.nproc_per_node,
            encrypts=self.launch.encrypts,
            park_dir=terms.spec.park_dir,
            grace_ms=terms.spec.grace_ms,
            resumes=terms.spec.parking_of_workers,
        )
