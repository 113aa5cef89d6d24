"""Joining: an agent on a machine of its own asks what is to be run, and keeps it in folders of that machine alone.

    agent -> orchestrator   GET LAUNCH_PATH, with the run's pass for agents, over TLS
    orchestrator -> agent   the launch, as `torchrelay run` wrote it down

Nothing is shared with the launcher but the connection: the pass comes as a file of this machine, or on standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import re
import select
import socket
import ssl
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import aiohttp
import msgspec
import xxhash

from torchrelay.wire.files.kept import MAIN, Kept, Load
from torchrelay.wire.files.launch import FILE, Launch, write_launch
from torchrelay.wire.files.owned import open_to_others
from torchrelay.wire.messages.channel import LAUNCH_PATH, Facts
from torchrelay.wire.trust.passes import LAST_LINE, Pass, Role, client_context, parse_pass, read_pass

logger = logging.getLogger("torchrelay.agent")

STDIN = "-"
STDIN_DESCRIPTOR = 0
MOST_WORD = 4096
PASS = "pass.pem"
MOST_PASS = 64 << 10
MOST_LAUNCH = 64 << 20
DRIVER = Path("/proc/driver/nvidia/version")
ASK_S = 5.0
AGAIN_S = 0.2
REFUSED = (401, 403)
_END = re.compile(rb"end (?P<grace>\d{1,4}(\.\d{1,3})?)")
OF_THE_STEP = re.compile(
    r"SLURM_(STEP|TASK|SRUN|LAUNCH|GTIDS|PROCID|LOCALID|NODEID|NTASKS|NPROCS|NNODES|NODELIST|DISTRIBUTION|TOPOLOGY|CPU_BIND)|PMIX?_"
)
_ADDRESS = re.compile(r"(?P<host>\[[^\]]+\]|[^:\[\]]+):(?P<port>\d{1,5})")


class CannotJoin(Exception):
    """Why this machine cannot be a node of the job, and what to do about it."""


class NotWanted(Exception):
    """Whoever started this agent has ended, or wants it to end, before it has begun."""


def url_of(join: str) -> str:
    """The URL of HOST:PORT. Raises `CannotJoin`."""
    found = _ADDRESS.fullmatch(join.removeprefix("https://").rstrip("/"))
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        raise CannotJoin(f"--join {join}: give HOST:PORT, as `torchrelay run` prints it")
    return f"https://{found['host']}:{found['port']}"


def take_pass(given: str) -> Pass:
    """The pass, from a file or from standard input. Raises `TrustError`, OSError."""
    if given != STDIN:
        return read_pass(Path(given))
    lines: list[str] = []
    # Nothing behind the pass is taken: it stays open, as long as whoever started us is there, and may say `end`.
    with open(STDIN_DESCRIPTOR, "rb", buffering=0, closefd=False) as source:
        while sum(map(len, lines)) < MOST_PASS and (line := source.readline(MOST_PASS)):
            lines.append(line.decode("ascii", "replace"))
            if lines[-1].startswith(LAST_LINE):
                break
    return parse_pass("".join(lines), "standard input")


def mark_of(held: Pass) -> str:
    """What tells this job from every other one, whatever they are called: a digest of its authority."""
    return xxhash.xxh3_64_hexdigest(held.authority.encode())[:12]


class Starter:
    """Whoever holds the other end of our standard input: ssh, srun, or the launcher itself.

    It may tell us to end. That it is gone is no reason to: the way to us may have broken, and ranks train on.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self.gone = False

    def told_to_end(self) -> float | None:
        """The seconds that workers have then; None: it has not told us so. Never waits."""
        while not self.gone and select.select([self._descriptor], [], [], 0)[0]:
            data = os.read(self._descriptor, MOST_WORD)
            self.gone = not data
            *lines, self._rest = (self._rest + data)[-MOST_WORD:].split(b"\n")
            for line in lines:
                if found := _END.fullmatch(line):
                    return float(found["grace"])
        return None


def own_address(url: str) -> str:
    """The address of this machine by which the orchestrator is reached. Raises `CannotJoin`."""
    host, _, port = url.removeprefix("https://").rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        raise CannotJoin(f"no way to {host}: {error.strerror}. Check the name, or give --host ADDRESS") from error


async def fetch(
    url: str, held: Path, patience_s: float, say: Callable[[str], None], starter: Starter | None = None
) -> Launch:
    """What is to be run. Asks until there is an answer, or nobody wants it any more.

    Raises `CannotJoin`, `NotWanted`, `TrustError`.
    """
    context, token = client_context(held), read_pass(held).token
    loop, trouble = asyncio.get_running_loop(), ""
    until_s = loop.time() + patience_s
    while True:
        try:
            return await ask(url, context, token)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if why := not_ours(error):
                raise CannotJoin(f"{url} is not this job's orchestrator, or refuses our pass: {why}") from error
            now = in_words(error)
        if starter is not None and (starter.told_to_end() is not None or starter.gone):
            raise NotWanted
        if loop.time() >= until_s:
            raise CannotJoin(f"{url} has not answered for {patience_s:g} s: {now}")
        if now != trouble:
            say(f"waiting for the orchestrator at {url.removeprefix('https://')}: {now}")
        trouble = now
        await asyncio.sleep(AGAIN_S)


async def ask(url: str, context: ssl.SSLContext, token: str) -> Launch:
    """Ask once. Raises `CannotJoin`, ClientError, OSError, TimeoutError."""
    limits = aiohttp.ClientTimeout(total=ASK_S)
    async with (
        aiohttp.ClientSession(timeout=limits, headers={"Authorization": f"Bearer {token}"}) as session,
        session.get(url + LAUNCH_PATH, ssl=context, server_hostname=Role.ORCHESTRATOR.server_name) as answer,
    ):
        data = bytearray()
        async for piece in answer.content.iter_any():
            data += piece
            if len(data) > MOST_LAUNCH:
                raise CannotJoin(f"{url} answered more than {MOST_LAUNCH} bytes")
        if answer.status in REFUSED:
            raise CannotJoin(f"{url} does not take our pass ({answer.status}): use the run's passes/agent.pem")
        answer.raise_for_status()
    try:
        return msgspec.json.decode(data, type=Launch)
    except msgspec.DecodeError as error:
        raise CannotJoin(f"{url} answered something else than a launch: install the same torchrelay") from error


def in_words(error: Exception) -> str:
    """Why there was no answer."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error.os_error)
    return str(error) or type(error).__name__


def not_ours(error: BaseException) -> str:
    """Why the certificates do not match, if it is that; else empty."""
    found: BaseException | None = error
    told = ""
    while found is not None:
        if isinstance(found, ssl.SSLError):
            told = getattr(found, "verify_message", "") or getattr(found, "reason", "") or told or str(found)
        found = found.__cause__ or found.__context__
    return told


def settle(launch: Launch, run_dir: Path, environment: Mapping[str, str]) -> Launch:
    """What is to be run, on this machine: in its own folders, on top of its own environment. Raises `CannotJoin`."""
    if not Path(launch.cwd).is_dir():
        where = "start the job from a folder that is on all machines"
        raise CannotJoin(f"{launch.cwd}, from which the job was started, is not on this machine: {where}")
    script = Path(launch.cwd) / launch.script
    if not launch.module and not script.is_file():
        raise CannotJoin(f"{script} is not on this machine: copy it to the same path on all machines")
    env = dict(launch.env) if launch.inherit else {**of_the_machine(environment), **launch.env}
    try:
        kept = begin(run_dir, launch, script)
        launch = msgspec.structs.replace(launch, env=env, code=str(kept.folder))
        write_launch(run_dir, launch)
    except OSError as error:
        raise CannotJoin(f"{error.filename}: {error.strerror}; give another --dir") from error
    return launch


def of_the_machine(environment: Mapping[str, str]) -> dict[str, str]:
    """What of this agent's own environment is the workers', too.

    What Slurm says of its step and its only task is not: a script would take itself for rank 0 of 1.
    """
    return {name: value for name, value in environment.items() if not OF_THE_STEP.match(name)}


def begin(run_dir: Path, launch: Launch, script: Path) -> Kept:
    """The code that this node keeps; of an agent before this one, if there was one."""
    kept = Kept(run_dir.absolute() / "code")
    if (run_dir / FILE).exists() and kept.folder.is_dir():
        return kept
    kept = Kept.begin(run_dir)
    if not launch.module:
        kept.keep(Load(MAIN, os.path.abspath(script)), script.read_bytes())
    return kept


def facts_of(launch: Launch) -> Facts:
    """What is compared between the machines of a run."""
    try:
        script = "" if launch.module else xxhash.xxh3_64_hexdigest((Path(launch.cwd) / launch.script).read_bytes())
    except OSError:
        script = ""
    return Facts(
        torch=installed("torch"),
        torchrelay=installed("torchrelay"),
        python=platform.python_version(),
        driver=driver(),
        script=script,
    )


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def driver() -> str:
    """The version of NVIDIA's driver; empty if there is none."""
    try:
        found = re.search(r"Kernel Module.*?(\d+\.\d+(\.\d+)?)", DRIVER.read_text())
    except OSError:
        return ""
    return "" if found is None else found[1]


def own_run_dir(given: Path | None, job: str, node: str) -> Path:
    """The folder for logs and code on this machine. `job`: a name that no other job has. Raises `CannotJoin`."""
    run_dir = (given or Path("/tmp") / f"torchrelay-{os.getuid()}" / (job or "job") / node).absolute()
    try:
        for folder in (run_dir.parent.parent, run_dir.parent) if given is None else ():
            folder.mkdir(mode=0o700, exist_ok=True)
            if wrong := open_to_others(folder):
                raise CannotJoin(f"{wrong}; or give another --dir")
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        (run_dir / "logs").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise CannotJoin(f"{error.filename}: {error.strerror}; give another --dir") from error
    if wrong := open_to_others(run_dir):
        raise CannotJoin(f"{wrong}; or give another --dir")
    return run_dir


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those of an agent on a machine of its own."""
    parser.add_argument("--join", required=True, metavar="HOST:PORT", help="the orchestrator, as `torchrelay run` says")
    parser.add_argument(
        "--token-file", required=True, metavar="F", help="the run's passes/agent.pem, copied here; -: standard input"
    )
    parser.add_argument("--node", default="", metavar="NAME", help="this node's name (the host's)")
    parser.add_argument("--slots", type=int, default=0, metavar="N", help="workers it has room for (ranks of a node)")
    parser.add_argument("--host", default="", metavar="ADDRESS", help="on which its workers listen (found out)")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="for logs and code (/tmp/torchrelay-UID/JOB-ID/NODE)")
    parser.add_argument(
        "--own-log",
        action="store_true",
        help="once attached, print into its own log and no more to whoever started it, who may not read for ever",
    )
    parser.add_argument(
        "--give-back",
        action="store_true",
        help="when it ends, cancel the Slurm job in which it runs: it has no other use",
    )
    parser.add_argument(
        "--forsaken",
        type=float,
        default=600.0,
        metavar="S",
        help="end when no orchestrator was heard and no step was made for so long; 0: never (600)",
    )
    parser.add_argument(
        "--patience", type=float, default=600.0, metavar="S", help="to wait for the orchestrator at the start (600)"
    )
