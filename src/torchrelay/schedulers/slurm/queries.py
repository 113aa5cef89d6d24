"""Queries: what Slurm is asked, and its answers as values. One that cannot be read is an error with the command."""

from __future__ import annotations

import asyncio
import getpass
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from torchrelay.schedulers.port import SchedulerError
from torchrelay.schedulers.slurm import reading
from torchrelay.schedulers.slurm.abilities import JSON_FROM, OLDEST, Site, site_of, version_text
from torchrelay.schedulers.slurm.commands import CommandFailed, Commands, shown
from torchrelay.schedulers.slurm.reading import JobRecord, JobRow, NodeRecord, Reservation, Unreadable

T = TypeVar("T")
SCRIPT_MOST = 1 << 20  # letters of a batch script that are looked at
GONE = "invalid job id"  # how Slurm says that it does not know a job (any more)


def user_name() -> str:
    """Our user's name; the number where it has none (a container, mostly)."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


class Queries:
    """Asks Slurm by its commands. Each method is one command, and raises `SchedulerError`.

    With `site` unknown everything is asked for as text. JSON is asked for from 23.02 on, until it turns out that this
    build has none or that it cannot be read.
    """

    def __init__(self, commands: Commands) -> None:
        self.commands = commands
        self.json = False

    async def site(self) -> Site:
        """Version, settings, partitions: two commands."""
        config = await self._read(("scontrol", "show", "config"), reading.config_of)
        version = reading.version_of(config["SLURM_VERSION"]) or OLDEST
        if version < OLDEST:
            least = version_text(OLDEST)
            raise SchedulerError(f"this is Slurm {version_text(version)}: torchrelay needs {least} or later")
        self.json = version >= JSON_FROM
        argv = ("scontrol", "show", "partition")
        return site_of(config, await self._read_either(argv, reading.partitions_of, reading.partitions_of_json))

    async def nodes(self) -> list[NodeRecord]:
        """All nodes."""
        return await self._read_either(("scontrol", "show", "nodes"), reading.nodes_of_text, reading.nodes_of_json)

    async def job(self, job: int) -> JobRecord:
        """One job, in detail."""
        argv = ("scontrol", "show", "job", str(job))
        of_text, of_json = partial(reading.job_of_text, wanted=job), partial(reading.job_of_json, wanted=job)
        return await self._read_either(argv, of_text, of_json)

    async def queue(self) -> list[JobRow]:
        """All jobs of ours that have not ended."""
        argv = ("squeue", "--noheader", f"--user={os.getuid()}", f"--format={reading.COLUMNS}")
        return await self._read(argv, reading.rows_of)

    async def notices(self, jobs: Iterable[int]) -> dict[int, float]:
        """Which of these jobs have been told to go for another job's sake, and when."""
        ids = ",".join(str(job) for job in jobs)
        argv = ("squeue", "--noheader", f"--jobs={ids}", "--Format=JobID:20,PreemptTime:20")
        try:
            return await self._read(argv, reading.notices_of)
        except CommandFailed as error:
            if GONE in error.said.lower():
                return {}  # it ended this moment; the next look shows it
            raise

    async def reservations(self) -> list[Reservation]:
        """Reservations, past and future."""
        return await self._read(("scontrol", "--oneliner", "show", "reservation"), reading.reservations_of)

    async def has_step(self, job: int) -> bool:
        """Whether something of ours runs in a satellite: an agent was started there."""
        said = await self.commands.run("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i")
        steps = [line.strip().rpartition(".")[2] for line in said.out.splitlines() if line.strip()]
        return any(step.isdigit() for step in steps)

    async def batch_script(self, job: int) -> str:
        """The script of a job of ours; empty if it has none, or if it is not to be had."""
        try:
            said = await self.commands.run("scontrol", "write", "batch_script", str(job), "-")
        except CommandFailed:
            return ""
        return said.out[:SCRIPT_MOST]

    async def admin_level(self) -> str:
        """Our level in accounting (None, Operator, Administrator); empty if there is no accounting."""
        argv = ("sacctmgr", "--noheader", "--parsable2", "show", "user", user_name(), "format=AdminLevel")
        try:
            said = await self.commands.run(*argv, deadline_s=5.0)
        except CommandFailed:
            return ""
        return (said.out.strip().splitlines() or [""])[0]

    async def _read(self, argv: tuple[str, ...], reader: Callable[[str], T]) -> T:
        """Run a command and read what it prints; of 10,000 nodes that takes a moment, beside the event loop."""
        said = await self.commands.run(*argv)
        try:
            return await asyncio.to_thread(reader, said.out)
        except (Unreadable, ValueError, LookupError, TypeError, AttributeError) as error:  # of another shape than known
            message = f"{shown(argv)} printed what cannot be read: {error}; try it by hand"
            raise CommandFailed(message, command=argv[0], said=str(error)) from error

    async def _read_either(self, argv: tuple[str, ...], of_text: Callable[[str], T], of_json: Callable[[str], T]) -> T:
        """As JSON where there is one: in text, an operator's words may look like fields."""
        if self.json:
            try:
                return await self._read((*argv, "--json"), of_json)
            except CommandFailed as error:
                if error.hung or GONE in error.said.lower():
                    raise
        found = await self._read((argv[0], "--oneliner", *argv[1:]), of_text)
        self.json = False  # text works and JSON did not
        return found
