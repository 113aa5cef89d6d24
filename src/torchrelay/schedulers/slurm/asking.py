"""Asking: names, comments and command lines with which nodes are asked for and given back. Pure.

A *satellite* is a job of its own, of one node mostly, that belongs to the main job. Its name is made from the main
job's id and the key of the need, so it is known before it is asked for:

    gpt+spare.4711.3fe2a09c11     comment: {"main":4711,"key":"gpt/3/8"}

It is asked for with `--dependency=singleton`: Slurm itself then starts no second job of that name while the first is
there. So two satellites for one need never hold nodes at once, whoever asked, and however often.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank, WorkerId
from torchrelay.schedulers.port import Place, Roster
from torchrelay.schedulers.slurm.hostlists import compress, ranges
from torchrelay.schedulers.slurm.judging import HELD, WAITING
from torchrelay.schedulers.slurm.reading import JobRecord, JobRow

MOST_COMMENT = 1024  # letters; Slurm takes no more (MAX_COMMENT_LEN)
MOST_REASON = 200
MOST_NAME = 40
POLL_S = 2.0
_NUMBERED = re.compile(r"\d+")


class Need(Struct, frozen=True, kw_only=True):
    """What is asked for in one go.

    name, key    the satellite's, and the request's
    main         the main job's id
    partition    where
    resources    further words of salloc, as `resources_of` makes them
    minutes      its time limit: what is left to the main job; None: the partition's
    wait_s       how long salloc may wait
    """

    name: str
    key: str
    main: int
    count: int
    partition: str
    resources: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()  # these and no others
    minutes: int | None = None
    wait_s: float = 600.0


class Wishes(Struct, frozen=True, kw_only=True):
    """What the user wants of Slurm.

    slots         of each node; 0: its GPUs, or one
    yields        the partition whose jobs may be stopped for us; empty: none
    resources     further words of salloc; None: those of the main job
    shrink_risk   shrink also where slurmctld may crash from it
    poll_s        seconds between two looks, at least
    rest          slurmctld is left alone for so many times as long as it needed to answer
    """

    slots: int = 0
    yields: str = ""
    resources: tuple[str, ...] | None = None
    shrink_risk: bool = False
    poll_s: float = POLL_S
    rest: float = 20.0


def satellite_name(job_name: str, main: int, key: str) -> str:
    """The name of the satellite for a need: the same whenever it is asked for."""
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", job_name)[:MOST_NAME] or "job"
    return f"{readable}{_ending(main)}{hashlib.sha256(key.encode()).hexdigest()[:10]}"


def _ending(main: int) -> str:
    return f"+spare.{main}."


def is_satellite(row: JobRow, main: int) -> bool:
    """Whether a job is a satellite of this main job, by its name."""
    return re.search(re.escape(_ending(main)) + r"[0-9a-f]{10}$", row.name) is not None


def key_of(row: JobRow) -> str:
    """The key that a satellite was asked for with; its name if the comment was changed."""
    try:
        told = json.loads(row.comment)
    except ValueError:
        return row.name
    key = told.get("key") if isinstance(told, dict) else None
    return key if isinstance(key, str) else row.name


def sorted_out(rows: Iterable[JobRow], main: int) -> tuple[list[JobRow], frozenset[str], tuple[int, ...]]:
    """Satellites that run, names of those that wait, and those that are too many: a second one of a name.

    Of several of a name the one that runs is kept, then the oldest. What is ending counts for nothing.
    """
    by_name = dict[str, list[JobRow]]()
    for row in rows:
        if is_satellite(row, main) and row.state in (*HELD, *WAITING):
            by_name.setdefault(row.name, []).append(row)
    kept, surplus = list[JobRow](), list[int]()
    for same in by_name.values():
        first, *others = sorted(same, key=lambda row: (row.state not in HELD, row.job))
        kept.append(first)
        surplus += [row.job for row in others]
    running = [row for row in kept if row.state in HELD]
    return running, frozenset(row.name for row in kept if row.state not in HELD), tuple(surplus)


# ---------------------------------------------------------------- command lines


def salloc(need: Need) -> tuple[str, ...]:
    """The command that asks for a satellite, and waits until it is there or `wait_s` is over."""
    words = ["salloc", "--no-shell", "--quiet", "--no-kill", f"--nodes={need.count}", f"--partition={need.partition}"]
    words += [f"--job-name={need.name}", "--dependency=singleton", f"--comment={satellite_comment(need)}"]
    # One second would mean: at once or never. That never waits for a job that has to yield first.
    words += [f"--immediate={max(2, math.ceil(need.wait_s))}", *need.resources]
    words += [] if need.minutes is None else [f"--time={max(1, need.minutes)}"]
    words += [f"--exclude={compress(need.exclude)}"] if need.exclude else []
    words += [f"--nodelist={compress(need.nodes)}"] if need.nodes else []
    return tuple(words)


def satellite_comment(need: Need) -> str:
    return json.dumps({"main": need.main, "key": need.key}, separators=(",", ":"))


def agent_argv(grant: str, node: str, command: Sequence[str]) -> tuple[str, ...]:
    """The command line that runs an agent's command on a node of a grant, beside what may run there.

    Without `--exact`, as the agent is to have all processors of the node that the job has. A node of the same job that
    fails does not end it (`--no-kill`), nor does a task of its own.
    """
    return (
        "srun",
        f"--jobid={grant}",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        "--no-kill",
        "--wait=0",
        "--kill-on-bad-exit=0",
        "--quiet",
        "--input=none",
        "--unbuffered",
        "--mpi=none",
        *command,
    )


def resources_of(job: JobRecord) -> tuple[str, ...]:
    """What a satellite must ask for, so that its node has what a node of the main job has."""
    asked = job.asked
    words = [
        f"--{flag}={asked[key]}"
        for key, flag in (
            ("Account", "account"),
            ("QOS", "qos"),
            ("Reservation", "reservation"),
            ("Features", "constraint"),
        )
        if key in asked
    ]
    gres = [
        part.removeprefix("gres:").removeprefix("gres/") for part in asked.get("TresPerNode", "").split(",") if part
    ]
    words += [f"--gres={','.join(gres or gres_of_job(asked))}"] if gres or gres_of_job(asked) else []
    if asked.get("OverSubscribe") == "NO":
        words.append("--exclusive")
    else:
        cpus, nodes = int(asked.get("NumCPUs", 0)), int(asked.get("NumNodes", 0))
        words += ["--ntasks-per-node=1", f"--cpus-per-task={cpus // nodes}"] if nodes and cpus > nodes else []
    memory = asked.get("MinMemoryNode", "0")
    words += [f"--mem={memory}"] if memory not in ("0", "0M") else []
    return tuple(words)


def gres_of_job(asked: Mapping[str, str]) -> list[str]:
    """A node's share of what was asked for the whole job (`--gpus=16`), as far as it can be divided."""
    nodes, found = int(asked.get("NumNodes", 0)), list[str]()
    for part in asked.get("TresPerJob", "").split(","):
        kind, _, count = part.removeprefix("gres:").removeprefix("gres/").rpartition(":")
        if kind and count.isdigit() and nodes:
            found.append(f"{kind}:{math.ceil(int(count) / nodes)}")
    return found


def plain_reason(reason: str) -> str:
    """A reason as Slurm can keep it: one line, not too long."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in reason).split())
    return line[:MOST_REASON] or "reported by torchrelay"


# ---------------------------------------------------------------- the roster as a comment


def roster_comment(roster: Roster) -> str:
    """The roster in at most `MOST_COMMENT` letters of JSON: with workers, without, or only which nodes.

    `{"job":"gpt","gen":3,"roster":{"n1":"0-7","n4":"8-15"},"workers":[...]}`; ranks without a node are under "".
    """
    places = sorted(roster.places, key=lambda place: place.rank)
    by_node = dict[str, list[int]]()
    for place in places:
        by_node.setdefault(place.node or "", []).append(int(place.rank))
    head: dict[str, object] = {"job": roster.job, "gen": roster.generation}
    held = {node: _short(ranks) for node, ranks in sorted(by_node.items())}
    names = compress(node for node in by_node if node)
    forms: list[dict[str, object]] = [
        {**head, "roster": held, "workers": [place.worker for place in places]},
        {**head, "roster": held},
        {**head, "ranks": len(places), "nodes": names},
        {**head, "ranks": len(places), "nodes": len([node for node in by_node if node])},
        {"gen": roster.generation, "ranks": len(places)},
    ]
    texts = [json.dumps(form, separators=(",", ":")) for form in forms]
    return next(text for text in texts if len(text) <= MOST_COMMENT)


def _short(ranks: list[int]) -> str:
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges(ranks))


def roster_of_comment(comment: str) -> Roster | None:
    """The roster back from a comment; None if it is none of ours, or was too long to name the places."""
    try:
        told = json.loads(comment)
        held, workers = told["roster"], told.get("workers") or []
        ranks = sorted((rank, node) for node, text in held.items() for rank in _long(text))
        places = tuple(
            Place(
                rank=Rank(rank),
                worker=WorkerId(workers[place]) if place < len(workers) and workers[place] else None,
                node=NodeId(node) if node else None,
            )
            for place, (rank, node) in enumerate(ranks)
        )
        return Roster(job=JobId(told["job"]), generation=Generation(told["gen"]), places=places)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _long(text: str) -> list[int]:
    found = list[int]()
    for part in text.split(","):
        first, *last = (int(one) for one in _NUMBERED.findall(part))
        found += range(first, (last[0] if last else first) + 1)
    return found
