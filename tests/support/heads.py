"""Orchestrators of one run, as far as they say where the head is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import web

from torchrelay.api.shown import Head, HeirView
from torchrelay.orchestrator.http.door import Door, Strangers
from torchrelay.wire.trust.passes import Role, pass_of, server_context


class Stand:
    """One orchestrator, as far as it says where the head is."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answer: Head | None = None
        self.status = 200
        self.tokens: list[str] = []

    def act(self, lease: int, *heirs: str, node: str = "m2") -> None:
        views = tuple(HeirView(node=f"m{place}", url=url) for place, url in enumerate(heirs, 3))
        self.answer, self.status = Head(acts=True, node=node, url=self.url, lease=lease, heirs=views), 200

    def point_to(self, url: str, *heirs: str) -> None:
        """As one that does not act."""
        views = tuple(HeirView(node="", url=heir) for heir in heirs)
        self.answer, self.status = Head(acts=False, node="m1", url=url, lease=1, heirs=views), 503


@asynccontextmanager
async def standing(passes: Path) -> AsyncIterator[Stand]:
    stand = Stand("")

    async def get_head(request: web.Request) -> web.Response:
        stand.tokens.append(request.headers.get("Authorization", ""))
        told = stand.answer if stand.status == 200 else {"error": "no", "head": stand.answer}
        return web.Response(body=msgspec.json.encode(told), status=stand.status)

    app = web.Application()
    app.add_routes([web.get("/v1/head", get_head)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    assert runner.server is not None
    door = Door(runner.server, Strangers(), server_context(pass_of(passes, Role.ORCHESTRATOR)))
    try:
        stand.url = f"https://127.0.0.1:{await door.open('127.0.0.1', 0)}"
        yield stand
    finally:
        await door.close()
        await runner.cleanup()
