"""Machines run: a run whose nodes are machines of their own. The orchestrator is here; all come to it over TLS."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from torchrelay.api.endpoint import LOGS, Endpoint, write_endpoint
from torchrelay.api.shown import Head, HeirView
from torchrelay.client.client import Away, Client, Denied
from torchrelay.client.heads import HEAD_PATH, Heads, places_of, where_ledger
from torchrelay.client.runs import NotPossible
from torchrelay.launcher import local_run
from torchrelay.launcher.allocation import step_environment
from torchrelay.launcher.following import FarLines, Over, Reach
from torchrelay.launcher.keeper import CANNOT_START, LASTING, STAYED_AWAY, Keeper
from torchrelay.launcher.local_run import INSIDE, LocalRun
from torchrelay.launcher.machines import Machines, by_hand, exported, is_this_machine
from torchrelay.launcher.plan import Plan
from torchrelay.launcher.renewal import Renewal
from torchrelay.launcher.satellites import Satellites, give_back
from torchrelay.launcher.voice import Voice
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers.local import BY_SSH, FIRST_KEY, LocalScheduler, Way
from torchrelay.schedulers.network import Isolation
from torchrelay.schedulers.port import SpareRequest
from torchrelay.wire.files.launch import ENCRYPTING, Launch
from torchrelay.wire.trust.authority import make_passes
from torchrelay.wire.trust.passes import Role, pass_of, read_pass
from torchrelay.wire.trust.trust import TrustError

LOOK_S = 1.0
SAY_S = 15.0  # between two words on nodes that have not joined
MOST_NAMES = 8
BY_SRUN = Way(tied=False, word_s=7.0, least_s=3.0, environment=step_environment)
HURRY_S = 2.0  # how long it may take to tell the orchestrator that all is to end at once
HEIRS_S = 10.0  # between two looks at which nodes may take the orchestrator's place
APART = (
    "the network is split, or they are lost. Without them nothing is decided here; where most of the nodes are, one of "
    "them acts by now, and `torchrelay attach` there follows it"
)
LAST_S = 30.0  # how long the last lines may take when another node's orchestrator acts
AWAY_S = 3600.0  # how long an orchestrator that cannot come back may be away, before the run is given up


def follow(plan: Plan) -> int:
    """Run a plan on its machines to its end. Returns the exit code."""
    return local_run.follow_as(MachinesRun, plan)


class MachinesRun(LocalRun):
    """One run on several machines."""

    def __init__(self, plan: Plan, voice: Voice, folder: Path, isolation: Isolation | None = None) -> None:
        super().__init__(plan, voice, folder, isolation)
        assert plan.machines is not None, "this run has machines"
        self.machines: Machines = plan.machines
        self.slots = slots_of(plan, self.machines)
        job = self.machines.slurm_job
        further = ("--heirs", "--node", self.machines.own_node, *(("--slurm", str(job)) if job else ()))
        further += (LASTING,) * self.lasts
        self.keeper = Keeper(plan.run_dir, plan.port, self.machines.address, folder / INSIDE, tls=True, further=further)
        # What ends an ssh ends the way to an agent; what ends an srun, the agent and its workers.
        way = BY_SRUN if job else BY_SSH
        self.scheduler = LocalScheduler(
            plan.run_dir, self.agent_command, dict(self.slots), words=self.pass_words, way=way
        )
        self._lost: set[NodeId] = set()
        self._joined: set[NodeId] = set()
        self._satellites: dict[NodeId, int] = {}  # nodes of further Slurm jobs
        self.satellites = self._make_satellites()
        self.heads = Heads(lambda: places_of(plan.run_dir), lambda: self.token, self.keeper.held)
        self._heirs: tuple[HeirView, ...] = ()  # those that were said
        self._looked_s = 0.0
        self._apart_since_s: float | None = None  # since when heirs cannot be reached, and whether that was said
        self._apart_told = False
        self._far: FarLines | None = None  # once another node's orchestrator acts
        self._far_over = False

    def make_trust(self) -> None:
        make_passes(self.plan.run_dir, self.plan.spec.job)
        self.token = read_pass(pass_of(self.plan.run_dir, Role.OPERATOR)).token

    def pass_words(self) -> bytes:
        """What an agent reads from its standard input."""
        return pass_of(self.plan.run_dir, Role.AGENT).read_bytes()

    def client_at(self, endpoint: Endpoint) -> Client:
        return Client(endpoint.url, self.token, endpoint.socket, pass_of(self.plan.run_dir, Role.OPERATOR))

    def join(self) -> str:
        """HOST:PORT of the orchestrator, for agents."""
        return self.keeper.where().url.removeprefix("https://")

    def launch(self) -> Launch:
        env = exported(self.plan.launch.env, self.plan.export)
        first = self.machines.hosts[0].address.rpartition("@")[2] if self.machines.hosts else ""
        master = self.machines.address if not first or is_this_machine(first) else first
        return msgspec.structs.replace(
            encrypting(self.plan),
            env=env,
            inherit=False,
            job=self.plan.spec.job,
            master_addr=master,
            code="",
            parks=self.plan.parking is not None,
        )

    def agent_command(self, node: NodeId, slots: int) -> list[str]:
        return self.machines.command(node, slots, self.join(), self._satellites.get(node, 0))

    async def start_satellite(self, node: NodeId, job: int) -> None:
        """An agent on a node of another Slurm job."""
        self._satellites[node] = job
        if node not in self.scheduler.processes():  # else it is tried again anyway, and now there
            await self.scheduler.add(node, self.plan.spec.nproc_per_node)

    async def start_nodes(self) -> None:
        if self.slots:
            await self.scheduler.acquire(SpareRequest(key=FIRST_KEY, count=len(self.slots)))
        else:
            self.voice.say(by_hand(self.plan.run_dir, self.join()))

    async def can_do_without(self, node: NodeId) -> bool:
        """A job that has trained goes on as long as it can; one that has not needs room for all its ranks."""
        self._lost.add(node)
        if node in self._satellites:
            self.satellites.give_up(node)
            return True
        if await asyncio.to_thread(self.has_trained):
            return bool(self.scheduler.processes())
        left = sum(slots for name, slots in self.slots.items() if name not in self._lost)
        return left >= self.plan.spec.world_size

    async def tidy_up(self) -> None:
        """What the ranks printed last comes when their agents end."""
        last = asyncio.create_task(self._print_far_lines())
        try:
            await super().tidy_up()
            self.print_new_lines(last=True)
            if self._far is not None and not self._far_over:
                await self.unless_hurried(self._last_far_lines(last))
        finally:
            last.cancel()
            await asyncio.gather(last, return_exceptions=True)
            if self.machines.floating.nodes:
                await give_back(self.machines.slurm_job, self.voice.say)

    async def end_at_once(self) -> None:
        """Agents on other machines hear it from the orchestrator, if it is there, and over their standard input."""
        with suppress(Away, Denied, TimeoutError):
            async with asyncio.timeout(HURRY_S):
                await asyncio.to_thread(self.now().shutdown, "killed by the operator", 0.0)
        await self.scheduler.close(0)

    def works(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """As on one machine; but what an agent writes down while it is alone is on its own machine."""
        renewal = Renewal(self.plan.run_dir, self.keeper, dict, self.now, self.voice.notice)
        return (
            self.tell(),
            self.print_lines(),
            self.keeper.keep(),
            self.mind_nodes(),
            self.mind_orchestrator(),
            self.mind_start(),
            self.mind_head(),
            renewal.watch(),
            *([self.satellites.mind()] if self.machines.floating.nodes else []),
        )

    def _make_satellites(self) -> Satellites:
        return Satellites(
            self.machines.slurm_job,
            self.machines.floating,
            self.plan.run_dir,
            first=self.slots,
            slots=self.plan.spec.nproc_per_node,
            now=self.now,
            start=self.start_satellite,
            say=self.voice.say,
        )

    async def mind_start(self) -> None:
        """Say which nodes have not joined. A job that has not begun waits for them, `--join-timeout` at most."""
        loop, told = asyncio.get_running_loop(), 0.0
        begun = loop.time()
        while missing := await self.missing():
            waited_s = loop.time() - begun
            log = self.plan.run_dir / LOGS / f"agent-{missing[0]}.log"
            what = f"{some_of(missing)} {'has' if len(missing) == 1 else 'have'} not joined, see {log}"
            if waited_s - told > SAY_S:
                told = waited_s
                self.voice.say(f"waiting for {waited_s:.0f} s: {what}")
            limit_s = self.plan.join_timeout_s
            if limit_s and waited_s > limit_s and not await asyncio.to_thread(self.has_trained):
                self.give_up(NotPossible(f"within {limit_s:g} s (--join-timeout), {what}", CANNOT_START))
            await asyncio.sleep(LOOK_S)

    async def missing(self) -> list[NodeId]:
        """The nodes that have not joined so far and are still expected; none if nobody can tell."""
        try:
            nodes = await asyncio.to_thread(self.now().view_nodes)
        except (Away, Denied, ValueError):
            return list(self.slots)
        self._joined.update(view.node for view in nodes.nodes)
        return [node for node in self.slots if node not in self._joined | self._lost]

    async def mind_orchestrator(self) -> None:
        """An orchestrator that cannot come back: the ranks train on, and nobody can be told how."""
        loop, since = asyncio.get_running_loop(), None
        while True:
            await asyncio.sleep(LOOK_S)
            trouble = self.keeper.trouble
            if trouble is None or not self._own_acts():
                since = None
                continue
            if since is None:
                since = loop.time()
                self.voice.say(f"{trouble}; the ranks train on, it is tried again, for an hour at most")
            elif loop.time() - since > AWAY_S:
                self.give_up(trouble)

    # ------------------------------------------------------------ another node's orchestrator acts

    async def mind_head(self) -> None:
        """Follow the one that acts, when it is no longer ours; and say beforehand where else it may be one day."""
        while self._own_acts():
            await self._look_at_heirs()
            if self.keeper.trouble is not None and await self.heads.look():
                self._give_way()
            await asyncio.sleep(LOOK_S)
        self._far = FarLines(Reach(self.keeper.where, self.token, self.keeper.held))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._print_far_lines())
            group.create_task(self._keep_where())
            try:
                await self.heads.mind(self.voice.say, AWAY_S, announce=True)
            except (NotPossible, Denied, TrustError) as error:
                self.give_up(NotPossible(str(error), STAYED_AWAY))

    def where_ledger(self) -> str:
        """Our own journal ends where the other one took over."""
        if self._far is None or self.heads.head is None:
            return super().where_ledger()
        return where_ledger(self.heads.head)

    def _own_acts(self) -> bool:
        """Whether nobody has taken the place of the orchestrator that we keep."""
        try:
            return bool(self.keeper.where().pid)
        except ValueError:
            return True  # damaged; it is written again

    def _give_way(self) -> None:
        """Ours cannot even ask whether another one acts, and one does."""
        with suppress(ValueError, OSError):
            there = msgspec.structs.replace(self.keeper.where(), url=self.heads.where().url, pid=0, socket="")
            write_endpoint(self.plan.run_dir, there)

    async def _look_at_heirs(self) -> None:
        """Say who they are, and when none of them can be reached: then nothing that is decided here leaves."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._looked_s < HEIRS_S:
            return
        self._looked_s = loop.time()
        try:
            head = await asyncio.to_thread(self.now().fetch, HEAD_PATH, Head)
        except Denied as error:
            if error.status == HTTPStatus.SERVICE_UNAVAILABLE:  # nobody need be named: it may have lost its heirs
                self._mind_apart("", loop.time(), idle=f"the orchestrator here waits for most of the nodes ({error})")
            return
        except (Away, ValueError):
            return
        self._tell_heirs(head.heirs)
        self._mind_apart(" and ".join(head.out_of_reach), loop.time())

    def _mind_apart(self, out: str, now_s: float, *, idle: str = "") -> None:
        """These have not been reached at this look. At one look alone that may be an heir that is being replaced.

        `idle`: our orchestrator does not act at all, and why. It may have been started again just now.
        """
        since_s = self._apart_since_s
        if not out and not idle:
            if self._apart_told:
                self.voice.say("nodes with copies of the journal are in reach again")
            self._apart_since_s, self._apart_told = None, False
        elif since_s is None:
            self._apart_since_s = now_s
        elif not self._apart_told:
            self._apart_told = True
            self.voice.say(f"{idle or f'{out} cannot be reached'}: {APART}")
        elif now_s - since_s > AWAY_S:
            what = f"for {AWAY_S:g} s {idle}" if idle else f"{out} could not be reached for {AWAY_S:g} s"
            self.give_up(NotPossible(f"{what}: {APART}", STAYED_AWAY))

    def _tell_heirs(self, heirs: tuple[HeirView, ...]) -> None:
        """Once for each: whoever has read it finds the run when this machine is lost."""
        if heirs and heirs != self._heirs:
            self._heirs = heirs
            self.voice.notice(
                f"copies of the journal are on {' and '.join(heir.node for heir in heirs)}. If this machine is lost: "
                f"`torchrelay attach` on one of them, or from elsewhere with --url {heirs[0].url} --ca F, a copy of "
                f"{pass_of(self.plan.run_dir, Role.OPERATOR)}"
            )

    async def _keep_where(self) -> None:
        """Whoever looks into the run's folder finds the one that acts, too."""
        while True:
            with suppress(ValueError, OSError):
                before, found = self.keeper.where(), self.heads.where()
                if self.heads.acts and not before.pid and found.url != before.url:
                    write_endpoint(self.plan.run_dir, msgspec.structs.replace(before, url=found.url))
            await asyncio.sleep(LOOK_S)

    async def _print_far_lines(self) -> None:
        if self._far is None or self._far_over:
            return
        async for found in self._far.follow():
            if isinstance(found, Over):
                self._far_over = True
                if found.left:
                    self.voice.say(f"{found.left:,} bytes of output did not come: they are in the logs of each node")
                return
            self.voice.far_lines(found)

    async def _last_far_lines(self, printing: asyncio.Task[None]) -> None:
        """Those that come while the agents end; as long as somebody tells of them."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LAST_S
        with suppress(Denied, TrustError):
            while not printing.done() and loop.time() < until_s:
                await asyncio.wait((printing,), timeout=LOOK_S)
                if not printing.done() and not await self.heads.look():
                    return


def some_of(nodes: Sequence[NodeId]) -> str:
    """Their names, not too many of them."""
    shown = ", ".join(nodes[:MOST_NAMES])
    return shown if len(nodes) <= MOST_NAMES else f"{shown} and {len(nodes) - MOST_NAMES} more"


def encrypting(plan: Plan) -> Launch:
    """What is launched: what goes from worker to worker is encrypted, unless the plan says that nobody listens."""
    if plan.plain_transfer:
        return plan.launch
    return msgspec.structs.replace(plan.launch, encrypts=True, preload=(*plan.launch.preload, *ENCRYPTING))


def slots_of(plan: Plan, machines: Machines) -> dict[NodeId, int]:
    """The hosts and how many workers each has room for: ranks first, then a share of the spares; spare nodes last."""
    if not machines.hosts:
        return {}  # each says itself how much room it has
    usual = list(local_run.slots_of(plan).values())
    usual += [plan.spec.nproc_per_node] * (len(machines.hosts) - len(usual))
    return {host.node: host.slots or slots for host, slots in zip(machines.hosts, usual, strict=True)}
