"""Allegiance: which orchestrator an agent obeys, votes for and looks for; what it writes down while none hears it.

It obeys the one whose journal it knows, with the highest lease that it has heard.

An orchestrator that has lost its journal, or an old one that was stopped and woke up, would give orders without knowing
what is so: its orders are refused. A file in the node's folder remembers it for the next agent of this node.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from torchrelay.agent.workers.forks import Ended
from torchrelay.protocol.health.pulses import Sample
from torchrelay.protocol.messages.events import WorkerSeen
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession.search import Search, answer_ms, door_ms, hear_known, hear_nothing, look, may_move
from torchrelay.protocol.succession.succession import Succession, VoterId
from torchrelay.protocol.succession.voter import Ballot, in_short, note, promise
from torchrelay.wire.files.alone import FILE, WRITE_S, Alone, Lone, write_alone
from torchrelay.wire.messages.channel import Appoint, Ask, Note, Vote
from torchrelay.wire.messages.codec import WireError

logger = logging.getLogger(__name__)

OBEYED = "allegiance.json"


class Known(Struct, frozen=True):
    """The journal's name, and the highest lease under which orders were taken."""

    journal: str = ""
    lease: int = 0


class Allegiance:
    """Raises `WireError` for whoever is not to be obeyed. Without a folder nothing is remembered."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = None if folder is None else folder / OBEYED
        self.known = self._read()

    def accept(self, journal: str, lease: int) -> None:
        """An orchestrator says who it is: from now on it is the one, or it is refused."""
        if self.known.journal and journal != self.known.journal:
            raise WireError("this orchestrator has another journal than the one that our workers run by: not obeyed")
        self.check(lease)
        known = Known(journal, lease)
        if known != self.known:
            self.known = known
            self._write()

    def check(self, lease: int) -> None:
        if lease < self.known.lease:
            raise WireError(f"the orchestrator's lease {lease} is over: we were attached to {self.known.lease}")

    def _read(self) -> Known:
        try:
            return Known() if self._path is None else msgspec.json.decode(self._path.read_bytes(), type=Known)
        except (OSError, msgspec.DecodeError):
            return Known()

    def _write(self) -> None:
        if self._path is None:
            return
        draft = self._path.with_name(f".{OBEYED}")
        try:
            draft.write_bytes(msgspec.json.encode(self.known))
            draft.replace(self._path)
        except OSError as error:
            logger.warning("which orchestrator is obeyed cannot be kept for the next agent: %s", error)


# ---------------------------------------------------------------- while no orchestrator is heard

# As long as no orchestrator hears this agent, it writes down how its workers are; see `wire.files.alone`.


async def write_while_alone(folder: Path, heard: Callable[[], bool], tell: Callable[[], Alone]) -> None:
    """Write, now and then, for ever. `heard`: whether an orchestrator is there; then nothing stands there."""
    trouble = ""
    while True:
        try:
            if heard():
                (folder / FILE).unlink(missing_ok=True)
            else:
                write_alone(folder, tell())
            trouble = ""
        except OSError as error:
            if str(error) != trouble:
                logger.warning("how the workers are cannot be written down: %s", error)
            trouble = str(error)
        await asyncio.sleep(WRITE_S)


def all_of(
    running: Iterable[tuple[WorkerSeen, Sample | None]], ended: Iterable[tuple[WorkerSeen, Ended | None]]
) -> Alone:
    """Those that run, with what can be seen of them, and those whose ends no orchestrator has heard of."""
    lone = [one_of(seen, sample) for seen, sample in running]
    for seen, end in ended:
        how, code = ("gone", None) if end is None else (end.cause, end.code)
        lone.append(Lone(worker=seen.worker, job=seen.job, rank=seen.rank, ended=how or "ended", code=code))
    return Alone(workers=tuple(lone))


def one_of(seen: WorkerSeen, sample: Sample | None) -> Lone:
    if sample is None:  # it is ending just now
        return Lone(worker=seen.worker, job=seen.job, rank=seen.rank)
    return Lone(
        worker=seen.worker,
        job=seen.job,
        rank=seen.rank,
        generation=sample.generation,
        point=sample.point,
        phase=sample.phase,
    )


# ---------------------------------------------------------------- votes

# An agent's part when the head's node is lost; see `protocol.succession`.

BALLOT = "ballot"  # in the node's folder


class Kept(Struct, frozen=True):
    """What the file holds."""

    voter: VoterId
    ballot: Ballot = Ballot()


class Voting:
    """One voter. What it says is on its disk before anybody hears of it. `folder`: the node's own, in memory.

    A node whose memory is gone is another voter: its name has a part that is drawn when its file is made.
    Raises OSError if nothing can be written there.
    """

    def __init__(self, folder: Path, node: NodeId) -> None:
        self._path = folder / BALLOT
        self._kept = self._read() or Kept(VoterId(f"{node}.{secrets.token_hex(8)}"))
        self._write(self._kept)

    @property
    def voter(self) -> VoterId:
        return self._kept.voter

    @property
    def noted(self) -> Succession | None:
        """The newest succession that it has noted."""
        return self._kept.ballot.noted

    def hear(self, asked: Note | Ask) -> Vote:
        """Answer a head, or a candidate. What cannot be written is not granted."""
        before = self._kept.ballot
        if isinstance(asked, Note):
            after, granted = note(before, asked.succession)
        else:
            after, granted = promise(before, asked.lease, asked.copy)
        if after != before:
            kept = Kept(self.voter, after)
            try:
                self._write(kept)
            except OSError as error:
                logger.error("no vote: %s cannot be written (%s)", self._path, error.strerror)
                granted = False
            else:
                self._kept = kept
        ballot = in_short(self._kept.ballot) if isinstance(asked, Note) else self._kept.ballot
        return Vote(voter=self.voter, granted=granted, ballot=ballot)

    def _read(self) -> Kept | None:
        try:
            return msgspec.msgpack.decode(self._path.read_bytes(), type=Kept)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:  # what it had promised is lost: it is somebody else from now on
            logger.error("%s cannot be read (%s): this agent votes under another name", self._path, error)
            return None

    def _write(self, kept: Kept) -> None:
        """Whole or not at all. It need not outlive the machine: then the name is another one."""
        draft = self._path.with_name(f".{BALLOT}")
        draft.write_bytes(msgspec.msgpack.encode(kept))
        os.replace(draft, self._path)


class Whereabouts:
    """Where the head may be, by `protocol.succession.search`. `given`: where it was first. `now_s`: the loop's time."""

    def __init__(
        self, given: Callable[[], str], noted: Callable[[], Succession | None], now_s: Callable[[], float]
    ) -> None:
        self._given = given
        self._noted = noted
        self._now_s = now_s
        self._search = Search()
        self.here = ""  # where it was looked for last

    @property
    def may_move(self) -> bool:
        """Whether somebody else may become head: then its silence is to be noticed soon."""
        return may_move(self._noted())

    def found(self) -> None:
        """It was where it was looked for."""
        self._search = Search()

    def told(self, known: Succession) -> None:
        """Where it was looked for, this one is known."""
        self._search = hear_known(self._search, self._noted(), known)

    def silent(self) -> None:
        """There was no answer at all: neither it, nor its machine."""
        self._search = hear_nothing(self._search)

    @property
    def handshake_s(self) -> float:
        """How long an orchestrator may take to answer."""
        return answer_ms(self._noted()) / 1000

    @property
    def door_s(self) -> float:
        """How long to wait where it was looked for last, until somebody there is head."""
        return door_ms(self._search, self._noted(), self.here, random.random()) / 1000

    def next(self) -> str:
        """Where to try now."""
        self._search, url = look(self._search, self._noted(), round(1000 * self._now_s()))
        self.here = url or self._given()
        return self.here


# ---------------------------------------------------------------- the heir on this node

HEIR = "heir"  # its folder, in this node's own
END_S = 20.0  # how long one that has become head may take to end all others
KILL_S = 2.0


class HeirProcess:
    """The process on this node that holds a copy of the journal: an orchestrator that does not act, or by now does.

    It outlives this agent, and need not: the head finds out.
    """

    def __init__(self, held: Path, node: NodeId, host: str, run_dir: Path, *, lasts: bool = False) -> None:
        self._held, self._node, self._host = held, node, host
        self._folder = run_dir / HEIR
        self._lasts = lasts
        # The same for all heirs on this node: who has missed where the next one listens finds it all the same.
        self._port = free_port(host)
        self._process: asyncio.subprocess.Process | None = None
        self._appointed: Appoint | None = None
        self._starting: asyncio.Task[None] | None = None

    def appoint(self, order: Appoint, url: str) -> None:
        """The head at `url` wants a copy here. One that there was before is of no use any more."""
        if self._appointed is not None and self._appointed.copy == order.copy and self._is_alive():
            return
        self._appointed = order
        if self._starting is not None:
            self._starting.cancel()
        self._starting = asyncio.create_task(self._start(order, url, self._starting))

    async def end(self) -> None:
        """It ends with the run. One that is head has told us to end, and may have more to do."""
        if self._starting is not None:
            await asyncio.wait((self._starting,), timeout=KILL_S)
        if self._is_alive() and is_head(self._folder):
            await self._wait(END_S)
        await self._kill()
        if not is_head(self._folder):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def _start(self, order: Appoint, url: str, former: asyncio.Task[None] | None) -> None:
        if former is not None:
            await asyncio.gather(former, return_exceptions=True)
        await self._kill()
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(mode=0o700)
            command = [sys.executable, "-P", "-m", "torchrelay.orchestrator", "--run-dir", str(self._folder), "--tls"]
            command += ["--heir", order.copy, "--join", url, "--pass", str(self._held)]
            command += ["--node", self._node, "--host", self._host, "--port", str(self._port)]
            command += ["--lasting"] * self._lasts
            with (self._folder / "orchestrator.err").open("wb") as words:
                self._process = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.PIPE, stdout=words, stderr=words, start_new_session=True
                )
            assert self._process.stdin is not None, "it is a pipe"
            self._process.stdin.write(f"{order.key}\n".encode())
            self._process.stdin.close()
        except OSError as error:
            logger.error("no copy of the journal here: %s", error)

    async def _kill(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        # By SIGTERM one that lasts does not end.
        for number in (signal.SIGINT if self._lasts else signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                pass  # it ends this moment
            if await self._wait(KILL_S):
                return

    async def _wait(self, deadline_s: float) -> bool:
        """Whether it has ended by then."""
        assert self._process is not None, "it has been started"
        try:
            async with asyncio.timeout(deadline_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True


def free_port(host: str) -> int:
    """One that nobody listens on now; 0 if there is none, or no such address."""
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            return int(probe.getsockname()[1])
    except OSError:
        return 0


def is_head(folder: Path) -> bool:
    """Whether the orchestrator in this folder acts: then it has written where it is."""
    return (folder / "endpoint.json").exists()
