"""Doorway: an orchestrator that does not act, and how it comes to; see `protocol.succession`.

Agents that have lost the head come to where an heir listens, and wait. When a majority of those that vote waits here,
they are asked for a lease. Whoever gets it lets them note that it is head now, and acts from then on.

A head whose process was started again stands in its own doorway: somebody else may have become head meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from random import uniform

import aiohttp
from aiohttp import WSMsgType, web
from msgspec import structs

from torchrelay.api.endpoint import Endpoint, write_endpoint
from torchrelay.orchestrator.core.agents import ATTACH_S, refuse
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.http.door import Door, Strangers
from torchrelay.orchestrator.http.following import not_the_head
from torchrelay.orchestrator.http.keys import Keys
from torchrelay.orchestrator.store.parts import asked_before, note_asked
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession import door as doors
from torchrelay.protocol.succession.head import Head
from torchrelay.protocol.succession.succession import CopyId, Place, Succession, VoterId, others_in
from torchrelay.wire.messages.channel import (
    AGENT_PATH,
    Ask,
    Attach,
    Known,
    Note,
    Refused,
    Vote,
    decode_to_orchestrator,
)
from torchrelay.wire.messages.codec import MAX_MESSAGE, WireError, encode
from torchrelay.wire.messages.prompt import resume_soon
from torchrelay.wire.trust.passes import Role, client_context, pass_of, read_pass, server_context

log = logging.getLogger("torchrelay.orchestrator")

# How long a candidate waits for promises before it asks for a higher lease; others do the same, so not all at once.
LEAST_S, MOST_S = 1.0, 2.0
GATHER_S = 1.0  # as long as the head is heard here, agents that miss it are kept for so long: others may come


class Superseded(Exception):
    """Another orchestrator has become head, and this one's copy of the journal is not what that one has."""

    def __init__(self, by: Succession) -> None:
        super().__init__(f"the orchestrator on {by.head.node} acts now (lease {by.lease}), at {by.head.url}")
        self.by = by


class Doorway:
    """Of one candidate; the rules are in `protocol.succession.door`. `known`: what stands in its journal.

    `begin` is called with each lease before anybody is asked for it: from the first on its copy must not change any
    more. `asked`: the highest that it has asked for before. Who does not wait for an answer need not remember it.
    """

    def __init__(
        self, place: Place, known: Succession, begin: Callable[[int], None] = lambda _: None, *, asked: int = 0
    ) -> None:
        self._door = doors.Door(place=place, known=known, under=known.lease, heard=asked)
        self._begin = begin
        self._waiting: dict[VoterId, web.WebSocketResponse] = {}
        self._greeting: tuple[Succession, bytes] | None = None  # what whoever comes is told, encoded
        self._changed = asyncio.Event()
        self._sending: set[asyncio.Task[None]] = set()
        self.follows = False  # whether a head is heard

    @property
    def copy(self) -> CopyId:
        return self._door.place.copy

    @property
    def known(self) -> Succession:
        """The newest succession that it knows of."""
        return self._door.known

    def gives_way_to(self, lease: int) -> bool:
        """Whether who acts with this lease has taken the place that it waits for."""
        return doors.gives_way_to(self._door, lease)

    @property
    def former(self) -> NodeId | None:
        """The node of the head whose place it has taken."""
        return self._door.former

    def listens_at(self, url: str) -> None:
        """Where it will be reached when it is head."""
        self._door = structs.replace(self._door, place=structs.replace(self._door.place, url=url))

    def learn(self, known: Succession) -> None:
        """The head has proposed another succession, or has settled one."""
        self._door = doors.learn(self._door, known)
        self._changed.set()

    async def wait(self, patience_s: float) -> Head:
        """Wait until this one is head. Raises `Superseded` if it cannot become that any more.

        Raises TimeoutError if the head is not heard and nobody has come here for `patience_s`.
        """
        loop = asyncio.get_running_loop()
        lonely_s = loop.time()
        until_s: float | None = None
        while not self._door.acts:
            if self._door.excluded is not None:
                raise Superseded(self._door.excluded)
            if self._waiting or self.follows:
                lonely_s = loop.time()
            elif loop.time() - lonely_s > patience_s:
                raise TimeoutError(f"no head, and nobody at the door, for {patience_s:g} s")
            if self._door.head is None and (until_s is None or loop.time() >= until_s):
                until_s = loop.time() + uniform(LEAST_S, MOST_S) if self._stand() else None
            self._changed.clear()
            try:
                async with asyncio.timeout_at(loop.time() + LEAST_S if until_s is None else until_s):
                    await self._changed.wait()
            except TimeoutError:
                if self._door.head is not None:
                    self._ask_all(Note(self._door.head.newest), self._door.head.noted)
                    until_s = loop.time() + LEAST_S
        assert self._door.head is not None, "it acts"
        log.info("head now: lease %d", self._door.head.settled.lease)
        return self._door.head

    async def tell(self, known: Succession) -> None:
        """Who waits need not look for the one that acts."""
        data = encode(Known(known))
        await asyncio.gather(*(send(socket, data) for socket in self._waiting.values()))

    async def close(self) -> None:
        """Send away who waits: they come back, to the one that acts."""
        for socket in list(self._waiting.values()):
            await socket.close()

    # ------------------------------------------------------------ asking

    def _stand(self) -> bool:
        """Ask for a lease, if enough voters wait here."""
        if not doors.may_stand(self._door):
            return False
        standing = doors.stand(self._door)
        assert standing.candidacy is not None, "it stands"
        lease = standing.candidacy.lease
        try:
            self._begin(lease)
        except OSError as error:
            log.error("no lease is asked for: that cannot be noted (%s)", error.strerror)
            return False
        here, voters = len(self._waiting), len(self._door.known.voters)
        log.info("%d of %d nodes are here: asking for lease %d", here, voters, lease)
        self._ask_all(Ask(lease, self.copy))
        self._become(standing)
        return True

    def _question(self) -> Ask | Note:
        if self._door.head is not None:
            return Note(self._door.head.newest)
        # To the lowest lease nobody promises anything: but it is told what was noted.
        return Ask(0 if self._door.candidacy is None else self._door.candidacy.lease, self.copy)

    def _ask_all(self, question: Ask | Note, answered: Collection[VoterId] = ()) -> None:
        """All but those that have answered. A note has the names of all voters: it is encoded once."""
        data = encode(question)
        for voter, socket in self._waiting.items():
            if voter not in answered:
                self._send(socket, data)

    def _greet_with(self, known: Succession) -> bytes:
        if self._greeting is None or self._greeting[0] is not known:
            self._greeting = known, encode(Known(known))
        return self._greeting[1]

    def _send(self, socket: web.WebSocketResponse, data: bytes) -> None:
        task = asyncio.create_task(send(socket, data))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def hear(self, vote: Vote) -> None:
        """An answer."""
        self._become(doors.hear_vote(self._door, vote.voter, vote.ballot, granted=vote.granted))

    def _become(self, door: doors.Door) -> None:
        """What has come of an answer, or of asking."""
        before, self._door = self._door, door
        if before.head is None and door.head is not None:
            self._ask_all(Note(door.head.newest))
        if (before.known, before.head, before.excluded) != (door.known, door.head, door.excluded):
            self._changed.set()

    # ------------------------------------------------------------ the door

    def app(self, keys: Keys, strangers: Strangers) -> web.Application:
        """What is served as long as it does not act."""

        async def serve(request: web.Request) -> web.StreamResponse:
            held = keys.held(request)
            if held:
                strangers.welcome(request.transport)
            if refused := keys.refusal(request, held):
                keys.complain(request, refused[1])
                raise refused[0](text=refused[1])
            if request.path != AGENT_PATH:
                raise not_the_head(self._door.known)
            return await self._greet(request)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", serve)
        return app

    async def _greet(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE, compress=False)
        await socket.prepare(request)
        resume_soon(socket.get_extra_info("socket"))
        try:
            async with asyncio.timeout(ATTACH_S):
                attach = decode_to_orchestrator(await socket.receive_bytes())
            if refusal := refuse(attach):
                await socket.send_bytes(encode(Refused(reason=refusal)))
            elif isinstance(attach, Attach) and attach.voter:
                await self._listen(socket, attach.voter)
        except (TimeoutError, TypeError, WireError, ConnectionError) as error:
            log.warning("at the door: %s", error)
        await socket.close()
        return socket

    async def _listen(self, socket: web.WebSocketResponse, voter: VoterId) -> None:
        """Hear one that waits, until it goes."""
        self._waiting[voter] = socket
        self._door = doors.come(self._door, voter)
        self._changed.set()
        if self.follows:  # the head is heard: unless a majority comes, this one had better go back to it
            asyncio.get_running_loop().call_later(GATHER_S, self._send_back, voter, socket)
        self._send(socket, self._greet_with(self._door.known))
        if not self.follows:  # else it knows all that the head does
            self._send(socket, encode(self._question()))
        try:
            async for raw in socket:
                if raw.type is not WSMsgType.BINARY:
                    raise WireError(f"a frame of type {raw.type.name}")
                vote = decode_to_orchestrator(raw.data)
                if isinstance(vote, Vote) and vote.voter == voter:
                    self.hear(vote)
        finally:
            if self._waiting.get(voter) is socket:
                del self._waiting[voter]
                self._door = doors.go(self._door, voter)

    def _send_back(self, voter: VoterId, socket: web.WebSocketResponse) -> None:
        if self.follows and self._waiting.get(voter) is socket:
            task = asyncio.create_task(close(socket))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)


async def close(socket: web.WebSocketResponse) -> None:
    """Close it; it may be gone."""
    with suppress(ConnectionError, RuntimeError):
        await socket.close()


async def send(socket: web.WebSocketResponse, data: bytes) -> None:
    """Send to one that may be going this moment."""
    try:
        await socket.send_bytes(data)
    except (ConnectionError, RuntimeError):
        pass  # it is gone


def doorway_of_head(place: Place, known: Succession, run_dir: Path) -> Doorway:
    """Of a head whose process was started again. It may be lost while it stands, and stand again."""
    return Doorway(place, known, partial(note_asked, run_dir), asked=asked_before(run_dir))


@asynccontextmanager
async def at_the_door(
    doorway: Doorway,
    run_dir: Path,
    host: str,
    port: int,
    advertise: str = "",
    *,
    elsewhere: bool = False,
    held: int | None = None,
) -> AsyncIterator[int]:
    """Listen as long as it does not act; yields the port. Raises OSError, `TrustError`.

    `elsewhere`: another port will do. `held`: see `Door.open`.
    """
    strangers = Strangers()
    runner = web.AppRunner(doorway.app(Keys.of_passes(run_dir), strangers), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    assert runner.server is not None, "it has been set up"
    door = Door(runner.server, strangers, server_context(pass_of(run_dir, Role.ORCHESTRATOR)))
    try:
        try:
            bound = await door.open(host, port, held)
        except OSError:
            if not elsewhere:
                raise
            bound = await door.open(host, 0)
        doorway.listens_at(url_of(advertise or host, bound))
        yield bound
    finally:
        await doorway.close()
        await door.close()
        await runner.cleanup()


def url_of(host: str, port: int, *, tls: bool = True) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"


# ---------------------------------------------------------------- one that was out of reach, and acts no more

LOOK_S = 2.0


async def look_for_another(service: Orchestrator, run_dir: Path) -> None:
    """Ask the heirs that we do not reach whether one of them is head by now; if so, give way. Never returns.

    Whoever follows this run finds that one from then on.
    """
    held = pass_of(run_dir, Role.OPERATOR)
    context, token = client_context(held), read_pass(held).token
    limits = aiohttp.ClientTimeout(total=LOOK_S)
    async with aiohttp.ClientSession(timeout=limits, headers={"Authorization": f"Bearer {token}"}) as session:
        while True:
            await asyncio.sleep(LOOK_S)
            for place in service.heirs.out_of_reach if service.heirs is not None else ():
                lease = await lease_at(session, place.url, context)
                if lease > service.journal.lease:
                    with suppress(OSError):  # a full disk, say: the launcher asks the heirs itself
                        write_endpoint(run_dir, Endpoint(url=place.url, pid=0, journal=service.journal.name))
                    by = Known(Succession(lease=lease, version=0, head=place))
                    for connection in service.connections.values():
                        connection.send(by)
                    service.give_way(f"the orchestrator on {place.node} acts now (lease {lease}), at {place.url}")


async def wait_or_give_way(doorway: Doorway, run_dir: Path, patience_s: float = math.inf) -> Head:
    """As `Doorway.wait`. While no head is heard, others are asked: who waits here is to know of one that acts."""
    waiting = asyncio.create_task(doorway.wait(patience_s))
    looking = asyncio.create_task(find_another(doorway, run_dir))
    try:
        await asyncio.wait((waiting, looking), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        raise Superseded(looking.result())
    finally:
        for task in (waiting, looking):
            task.cancel()
        await asyncio.gather(waiting, looking, return_exceptions=True)


async def find_another(doorway: Doorway, run_dir: Path) -> Succession:
    """Ask all others that may have become head, until one has. A silent one keeps nobody waiting."""
    held = pass_of(run_dir, Role.OPERATOR)
    context, token = client_context(held), read_pass(held).token
    limits = aiohttp.ClientTimeout(total=LOOK_S)
    async with aiohttp.ClientSession(timeout=limits, headers={"Authorization": f"Bearer {token}"}) as session:
        while True:
            await asyncio.sleep(LOOK_S)
            others = [] if doorway.follows else others_in(doorway.known, doorway.copy)
            leases = await asyncio.gather(*(lease_at(session, place.url, context) for place in others))
            for place, lease in zip(others, leases, strict=True):
                if doorway.gives_way_to(lease):
                    by = Succession(lease=lease, version=0, head=place)
                    await doorway.tell(by)
                    return by


async def lease_at(session: aiohttp.ClientSession, url: str, context: ssl.SSLContext) -> int:
    """The lease of the orchestrator that acts there; 0 if none does."""
    try:
        async with session.get(url + "/healthz", ssl=context, server_hostname=Role.ORCHESTRATOR.server_name) as answer:
            found = await answer.json()
            return int(found["lease"])
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError):
        return 0
