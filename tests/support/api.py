"""What tests of api share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType, web
from aiohttp.test_utils import TestServer

from tests.support.brain import (
    serving,
)
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.http.api import make_app
from torchrelay.orchestrator.http.keys import Keys
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.wire.messages.channel import (
    AGENT_PATH,
    Attach,
    ToAgent,
    decode_to_agent,
)
from torchrelay.wire.messages.codec import encode

TOKEN = "trt_a-token-for-tests-only"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


class Port:
    """A served orchestrator and a session with the right token."""

    def __init__(self, service: Orchestrator, app: web.Application, url: str, session: ClientSession) -> None:
        self.service, self.app, self.url, self.session = service, app, url, session

    async def get(self, path: str, status: int = 200) -> Any:
        async with self.session.get(self.url + path) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def post(self, path: str, body: object, status: int) -> Any:
        async with self.session.post(self.url + path, data=msgspec.json.encode(body)) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    @asynccontextmanager
    async def agent(self, node: str = "node-0", incarnation: str = "first", **more: Any) -> AsyncIterator[Agent]:
        """A connection that says Attach."""
        async with self.session.ws_connect(self.url + AGENT_PATH) as websocket:
            agent = Agent(websocket)
            await agent.say(Attach(node=NodeId(node), incarnation=incarnation, slots=3, **more))
            yield agent


class Agent:
    """An agent's end of the channel."""

    def __init__(self, websocket: ClientWebSocketResponse) -> None:
        self.websocket = websocket

    async def say(self, message: Any) -> None:
        await self.websocket.send_bytes(encode(message))

    async def hear(self, kind: type[ToAgent]) -> Any:
        """The next message of a kind; fails if the connection ends before."""
        async with asyncio.timeout(10):
            while True:
                raw = await self.websocket.receive()
                assert raw.type is WSMsgType.BINARY, f"the connection ended: {raw}"
                message = decode_to_agent(raw.data)
                if isinstance(message, kind):
                    return message

    async def until_closed(self) -> str:
        """Wait for the end of the connection; returns the reason that was given."""
        async with asyncio.timeout(10):
            while True:
                raw = await self.websocket.receive()
                if raw.type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.CLOSING):
                    return raw.extra or ""


@asynccontextmanager
async def open_port(folder: Path, run_dir: Path | None = None) -> AsyncIterator[Port]:
    async with serving(folder) as service:
        app = make_app(service, Keys.of_one(TOKEN), run_dir=run_dir)
        server = TestServer(app)
        await server.start_server()
        try:
            async with ClientSession(headers=HEADERS) as session:
                yield Port(service, app, str(server.make_url("")).rstrip("/"), session)
        finally:
            service.end()
            await server.close()


def play(folder: Path, story: Callable[[Port], Awaitable[None]], run_dir: Path | None = None) -> None:
    async def all_of_it() -> None:
        async with asyncio.timeout(30), open_port(folder, run_dir) as port:
            await story(port)

    asyncio.run(all_of_it())
