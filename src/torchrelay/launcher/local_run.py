"""Local run: starts orchestrator and agents on this machine, submits the job, follows it to its end, and tidies up."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from torchrelay.agent.output.scribe import read_left_out
from torchrelay.api.endpoint import ENDPOINT, LOGS, TOKEN, Endpoint
from torchrelay.api.shown import Incidents
from torchrelay.client.client import Away, Client, Denied
from torchrelay.client.ledger_file import ledger, write_ledger
from torchrelay.client.runs import NotPossible
from torchrelay.launcher.following import Degraded, Followed, Remark, moments
from torchrelay.launcher.keeper import CANNOT_START, LASTING, Keeper
from torchrelay.launcher.parking import PARKING
from torchrelay.launcher.plan import ENDING, TELLING, Plan
from torchrelay.launcher.renewal import Renewal
from torchrelay.launcher.sweep import PrivateFolder, sweep
from torchrelay.launcher.voice import HOW_TO_JOIN, NEVER_JOINED, NOT_JOINED, UNHEARD, Voice, remedy, summary
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.recovery.ending import NO_SPARE, PARKED
from torchrelay.schedulers.lasting import AGAIN_S, is_told_by_slurm
from torchrelay.schedulers.local import FIRST_KEY, LocalScheduler, spread, write_file
from torchrelay.schedulers.machine import write_machine
from torchrelay.schedulers.network import RECORD as NETWORK
from torchrelay.schedulers.network import Isolation
from torchrelay.schedulers.port import GrantLost, SchedulerError, SpareRequest
from torchrelay.schedulers.tether import adopt_orphans
from torchrelay.wire.files.descriptors import allow_many
from torchrelay.wire.files.launch import UNPROTECTED, Launch, forget_environment, write_launch
from torchrelay.wire.files.page import no_room
from torchrelay.wire.files.tails import LogTail, last_lines
from torchrelay.wire.trust.trust import new_token, write_token

LOOPBACK = "127.0.0.1"
PATHS = "TORCHRELAY_NET_PATHS"  # which interfaces the network core uses
INSIDE = "orchestrator"  # its unix socket, in the run's private folder
STOPPED = 130
STOP_S = 20.0  # how long a run may take to stop in order after Ctrl-C
END_S = 20.0  # how long orchestrator and agents may take to end when the job is over
LINGER_S = 20.0  # how long workers train on without their agent, which is started again at once
LINES_S = 0.25  # how often the ranks' logs are looked at


def follow(plan: Plan) -> int:
    """Run a plan to its end on this machine. Returns the exit code; nothing is left running, whatever happens."""
    return follow_as(LocalRun, plan)


def follow_as(kind: type[LocalRun], plan: Plan) -> int:
    """The same, of this kind of run."""
    voice = Voice(quiet=plan.quiet, world_size=plan.spec.world_size)
    for remark in plan.remarks:
        voice.say(remark)
    adopt_orphans()
    allow_many()
    folder = PrivateFolder()
    isolation = None
    try:
        isolation = isolate(plan) if plan.isolate else None
        return asyncio.run(go(lambda: kind(plan, voice, folder.path, isolation)))
    except NotPossible as error:
        voice.say(str(error))
        return error.code
    finally:
        left = sweep()
        with suppress(OSError):
            forget_environment(plan.run_dir)
        folder.remove()
        if isolation is not None:
            isolation.close()
        if left:
            voice.say(f"left running, as they could not be ended: {', '.join(left)}. End them yourself")


def isolate(plan: Plan) -> Isolation:
    """A network with a link for each virtual node. Raises `NotPossible`."""
    try:
        isolation = Isolation.open(plan.run_dir, slots_of(plan), plan.links)
    except SchedulerError as error:
        raise NotPossible(f"no network for --isolate: {error}", CANNOT_START) from error
    write_file(plan.run_dir / NETWORK, isolation.network)
    return isolation


def slots_of(plan: Plan) -> dict[NodeId, int]:
    """The virtual nodes and their slots; spare nodes after the others."""
    nodes, nproc = plan.spec.nodes, plan.spec.nproc_per_node
    spares = plan.spec.spares - plan.spare_nodes * nproc
    return spread(nodes, nproc, spares) | spread(plan.spare_nodes, nproc, 0, first=nodes)


async def go(make: Callable[[], LocalRun]) -> int:
    """Start everything, wait for the verdict, end everything. Raises `NotPossible`."""
    run = make()
    loop = asyncio.get_running_loop()
    for name in ENDING | TELLING:
        number = signal.Signals[name]
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored, as by nohup: it stays so
            loop.add_signal_handler(number, run.hear, name)
    try:
        await run.until_verdict(run.start())
        code = await run.until_verdict(run.watch())
        await run.unless_hurried(run.conclude())
        return code
    finally:
        await run.tidy_up()


class LocalRun:
    """One run on this machine. `verdict` is its exit code, or why it cannot go on."""

    def __init__(self, plan: Plan, voice: Voice, folder: Path, isolation: Isolation | None = None) -> None:
        self.plan = plan
        self.voice = voice
        self.folder = folder
        self.network = isolation.network if isolation is not None else None
        self.isolation = isolation
        host = LOOPBACK if self.network is None else self.network.address
        # By SIGTERM nothing of a job ends that may park, where Slurm sends it to each process.
        self.lasts = plan.parking is not None and is_told_by_slurm(os.environ)
        end_by = signal.SIGINT if self.lasts else signal.SIGTERM
        self.keeper = Keeper(plan.run_dir, plan.port, host, folder / INSIDE, further=(LASTING,) * self.lasts)
        self.scheduler = LocalScheduler(plan.run_dir, self.agent_command, slots_of(plan), end_by=end_by)
        self.tail = LogTail(plan.run_dir / LOGS)
        self.token = new_token()
        self.client: Client | None = None
        self.verdict: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.hurry = asyncio.Event()
        self.finishing = False  # the orchestrator has said that every rank's script has ended
        self.went_on = False  # the job trains, or has trained
        self.unheard = False  # they have, and no orchestrator has heard of it
        self.warned = False  # the operator knows that the script is not protected, and what would protect it
        self._signals, self._told_s = 0, 0.0
        self._remarked: set[str] = set()
        self._left_out: set[str] = set()  # logs of which that was said
        self._telling: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ start

    async def start(self) -> None:
        """Orchestrator, agents, job. Raises `NotPossible`."""
        plan = self.plan
        if full := no_room(self.folder, sum(slots_of(plan).values())):
            raise NotPossible(full, CANNOT_START)
        self.make_trust()
        if plan.parking is not None:
            plan.parking.claim(plan.run_dir)
        write_launch(plan.run_dir, self.launch())
        write_machine(plan.run_dir, self.folder)
        client = self.client_at(await self.keeper.start())
        await self.start_nodes()
        try:
            client.submit(plan.spec)
        except (Away, Denied) as error:
            raise NotPossible(f"the job could not be submitted: {error}", CANNOT_START) from error
        self.client = client
        if plan.parking is not None and plan.parking.told:
            self.voice.notice(f"{plan.spec.job} {plan.parking.told}")
        self.voice.notice(f"{plan.spec.job} in {plan.run_dir}: torchrelay status --run-dir {plan.run_dir}")

    def make_trust(self) -> None:
        """What operators and agents show to the orchestrator."""
        write_token(self.plan.run_dir / TOKEN, self.token)

    def client_at(self, endpoint: Endpoint) -> Client:
        return Client(endpoint.url, self.token, endpoint.socket)

    async def start_nodes(self) -> None:
        await self.scheduler.acquire(SpareRequest(key=FIRST_KEY, count=len(slots_of(self.plan))))

    def launch(self) -> Launch:
        """What agents run. Where nodes have addresses, scripts that ask find the first of them."""
        launch = msgspec.structs.replace(self.plan.launch, parks=self.plan.parking is not None)
        if self.network is None:
            return launch
        env = self.plan.launch.env
        if self.network.path_names:
            env = {PATHS: f"={','.join(self.network.path_names)}"} | env
        return msgspec.structs.replace(launch, master_addr=self.network.nodes[0].address, env=env)

    def agent_command(self, node: NodeId, slots: int) -> list[str]:
        """The command line of a virtual node's agent."""
        run_dir = self.plan.run_dir
        command = [
            sys.executable, "-P", "-m", "torchrelay.agent", "--node", node, "--slots", str(slots), "--endpoint",
            str(run_dir / ENDPOINT), "--token-file", str(run_dir / TOKEN), "--run-dir", str(run_dir), "--folder",
            str(self.folder), "--linger", str(LINGER_S),
        ]  # fmt: skip
        if self.isolation is None:
            return command
        return self.isolation.command(node, [*command, "--host", self.isolation.network.link(node).address])

    # ------------------------------------------------------------ watch

    async def until_verdict(self, work: Coroutine[Any, Any, None]) -> int:
        """Do some work until it is done or there is a verdict. Returns 0, or the verdict; raises what either raises."""
        task = asyncio.create_task(work)
        await asyncio.wait((task, self.verdict), return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not task.cancelled():
            task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return self.verdict.result() if self.verdict.done() else 0

    async def watch(self) -> None:
        """Tell what happens, until there is a verdict."""
        if self.verdict.done():
            return
        async with asyncio.TaskGroup() as group:
            for work in self.works():
                group.create_task(work)

    def works(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """What is done beside one another while the job runs."""
        renewal = Renewal(self.plan.run_dir, self.keeper, self.scheduler.processes, self.now, self.voice.notice)
        alone = Followed(
            self.folder, self.plan.spec, self.keeper, self.scheduler, self.voice.say, lambda: self.finishing
        )
        return (
            self.tell(),
            self.print_lines(),
            self.keeper.keep(),
            self.mind_nodes(),
            renewal.watch(),
            self.follow_alone(alone),
        )

    def now(self) -> Client:
        """A client of whichever orchestrator there is now: another one may have taken over elsewhere."""
        return self.client_at(self.keeper.where())

    async def tell(self) -> None:
        """Notices of incidents as they happen; the end of the job is the verdict."""
        async for moment in moments(self.keeper.where, self.token, self.keeper.held):
            if isinstance(moment, Degraded):
                self.voice.say(moment.reason or "all is well again")
                continue
            if isinstance(moment, Remark):
                if moment.text not in self._remarked:
                    self._remarked.add(moment.text)
                    self.voice.say(moment.text)
                continue
            self.voice.tell(moment)
            self.finishing |= any(
                note.phase == JobPhase.FINISHING and note.job == self.plan.spec.job for note in moment.notes
            )
            self.went_on |= any(note.phase == JobPhase.RUNNING for note in moment.notes)
            if any(note.phase == JobPhase.ENDED and note.job == self.plan.spec.job for note in moment.notes):
                self.decide(moment.outcomes[self.plan.spec.job])

    async def print_lines(self) -> None:
        while True:
            self.print_new_lines()
            await asyncio.sleep(LINES_S)

    def print_new_lines(self, *, last: bool = False) -> None:
        lines = self.tail.read(last)
        for rank, line in lines:
            self.voice.line(rank, line)
            if line == UNPROTECTED and not self.warned and not self.voice.quiet:
                self.warned = True
                self.voice.say(NOT_JOINED)
        if lines:
            self.voice.flush()
        self.tell_left_out()

    def tell_left_out(self, *, last: bool = False) -> None:
        """Say of each log that it cannot be written, once; and at the end how much is missing."""
        for found in (found for folder in self.folder.iterdir() for found in read_left_out(folder)):
            where = self.plan.run_dir / LOGS / found.log
            if last:
                self.voice.say(f"{found.size:,} bytes of output could not be written to {where}: {found.why}")
            elif found.log not in self._left_out:
                self._left_out.add(found.log)
                self.voice.notice(f"{where} cannot be written ({found.why}): output is left out, training goes on")

    async def follow_alone(self, alone: Followed) -> None:
        """Without an orchestrator the ranks' own ends are the verdict."""
        reason = await alone.to_its_end()
        if reason is not None:
            self.give_up(reason)
            return
        self.unheard = True
        await self.scheduler.close(END_S)  # the ranks leave, and what they say then is still printed
        self.decide(0)

    async def mind_nodes(self) -> None:
        """A node whose agent cannot run is given up; without any node there is no run."""
        async for event in self.scheduler.watch():
            if isinstance(event, GrantLost):
                words = last_lines(self.plan.run_dir / LOGS / f"agent-{event.node}.log", 1)
                reason = f"{event.node}: {event.reason}: {' '.join(words)}"
                if await self.can_do_without(event.node):
                    self.voice.say(reason)
                else:
                    code = NO_SPARE if await asyncio.to_thread(self.has_trained) else CANNOT_START
                    self.give_up(NotPossible(reason, code))

    async def can_do_without(self, node: NodeId) -> bool:  # noqa: ARG002  which one it is matters elsewhere
        """Whether there is a run at all without this node."""
        return bool(self.scheduler.processes())

    def has_trained(self) -> bool:
        """Whether the job has come so far that nobody may say it could not start."""
        try:
            return self.client is not None and self.now().job(self.plan.spec.job).joined
        except (Away, Denied, ValueError):
            return self.client is not None

    # ------------------------------------------------------------ verdict

    def decide(self, code: int) -> None:
        if not self.verdict.done():
            self.verdict.set_result(code)

    def give_up(self, reason: NotPossible) -> None:
        if not self.verdict.done():
            self.verdict.set_exception(reason)

    def hear(self, name: str) -> None:
        """A signal came: passed on to the ranks, and if it is one that ends them they have the grace time for it."""
        if name in self.plan.ending:
            self.interrupt(name)
        elif self.client is not None and not self.verdict.done():
            self.voice.notice(f"{name}: passed on to the ranks that listen for it")
            self.pass_on(name, f"{name} to the launcher", None)

    def interrupt(self, name: str) -> None:
        """Ctrl-C or the like: the first time the ranks are told, the second time everything is killed."""
        now_s = asyncio.get_running_loop().time()
        if self.lasts and name == PARKING and self._signals and now_s - self._told_s < AGAIN_S:
            return  # Slurm sends it several times in a row
        self._signals, self._told_s = self._signals + 1, now_s
        if self._signals > 1:
            self.hurry.set()
            self.decide(STOPPED)
        elif self.verdict.done():
            pass  # it is ending already
        elif self.client is None:
            self.decide(STOPPED)
        else:
            grace_s = self.plan.grace_s
            told = f"the ranks have {grace_s:g} s to end by themselves (--grace)"
            if name == PARKING and self.plan.parking is not None:
                told = f"the job parks if that fits into {grace_s:g} s (--grace)"
            self.voice.say(f"stopping ({name}): {told}; once more kills at once")
            asyncio.get_running_loop().call_later(grace_s + STOP_S, self.decide, STOPPED)
            self.pass_on(name, f"stopped by the operator ({name})", round(grace_s * 1000))

    def pass_on(self, name: str, reason: str, grace_ms: int | None) -> None:
        task = asyncio.create_task(self.tell_ranks(self.now(), name, reason, grace_ms))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def tell_ranks(self, client: Client, name: str, reason: str, grace_ms: int | None) -> None:
        """Apart from the loop, which must hear a second Ctrl-C while this waits for an answer."""
        try:
            if name == PARKING and grace_ms is not None and self.plan.parking is not None:
                with suppress(Denied):  # it cannot be parked now: the ranks are to end by themselves
                    await asyncio.to_thread(client.park, self.plan.spec.job, name, reason, grace_ms)
                    return
            await asyncio.to_thread(client.signal, self.plan.spec.job, name, reason, grace_ms)
        except (Away, Denied) as error:
            if grace_ms is None:
                self.voice.say(f"{name} could not be passed on: {error}")
            else:
                self.voice.say(f"{error}: ending without it")
                self.decide(STOPPED)

    # ------------------------------------------------------------ end

    async def conclude(self) -> None:
        """The last lines of the ranks, and our own."""
        self.print_new_lines(last=True)
        self.tell_left_out(last=True)
        if self.client is None:
            return
        if self.unheard:
            self.went_on = True
            self.voice.say(UNHEARD.format(self.plan.spec.job))
            return
        try:
            client = self.now()
            job = await asyncio.to_thread(client.job, self.plan.spec.job)
            incidents = await asyncio.to_thread(client.view_incidents, job.job)
            write_ledger(self.plan.run_dir, ledger(incidents))
        except (Away, Denied, OSError) as error:
            self.voice.say(f"no summary: {error}")
            self.went_on = True  # for all we know
            return
        self.went_on |= self.plan.parking is not None and self.plan.parking.is_behind(job.step)
        code = 0 if job.outcome is None else job.outcome.code
        if code not in (0, STOPPED, PARKED):
            self.quote(incidents)
        if not job.joined and code == 0:
            self.voice.say(NEVER_JOINED if self.warned else f"{NEVER_JOINED}. {HOW_TO_JOIN}")
        self.voice.say(summary(job, self.where_ledger()))
        if code == PARKED and self.plan.parking is not None:
            self.voice.say(self.plan.parking.how_to_go_on())
        if code and self.plan.parking is not None and self.plan.parking.resume is not None and not self.went_on:
            self.voice.say(f"it had not gone on: the parking in {self.plan.parking.resume} is as it was")
        elif helps := remedy(code, self.plan.spec):
            self.voice.say(helps)

    def where_ledger(self) -> str:
        """The folder with the journal that tells of the whole run."""
        return str(self.plan.run_dir)

    def quote(self, incidents: Incidents) -> None:
        """What a failed worker said before it had a rank: it stands in no rank's log."""
        logs = self.plan.run_dir / LOGS
        faults = incidents.incidents[-1].faults if incidents.incidents else ()
        for fault in faults[:1]:
            if last_lines(logs / f"rank-{fault.rank}.log", 1):
                continue  # it had one, and its words have been printed
            for line in last_lines(logs / f"{fault.worker}.log"):
                self.voice.say(f"{fault.worker}: {line}")

    async def unless_hurried(self, work: Coroutine[Any, Any, None]) -> None:
        """Do some work to its end, or until there is no time for it."""
        task = asyncio.create_task(work)
        hurried = asyncio.create_task(self.hurry.wait())
        await asyncio.wait((task, hurried), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        for each in (task, hurried):
            each.cancel()
        await asyncio.gather(task, hurried, return_exceptions=True)

    async def tidy_up(self) -> None:
        """End agents and orchestrator in order, or at once if there is no time."""
        if self.plan.parking is not None and not self.went_on:
            self.plan.parking.give_back()
        await self.unless_hurried(self._end_gently())
        if self.hurry.is_set():
            await self.end_at_once()
            sweep()
            await self.scheduler.close(0)
            await self.keeper.stop(0)

    async def end_at_once(self) -> None:
        """What `sweep` does not reach."""

    async def _end_gently(self) -> None:
        self.keeper.expect_end()
        try:
            if self.client is not None:
                await asyncio.to_thread(self.now().shutdown, "the run is over")
        except (Away, Denied):
            pass  # it is gone already, or is killed below
        await self.scheduler.close(END_S)
        await self.keeper.stop(END_S if self.client is not None else 1.0)
