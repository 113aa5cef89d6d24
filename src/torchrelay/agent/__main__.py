"""Starts an agent: `python -m torchrelay.agent --node node-0 --slots 5 --url http://127.0.0.1:4100 ...`.

What to run it reads from `RUN_DIR/job.json` (`launch`). It logs to standard error, which whoever starts it sends
to `RUN_DIR/logs/agent-<node>.log`; its forkserver writes there too. It ends, its workers first, on SIGINT and SIGTERM
(but see `notice`), when the orchestrator says so, and, with --tied, when the process that started it has ended.

Exit codes: 0 told to end; 2 bad arguments; 94 cannot start (no torch, wrong token, node name in use); the reason is
the last line of the log. 95: a defect of its own; the traceback is in the log, and its workers train on, as after a
SIGKILL, until an agent that is started again adopts them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torchrelay.agent.agent import CANNOT_START, ENDED_WELL, Agent, Site
from torchrelay.agent.joining import (
    PASS,
    STDIN,
    STDIN_DESCRIPTOR,
    CannotJoin,
    NotWanted,
    Starter,
    add_flags,
    fetch,
    mark_of,
    own_address,
    own_run_dir,
    settle,
    take_pass,
    url_of,
)
from torchrelay.agent.uplink import UNIX
from torchrelay.protocol.messages.ids import SAFE_ID, NodeId
from torchrelay.schedulers.lasting import is_told_by_slurm
from torchrelay.wire.files.descriptors import allow_many
from torchrelay.wire.files.launch import Launch, forget_environment, read_launch
from torchrelay.wire.files.owned import Foreign, read_owned
from torchrelay.wire.files.ownlog import OwnLog
from torchrelay.wire.trust.passes import read_pass, write_pass
from torchrelay.wire.trust.trust import TrustError, read_token

logger = logging.getLogger("torchrelay.agent")

LOOPBACK = "127.0.0.1"
MAX_SOCKET_PATH = 107  # bytes; the kernel's limit for unix sockets
PARENT_S = 0.5
DEFECT = 95


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m torchrelay.agent", description="The agent of one node.")
    parser.add_argument("--node", required=True, help="this node's name, unique in the cluster")
    parser.add_argument("--slots", type=int, required=True, help="worker processes this node has room for")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="the orchestrator, http://host:port")
    where.add_argument("--endpoint", type=Path, help="a JSON file with the orchestrator's url; read at each attempt")
    parser.add_argument("--token-file", type=Path, required=True, help="the run's token (0600)")
    parser.add_argument("--run-dir", type=Path, required=True, help="the run's folder, with job.json and logs/")
    parser.add_argument("--folder", type=Path, help="0700 folder for sockets and pages (default: one in /dev/shm)")
    parser.add_argument("--host", default=LOOPBACK, help="address on which this node's workers listen")
    parser.add_argument("--linger", type=float, default=0.0, help="seconds that workers outlive this agent's death")
    parser.add_argument("--tied", action="store_true", help="end when the process that started this one has ended")
    return checked(parser, parser.parse_args(arguments))


def checked(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    if not SAFE_ID.fullmatch(options.node):
        parser.error(f"--node {options.node!r}: use letters, digits, '.', '_' and '-'")
    if options.slots < 1:
        parser.error("--slots: at least 1")
    return options


def private_folder(wanted: Path | None) -> tuple[Path, bool]:
    """The folder for the nodes' sockets and pages, and whether we made it up, to remove it. Raises `ValueError`."""
    if wanted is None:
        memory = Path("/dev/shm")
        base = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
        return Path(tempfile.mkdtemp(prefix="torchrelay-", dir=base)), True
    wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = wanted.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{wanted} is no folder, but a link or a file: remove it")
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ValueError(f"{wanted} is open to others: chmod 700 {wanted}, and remove what is in it")
    return wanted.absolute(), False


def take_node(folder: Path, node: str) -> Path:
    """This node's own folder, locked until the process ends. Raises `ValueError` if another agent has it."""
    own = folder / node
    longest = own / "forkserver"
    if len(os.fsencode(longest)) > MAX_SOCKET_PATH:
        raise ValueError(f"{longest} is too long for a socket: name a shorter --folder")
    own.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"another agent of {node} runs in {folder}: end it first, or use another --node") from None
    with contextlib.suppress(OSError):  # no room: whoever is told to end us cannot, and what needs room says so
        os.ftruncate(descriptor, 0)
        os.write(descriptor, b"%d" % os.getpid())
    return own


def address_book(options: argparse.Namespace) -> Callable[[], str]:
    """Where the orchestrator is, asked before each attempt."""
    if options.url is not None:
        return lambda: str(options.url)

    def look() -> str:
        # A missing or half-written file raises OSError or ValueError: the agent says so and tries again.
        found = json.loads(trusted(options.endpoint))
        # A node with an address of its own has a network, which is to be its way: also when it is cut.
        inside = str(found.get("socket", "")) if options.host == LOOPBACK else ""
        return UNIX + inside if inside and os.path.exists(inside) else str(found["url"])

    return look


def trusted(path: Path) -> str:
    """What a file of ours says. Raises ValueError if it is not ours: we are about to show our token there."""
    try:
        return read_owned(path).text
    except Foreign as error:
        raise ValueError(f"{path} is not trusted: {error}") from error


async def watch_parent(agent: Agent, parent: int) -> None:
    """End with the process that started us. (Asking the kernel for a signal would tie us to one of its threads.)"""
    while os.getppid() == parent:
        await asyncio.sleep(PARENT_S)
    agent.stop("the process that started this agent has ended")


def obey_starter(agent: Agent, starter: Starter) -> None:
    """End when whoever started this agent says so over its standard input."""
    loop = asyncio.get_running_loop()

    def look() -> None:
        grace_s = starter.told_to_end()
        if grace_s is not None:
            agent.stop("the launcher ends the run", grace_s)
        if starter.gone:
            loop.remove_reader(STDIN_DESCRIPTOR)

    loop.add_reader(STDIN_DESCRIPTOR, look)


async def print_apart(agent: Agent, log: Path) -> None:
    """Once attached, what this agent and its forkserver print goes into a file of this machine.

    Whoever started us may stop reading (srun, when its machine is lost): then what is printed there would wait.
    """
    while not agent.uplink.connected:
        await asyncio.sleep(PARENT_S)
    logger.info("attached: from here on, see %s", log)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    for printed in (1, 2):
        os.dup2(descriptor, printed)
    os.close(descriptor)


async def serve(options: argparse.Namespace, folder: Path, launch: Launch, parent: int) -> int:
    site = Site(
        node=NodeId(options.node),
        slots=options.slots,
        host=options.host,
        folder=folder,
        logs=options.run_dir.absolute() / "logs",
        linger_s=options.linger,
        forsaken_s=0.0 if options.held is None else options.forsaken,
        held=options.held,
        lasts=launch.parks and is_told_by_slurm(os.environ),
    )

    def token() -> str:
        return read_token(options.token_file) if site.held is None else read_pass(site.held).token

    agent = Agent(site, launch, where=address_book(options), token=token)
    watching = asyncio.create_task(watch_parent(agent, parent)) if options.tied else None
    apart = None
    if options.held is not None and options.own_log:
        apart = asyncio.create_task(print_apart(agent, site.logs / f"agent-{site.node}.log"))
    if site.held is not None and options.token_file == STDIN:
        obey_starter(agent, options.starter)
    try:
        return await agent.run()
    except Exception:  # the top of the process
        logger.exception("a defect of the agent: it ends, and its workers train on for the next agent to adopt")
        logging.shutdown()
        os._exit(DEFECT)  # in order, the event loop would kill the forkserver, and with it the workers
    finally:
        for task in (watching, apart):
            if task is not None:
                task.cancel()


def main(arguments: list[str] | None = None) -> int:
    parent = os.getppid()
    options = parse(arguments)
    options.held = None
    allow_many()
    log_to(options.run_dir / "logs", options.node)
    return run(options, parent)


def log_to(folder: Path, node: str) -> None:
    handler = OwnLog(sys.stderr, folder / f"agent-{node}.log")
    form = f"%(asctime)s %(levelname).1s {node}: %(message)s"
    logging.basicConfig(handlers=[handler], level=logging.INFO, format=form)


def run(options: argparse.Namespace, parent: int) -> int:
    """Serve with a launch that lies in the run's folder. Returns the exit code."""
    try:
        launch = read_launch(options.run_dir)
        if options.held is None:
            read_token(options.token_file)
        folder, made_up = private_folder(options.folder)
        (options.run_dir / "logs").mkdir(mode=0o700, exist_ok=True)
        own = stand_by(folder, options) if options.held is not None else take_node(folder, options.node)
    except (TrustError, ValueError, OSError) as error:
        logger.error("cannot start: %s", error)
        return CANNOT_START
    if own is None:
        return ENDED_WELL
    code = asyncio.run(serve(options, own, launch, parent))
    remove(folder if made_up else own)
    return code


def remove(folder: Path) -> None:
    """All at once: an agent that stands by takes the name as soon as the lock is free."""
    gone = folder.with_name(f".{folder.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


# ---------------------------------------------------------------- on a machine of its own

STAND_BY_S = 0.5
LINGER_S = 20.0  # how long workers train on without their agent, which is started again at once
GIVE_BACK_S = 20.0
MEMORY = Path("/dev/shm")


def stand_by(folder: Path, options: argparse.Namespace) -> Path | None:
    """This node's folder. Another agent of the node may be there still, although the ssh that started it has ended.

    Then wait for its end, as long as whoever started this one is there. If that one says that all is to end, so does
    the other agent, which cannot hear it. Then returns None. Raises `ValueError`.
    """
    told, ending = False, False
    while True:
        try:
            own = take_node(folder, options.node)
        except ValueError:
            if options.token_file != STDIN or (options.starter.gone and not ending):
                raise
            if options.starter.told_to_end() is not None:
                end_other(folder / options.node)
                ending = True
        else:
            if ending:
                remove(own)
            return None if ending else own
        if not told:
            logger.info("another agent of %s runs here: standing by", options.node)
            told = True
        time.sleep(STAND_BY_S)


def end_other(own: Path) -> None:
    """SIGINT for the agent that holds a node's folder: a SIGTERM may mean something else to it."""
    with contextlib.suppress(OSError, ValueError):  # it ends this moment
        number = int((own / "lock").read_text())
        logger.info("told to end: so is the agent that runs here (process %d)", number)
        os.kill(number, signal.SIGINT)


def say(text: str) -> None:
    print(f"torchrelay: {text}", file=sys.stderr, flush=True)


def join(arguments: list[str]) -> int:
    """`torchrelay agent --join ...`: ask the orchestrator what is to be run, then serve. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="torchrelay agent", description="Make this machine a node of a running job.")
    add_flags(parser)
    options = parser.parse_args(arguments)
    options.node = options.node or socket.gethostname().partition(".")[0]
    allow_many()
    try:
        return join_as(options, parser)
    finally:
        if options.give_back:
            give_back(os.environ.get("SLURM_JOB_ID", ""))


def join_as(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """The same, with these options."""
    try:
        prepare(options)
    except (CannotJoin, TrustError, OSError, ValueError) as error:
        say(f"{options.node} cannot join: {error}")
        return CANNOT_START
    except NotWanted:
        say(f"{options.node} is not wanted any more")
        return ENDED_WELL
    checked(parser, options)
    log_to(options.run_dir / "logs", options.node)
    code = run(options, os.getppid())
    with contextlib.suppress(OSError):
        forget_environment(options.run_dir)
    with contextlib.suppress(OSError):
        if len(list(options.folder.iterdir())) == 1:  # no other agent of this job is here
            options.held.unlink()
            options.folder.rmdir()
    return code


def give_back(job: str) -> None:
    """Cancel a Slurm job of ours: nobody else may be there to do it."""
    if job.isdecimal():
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["scancel", job], timeout=GIVE_BACK_S, check=False)


def prepare(options: argparse.Namespace) -> None:
    """Fill in what an agent needs from what the orchestrator says. Raises `CannotJoin`, `TrustError`, OSError."""
    options.url, options.endpoint, options.tied, options.linger = url_of(options.join), None, False, LINGER_S
    options.starter = Starter() if options.token_file == STDIN else None
    held = take_pass(options.token_file)
    # The same for all agents of this job here: one that is started again finds the workers of the one before it.
    mark = mark_of(held)
    memory = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    options.folder, _ = private_folder(memory / f"torchrelay-{os.getuid()}-{mark}")
    options.held = write_pass(options.folder / PASS, held)
    launch = asyncio.run(fetch(options.url, options.held, options.patience, say, options.starter))
    options.host = options.host or own_address(options.url)
    options.slots = options.slots or launch.nproc_per_node
    options.run_dir = own_run_dir(options.dir, f"{launch.job}-{mark}", options.node)
    settle(launch, options.run_dir, os.environ)
    say(f"{options.node} ({options.host}) joins {launch.job} at {options.join}; logs in {options.run_dir / 'logs'}")


if __name__ == "__main__":
    sys.exit(main())
