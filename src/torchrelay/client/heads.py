"""Heads: finds the orchestrator that acts, wherever it is by now, and says so when it is another one.

It is asked for where it was last, where the run's folder or the one who asks says, and where the answers point to. The
one that acts answers with its heirs: when it is lost, one of these takes its place. Over TLS only answers with a
certificate of this job count, and no token is sent to anybody else.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Struct

from torchrelay.api.endpoint import JOURNAL, Endpoint, read_endpoint
from torchrelay.api.shown import Head
from torchrelay.client.client import Denied, reason_in
from torchrelay.client.runs import NotPossible
from torchrelay.orchestrator.store.parts import kept_succession
from torchrelay.wire.trust.passes import Role, client_context

HEAD_PATH = "/v1/head"
ASK_S = 2.0  # how long one may take to answer
LOOK_S = 1.0  # between two looks
HOPS = 3  # answers that point elsewhere, one after the other, in one look
MOST = 8  # places that are asked in one look
MOST_ANSWER = 64 << 10
LONGEST_URL = 300
REFUSED = (401, 403)
STAYED_AWAY = 92
WAITING = "waiting until one does, {:g} s at most; ranks that need no orders train on"


class Refusal(Struct, frozen=True):
    """What one says that does not act."""

    head: Head | None = None


class Heads:
    """Of one run. `given`: where it may be, asked at each look. `token`, `held`: what is shown there.

    `where` and `head` say which one acts; without one, where the last one was.
    """

    def __init__(
        self, given: Callable[[], Iterable[Endpoint]], token: Callable[[], str], held: Path | None = None
    ) -> None:
        self.head: Head | None = None
        self.acts = False  # whether it did at the last look
        self.trouble: dict[str, str] = {}  # why those that were asked did not answer
        self._given = given
        self._token = token
        self._held = held
        self._known: tuple[Endpoint, ...] = ()
        self._where = Endpoint(url="", pid=0)

    def where(self) -> Endpoint:
        """The endpoint of the one that acts, as it was at the last look."""
        return self._where

    async def look(self) -> bool:
        """Whether one acts. Raises `Denied` if it refuses what we show, `TrustError` if that cannot be used."""
        asked: set[str] = set()
        waiting = [*self._known, *self._given()]
        self.trouble = {}
        found: list[tuple[Endpoint, Head]] = []
        for _ in range(HOPS):
            fresh = {one.url: one for one in waiting if one.url not in asked}
            some = list(fresh.values())[: MOST - len(asked)]
            asked |= {one.url for one in some}
            answers = await asyncio.gather(*(self._ask(one) for one in some))
            told = [(one, head) for one, head in zip(some, answers, strict=True) if head is not None]
            found += [(one, head) for one, head in told if head.acts]
            waiting = [place for _, head in told for place in self._places(head)]
        self.acts = bool(found)
        if found:
            self._where, self.head = max(found, key=lambda one: one[1].lease)
            self._known = (self._where, *self._places(self.head))
        return self.acts

    async def mind(
        self,
        say: Callable[[str], None],
        patience_s: float,
        *,
        is_over: Callable[[], bool] = lambda: False,
        announce: bool = False,
    ) -> None:
        """Look, again and again, and say when another one acts, or none. Returns when the run `is_over`.

        `announce`: the first one that is found is said, too.

        Raises `NotPossible` if none has acted for `patience_s`; else as `look`.
        """
        loop, lease, url = asyncio.get_running_loop(), 0, ""
        since_s, said = 0.0, False
        while True:
            if await self.look():
                assert self.head is not None, "it acts"
                if said or (self._where.url != url if lease else announce):
                    say(f"the orchestrator on {name_of(self.head)} acts now, at {self._where.url}")
                lease, url = self.head.lease, self._where.url
                since_s, said = 0.0, False
            elif await asyncio.to_thread(is_over):
                return
            elif not since_s and lease:
                since_s = loop.time()  # it may be started again this moment
            else:
                since_s = since_s or loop.time()
                if not said:
                    said = True
                    say(f"no orchestrator acts at the moment ({self.troubles}): {WAITING.format(patience_s)}")
                if loop.time() - since_s > patience_s:
                    raise NotPossible(f"no orchestrator has acted for {patience_s:g} s: {self.troubles}", STAYED_AWAY)
            await asyncio.sleep(LOOK_S)

    @property
    def troubles(self) -> str:
        """Who was asked at the last look, and what came back."""
        return "; ".join(f"{url}: {why}" for url, why in self.trouble.items()) or "nobody could be asked"

    def _places(self, head: Head) -> list[Endpoint]:
        """Where an answer points to: only to where our certificate is asked for."""
        urls = (head.url, *(heir.url for heir in head.heirs))
        return [Endpoint(url=url, pid=0) for url in urls if self._held is not None and is_https(url)]

    async def _ask(self, endpoint: Endpoint) -> Head | None:
        """What one says; None if nobody answers. Raises as `look`."""
        name = None if self._held is None else Role.ORCHESTRATOR.server_name
        if self._held is not None and not (endpoint.socket or is_https(endpoint.url)):
            self.trouble[endpoint.url] = "give https://HOST:PORT: a pass is shown over TLS only"
            return None
        try:
            async with (
                aiohttp.ClientSession(
                    connector=way_to(endpoint, self._held),
                    timeout=aiohttp.ClientTimeout(total=ASK_S),
                    headers={"Authorization": f"Bearer {self._token()}"},
                ) as session,
                session.get(endpoint.url + HEAD_PATH, server_hostname=name, allow_redirects=False) as answer,
            ):
                data = await read_some(answer.content)
                if answer.status in REFUSED:
                    raise Denied(answer.status, reason_in(data))
                if answer.status == 200:
                    return msgspec.json.decode(data, type=Head)
                self.trouble[endpoint.url] = "the orchestrator there does not act"
                return msgspec.json.decode(data, type=Refusal).head
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            self.trouble[endpoint.url] = in_words(error)
            return None


async def read_some(content: aiohttp.StreamReader) -> bytes:
    """The whole answer; of one that is too long, too little to be one."""
    data = bytearray()
    while len(data) < MOST_ANSWER and (piece := await content.read(MOST_ANSWER)):
        data += piece
    return bytes(data)


def name_of(head: Head) -> str:
    """The node where it acts, in words."""
    return head.node or "the launcher's machine"


def where_ledger(head: Head) -> str:
    """The folder with its journal, and on which machine that is."""
    return f"{head.run_dir} on {head.node}" if head.node else head.run_dir


def is_https(url: str) -> bool:
    """Whether this is the URL of a machine's port, over TLS, and nothing more."""
    try:
        where = urlsplit(url)
        return len(url) <= LONGEST_URL and url == f"https://{where.netloc}" and bool(where.hostname and where.port)
    except ValueError:
        return False


def in_words(error: BaseException) -> str:
    """Why there was no answer."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError | ssl.SSLError | aiohttp.ClientSSLError):
        return "it has no certificate of this job"
    if isinstance(error, aiohttp.ClientConnectorError):
        return os.strerror(error.os_error.errno) if error.os_error.errno else str(error.os_error)
    if isinstance(error, TimeoutError):
        return "no answer"
    return str(error) or type(error).__name__


def way_to(endpoint: Endpoint, held: Path | None = None) -> aiohttp.BaseConnector:
    """Through the unix socket if there is one: no crowd is in the way there, and nobody asks for a pass.

    Raises `TrustError`.
    """
    if endpoint.socket and Path(endpoint.socket).exists():
        return aiohttp.UnixConnector(endpoint.socket)
    return aiohttp.TCPConnector() if held is None else aiohttp.TCPConnector(ssl=client_context(held))


def places_of(run_dir: Path) -> list[Endpoint]:
    """Where a run's folder says that its orchestrator is, and where else it may be by now."""
    found: list[Endpoint] = []
    try:
        endpoint = read_endpoint(run_dir)
    except ValueError:
        endpoint = None  # damaged: the journal may still tell
    if endpoint is not None:
        found.append(endpoint)
    known = kept_succession(run_dir / JOURNAL)
    if known is not None:
        urls = [place.url for each in known.chain for place in (each.head, *each.heirs)]
        found += [Endpoint(url=url, pid=0) for url in urls if is_https(url)]
    return found
