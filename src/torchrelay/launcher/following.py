"""Following: the orchestrator's story as it happens, over its event stream, through its restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
from msgspec import Struct

from torchrelay.api.endpoint import Endpoint
from torchrelay.orchestrator.views.story import Moment
from torchrelay.wire.trust.passes import Role, client_context
from torchrelay.wire.trust.trust import TrustError

JOURNAL_HEADER = "X-Torchrelay-Journal"  # whose story it is
RETRY_S = 0.1
# The orchestrator sends a comment every few seconds: a stream that is silent for longer is dead.
SILENT_S = 20.0

_decoder = msgspec.json.Decoder(Moment)


class Remark(Struct, frozen=True):
    """Something about the machines of the run, said whenever the stream begins."""

    text: str


class Degraded(Struct, frozen=True):
    """The orchestrator decides nothing at the moment, and why; an empty reason: all is well again."""

    reason: str


async def moments(
    where: Callable[[], Endpoint], token: str, held: Path | None = None
) -> AsyncIterator[Moment | Degraded | Remark]:
    """Every moment, each once, in order, for ever. An orchestrator that is away is waited for.

    where   its endpoint, asked before each attempt, as another one may have taken over elsewhere
    held    the pass to show at an https URL
    """
    since, journal = 0, ""
    limits = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=SILENT_S)
    # One line is one moment, and those of a job's whole roster can be long.
    headers = {"Authorization": f"Bearer {token}"}
    while True:
        try:
            endpoint = where()
            async with (
                aiohttp.ClientSession(
                    connector=way_to(endpoint, held), timeout=limits, read_bufsize=1 << 20, headers=headers
                ) as session,
                session.get(
                    f"{endpoint.url}/v1/events",
                    params={"since": str(since)},
                    server_hostname=None if held is None else Role.ORCHESTRATOR.server_name,
                ) as answer,
            ):
                answer.raise_for_status()
                told = answer.headers.get(JOURNAL_HEADER, "")
                if told != (journal or told):
                    raise ValueError("this orchestrator goes by another journal: what it tells is not of our run")
                journal = told
                kind = b""
                async for line in answer.content:
                    if line.startswith(b"event: "):
                        kind = line[7:].strip()
                    elif line.startswith(b"data: ") and kind == b"remark":
                        kind = b""
                        yield Remark(msgspec.json.decode(line[6:], type=str))
                    elif line.startswith(b"data: ") and kind == b"degraded":
                        kind = b""
                        yield Degraded(msgspec.json.decode(line[6:], type=str))
                    elif line.startswith(b"data: "):
                        moment = _decoder.decode(line[6:])
                        since = moment.seq
                        yield moment
        except (aiohttp.ClientError, TimeoutError, OSError, TrustError, ValueError):
            pass  # it is away, or was ended: the next attempt shows
        await asyncio.sleep(RETRY_S)


def way_to(endpoint: Endpoint, held: Path | None = None) -> aiohttp.BaseConnector:
    """Through the unix socket if there is one: no crowd is in the way there, and nobody asks for a pass.

    Raises `TrustError`.
    """
    if endpoint.socket and Path(endpoint.socket).exists():
        return aiohttp.UnixConnector(endpoint.socket)
    return aiohttp.TCPConnector() if held is None else aiohttp.TCPConnector(ssl=client_context(held))
