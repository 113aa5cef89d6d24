"""Following: a run is followed to its end by its orchestrator's story, or without it by what its agents write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
from msgspec import Struct

from torchrelay.api.endpoint import Endpoint
from torchrelay.api.shown import Lines, Place
from torchrelay.client.heads import way_to
from torchrelay.client.runs import NotPossible
from torchrelay.launcher.keeper import STAYED_AWAY, Keeper
from torchrelay.orchestrator.views.story import Moment
from torchrelay.protocol.messages.events import JobSpec
from torchrelay.protocol.messages.ids import JobId, NodeId, Rank
from torchrelay.schedulers.local import LocalScheduler
from torchrelay.wire.files.alone import Alone, Lone, read_alone
from torchrelay.wire.trust.passes import Role
from torchrelay.wire.trust.trust import TrustError

JOURNAL_HEADER = "X-Torchrelay-Journal"  # whose story it is
RETRY_S = 0.1
# The orchestrator sends a comment every few seconds: a stream that is silent for longer is dead.
SILENT_S = 20.0
HERE_S = 1.0  # between two looks at where it is
LINES_PATH, LOGS_HEADER = "/v1/lines", "X-Torchrelay-Logs"

_decoder = msgspec.json.Decoder(Moment)
_lines_decoder = msgspec.json.Decoder(Lines)


class Remark(Struct, frozen=True):
    """Something about the machines of the run, said whenever the stream begins."""

    text: str


class Degraded(Struct, frozen=True):
    """The orchestrator decides nothing at the moment, and why; an empty reason: all is well again."""

    reason: str


@dataclass(frozen=True)
class Reach:
    """How the orchestrator is reached.

    where   its endpoint, asked before each attempt, and now and then: another one may have taken over elsewhere
    held    the pass to show at an https URL
    """

    where: Callable[[], Endpoint]
    token: str
    held: Path | None = None

    @asynccontextmanager
    async def opened(self, path: str, since: str = "", body: bytes | None = None) -> AsyncIterator[Opened]:
        """A stream of events. Raises ClientError, TimeoutError, OSError, `TrustError`, ValueError."""
        endpoint = self.where()
        limits = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=SILENT_S)
        # One line is one moment, and those of a job's whole roster can be long.
        async with (
            aiohttp.ClientSession(
                connector=way_to(endpoint, self.held),
                timeout=limits,
                read_bufsize=1 << 20,
                headers={"Authorization": f"Bearer {self.token}"},
            ) as session,
            session.get(
                endpoint.url + path,
                params={"since": since} if since else None,
                data=body,
                allow_redirects=False,
                server_hostname=None if self.held is None else Role.ORCHESTRATOR.server_name,
            ) as answer,
        ):
            answer.raise_for_status()
            yield Opened(answer, lambda: self.where().url == endpoint.url)


@dataclass(frozen=True)
class Opened:
    """A stream of events, for as long as it comes from the right place."""

    answer: aiohttp.ClientResponse
    here: Callable[[], bool]

    async def events(self) -> AsyncIterator[tuple[bytes, bytes]]:
        """Each event's kind, empty for most, and its data. Ends when the orchestrator is somewhere else."""
        kind = b""
        async for line in self._lines():
            if line.startswith(b"event: "):
                kind = line[7:].strip()
            elif line.startswith(b"data: "):
                yield kind, line[6:]
                kind = b""

    async def _lines(self) -> AsyncIterator[bytes]:
        while True:
            reading = asyncio.ensure_future(self.answer.content.readline())
            try:
                while not (await asyncio.wait((reading,), timeout=HERE_S))[0]:
                    if not self.here():
                        return
            finally:
                reading.cancel()
            line = reading.result()
            if not line:
                return
            yield line


AWAY = (aiohttp.ClientError, TimeoutError, OSError, TrustError, ValueError)  # or was ended: the next attempt shows


async def moments(
    where: Callable[[], Endpoint], token: str, held: Path | None = None, since: int = 0
) -> AsyncIterator[Moment | Degraded | Remark]:
    """Every moment after `since`, each once, in order, for ever. An orchestrator that is away is waited for."""
    reach, journal = Reach(where, token, held), ""
    while True:
        try:
            async with reach.opened("/v1/events", str(since)) as opened:
                told = opened.answer.headers.get(JOURNAL_HEADER, "")
                if told != (journal or told):
                    raise ValueError("this orchestrator goes by another journal: what it tells is not of our run")
                journal = told
                async for kind, data in opened.events():
                    if kind == b"remark":
                        yield Remark(msgspec.json.decode(data, type=str))
                    elif kind == b"degraded":
                        yield Degraded(msgspec.json.decode(data, type=str))
                    elif not kind:
                        moment = _decoder.decode(data)
                        since = moment.seq
                        yield moment
        except AWAY:
            pass
        await asyncio.sleep(RETRY_S)


# ---------------------------------------------------------------- what ranks print, elsewhere


class Over(Struct, frozen=True):
    """Nothing is printed any more. `left`: bytes that stand in the logs and did not come."""

    left: int


class FarLines:
    """What ranks print, as the orchestrator that acts tells it. Each line comes once, also if it is asked again."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._places: dict[str, dict[Rank, Place]] = {}  # by whose logs they are

    async def follow(self) -> AsyncIterator[Lines | Over]:
        """Lines as they come, until nothing is printed any more."""
        logs = ""
        while True:
            try:
                # Whose logs these are is known from the answer. In others, these places are found to mean nothing.
                places = list(self._places.get(logs, {}).values())
                async with self._reach.opened(LINES_PATH, body=msgspec.json.encode(places)) as opened:
                    told = opened.answer.headers.get(LOGS_HEADER, "")
                    known = self._places.setdefault(told, {})
                    if told != logs:
                        logs = told
                        if places or known:
                            continue
                    async for kind, data in opened.events():
                        if kind == b"over":
                            yield Over(msgspec.json.decode(data, type=int))
                            return
                        if not kind:
                            lines = _lines_decoder.decode(data)
                            known[lines.rank] = Place(lines.rank, lines.file, lines.end)
                            yield lines
            except AWAY:
                pass
            await asyncio.sleep(RETRY_S)


# ---------------------------------------------------------------- without an orchestrator

# It is away, and perhaps for good: the run is followed to its end by what its agents write.
#
# Nobody decides meanwhile. Ranks that need nobody train on, to the end of their scripts; a rank that is lost is not
# replaced, and those that wait for it wait for orders, `PATIENCE_S` at most. When nothing moves, that is an end, too.

PATIENCE_S = 600.0  # how long those that need orders may wait for them: the workers' own patience
STILL_S = 3600.0  # how long no rank may come further
LOOK_S = 0.5
SURE_S = 25.0  # without any agent being heard; one that is started again, or taken for stuck, is back by then
GOES_ON = (
    "Training goes on without it, to its end if nobody needs it; it is tried again now and then. A rank that needs it "
    f"waits for {PATIENCE_S:g} s at most, and after an hour without any step the run ends with 92"
)
GRACE_S = 15.0  # after the workers' patience: their own ends, and what they say, come first


@dataclass(frozen=True, slots=True)
class Finding:
    """What is to be said now, and whether that is the end. `over`: the ranks have finished (True) or cannot (False)."""

    say: str = ""
    over: bool | None = None


class Watch:
    """Judges what the agents write, look by look; any time of the same clock may be given."""

    def __init__(self, job: JobId, world_size: int) -> None:
        self._job = job
        self._world_size = world_size
        self._lost_s: float | None = None  # since when a rank is lost
        self._place: tuple[object, ...] = ()
        self._moved_s = 0.0

    def look(self, told: Iterable[Alone], now_s: float, *, finishing: bool = False) -> Finding:
        """`finishing`: the orchestrator has said that all ranks have finished, and may have let some of them go."""
        workers = sorted((one for alone in told for one in alone.workers if self._counts(one)), key=lambda w: w.worker)
        # A rank that was taken over while its node could not be heard may have ended twice.
        if finishing or len({one.rank for one in workers if one.done}) >= self._world_size:
            return Finding(over=True)
        place = tuple((one.worker, one.generation, one.point, one.phase, one.ended) for one in workers)
        if place != self._place:
            self._place, self._moved_s = place, now_s
        lost = [one for one in workers if one.ended and one.rank is not None and one.code != 0]
        if lost:
            return self._lost(lost, workers, now_s)
        self._lost_s = None
        if now_s - self._moved_s >= STILL_S:
            return Finding(f"no rank has come further for {STILL_S:g} s, and no orchestrator is there to act", False)
        return Finding()

    def _lost(self, lost: list[Lone], workers: list[Lone], now_s: float) -> Finding:
        ends = ", ".join(f"rank {one.rank}: {one.ended}" for one in lost)
        if not any(not one.ended and one.rank is not None for one in workers):
            return Finding(f"no rank is left, and no orchestrator replaces them ({ends})", False)
        if self._lost_s is None:
            self._lost_s = now_s
            return Finding(
                f"{ends}. No orchestrator is there to replace it: if none comes back, the run ends with 92 in "
                f"{PATIENCE_S:g} s"
            )
        if now_s - self._lost_s >= PATIENCE_S + GRACE_S:
            return Finding(f"no orchestrator came back for {PATIENCE_S:g} s ({ends})", False)
        return Finding()

    def _counts(self, one: Lone) -> bool:
        return one.job == self._job


@dataclass
class Followed:
    """A run, for as long as its agents are alone: what is asked of others, and a voice."""

    folder: Path
    spec: JobSpec
    keeper: Keeper
    scheduler: LocalScheduler
    say: Callable[[str], None]
    finishing: Callable[[], bool]

    async def to_its_end(self) -> NotPossible | None:
        """Wait until all ranks have ended with 0 and nobody has heard of it; or why there is no hope for that."""
        while True:
            await self._until_alone()
            trouble = self.keeper.trouble
            self.say(f"{trouble or 'the orchestrator does not answer'}. {GOES_ON}")
            found = await self._until_over()
            if found is None:
                self.say("the orchestrator is there again")
                continue
            if found.over:
                return None
            return NotPossible(found.say, self.keeper.trouble.code if self.keeper.trouble else STAYED_AWAY)

    async def _until_alone(self) -> None:
        """All agents are, for certain: an orchestrator that ends is mostly back within a second."""
        since_s = None
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = asyncio.get_running_loop().time()
            if await self._read() is None:
                since_s = None
                continue
            since_s = now_s if since_s is None else since_s
            if now_s - since_s >= (SURE_S if self.keeper.trouble is None else 0):
                return

    async def _until_over(self) -> Finding | None:
        """None: they are not alone any more."""
        watch = Watch(self.spec.job, self.spec.world_size)
        while (told := await self._read()) is not None:
            found = watch.look(told, asyncio.get_running_loop().time(), finishing=self.finishing())
            if found.over is not None:
                return found
            if found.say:
                self.say(found.say)
            await asyncio.sleep(LOOK_S)
        return None

    async def _read(self) -> list[Alone] | None:
        return await asyncio.to_thread(read_all, self.folder, list(self.scheduler.processes()))


def read_all(folder: Path, nodes: Iterable[NodeId]) -> list[Alone] | None:
    """What the agents of all these nodes write; None if one of them is not alone."""
    found = [read_alone(folder / node) for node in nodes]
    known = [alone for alone in found if alone is not None]
    return known if known and len(known) == len(found) else None
