"""Agents that vote, over real connections: a head hears them whatever it waits for, and they notice its silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession, WSMsgType, web
from msgspec import structs

from torchrelay.agent.allegiance import Voting
from torchrelay.agent.uplink import Uplink
from torchrelay.orchestrator import doorway
from torchrelay.orchestrator.core.agents import serve_agent
from torchrelay.orchestrator.core.heirs import Heirs
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.store.journal import Journal
from torchrelay.protocol.health.pulses import Beat
from torchrelay.protocol.messages.events import NodeJoined
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession.head import first
from torchrelay.protocol.succession.succession import CopyId, Place, Succession, VoterId
from torchrelay.wire.messages.channel import (
    AGENT_PATH,
    Ask,
    Attach,
    Attached,
    BeatFrame,
    Known,
    Note,
    decode_to_agent,
    decode_to_orchestrator,
)
from torchrelay.wire.messages.codec import encode
from torchrelay.wire.messages.inheritance import Part
from torchrelay.wire.trust.authority import make_passes

NODES = [NodeId(name) for name in ("m1", "m2", "m3")]
DEADLINE_S = 20.0


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))


async def until(fact: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    async with asyncio.timeout(deadline_s):
        while not fact():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """The URL at which agents find this handler."""
    app = web.Application()
    app.router.add_get(AGENT_PATH, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Elsewhere(set[NodeId | None]):
    """The nodes of this machine: none, although all are."""

    def add(self, element: NodeId | None) -> None:
        pass


class Copying:
    """An heir that has each part at once, until it falls silent."""

    def __init__(self, place: Place, heirs: Heirs) -> None:
        self.place, self.heirs, self.silent = place, heirs, False

    def send(self, part: Part) -> None:
        if not self.silent:
            asyncio.get_running_loop().call_soon(self.heirs.hear_held, self, part.number)

    def close(self, reason: str) -> None:
        assert self.silent or reason == "the head ends", reason


async def vote(node: NodeId, url: str, voting: Voting) -> None:
    """An agent that beats and votes, and comes back whenever its connection ends."""
    while True:
        with suppress(ClientError, ConnectionError):
            async with ClientSession() as session, session.ws_connect(url + AGENT_PATH) as socket:
                await socket.send_bytes(encode(Attach(node=node, incarnation="1", slots=1, voter=voting.voter)))
                beating = asyncio.create_task(beat(node, socket.send_bytes))
                try:
                    async for frame in socket:
                        message = decode_to_agent(frame.data) if frame.type is WSMsgType.BINARY else None
                        if isinstance(message, Note | Ask):
                            await socket.send_bytes(encode(voting.hear(message)))
                finally:
                    beating.cancel()
        await asyncio.sleep(0.05)


async def beat(node: NodeId, send: Callable[[bytes], Awaitable[None]]) -> None:
    while True:
        await send(encode(BeatFrame(Beat(node=node, incarnation="1", samples=()))))
        await asyncio.sleep(0.2)


class Office:
    """A head with three agents that vote, and two heirs that have all."""

    def __init__(self, folder: Path) -> None:
        self.journal = Journal(folder / "journal.db")
        head = first(Place(NODES[0], CopyId("first"), "https://m1:1"), self.journal.lease)
        self.heirs = Heirs(head, self.journal, node=NODES[0], now_s=asyncio.get_running_loop().time)
        self.heirs.own = Elsewhere(self.heirs.own)
        self.service = Orchestrator(self.journal, heirs=self.heirs)
        self.votings = {}
        for node in NODES:
            (folder / node).mkdir()
            self.votings[node] = Voting(folder / node, node)
        self.agents: dict[NodeId, asyncio.Task[None]] = {}
        self.ports: dict[NodeId, Copying] = {}

    async def attach(self, request: web.Request) -> web.StreamResponse:
        return await serve_agent(request, self.service)

    def start(self, node: NodeId, url: str) -> None:
        """Its agent comes, or comes back."""
        if node in self.agents:
            self.agents[node].cancel()
        self.agents[node] = asyncio.create_task(vote(node, url, self.votings[node]))

    async def inherit(self) -> None:
        """Two heirs come, and are settled."""
        await until(lambda: len(self.heirs._appointed) == 2)
        for key, one in list(self.heirs._appointed.items()):
            port = self.ports[one.node] = Copying(Place(one.node, one.copy, f"https://{one.node}:2"), self.heirs)
            self.heirs.join(port, self.journal.part, key)
            self.heirs.hear_held(port, self.journal.part)
        await until(lambda: len(self.heirs.head.settled.heirs) == 2 and self.heirs.head.proposed is None)


def test_an_agent_that_comes_back_while_nothing_leaves_is_heard(tmp_path: Path) -> None:
    """An heir is lost with its node, and only the votes of the two others let the head do without it."""

    async def story() -> None:
        office = Office(tmp_path)
        async with serving(office.attach) as url:
            work = asyncio.create_task(office.service.serve())
            for node in NODES:
                office.start(node, url)
            await office.inherit()
            office.ports[NODES[2]].silent = True
            office.agents[NODES[2]].cancel()
            left = asyncio.Event()
            office.service.take(NodeJoined(node=NodeId("m9"), incarnation="1", slots=1), lambda _: left.set())
            await until(lambda: office.heirs._waiting)
            office.start(NODES[1], url)  # its connection ends this moment, and it comes back
            async with asyncio.timeout(DEADLINE_S):
                await left.wait()
            assert [place.node for place in office.heirs.head.settled.heirs] == [NODES[1]]
            assert office.service.cluster.nodes[NODES[1]].alive
            for task in office.agents.values():
                task.cancel()
            office.service.end()
            await work
        office.journal.close()

    run(story)


@pytest.mark.parametrize("before", [True, False], ids=["heirs were there", "heirs come later"])
def test_a_silent_head_is_noticed_soon_where_another_may_take_its_place(before: bool) -> None:
    """Also on a connection that was made when nobody could."""

    async def story() -> None:
        silent, pinged, may_move = asyncio.Event(), asyncio.Event(), before

        async def head(request: web.Request) -> web.StreamResponse:
            socket = web.WebSocketResponse(autoping=False)
            await socket.prepare(request)
            async for frame in socket:
                if silent.is_set():
                    continue
                if frame.type is WSMsgType.PING:
                    await socket.pong(frame.data)
                    pinged.set()
                elif isinstance(decode_to_orchestrator(frame.data), Attach):
                    await socket.send_bytes(encode(Attached(lease=1, journal="j")))
            return socket

        async with serving(head) as url:
            uplink = Uplink(
                where=lambda: url,
                token=lambda: "token",
                attach=lambda: Attach(node=NODES[0], incarnation="1", slots=1),
                beat=lambda: Beat(node=NODES[0], incarnation="1"),
                on_message=lambda _: None,
                on_acked=lambda _: None,
                may_move=lambda: may_move,
            )
            work = asyncio.create_task(uplink.run())
            await until(lambda: uplink.connected)
            may_move = True
            await pinged.wait()
            pinged.clear()
            await pinged.wait()
            assert uplink.connected, "it had an answer to the first"
            silent.set()
            await until(lambda: not uplink.connected, deadline_s=6)
            work.cancel()

    run(story)


def test_who_waits_at_a_door_is_told_what_is_known_there() -> None:
    known = first(Place(NODES[1], CopyId("other"), "https://m2:1"), 3).settled

    async def story() -> None:
        told: list[Succession] = []

        async def door(request: web.Request) -> web.StreamResponse:
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            await socket.receive_bytes()
            await socket.send_bytes(encode(Known(known)))
            await asyncio.sleep(0.2)
            await socket.send_bytes(encode(Attached(lease=1, journal="j")))
            async for _ in socket:
                pass
            return socket

        async with serving(door) as url:
            uplink = Uplink(
                where=lambda: url,
                token=lambda: "token",
                attach=lambda: Attach(node=NODES[0], incarnation="1", slots=1),
                beat=lambda: Beat(node=NODES[0], incarnation="1"),
                on_message=lambda _: None,
                on_acked=lambda _: None,
                told=told.append,
            )
            work = asyncio.create_task(uplink.run())
            await until(lambda: uplink.connected)
            assert told == [known]
            work.cancel()

    run(story)


def test_an_heir_whose_head_is_lost_asks_others_and_gives_way_to_one_that_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents that wait at its door would not know."""
    heir, other = (Place(node, CopyId(node), f"https://{node}:1") for node in NODES[1:])
    head = first(Place(NODES[0], CopyId("first"), "https://m1:1"), 1).settled
    known = structs.replace(head, version=2, heirs=(heir, other), voters=(VoterId("m1.0"),))
    asked: list[str] = []

    async def lease_at(_: ClientSession, url: str, __: object) -> int:
        asked.append(url)
        return 2 if url == other.url else 0

    monkeypatch.setattr(doorway, "lease_at", lease_at)
    monkeypatch.setattr(doorway, "LOOK_S", 0.1)
    make_passes(tmp_path, "job")

    async def story() -> None:
        door = doorway.Doorway(heir, known)
        door.follows = True
        waiting = asyncio.create_task(doorway.wait_or_give_way(door, tmp_path, 60))
        await asyncio.sleep(0.5)
        assert asked == [], "the head is heard"
        door.follows = False
        with pytest.raises(doorway.Superseded) as raised:
            await waiting
        assert raised.value.by.head == other

    run(story)
