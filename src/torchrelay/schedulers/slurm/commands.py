"""Commands: Slurm's programs are run with a deadline, a bound on what they print, no shell and a clean environment.

Whatever goes wrong is a `CommandFailed` that names the command, what it said, and what helps.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from torchrelay.schedulers.port import SchedulerError
from torchrelay.schedulers.tether import tethered

DEADLINE_S = 20.0
MOST_BYTES = 64 << 20  # 10,000 nodes as JSON are 20 MB
MOST_SAID = 64 << 10  # of stderr; the rest is read and dropped
END_S = 2.0  # between SIGTERM, with which salloc takes its request back, and SIGKILL
# Settings of Slurm's commands that are not about which cluster is meant. Those of the allocation that we run in would
# make salloc and srun part of it, and formats of the user's would change what we read.
OURS_NOT = ("SLURM", "SALLOC_", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_", "SACCTMGR_")
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS")


class CommandFailed(SchedulerError):
    """A command of Slurm's did not do what it was to do.

    command   its name, e.g. "scontrol"
    said      what it printed, in one line; empty if nothing
    hung      it did not end in time
    """

    def __init__(self, message: str, *, command: str, said: str = "", hung: bool = False) -> None:
        super().__init__(message)
        self.command, self.said, self.hung = command, said, hung


@dataclass(frozen=True)
class Said:
    """What a command printed, and how long it took."""

    out: str
    err: str
    took_s: float


# What is said in their messages, in lower case, and what helps.
REMEDIES = (
    ("unable to contact slurm controller", "is slurmctld running? try `scontrol ping`"),
    ("socket timed out", "slurmctld is busy: it is asked again later"),
    ("slurm.conf", "name the cluster's configuration in SLURM_CONF"),
    ("configuration file", "name the cluster's configuration in SLURM_CONF"),
    ("munge", "is munged running on this machine? try `munge -n | unmunge`"),
    ("protocol authentication error", "is munged running on this machine? try `munge -n | unmunge`"),
    ("invalid account", "name an account that you may use (SBATCH_ACCOUNT, or --account)"),
    ("invalid partition", "name a partition that `sinfo` lists"),
    ("user id", "the job, or the right to do this, is another user's"),
    ("permission denied", "this needs an operator's rights"),
    ("rate limit", "the site limits how often slurmctld may be asked: raise the poll interval"),
)


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for Slurm's commands: no allocation, no formats of the user's, times in UTC, plain English."""
    kept = {name: value for name, value in environ.items() if not name.startswith(OURS_NOT) or name in KEPT}
    return {**kept, "LC_ALL": "C", "TZ": "UTC"}


def one_line(text: str, most: int = 300) -> str:
    """A message in one line that can be printed, and not too long."""
    line = "; ".join(part.strip() for part in text.splitlines() if part.strip())
    line = "".join(letter if letter.isprintable() else "?" for letter in line)
    return line if len(line) <= most else f"{line[: most - 3]}..."


def remedy_for(said: str) -> str:
    """What helps against a message; a general word if we do not know it."""
    lower = said.lower()
    return next((remedy for mark, remedy in REMEDIES if mark in lower), "try the command by hand")


class Commands:
    """Runs Slurm's commands, each in a process of its own.

    environ      of the commands, before it is cleaned (this process's)
    deadline_s   for each of them, in seconds, unless a call says otherwise
    most_bytes   that one may print
    """

    def __init__(
        self, environ: Mapping[str, str] | None = None, *, deadline_s: float = DEADLINE_S, most_bytes: int = MOST_BYTES
    ) -> None:
        self._environ = clean(os.environ if environ is None else environ)
        self._deadline_s = deadline_s
        self._most_bytes = most_bytes

    async def run(self, *argv: str, deadline_s: float | None = None) -> Said:
        """Run a command to its end. Raises `CommandFailed`: missing, hangs, prints too much, exits with nonzero."""
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        now_s = asyncio.get_running_loop().time
        begun_s, kept = now_s(), bytearray()
        process = await self._start(argv)
        try:
            async with asyncio.timeout(limit_s):
                out, _, _ = await asyncio.gather(
                    self._read_out(process, argv), read_some(process.stderr, kept), process.wait()
                )
        except TimeoutError:
            said = one_line(kept.decode(errors="replace"))
            helps = remedy_for(said) if said else "is slurmctld well? try `scontrol ping`"
            message = f"{shown(argv)} did not end within {limit_s:g} s: {said or 'no word'}; {helps}"
            raise CommandFailed(message, command=argv[0], said=said, hung=True) from None
        finally:
            await end(process)
        err = kept.decode(errors="replace")
        said = one_line(err) or one_line(out)
        if process.returncode:
            message = f"{shown(argv)} ended with {process.returncode}: {said or 'no word'}; {remedy_for(said)}"
            raise CommandFailed(message, command=argv[0], said=said)
        return Said(out, err, now_s() - begun_s)

    async def _start(self, argv: tuple[str, ...]) -> asyncio.subprocess.Process:
        try:
            # A session of its own, so that all of it can be ended, and Ctrl-C in the terminal is not for it.
            return await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environ,
                start_new_session=True,
                preexec_fn=tethered(signal.SIGTERM),
            )
        except OSError as error:
            told = "is not on PATH" if isinstance(error, FileNotFoundError) else f"cannot be run ({error.strerror})"
            message = f"{argv[0]} {told}: install Slurm's commands here, or put their folder on PATH"
            raise CommandFailed(message, command=argv[0]) from error

    async def _read_out(self, process: asyncio.subprocess.Process, argv: tuple[str, ...]) -> str:
        assert process.stdout is not None, "it has been asked for"
        parts, count = list[bytes](), 0
        while part := await process.stdout.read(1 << 16):
            parts.append(part)
            count += len(part)
            if count > self._most_bytes:
                message = f"{shown(argv)} printed more than {self._most_bytes} bytes: try the command by hand"
                raise CommandFailed(message, command=argv[0])
        return b"".join(parts).decode(errors="replace")


def shown(argv: tuple[str, ...]) -> str:
    """A command line as a message shows it."""
    return f"`{one_line(shlex.join(argv), 200)}`"


async def read_some(stream: asyncio.StreamReader | None, kept: bytearray) -> None:
    """All is read, so that its writer never waits; the beginning is kept."""
    assert stream is not None, "it has been asked for"
    while part := await stream.read(1 << 16):
        kept += part[: MOST_SAID - len(kept)]


async def end(process: asyncio.subprocess.Process) -> None:
    """End it and what it started, first in a friendly way."""
    if process.returncode is None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await process.wait()
                    break
