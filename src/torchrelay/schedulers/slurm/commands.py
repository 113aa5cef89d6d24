"""Commands: Slurm's programs are run with a deadline, a bound on what they print, no shell and a clean environment.

Whatever goes wrong is a `CommandFailed` that names the command, what it said, and what helps.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from torchrelay.schedulers.port import SchedulerError
from torchrelay.schedulers.tether import tethered

DEADLINE_S = 20.0
MOST_BYTES = 64 << 20  # 10,000 nodes as JSON are 20 MB
MOST_SAID = 64 << 10  # of stderr; the rest is read and dropped
TICK_S = 0.25  # how often it is seen how much one has printed
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
    ("configuration source", "name the cluster's configuration in SLURM_CONF"),
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
        """Run a command to its end. Raises `CommandFailed`: missing, hangs, prints too much, exits with nonzero.

        It prints into memory and not into pipes: a child that it leaves behind keeps nobody waiting. Where this is
        cancelled, the command is ended first.
        """
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        now_s = asyncio.get_running_loop().time
        begun_s = now_s()
        with memory("out") as out, memory("err") as err:
            process = self._start(argv, out, err)
            try:
                async with asyncio.timeout(limit_s):
                    await self._ended(process, out, argv)
            except TimeoutError:
                said = one_line(read(err))
                helps = remedy_for(said) if said else "is slurmctld well? try `scontrol ping`"
                message = f"{shown(argv)} did not end within {limit_s:g} s: {said or 'no word'}; {helps}"
                raise CommandFailed(message, command=argv[0], said=said, hung=True) from None
            finally:
                await end(process)
            found = Said(read(out, self._most_bytes), read(err), now_s() - begun_s)
        said = one_line(found.err) or one_line(found.out)
        if process.returncode:
            message = f"{shown(argv)} ended with {process.returncode}: {said or 'no word'}; {remedy_for(said)}"
            raise CommandFailed(message, command=argv[0], said=said)
        return found

    def _start(self, argv: tuple[str, ...], out: IO[bytes], err: IO[bytes]) -> subprocess.Popen[bytes]:
        try:
            # A session of its own, so that all of it can be ended, and Ctrl-C in the terminal is not for it.
            return subprocess.Popen(
                self._found(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._environ,
                start_new_session=True,
                preexec_fn=tethered(signal.SIGTERM),
            )
        except OSError as error:
            told = "is not on PATH" if isinstance(error, FileNotFoundError) else f"cannot be run ({error.strerror})"
            message = f"{argv[0]} {told}: install Slurm's commands here, or put their folder on PATH"
            raise CommandFailed(message, command=argv[0]) from error

    def _found(self, argv: tuple[str, ...]) -> list[str]:
        """With the program's own path, by the PATH that it will run with. Raises FileNotFoundError."""
        path = shutil.which(argv[0], path=self._environ.get("PATH"))
        if path is None:
            raise FileNotFoundError(argv[0])
        return [path, *argv[1:]]

    async def _ended(self, process: subprocess.Popen[bytes], out: IO[bytes], argv: tuple[str, ...]) -> None:
        """Wait until it has ended. Raises `CommandFailed` if it prints too much meanwhile."""
        while True:
            over = await exits(process, TICK_S)
            if os.fstat(out.fileno()).st_size > self._most_bytes:
                message = f"{shown(argv)} printed more than {self._most_bytes} bytes: try the command by hand"
                raise CommandFailed(message, command=argv[0])
            if over:
                return


def memory(name: str) -> IO[bytes]:
    """A file that is in memory only."""
    return os.fdopen(os.memfd_create(f"torchrelay-slurm-{name}"), "w+b")


def read(file: IO[bytes], most: int = MOST_SAID) -> str:
    """The beginning of what was printed into it."""
    return os.pread(file.fileno(), most, 0).decode(errors="replace")


def shown(argv: tuple[str, ...]) -> str:
    """A command line as a message shows it."""
    return f"`{one_line(shlex.join(argv), 200)}`"


async def read_some(stream: asyncio.StreamReader | None, kept: bytearray) -> None:
    """All is read, so that its writer never waits; the beginning is kept."""
    assert stream is not None, "it has been asked for"
    while part := await stream.read(1 << 16):
        kept += part[: MOST_SAID - len(kept)]


async def exits(process: subprocess.Popen[bytes], within_s: float) -> bool:
    """Whether a process ends within a time.

    By the kernel's word for it: asyncio's own child processes may wait for ever if a task is cancelled that starts one.
    """
    if process.poll() is not None:
        return True
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    word = os.pidfd_open(process.pid)
    try:
        loop.add_reader(word, settle, ended)
        await asyncio.wait({ended}, timeout=within_s)
    finally:
        loop.remove_reader(word)
        os.close(word)
    return process.poll() is not None


def settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def end(process: subprocess.Popen[bytes]) -> None:
    """End it and what it started, first in a friendly way: salloc then takes its request back."""
    if process.poll() is not None:
        return
    try:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        await exits(process, END_S)
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, on a dead file system: let it be
                process.wait(END_S)
