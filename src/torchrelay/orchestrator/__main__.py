"""Run an orchestrator: `python -m torchrelay.orchestrator --run-dir DIR [--host H] [--port P]`.

It goes on where the journal in DIR ends. SIGTERM and SIGINT end it and leave training alone (with `--lasting` only
SIGINT does); `POST /v1/shutdown` ends the agents and their workers, too. Exit codes: 0, 94 (could not start: port,
journal, disk), 95 (our own defect), 96 (another orchestrator has taken over this journal: this one decides nothing any
more).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import signal
import sys
from pathlib import Path

from aiohttp import web

from torchrelay.api.endpoint import JOURNAL, LOGS, TOKEN, Endpoint, read_endpoint, write_endpoint
from torchrelay.orchestrator.core.agents import Estate
from torchrelay.orchestrator.core.heirs import Heirs, safe
from torchrelay.orchestrator.core.parking import Claims, watch_parking
from torchrelay.orchestrator.core.rules import all_ended, other_rules
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.doorway import Superseded as Excluded
from torchrelay.orchestrator.doorway import at_the_door, doorway_of_head, look_for_another, url_of, wait_or_give_way
from torchrelay.orchestrator.heir import NoBequest, Terms, inherit
from torchrelay.orchestrator.http.api import make_app
from torchrelay.orchestrator.http.changes import look_for_freezes, watch_freezes
from torchrelay.orchestrator.http.door import Door, Strangers, be_brief
from torchrelay.orchestrator.http.following import last_lines_told
from torchrelay.orchestrator.http.keys import Keys
from torchrelay.orchestrator.scheduling import publish_rosters, under_slurm
from torchrelay.orchestrator.store.journal import Journal, JournalRefused, JournalUnavailable, Superseded
from torchrelay.orchestrator.store.parts import kept_succession, own_copy, write_copy_name
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.succession.head import Head, first
from torchrelay.protocol.succession.succession import Place as CopyPlace
from torchrelay.schedulers.local import LocalScheduler
from torchrelay.wire.files.descriptors import allow_many
from torchrelay.wire.files.ownlog import OwnLog
from torchrelay.wire.messages.codec import WireError
from torchrelay.wire.trust.passes import Role, pass_of, server_context
from torchrelay.wire.trust.trust import TrustError, new_token, read_token, write_token

CANNOT_START = 94
DEFECT = 95
SUPERSEDED = 96
GIVE_BACK_S = 10.0
# Values of a large job are many and hardly ever garbage in a circle. Looking for such as often as Python does took 40 %
# of a recovery of 8,192 ranks.
COLLECT = (50_000, 20, 100)

log = logging.getLogger("torchrelay.orchestrator")


class CannotStart(Exception):
    """What is in the way, and what to do about it."""


def options_of(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m torchrelay.orchestrator", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="journal, token, endpoint and logs of the run")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: any free one")
    parser.add_argument("--advertise", default="", metavar="HOST", help="under which others reach it (--host)")
    parser.add_argument("--tls", action="store_true", help="only with the run's passes, over TLS")
    parser.add_argument("--socket", type=Path, help="a unix socket as well, in a folder of its owner alone")
    parser.add_argument("--take-over", action="store_true", help="although another one holds the journal: it is stuck")
    parser.add_argument("--listen", type=int, metavar="FD", help="a socket that is bound to that port: see the keeper")
    parser.add_argument("--kept", action="store_true", help="whoever started this one starts it again when it ends")
    parser.add_argument("--journal", default="", metavar="NAME", help="the journal that the run had: no other will do")
    parser.add_argument("--slurm", type=int, metavar="JOB", help="the Slurm job on whose nodes the agents are")
    parser.add_argument("--heirs", action="store_true", help="this node may be lost: others keep copies of the journal")
    parser.add_argument("--node", default="", metavar="NAME", help="the run's node that this machine is, if it is one")
    parser.add_argument("--heir", default="", metavar="COPY", help="copy another one's journal, to take its place")
    parser.add_argument("--join", default="", metavar="URL", help="with --heir: that other one")
    parser.add_argument("--launcher", default="", metavar="NAME", help="the node on which the run was begun (--node)")
    parser.add_argument("--pass", dest="held", type=Path, metavar="F", help="with --heir: the run's pass for agents")
    parser.add_argument("--lasting", action="store_true", help="SIGTERM does not end it: the job is about to park")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds that a stopped worker waits for orders")
    options = parser.parse_args(words)
    options.launcher = options.launcher or options.node
    return options


def main(words: list[str] | None = None) -> int:
    """The process: everything that can go wrong at the start is one line and exit code 94."""
    options = options_of(words)
    if options.lasting:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    allow_many()
    gc.set_threshold(*COLLECT)
    run_dir: Path = options.run_dir
    try:
        prepare(run_dir)
        superseded = asyncio.run(inherit_and_run(options) if options.heir else run(options))
    except Excluded as error:
        with contextlib.suppress(OSError):  # whoever follows this run finds the one that acts
            if not options.heir:  # its agent would take it for a head, and leave its passes behind
                write_endpoint(run_dir, Endpoint(url=error.by.head.url, pid=0, journal=known_name(run_dir)))
        superseded = str(error)
    except (NoBequest, TimeoutError) as error:
        log.info("not wanted any more: %s", error)
        return 0
    except (CannotStart, JournalRefused, JournalUnavailable, Superseded, TrustError, WireError) as error:
        print(f"torchrelay: the orchestrator cannot start: {error}", file=sys.stderr)
        log.error("cannot start: %s", error)
        return CANNOT_START
    except Exception:  # the top of the process: an assertion or another defect of ours ends it, with its trace
        log.exception("the orchestrator ends: this is a defect of torchrelay")
        where = run_dir / LOGS / "orchestrator.log"
        print(f"torchrelay: the orchestrator failed; this is a defect of torchrelay, see {where}", file=sys.stderr)
        return DEFECT
    if superseded:
        print(f"torchrelay: this orchestrator ends: {superseded}", file=sys.stderr)
        return SUPERSEDED
    return 0


def prepare(run_dir: Path) -> None:
    """The run's folder, and the log."""
    try:
        (run_dir / LOGS).mkdir(parents=True, exist_ok=True, mode=0o700)
        path = run_dir / LOGS / "orchestrator.log"
        handler = OwnLog(path.open("a"), path)
    except OSError as error:
        raise CannotStart(f"{run_dir}: {error.strerror}; choose a folder that you may write to") from error
    logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    be_brief()


async def run(options: argparse.Namespace, head: Head | None = None, former: NodeId | None = None) -> str:
    """Serve until told to end. Returns who has taken over, if somebody has. Raises what keeps it from starting.

    `head`: what it is by the voters' will. Without that it asks them, if there are any.
    """
    wrong = other_rules(options.run_dir / JOURNAL)
    if wrong:
        raise JournalRefused(wrong)
    while True:
        if head is None and options.heirs:
            head = await elected(options)
        superseded, stuck = await act(options, head, former)
        if not stuck:
            return superseded
        log.warning("%s: asking for a lease anew", superseded)
        head = former = None


async def inherit_and_run(options: argparse.Namespace) -> str:
    """Copy a head's journal, and act in its place when its node is lost."""
    key = sys.stdin.readline().strip()
    options.heirs = True
    found = await inherit(
        Terms(options.node, options.heir, key, options.join, options.held, options.host, options.port, options.run_dir)
    )
    options.port, options.patience, options.slurm = found.port, found.patience_s, found.slurm_job or None
    options.launcher = found.launcher
    write_copy_name(options.run_dir, options.heir)
    return await run(options, found.head, found.former)


async def elected(options: argparse.Namespace) -> Head | None:
    """What the voters make of this one, if its journal knows of any; else it begins alone. Raises `Excluded`."""
    known = kept_succession(options.run_dir / JOURNAL)
    if known is None or (known.base is None and not known.voters):
        return None
    place = CopyPlace(NodeId(options.node), own_copy(options.run_dir))
    if not known.has_copy(place.copy):
        raise CannotStart("this machine was started again since: its journal may have lost its end. Others have copies")
    doorway = doorway_of_head(place, known, options.run_dir)
    try:
        where = options.host, options.port, options.advertise
        async with at_the_door(doorway, options.run_dir, *where, held=options.listen) as options.port:
            return await wait_or_give_way(doorway, options.run_dir)
    except OSError as error:
        raise port_taken(options, error) from error


async def act(options: argparse.Namespace, head: Head | None, former: NodeId | None) -> tuple[str, bool]:
    """Serve until told to end. Returns who has taken over, and whether it is only the lease that is over."""
    run_dir: Path = options.run_dir
    name = options.journal or known_name(run_dir)
    lease = None if head is None else head.settled.lease
    with contextlib.closing(Journal(run_dir / JOURNAL, take_over=options.take_over, name=name, lease=lease)) as journal:
        heirs = heirs_of(options, journal, head, former) if options.heirs else None
        service = Orchestrator(journal, patience_s=options.patience, kept=options.kept, heirs=heirs)
        look_for_freezes(service, run_dir)
        ending = [signal.SIGINT, *[signal.SIGTERM] * (not options.lasting)]
        for number in ending:
            asyncio.get_running_loop().add_signal_handler(number, service.end)
        keys = Keys.of_passes(run_dir) if options.tls else Keys.of_one(token_of(run_dir))
        tls = server_context(pass_of(run_dir, Role.ORCHESTRATOR)) if options.tls else None
        strangers = Strangers()
        estate = Estate(run_dir, options.slurm or 0, NodeId(options.launcher)) if heirs is not None else None
        app = make_app(service, keys, strangers, run_dir, estate)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        assert runner.server is not None, "it has been set up"
        door = Door(runner.server, strangers, tls)
        try:
            bound = await listen(door, options)
            options.port = bound
            url = url_of(options.advertise or options.host, bound, tls=options.tls)
            if heirs is not None:
                heirs.listens_at(url)
            inside = await listen_inside(runner, options.socket)
            write_endpoint(run_dir, Endpoint(url=url, pid=journal.anchors[-1].pid, journal=journal.name, socket=inside))
            log.info("listening on %s", url)
            await serve(service, options)
            await door.close()  # agents that come are refused, and know at once that nobody listens
            await last_lines_told(app)
        finally:
            await door.close()
            await runner.cleanup()
            for number in ending:
                asyncio.get_running_loop().remove_signal_handler(number)
        # Only when the run is over: its node alone may have been told to end, and other heirs go on.
        if options.heir and options.slurm and service.leaving and is_lost(service.cluster, options.launcher):
            await give_back(options.slurm)
        return service.superseded, heirs is not None and bool(heirs.stuck)


def heirs_of(options: argparse.Namespace, journal: Journal, head: Head | None, former: NodeId | None) -> Heirs:
    """What this head does for its own loss."""
    if head is None:
        head = first(CopyPlace(NodeId(options.node), own_copy(options.run_dir)), journal.lease)
    else:
        journal.keep_succession(head.settled)
    now_s = asyncio.get_running_loop().time
    return Heirs(head, journal, node=NodeId(options.node) if options.node else None, now_s=now_s, former=former)


def known_name(run_dir: Path) -> str:
    """The name of the journal that this run had; empty if it had none, or if nobody can say."""
    try:
        endpoint = read_endpoint(run_dir)
    except ValueError:
        return ""  # damaged; it is written anew
    return "" if endpoint is None else endpoint.journal


def token_of(run_dir: Path) -> str:
    """The run's token; made if there is none yet."""
    path = run_dir / TOKEN
    if not path.exists():
        write_token(path, new_token())
    return read_token(path)


async def listen(door: Door, options: argparse.Namespace) -> int:
    """Bind the port; returns its number."""
    try:
        return await door.open(options.host, options.port, options.listen)
    except OSError as error:
        raise port_taken(options, error) from error


def port_taken(options: argparse.Namespace, error: OSError) -> CannotStart:
    hint = "choose another --port, or 0 for any free one"
    return CannotStart(f"port {options.port} on {options.host} cannot be used ({error.strerror}): {hint}")


async def listen_inside(runner: web.AppRunner, path: Path | None) -> str:
    """Bind the socket in its owner's folder, if one is wanted; returns its path. Without it the port has to do."""
    if path is None:
        return ""
    try:
        path.unlink(missing_ok=True)  # of the one before
        await web.UnixSite(runner, str(path)).start()
        path.chmod(0o600)
    except OSError as error:
        log.warning("no unix socket at %s (%s): the port has to do", path, error.strerror)
        return ""
    return str(path)


async def serve(service: Orchestrator, options: argparse.Namespace) -> None:
    """The service and what goes with it. If one of them fails, all end."""
    run_dir, slurm_job = options.run_dir, options.slurm
    local = LocalScheduler(run_dir)
    claims = Claims() if options.heir else None
    async with asyncio.TaskGroup() as group:
        beside = [
            group.create_task(
                publish_rosters(service, local) if slurm_job is None else under_slurm(service, slurm_job, run_dir)
            ),
            group.create_task(watch_freezes(service, run_dir)),
            group.create_task(watch_parking(service, run_dir, claims)),
            *([group.create_task(claims.keep(service))] if claims is not None else []),
            group.create_task(collect_in_peace(service)),
            *([group.create_task(end_with_the_jobs(service))] if options.heir else []),
            *([group.create_task(look_for_another(service, run_dir))] if service.heirs is not None else []),
        ]
        await service.serve()
        for task in beside:
            task.cancel()


# ---------------------------------------------------------------- Python's collector

LOOK_S = 1.0
SPARED_S = 60.0  # a job may wait for a spare for hours: what is garbage by then is to go


async def collect_in_peace(service: Orchestrator) -> None:
    """Leave the collector off while a job recovers, for `SPARED_S` at most. Never returns.

    Nearly all that is made then stays, and to look at it took an eighth of a recovery of 16,384 ranks.
    """
    now_s = asyncio.get_running_loop().time
    begun_s: float | None = None
    try:
        while True:
            news = service.news
            if not service.busy:
                begun_s = None
            elif begun_s is None:
                begun_s = now_s()
            if begun_s is not None and now_s() - begun_s < SPARED_S:
                gc.disable()
            else:
                gc.enable()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await news.wait()
    finally:
        gc.enable()


# ---------------------------------------------------------------- the launcher is lost

FOLLOWED_S = 5.0  # after the last job's end: whoever follows it reads how it ended, or ends us itself


async def end_with_the_jobs(service: Orchestrator) -> None:
    """Whoever has taken a lost head's place ends the agents when the job has ended: no launcher does. Never returns."""
    while not (service.cluster.jobs and all_ended(service.cluster)):
        await service.news.wait()
    await asyncio.sleep(FOLLOWED_S)
    await safe(service)  # one that did not know of the end would miss the nodes that have gone
    service.begin_shutdown("the job has ended, and its launcher is lost")
    await asyncio.get_running_loop().create_future()


def is_lost(cluster: Cluster, node: NodeId) -> bool:
    """Whether a node was one of the run's, and is lost."""
    return node in cluster.nodes and not cluster.nodes[node].alive


async def give_back(job: int) -> None:
    """End the Slurm job: its batch script was lost with its node. This ends ourselves, too."""
    try:
        process = await asyncio.create_subprocess_exec("scancel", str(job))
        async with asyncio.timeout(GIVE_BACK_S):
            await process.wait()
    except (OSError, TimeoutError) as error:
        log.error("Slurm job %d could not be given back (%s): cancel it", job, error)


if __name__ == "__main__":
    sys.exit(main())
