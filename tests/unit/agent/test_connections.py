"""The agent's end of a worker's link, with this test as the worker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from torchrelay.agent.connections import WorkerConnections
from torchrelay.agent.workers.forks import Child
from torchrelay.agent.workers.processes import Processes
from torchrelay.protocol.messages.events import WorkerStarted, WorkerWarm
from torchrelay.protocol.messages.ids import JobId, NodeId, WorkerId
from torchrelay.wire.messages.codec import encode
from torchrelay.wire.messages.framing import frame, read_frame
from torchrelay.wire.messages.worker_frames import FromWorker, Welcome, decode_to_worker

W1 = Child(worker=WorkerId("w1"), job=JobId("j"), slot=2, pid=os.getpid())
WARM = frame(encode(WorkerWarm(worker=W1.worker)))
DEADLINE_S = 20.0


class OnlyUs:
    """Processes of which this one is the only worker."""

    async def child_of(self, pid: int, deadline_s: float) -> Child | None:
        del deadline_s
        return W1 if pid == W1.pid else None


async def welcome(child: Child) -> Welcome:
    return Welcome(
        job=child.job,
        worker=child.worker,
        node=NodeId("n"),
        slot=child.slot,
        host="127.0.0.1",
        secret=b"s" * 32,
        patience_s=1.0,
        logs="/logs",
    )


@asynccontextmanager
async def linked(folder: Path) -> AsyncIterator[tuple[WorkerConnections, list[FromWorker], asyncio.StreamWriter]]:
    """WorkerConnections, what they have heard, and a worker's end that has been welcomed."""
    heard: list[FromWorker] = []
    links = WorkerConnections(folder / "agent", cast(Processes, OnlyUs()), welcome=welcome, on_event=heard.append)
    await links.open()
    reader, writer = await asyncio.open_unix_connection(str(links.path))
    first = decode_to_worker(await read_frame(reader))
    assert isinstance(first, Welcome)
    try:
        yield links, heard, writer
    finally:
        writer.close()
        await links.close()


def test_last_words_are_waited_for_until_the_link_ends(tmp_path: Path) -> None:
    async def story() -> None:
        async with linked(tmp_path) as (links, heard, writer):
            writer.write(WARM[:5])
            waiting = asyncio.create_task(links.last_words(W1.worker, DEADLINE_S))
            done, _ = await asyncio.wait({waiting}, timeout=0.05)
            assert not done
            writer.write(WARM[5:] + WARM)
            writer.close()
            await waiting
            assert heard == [WorkerWarm(worker=W1.worker)] * 2

    asyncio.run(story())


def test_a_link_that_stays_open_after_the_end_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    async def story() -> None:
        async with linked(tmp_path) as (links, _, writer):
            await asyncio.wait_for(links.last_words(W1.worker, 0.05), DEADLINE_S)
            assert not writer.is_closing()
            await asyncio.wait_for(links.last_words(WorkerId("never called"), DEADLINE_S), 1.0)

    asyncio.run(story())


def test_a_worker_that_lies_about_its_process_is_hung_up_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with linked(tmp_path) as (links, heard, writer):
            lie = WorkerStarted(worker=W1.worker, node=NodeId("n"), slot=2, pid=1)
            writer.write(frame(encode(lie)) + WARM)
            await links.last_words(W1.worker, DEADLINE_S)
            assert heard == []

    asyncio.run(story())


def test_what_a_worker_said_is_told_to_who_adopts_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with linked(tmp_path) as (links, _, writer):
            assert not links.seen(W1).warm
            started = WorkerStarted(worker=W1.worker, node=NodeId("n"), slot=2, pid=W1.pid, address="a:1", store="a:2")
            writer.write(frame(encode(started)) + WARM)
            writer.close()
            await links.last_words(W1.worker, DEADLINE_S)
            seen = links.seen(W1)
            assert (seen.warm, seen.address, seen.store, seen.job) == (True, "a:1", "a:2", "j")
            links.forget(W1.worker)
            assert links.seen(W1).address == ""

    asyncio.run(story())
