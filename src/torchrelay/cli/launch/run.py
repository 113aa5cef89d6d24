"""`torchrelay run`: torchrun's command line, and ours; checks everything that can be checked before anything starts."""

from __future__ import annotations

import argparse
import fcntl
import importlib.machinery
import os
import re
import socket
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from torchrelay.agent.workers.processes import LET_US_RECOVER
from torchrelay.api.endpoint import ENDPOINT, JOURNAL
from torchrelay.cli.launch.machine_flags import add_machines, hosts_of, machines_of, nodes_of, read_spares
from torchrelay.cli.launch.net_flags import add_network, network_environment, path_limits
from torchrelay.cli.launch.park_flags import add_parking, parking_of, with_parking
from torchrelay.cli.launch.unprepared import ends_at_once
from torchrelay.client.runs import FOLDER, NotPossible, time_in
from torchrelay.launcher.plan import ENDING, TELLING, Plan
from torchrelay.orchestrator.store.lock import is_written
from torchrelay.orchestrator.store.mark import SUFFIX
from torchrelay.protocol.messages.events import JobSpec
from torchrelay.protocol.messages.ids import JobId
from torchrelay.schedulers.network import obstacle
from torchrelay.wire.files.kept import MAIN, Kept, Load
from torchrelay.wire.files.launch import Launch
from torchrelay.wire.files.owned import open_to_others

BAD_ARGUMENTS = 2
CANNOT_START = 94
MOST = 1_000_000  # of anything that is counted or waited for in seconds
MOST_PATH = 400  # bytes of the path of a run's folder: SQLite opens files up to 512
MOST_PORT = 65_535
MOST_GRACE_S = 86_400
MOST_LINKS = 4  # paths that the network core can use

DESCRIPTION = """
Start a script on this machine as torchrun does, and keep it going through faults. What comes after the script's name
belongs to the script. Exit code: the script's own; 2 bad arguments; 90 no spare in time; 91 no clean state to go on
from; 92 the orchestrator stayed away; 93 the script is refused; 94 could not start; 95 our own defect; 130 stopped;
75 parked.
"""

# torchrun's flags that mean nothing here: accepted, so that a command line can stay as it is, and named once.
IGNORED_VALUES = (
    "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "monitor-interval", "start-method", "event-log-handler",
    "role", "redirects", "tee", "local-ranks-filter", "node-rank", "master-addr", "master-port", "local-addr",
    "logs-specs", "numa-binding",
)  # fmt: skip
IGNORED_FLAGS = ("standalone",)
ONE_MACHINE = "a line for each machine is torchrun's. Start it once, with --hosts A,B,C, and leave this flag out"
REFUSED_FLAGS = {
    "no-python": "workers are forked from a process that has torch imported: give a Python script, or -m MODULE",
    "run-path": "give the script's path itself",
    "virtual-local-rank": "each worker sees the LOCAL_RANK that torchrun would give it",
}


def both(name: str) -> tuple[str, ...]:
    """The two spellings that torchrun allows, if they differ."""
    return tuple(dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}")))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="torchrelay run", description=DESCRIPTION, allow_abbrev=False,
        usage="torchrelay run [flags] [-m] script [the script's arguments]",
    )  # fmt: skip
    as_torchrun = parser.add_argument_group("as in torchrun")
    as_torchrun.add_argument(*both("nproc-per-node"), default="1", metavar="N", help="ranks on each node")
    as_torchrun.add_argument("-m", "--module", action="store_true", help="the script is a module's name")
    as_torchrun.add_argument(
        *both("max-restarts"), type=int, default=0, metavar="N",
        help="how often all ranks may start again from the script's own checkpoint, if nothing better is left (0)",
    )  # fmt: skip
    as_torchrun.add_argument(
        "--grace", *both("shutdown-timeout"), type=float, default=30.0, metavar="S", dest="grace",
        help="seconds that the ranks have to end by themselves after a SIGTERM, SIGINT, SIGHUP or SIGQUIT (30)",
    )  # fmt: skip
    as_torchrun.add_argument(
        *both("signals-to-handle"), default="", metavar="NAMES",
        help="further signals that end the ranks, such as SIGUSR1; without it SIGUSR1 and SIGUSR2 are only passed on",
    )  # fmt: skip
    as_torchrun.add_argument(*both("log-dir"), type=Path, metavar="DIR", help="where the ranks' output goes")
    ours = parser.add_argument_group("torchrelay's own")
    ours.add_argument("--nodes", "--nnodes", metavar="N", help="nodes, each with an agent (1, or all hosts but spares)")
    ours.add_argument(
        "--isolate", action="store_true", help="give each virtual node a network link of its own, to cut it (root)"
    )
    ours.add_argument(
        "--links", type=int, default=0, metavar="K",
        help="with --isolate: further links of each node, the paths of its collectives with --net-failover (0)",
    )  # fmt: skip
    add_spares(ours)
    ours.add_argument("--run-dir", type=Path, metavar="DIR", help=f"the run's folder (./{FOLDER}/JOB)")
    ours.add_argument("--job", metavar="NAME", help="the job's name (the script's name and the time)")
    ours.add_argument("--port", type=int, default=0, metavar="P", help="port of the orchestrator (any)")
    ours.add_argument("-q", "--quiet", action="store_true", help="print neither the ranks' output nor notices")
    add_machines(parser.add_argument_group("nodes that are machines of their own (without: all on this one, virtual)"))
    add_parking(parser.add_argument_group("a job that leaves all its nodes, and goes on later"))
    add_moving(parser.add_argument_group("planned and pre-emptive moves of ranks"))
    add_network(parser.add_argument_group("network paths"))
    for name in IGNORED_VALUES:
        short = {"redirects": ("-r",), "tee": ("-t",)}.get(name, ())
        parser.add_argument(*short, *both(name), dest=f"ignored_{name}", help=argparse.SUPPRESS)
    for name in IGNORED_FLAGS:
        parser.add_argument(*both(name), dest=f"ignored_{name}", action="store_const", const="", help=argparse.SUPPRESS)
    for name in REFUSED_FLAGS:
        parser.add_argument(*both(name), dest=f"refused_{name}", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("script", help="a Python file, or with -m a module")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


def add_spares(group: argparse._ArgumentGroup) -> None:
    """Who takes the place of a lost rank, and where."""
    group.add_argument(
        "--spares", default=0, metavar="K",
        help="warm workers that wait for a rank (0). Or, in nodes, dedicated:K,floating:N,partition=P: K as by "
        "--spare-nodes; N more in a Slurm job when nodes are lost, idle ones first, then those of partition P",
    )  # fmt: skip
    group.add_argument(
        *both("spare-nodes"),
        type=int,
        default=0,
        metavar="K",
        help="further virtual nodes with room for as many ranks as each other has, all of them spares (0)",
    )
    group.add_argument("--no-refill", action="store_true", help="never use the slot of a lost worker again")
    group.add_argument(
        "--slot-faults",
        type=int,
        default=3,
        metavar="N",
        help="workers that a slot may lose in ten minutes before it is not used any more; 0: any number (3)",
    )
    group.add_argument(
        "--spare-wait", type=float, default=600.0, metavar="S", help="seconds to wait if there is no spare (600)"
    )
    group.add_argument(
        *both("oversubscribe"),
        type=int,
        default=1,
        metavar="N",
        help="if no spare is left, up to N ranks run in one slot until there is room; 1: they wait for a spare (1)",
    )


def add_moving(group: argparse._ArgumentGroup) -> None:
    """What torchrelay may do of its own accord, before anything fails."""
    group.add_argument(
        *both("moves-per-hour"),
        type=int,
        default=60,
        metavar="N",
        help="how often ranks may be moved within an hour; 0: never, less than 0: any number (60)",
    )
    group.add_argument(
        *both("probation"),
        default="7d",
        metavar="TIME",
        help="for how long a repaired place is used only as a last resort: 90s, 10m, 2h, 7d; 0: not at all (7d)",
    )
    group.add_argument(
        *both("return-home"),
        action="store_true",
        help="ranks move back, by themselves, to the node they began on, if it has room and is well again",
    )


def plan(words: list[str]) -> Plan:
    """Check the command line. Raises `NotPossible` with what to change; SystemExit(2) for what argparse refuses."""
    given = parser().parse_args(words)
    for name, remedy in REFUSED_FLAGS.items():
        if getattr(given, f"refused_{name}"):
            raise NotPossible(f"--{name} is not possible here: {remedy}", BAD_ARGUMENTS)
    check_script(given.script, module=given.module)
    if given.isolate and (why := obstacle()):
        raise NotPossible(f"--isolate is not possible: {why}", BAD_ARGUMENTS)
    if given.links and not given.isolate:
        raise NotPossible(f"--links {given.links} means nothing without --isolate", BAD_ARGUMENTS)
    read_spares(given)
    check_numbers(given)
    hosts = hosts_of(given, os.environ)
    given.nodes = nodes_of(given, hosts)
    nproc, nodes = number_of_ranks(given.nproc_per_node), number_of_nodes(given.nodes)
    if hosts is None:
        check_machines(given, nodes)
    machines = machines_of(given, hosts, nodes, nproc)
    if not 0 <= given.grace <= MOST_GRACE_S:
        raise NotPossible(f"--grace {given.grace:g}: give seconds, from 0 to {MOST_GRACE_S}", BAD_ARGUMENTS)
    ending = ENDING | signals_in(given.signals_to_handle)
    run_dir, job = name_of(given)
    spec = spec_of(given, job, nodes, nproc)
    launch = Launch(
        script=given.script, args=tuple(given.args), module=given.module, cwd=here(),
        env={**os.environ, **network_environment(given)}, nproc_per_node=nproc, master_port=free_port(),
        paths=path_limits(given),
    )  # fmt: skip
    source = None if given.module else source_of(given.script)
    place = parking_of(given, spec, source, apart=machines is not None)
    spec = with_parking(spec, place, given.grace)
    # Nothing is refused any more but for the folder itself: what is refused leaves none behind.
    run_dir, spec = take_name(given, run_dir, spec)
    launch = replace(launch, code=str(keep_script(run_dir, given.script, source)))
    return Plan(
        run_dir, spec, launch, given.port, given.quiet, remarks(given), given.isolate, given.spare_nodes, given.links,
        given.grace, ending, machines, given.export, given.join_timeout,
        given.plain_transfer, place,
    )  # fmt: skip


def check_numbers(given: argparse.Namespace) -> None:
    """Raises `NotPossible` for what is too small or too large."""
    for name in ("spares", "spare_nodes", "max_restarts", "slot_faults", "spare_wait", "port"):
        flag = f"--{name.replace('_', '-')}"
        if getattr(given, name) < 0:
            raise NotPossible(f"{flag} {getattr(given, name)}: it cannot be negative", BAD_ARGUMENTS)
        if not getattr(given, name) <= MOST:
            raise NotPossible(f"{flag} {getattr(given, name)}: give at most {MOST:,}", BAD_ARGUMENTS)
    if given.port > MOST_PORT:
        raise NotPossible(f"--port {given.port}: give a number from 0 (any) to {MOST_PORT}", BAD_ARGUMENTS)
    if not 0 <= given.links <= MOST_LINKS:
        raise NotPossible(f"--links {given.links}: give a number from 0 to {MOST_LINKS}", BAD_ARGUMENTS)
    if given.oversubscribe < 1:
        raise NotPossible(f"--oversubscribe {given.oversubscribe}: give a number, at least 1", BAD_ARGUMENTS)


def here() -> str:
    """The folder that the ranks begin in. Raises `NotPossible`."""
    try:
        return os.getcwd()
    except OSError as error:
        raise NotPossible(f"the current folder is gone ({error.strerror}): change into another one", 2) from error


def signals_in(text: str) -> frozenset[str]:
    """The names in --signals-to-handle."""
    names = frozenset(filter(None, (name.strip() for name in text.split(","))))
    if unknown := sorted(names - ENDING - TELLING):
        known = ", ".join(sorted(ENDING | TELLING))
        raise NotPossible(
            f"--signals-to-handle {', '.join(unknown)}: those that are passed on are {known}", BAD_ARGUMENTS
        )
    return names


def spec_of(given: argparse.Namespace, job: JobId, nodes: int, nproc: int) -> JobSpec:
    """What the orchestrator is told of the job."""
    return JobSpec(
        job=job,
        world_size=nodes * nproc,
        nproc_per_node=nproc,
        nodes=nodes,
        spares=given.spares + given.spare_nodes * nproc,
        refill=not given.no_refill,
        max_restarts=given.max_restarts,
        slot_faults=given.slot_faults,
        spare_wait_ms=round(given.spare_wait * 1000),
        moves_per_hour=given.moves_per_hour,
        probation_ms=time_in(given.probation),
        return_home=given.return_home,
        ranks_per_slot=given.oversubscribe,
    )


def remarks(given: argparse.Namespace) -> tuple[str, ...]:
    """What is said before the start."""
    return (*remarks_on_flags(given), *remarks_on_transfer(given), *remarks_on_environment(os.environ))


def remarks_on_environment(env: Mapping[str, str]) -> tuple[str, ...]:
    """The operator's own settings of NCCL that break recoveries."""
    names = [f"{name}={env[name]}" for name, ours in LET_US_RECOVER.items() if env.get(name, ours) != ours]
    return (f"kept as you have set it: {', '.join(names)}; torch may end healthy ranks in a recovery",) if names else ()


def remarks_on_transfer(given: argparse.Namespace) -> tuple[str, ...]:
    """Who reads the line knows what others on the network can read."""
    return ("--plain-transfer: states and records go between machines unencrypted",) if given.plain_transfer else ()


def remarks_on_flags(given: argparse.Namespace) -> tuple[str, ...]:
    """Those of torchrun that mean nothing here."""
    ignored = [name for name in IGNORED_VALUES + IGNORED_FLAGS if getattr(given, f"ignored_{name}") is not None]
    if not ignored:
        return ()
    apart = given.nodes == "1" or given.hosts or given.hostfile or given.by_hand
    here = "" if apart else f"; all {given.nodes} nodes are started on this machine"
    return (f"ignored, as it means nothing here: {', '.join('--' + name for name in ignored)}{here}",)


def check_machines(given: argparse.Namespace, nodes: int) -> None:
    """Raises `NotPossible` for a line that torchrun is given on each of several machines: each would train alone."""
    found = vars(given)
    rank = found["ignored_node-rank"]
    if rank not in (None, "0"):
        raise NotPossible(f"--node-rank {rank}: {ONE_MACHINE}", BAD_ARGUMENTS)
    for name in ("master-addr", "rdzv-endpoint"):
        value = found[f"ignored_{name}"]
        if nodes > 1 and value is not None and not is_here(value):
            raise NotPossible(f"--{name} {value} with --nnodes {nodes}: {ONE_MACHINE}", BAD_ARGUMENTS)


def is_here(endpoint: str) -> bool:
    """Whether a host, or a host and port, is this machine. False for a name that nobody knows."""
    found = re.fullmatch(r"\[(?P<bare>[^\]]*)\](:\d*)?|(?P<name>[^:]*)(:\d*)?|(?P<six>.*)", endpoint)
    host = next((part for part in found.group("bare", "name", "six") if part is not None), "") if found else endpoint
    try:
        known = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM) if host else []
    except OSError:
        return False
    return not host or any(is_ours(family, address) for family, _, _, _, address in known)


def is_ours(family: int, address: Any) -> bool:
    """Whether this machine has an address: only one's own can be bound."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def check_script(script: str, *, module: bool) -> None:
    """Raises `NotPossible` if there is nothing to run."""
    if not module:
        if not Path(script).is_file():
            raise NotPossible(f"script not found: {script} (from {os.getcwd()})", BAD_ARGUMENTS)
        return
    # Only the first part is looked for: finding the rest would import it here.
    first = script.partition(".")[0]
    if importlib.machinery.PathFinder.find_spec(first, [os.getcwd(), *sys.path]) is None:
        raise NotPossible(f"module not found: {script} (from {os.getcwd()})", BAD_ARGUMENTS)


def number_of_ranks(text: str) -> int:
    """--nproc-per-node: a number; `cpu` and `auto` are the number of cores here."""
    if text in ("cpu", "auto"):
        return os.cpu_count() or 1
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise NotPossible(f"--nproc-per-node {text}: give a number, at least 1, or `cpu`", BAD_ARGUMENTS)
    return int(text)


def number_of_nodes(text: str) -> int:
    """--nodes: a number. torchrun's ranges are refused: the world size never changes here."""
    if ":" in text:
        raise NotPossible(f"--nnodes {text}: give one number: the world size stays, spares help out", BAD_ARGUMENTS)
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise NotPossible(f"--nodes {text}: give a number, at least 1", BAD_ARGUMENTS)
    return int(text)


def name_of(given: argparse.Namespace) -> tuple[Path, JobId]:
    """The run's folder and the job's name."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", given.script if given.module else Path(given.script).stem)[:40]
    stem = stem.lstrip("._-") or "job"
    now = datetime.now().astimezone()
    job = given.job or (stem if given.run_dir is not None else f"{stem}-{now:%Y%m%d-%H%M%S}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", job):
        remedy = "use letters, digits, '.', '_' and '-', at most 63, a letter or digit first"
        raise NotPossible(f"--job {job!r}: {remedy}", BAD_ARGUMENTS)
    run_dir = given.run_dir or FOLDER / job
    if (length := len(os.fsencode(run_dir.absolute()))) > MOST_PATH:
        raise NotPossible(f"--run-dir {run_dir}: {length} bytes, at most {MOST_PATH} are possible", BAD_ARGUMENTS)
    return run_dir, JobId(job)


def take_name(given: argparse.Namespace, run_dir: Path, spec: JobSpec) -> tuple[Path, JobSpec]:
    """Make the run's folder. If its name was made up here, another run may have it: then it gets a number."""
    if given.run_dir is not None or given.job is not None:
        take_folder(run_dir, given.log_dir)
        return run_dir, spec
    job, number = spec.job, 1
    while True:
        try:
            make_parents(FOLDER / job)
            (FOLDER / job).mkdir(mode=0o700)
        except FileExistsError:
            number += 1
            job = JobId(f"{spec.job}-{number}")
            continue
        except OSError as error:
            raise cannot_make(error) from error
        take_folder(FOLDER / job, given.log_dir)
        return FOLDER / job, replace(spec, job=job)


def make_parents(folder: Path) -> None:
    """The folders above one; whatever the umask, nobody else may put another in its place. Raises OSError."""
    for parent in reversed(folder.absolute().parents):
        if not parent.exists():
            parent.mkdir(mode=0o755, exist_ok=True)


def take_folder(run_dir: Path, log_dir: Path | None) -> None:
    """Make the run's folder. One that holds a run already is refused."""
    if (run_dir / JOURNAL).exists():
        if is_written(run_dir / JOURNAL):
            raise NotPossible(f"{run_dir} holds a run that is under way: use another --run-dir or --job", CANNOT_START)
        raise NotPossible(f"{run_dir} holds a run already: use another --run-dir or --job, or remove it", CANNOT_START)
    try:
        make_parents(run_dir)
        run_dir.mkdir(mode=0o700, exist_ok=True)
        if wrong := open_to_others(run_dir):
            raise NotPossible(wrong, CANNOT_START)
        logs = run_dir / "logs"
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
            logs.symlink_to(log_dir.absolute(), target_is_directory=True)
        else:
            logs.mkdir(mode=0o700, exist_ok=True)
        hold(run_dir)
        # Of a run whose journal was removed: this one begins its own.
        for left in (run_dir / ENDPOINT, (run_dir / JOURNAL).with_suffix(SUFFIX)):
            left.unlink(missing_ok=True)
    except BlockingIOError as error:
        why = f"{run_dir} is in use by a run that starts: use another --run-dir or --job"
        raise NotPossible(why, CANNOT_START) from error
    except OSError as error:
        raise cannot_make(error) from error


_held: dict[Path, int] = {}  # descriptors, closed by the end of the process


def hold(run_dir: Path) -> None:
    """Nobody else may start a run in this folder while this process lives. Raises `BlockingIOError`."""
    where = run_dir.resolve()
    if where in _held:
        return
    folder = os.open(where, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _held[where] = folder
    except BlockingIOError:
        os.close(folder)
        raise
    except OSError:
        os.close(folder)  # a file system without locks


def cannot_make(error: OSError) -> NotPossible:
    return NotPossible(f"{error.filename}: {error.strerror}; choose another --run-dir", CANNOT_START)


def source_of(script: str) -> bytes:
    """The script as it is now. Raises `NotPossible` if it cannot be read."""
    try:
        return Path(script).read_bytes()
    except OSError as error:
        raise NotPossible(f"script cannot be read: {script}: {error.strerror}", BAD_ARGUMENTS) from error


def keep_script(run_dir: Path, script: str, source: bytes | None) -> Path:
    """The folder in which the run keeps its code, with the script's source in it (None: the script is a module)."""
    try:
        kept = Kept.begin(run_dir)
        if source is not None:
            kept.keep(Load(MAIN, os.path.abspath(script)), source)
    except OSError as error:
        raise cannot_make(error) from error
    return kept.folder


def free_port() -> int:
    """A port for scripts that read MASTER_PORT; torchrelay's own rendezvous does not use it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run(words: list[str]) -> int:
    """Check, start, and follow a run to its end. Returns the exit code."""
    with ends_at_once():
        checked = plan(words)
        # They import a web client and more: not for bad arguments.
        if checked.machines is None:
            from torchrelay.launcher.local_run import follow
        else:
            from torchrelay.launcher.machines_run import follow

    return follow(checked)
