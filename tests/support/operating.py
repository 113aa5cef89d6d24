"""What tests of operating share."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp.test_utils import TestServer

from tests.support.brain import JOB, Node, RecordingLink, serving, spec, until
from torchrelay.api.endpoint import TOKEN, Endpoint, write_endpoint
from torchrelay.cli import main as command
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.http.api import make_app
from torchrelay.orchestrator.http.changes import watch_freezes
from torchrelay.orchestrator.http.keys import Keys
from torchrelay.orchestrator.store.journal import read_history
from torchrelay.protocol.messages.events import (
    JobSubmitted,
)
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.wire.trust.trust import new_token, write_token


class Said(NamedTuple):
    code: int
    out: str
    err: str


def carry_out(words: list[str]) -> Said:
    """One command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as caught:
        command.main(words)
    assert isinstance(caught.value.code, int)
    return Said(caught.value.code, out.getvalue(), err.getvalue())


class Desk:
    """An operator before a job that trains: ranks 0, 1 on node-0, 2, 3 on node-1, a spare on each."""

    def __init__(self, run_dir: Path, service: Orchestrator, url: str, token: str) -> None:
        self.run_dir, self.service, self.url, self.token = run_dir, service, url, token

    async def say(self, *words: str) -> Said:
        return await asyncio.to_thread(carry_out, [*words, "--run-dir", str(self.run_dir)])

    async def ask(self, *words: str) -> Any:
        said = await self.say(*words, "-o", "json")
        assert said.code == 0, said
        return json.loads(said.out)

    def journalled(self) -> list[Any]:
        return [entry.event for entry in read_history(self.run_dir / "journal.db").entries]


@asynccontextmanager
async def at_a_desk(folder: Path, **changes: object) -> AsyncIterator[Desk]:
    run_dir = folder / "run"
    run_dir.mkdir()
    token = new_token()
    write_token(run_dir / TOKEN, token)
    async with serving(run_dir) as service:
        server = TestServer(make_app(service, Keys.of_one(token)))
        await server.start_server()
        url = str(server.make_url("")).rstrip("/")
        write_endpoint(run_dir, Endpoint(url=url, pid=1))
        watching = asyncio.create_task(watch_freezes(service, run_dir))
        try:
            await train(service, **changes)
            yield Desk(run_dir, service, url, token)
        finally:
            watching.cancel()
            service.end()
            await server.close()


async def train(service: Orchestrator, **changes: object) -> None:
    nodes = []
    for number in (0, 1):
        link = RecordingLink(NodeId(f"node-{number}"))
        await service.attach(link, link.joined(slots=3))
        nodes.append(Node(service, link))
    await service.put(JobSubmitted(spec=spec(world_size=4, nodes=2, spares=2, **changes)))

    def there() -> bool:
        for node in nodes:
            node.heed()
        job = service.cluster.jobs[JOB]
        warm = [w for w in service.cluster.spares(JOB) if w.life == "warm"]
        return job.phase == "running" and len(warm) == 2 and all(seat.joined for seat in job.seats.values())

    await until("training", there)


def play(folder: Path, story: Callable[[Desk], Awaitable[None]], **changes: object) -> None:
    async def all_of_it() -> None:
        async with asyncio.timeout(60), at_a_desk(folder, **changes) as desk:
            await story(desk)

    asyncio.run(all_of_it())
