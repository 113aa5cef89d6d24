"""Following: what whoever follows a run from elsewhere asks for: where the orchestrator acts, and what ranks print.

    GET  /v1/head     where it acts, and which nodes may take its place (`Head`)
    GET  /v1/lines    what ranks print, as server-sent events: `Lines`, from the places on that the body names

The body is a list of `Place`, one for each rank of which something was read before; without it all comes that is in
the logs. The header X-Torchrelay-Logs says whose logs these are: places in others mean nothing. Event `over`: nothing
will be printed any more, and how many bytes were not sent.

A reader gets `ROUND` bytes each `PAUSE_S` at most, from the files: nothing is kept for it in memory. One that reads
nothing for `SLOW_S` is cut off, and comes back at its place.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from aiohttp import web

from torchrelay.api.endpoint import LOGS
from torchrelay.api.shown import Head, HeirView, Lines, Place
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.http.answers import SERVICE, answer, refusal
from torchrelay.orchestrator.store.output import Reader
from torchrelay.orchestrator.store.parts import own_copy
from torchrelay.protocol.succession.succession import Succession

LINES_PATH = "/v1/lines"
HEAD_PATH = "/v1/head"
LOGS_HEADER = "X-Torchrelay-Logs"
READERS = 16  # at a time
ROUND, PAUSE_S = 256 << 10, 0.1
QUIET_S = 0.25  # between two looks while nothing is printed
SLOW_S = 20.0
KEEPALIVE_S = 5.0
LAST_S = 2.0  # how long readers may take for the last lines

RUN_DIR: web.AppKey[Path] = web.AppKey("run_dir", Path)
READING: web.AppKey[set[asyncio.Task[None]]] = web.AppKey("reading", set)


async def get_head(request: web.Request) -> web.Response:
    """The one that acts answers this; what others say is in `not_the_head`."""
    service = request.app[SERVICE]
    run_dir = str(request.app[RUN_DIR].absolute()) if RUN_DIR in request.app else ""
    if service.heirs is None:
        return answer(Head(acts=True, node="", url="", lease=service.journal.lease, run_dir=run_dir))
    out = tuple(place.node for place in service.heirs.out_of_reach)
    head = head_in(service.heirs.head.newest)
    return answer(msgspec.structs.replace(head, acts=True, run_dir=run_dir, out_of_reach=out))


def head_in(known: Succession) -> Head:
    """What a succession says of it."""
    heirs = tuple(HeirView(node=place.node, url=place.url) for place in known.heirs)
    return Head(acts=False, node=known.head.node, url=known.head.url, lease=known.lease, heirs=heirs)


def not_the_head(known: Succession) -> web.HTTPException:
    """The answer of an orchestrator that does not act: where another one does, or may by now."""
    head = head_in(known)
    where = f"{head.node or 'the launcher'}'s machine, at {head.url}"
    text = f"the orchestrator here does not act; the last that is known to act was on {where}. Ask there"
    body = msgspec.json.encode({"error": text, "head": head}).decode()
    return web.HTTPServiceUnavailable(text=body, content_type="application/json")


# ---------------------------------------------------------------- lines


async def get_lines(request: web.Request) -> web.StreamResponse:
    """What ranks print, for as long as there is an orchestrator."""
    app = request.app
    if RUN_DIR not in app:
        raise refusal(web.HTTPNotFound, "this orchestrator has no folder with logs")
    try:
        places = msgspec.json.decode(await request.read() or b"[]", type=list[Place])
    except msgspec.DecodeError as error:
        raise refusal(web.HTTPBadRequest, f"the body is not a list of places in logs: {error}") from error
    reading = app[READING]
    if len(reading) >= READERS:
        raise refusal(web.HTTPServiceUnavailable, f"{READERS} readers follow the lines already: end one of them")
    service, run_dir = app[SERVICE], app[RUN_DIR]
    logs = service.journal.name if service.heirs is None else own_copy(run_dir)
    stream = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", LOGS_HEADER: logs}
    )
    await stream.prepare(request)
    task = asyncio.create_task(tell_lines(service, stream, Reader(run_dir / LOGS, places)))
    reading.add(task)
    try:
        await task
    except (ConnectionError, TimeoutError):
        if request.transport is not None:
            request.transport.abort()  # it reads nothing, or is gone
    finally:
        task.cancel()
        reading.discard(task)
    return stream


async def tell_lines(service: Orchestrator, stream: web.StreamResponse, reader: Reader) -> None:
    """Everything after the reader's places. Raises ConnectionError, TimeoutError."""
    now_s = asyncio.get_running_loop().time
    said_s = now_s()
    while True:
        over = service.over
        found = await asyncio.to_thread(reader.read, ROUND, last=over and service.leaving)
        if found:
            await write(stream, b"".join(map(frame, found)))
        elif now_s() - said_s > KEEPALIVE_S:
            await write(stream, b": still here\n\n")
        elif over:
            break
        if found:
            said_s = now_s()
        if not over:
            await asyncio.sleep(PAUSE_S if found else QUIET_S)
    if service.leaving:
        await write(stream, b"event: over\ndata: %d\n\n" % await asyncio.to_thread(reader.left))


async def write(stream: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(SLOW_S):
        await stream.write(data)


def frame(lines: Lines) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(lines)


async def last_lines_told(app: web.Application) -> None:
    """Wait until readers have what was printed last, `LAST_S` at most."""
    if reading := app[READING]:
        await asyncio.wait(list(reading), timeout=LAST_S)


ROUTES = (web.get(HEAD_PATH, get_head), web.get(LINES_PATH, get_lines))
