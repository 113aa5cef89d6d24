"""`torchrelay attach`: follows a run whose launcher is lost, or that somebody else follows, and leaves it alone.

What is told and printed is the same as by the launcher, from the orchestrator that acts, wherever that is by now. Lines
begin with the first that it has in its logs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrelay.agent.allegiance import HEIR
from torchrelay.api.endpoint import JOURNAL, TOKEN, Endpoint
from torchrelay.api.shown import JobStatus
from torchrelay.client.chronicle import Chronicle
from torchrelay.client.client import Away, Client, Denied, job_in
from torchrelay.client.heads import STAYED_AWAY, Heads, name_of, places_of, where_ledger
from torchrelay.client.runs import FOLDER, Far, NotPossible, begun
from torchrelay.launcher.following import Degraded, FarLines, Over, Reach, Remark, moments
from torchrelay.launcher.voice import Voice, summary
from torchrelay.orchestrator.views.story import Moment
from torchrelay.protocol.model.job import JobPhase
from torchrelay.wire.files.owned import open_to_others
from torchrelay.wire.trust.passes import Role, pass_of, read_pass
from torchrelay.wire.trust.trust import read_token

STOPPED = 130
LAST_S = 30.0  # how long the last lines may take when the job has ended
AGAIN_S = 0.1
ENDED_S = 5.0  # between two looks whether the job has ended
SUMMED_UP_S = 10.0  # how long the orchestrator may take to tell how the job has ended


def attach(given: argparse.Namespace) -> int:
    """Follow a run to its end. Returns the job's exit code."""
    return follow(given.run_dir, given.job, given.patience)


def follow(run: Path | Far | None, job: str | None, patience_s: float) -> int:
    """The same. Raises `NotPossible`, `Denied`, `TrustError`."""
    folder = None if isinstance(run, Far) else find_folder(run)
    following = Attached(run if isinstance(run, Far) else None, folder, job, patience_s)
    try:
        return asyncio.run(following.follow())
    except KeyboardInterrupt:
        following.voice.say(f"not following any more. {following.name} goes on: `torchrelay attach` finds it again")
        return STOPPED


def find_folder(given: Path | None, machine: Path = Path("/tmp")) -> Path:
    """The run's folder: the launcher's, or that of a node that has a copy of the journal. Raises `NotPossible`."""
    if given is not None:
        if (given / JOURNAL).exists():
            return given
        raise NotPossible(f"{given} is not a run's folder (no {JOURNAL} in it): name one with --run-dir", 2)
    nodes = machine / f"torchrelay-{os.getuid()}"
    found = list(FOLDER.glob(f"*/{JOURNAL}"))
    if nodes.is_dir() and not open_to_others(nodes):
        found += nodes.glob(f"*/*/{HEIR}/{JOURNAL}")
    if not found:
        where = f"under ./{FOLDER} or under {nodes}"
        raise NotPossible(f"no run {where}: name one with --run-dir, or with --url and --ca", 2)
    newest: Path = max((journal.parent for journal in found), key=begun)
    return newest


class Attached:
    """One run, seen from outside. `far`: where to ask; or `folder`: a folder of the run on this machine."""

    def __init__(self, far: Far | None, folder: Path | None, job: str | None, patience_s: float) -> None:
        self._folder = folder
        self._job = job
        self._patience_s = patience_s
        self._held = held_in(far, folder)
        self._given = [Endpoint(url=far.url.rstrip("/"), pid=0)] if far is not None else []
        self.heads = Heads(self._places, self._token, self._held)
        self.voice = Voice(quiet=False, world_size=1)
        self._remarked: set[str] = set()

    @property
    def name(self) -> str:
        """The job, in words."""
        return self._job or "the job"

    def _places(self) -> list[Endpoint]:
        return self._given if self._folder is None else places_of(self._folder)

    def _token(self) -> str:
        if self._held is not None:
            return read_pass(self._held).token
        assert self._folder is not None, "without a pass there is a folder"
        return read_token(self._folder / TOKEN)

    def _client(self) -> Client:
        where = self.heads.where()
        return Client(where.url, self._token(), where.socket, self._held)

    # ------------------------------------------------------------ from start to end

    async def follow(self) -> int:
        """Until the job has ended. Raises as `follow` does."""
        minding = asyncio.create_task(self.heads.mind(self.voice.say, self._patience_s, is_over=self._is_over))
        following = asyncio.create_task(self._follow())
        try:
            await asyncio.wait((minding, following), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                return following.result()
            minding.result()  # it has ended: the run is over, or nobody has acted for too long
            return self._told_by_the_journal()
        finally:
            for task in (minding, following):
                task.cancel()
            await asyncio.gather(minding, following, return_exceptions=True)

    def _is_over(self) -> bool:
        """Whether the journal here says so; nobody answers."""
        if self._folder is None:
            return False
        try:
            return Chronicle.of(self._folder).over
        except (Denied, ValueError):
            return False  # it cannot be read now

    def _told_by_the_journal(self) -> int:
        assert self._folder is not None, "its journal was read"
        chronicle = Chronicle.of(self._folder)
        job = chronicle.job(self._job)
        self.voice.say(f"{chronicle.remark}; {summary(job, str(self._folder))}")
        return code_of(job)

    async def _follow(self) -> int:
        seq, job = await self._begun()
        self.voice = Voice(quiet=False, world_size=job.world_size)
        self._job = job.job
        assert self.heads.head is not None, "it has told of the job"
        self.voice.say(f"{job.job} on {name_of(self.heads.head)}: {how(job)}. Ctrl-C leaves it alone")
        printing = asyncio.create_task(self._print_lines())
        try:
            if job.outcome is None:
                await first_of(self._tell(seq), self._ended())
            job, where = await self._summed_up(job)
            await self._last_lines(printing)
        finally:
            printing.cancel()
            await asyncio.gather(printing, return_exceptions=True)
        self.voice.say(summary(job, where))
        return code_of(job)

    async def _begun(self) -> tuple[int, JobStatus]:
        """How far the story is, and the job. Nobody may act so far, and no job may have been submitted."""
        while True:
            if self.heads.acts:
                try:
                    status = await asyncio.to_thread(self._client().view_status)
                    return status.seq, job_in(status, self._job)
                except Away:
                    pass
                except Denied as error:
                    if error.status != 503:
                        raise
            await asyncio.sleep(AGAIN_S)

    async def _tell(self, seq: int) -> None:
        """Say what happens, until the job has ended."""
        async for moment in moments(self.heads.where, self._token(), self._held, seq):
            match moment:
                case Degraded(reason):
                    self.voice.say(reason or "all is well again")
                case Remark(text):
                    if text not in self._remarked:
                        self._remarked.add(text)
                        self.voice.say(text)
                case Moment():
                    self.voice.tell(moment)
                    if any(note.phase == JobPhase.ENDED and note.job == self._job for note in moment.notes):
                        return

    async def _ended(self) -> None:
        """Look whether the job has ended. A moment after the one that we begin with may be undone with its head."""
        while True:
            await asyncio.sleep(ENDED_S)
            with suppress(Away, Denied):
                if (await asyncio.to_thread(self._client().job, self._job)).phase == JobPhase.ENDED:
                    return

    async def _print_lines(self) -> None:
        async for found in FarLines(Reach(self.heads.where, self._token(), self._held)).follow():
            if isinstance(found, Over):
                if found.left:
                    self.voice.say(f"{found.left:,} bytes of output did not come: they are in the logs of each node")
                return
            self.voice.far_lines(found)

    async def _summed_up(self, job: JobStatus) -> tuple[JobStatus, str]:
        """How the job has ended, and the folder in which its ledger is. Raises `NotPossible` if nobody tells."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + SUMMED_UP_S
        while loop.time() < until_s:
            try:
                found = await asyncio.to_thread(self._client().job, self._job)
            except (Away, Denied):
                found = job
            if found.outcome is not None:
                assert self.heads.head is not None, "it has told of the job"
                return found, where_ledger(self.heads.head)
            await asyncio.sleep(AGAIN_S)
        where = "`torchrelay report` on the node of its orchestrator says how"
        raise NotPossible(f"{self.name} has ended, and its orchestrator, too: {where}", STAYED_AWAY)

    async def _last_lines(self, printing: asyncio.Task[None]) -> None:
        """Those that come while the agents end; as long as somebody tells of them."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LAST_S
        while not printing.done() and loop.time() < until_s and self.heads.acts:
            await asyncio.wait((printing,), timeout=AGAIN_S)


async def first_of(*works: Coroutine[Any, Any, None]) -> None:
    """Do some work until one part of it is done. Raises what that raises."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def held_in(far: Far | None, folder: Path | None) -> Path | None:
    """The pass to show; None for a run on one machine, which has a token."""
    if far is not None:
        return far.held
    assert folder is not None, "it is the one or the other"
    held = pass_of(folder, Role.OPERATOR)
    return held if held.exists() else None


def how(job: JobStatus) -> str:
    """How a job is doing, in a line."""
    if job.outcome is not None:
        return f"it has ended with {job.outcome.code}"
    step = "" if job.step is None else f", at step {job.step}"
    open_now = f", {job.incidents.open} incident{'s' * (job.incidents.open > 1)} open" if job.incidents.open else ""
    return f"{job.phase}{step}{open_now}"


def code_of(job: JobStatus) -> int:
    return 0 if job.outcome is None else job.outcome.code
