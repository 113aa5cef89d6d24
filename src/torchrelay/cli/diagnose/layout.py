"""`torchrelay doctor --layout`: where the state of each rank would come from, if it were lost.

Of a running job, or, with a script behind it, of one that is not launched yet.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from torchrelay.api.shown import RankStatus
from torchrelay.client.runs import NotPossible, find_source
from torchrelay.terminal.progress import progress
from torchrelay.terminal.show import Output, remark, show_json, table

RESTART = "none: from the checkpoint that the script loads, with --max-restarts; without it the job ends with 91"


class Origin(Struct, frozen=True, kw_only=True):
    """One rank: what it holds, and who else does."""

    rank: int
    node: str | None
    shard: str
    replicas: tuple[int, ...]
    elsewhere: tuple[int, ...]  # those of them on other nodes


class Survey(Struct, frozen=True, kw_only=True):
    """A job: its ranks, and what it survives without a step lost."""

    job: str
    ranks: tuple[Origin, ...]
    losses: int  # so many ranks may be lost at once, whichever they are
    snapshot_every: int  # steps; so many are made again at most, where there is no replica; 0: no snapshots
    snapshot_nodes: int  # that have a copy of each snapshot: one less may be lost at once
    nodes: tuple[str, ...]  # the loss of one of these would take all holders of some state with it


class Holder(Struct, frozen=True):
    """A rank, where it is, and the name of what it holds."""

    rank: int
    node: str | None
    shard: str


class Intervals(Struct, frozen=True):
    """Steps between two snapshots, if the state of some rank has no replica, and if all have one; 0: none.

    `buddies`: nodes that get a copy beside the rank's own, if there are so many.
    """

    alone: int = 0
    replicated: int = 0
    buddies: int = 1


NO_SNAPSHOTS = Intervals()
# By how many nodes have a copy of a snapshot.
PLACES = {1: "on its own node", 2: "on its node and another", 3: "on its node and two others"}
WHOM = {1: "rank", 2: "rank, or any one node,", 3: "rank, or any two nodes,"}


def show_layout(given: argparse.Namespace) -> int:
    """Print it. Returns 0: any one rank and any one node may be lost; 1: not. Raises `NotPossible` if not known yet.

    With snapshots some steps are made again after that.
    """
    told = survey(*(foreseen(given) if given.script else running(given.run_dir, given.job)))
    print(show_json(told) if given.output is Output.JSON else page(told))
    return 0 if (told.losses and not told.nodes) or copied_elsewhere(told) else 1


def copied_elsewhere(told: Survey) -> bool:
    """Whether snapshots lie on more than one node."""
    return told.snapshot_nodes > 1


def running(run_dir: Path | None, job: str | None) -> tuple[str, list[Holder], Intervals]:
    """The ranks of a job that runs."""
    source, note = find_source(run_dir)
    remark(note)
    found = source.view_ranks(job)
    rows = [row for row in found.ranks if row.rank is not None]
    if any(row.worker is None or row.replacement for row in rows):
        status = source.job(found.job)
        if status.outcome is not None:
            raise NotPossible(f"job {found.job} has ended: ask of one that runs, or of a script before its start", 1)
        raise NotPossible(f"job {found.job} is about to replace ranks: ask again when all have their state", 1)
    if not rows or any(not row.shard for row in rows):
        raise NotPossible(
            f"the ranks of job {found.job} have not all called protect() yet: ask again when they have", 1
        )
    every = found.snapshot_every
    return str(found.job), [holder_of(row) for row in rows], Intervals(every, every, found.snapshot_buddies)


def holder_of(row: RankStatus) -> Holder:
    assert row.rank is not None, "spares hold nothing"
    return Holder(int(row.rank), None if row.node is None else str(row.node), row.shard)


def foreseen(given: argparse.Namespace) -> tuple[str, list[Holder], Intervals]:
    """The ranks of a job that is not launched: each runs the script alone, as far as protect()."""
    world = given.nodes * given.nproc_per_node
    script = ["-m", *given.script] if given.module else given.script
    words = [sys.executable, "-P", "-m", "torchrelay.worker.bootstrap.foresee"]
    words += [str(given.nodes), str(given.nproc_per_node), *script]
    holders, every = [], Intervals()
    with (
        progress("ranks have come to protect()") as shown,
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as asked,
    ):
        assert asked.stdout is not None, "it is a pipe"
        for line in asked.stdout:
            told = json.loads(line)
            if "error" in told:
                raise NotPossible(told["error"], 93 if told["error"].startswith("refused") else 1)
            every = Intervals(told["alone"], told["replicated"], told["buddies"])
            holders.append(Holder(told["rank"], f"node-{told['node']}", told["shard"]))
            shown(len(holders), world)
    if len(holders) < world:
        raise NotPossible(f"only {len(holders)} of {world} ranks came to protect(): see the message above", 1)
    return Path(given.script[0]).name, holders, every


def survey(job: str, rows: Sequence[Holder], intervals: Intervals = NO_SNAPSHOTS) -> Survey:
    """What the holders of each shard, and the nodes they are on, come to."""
    held: dict[str, list[Holder]] = {}
    for row in rows:
        held.setdefault(row.shard, []).append(row)
    origins = [origin_of(row, held[row.shard]) for row in rows]
    on = [{row.node for row in holders} for holders in held.values()]
    alone = sorted({str(node) for nodes in on if len(nodes) == 1 for node in nodes})
    losses = min(len(holders) for holders in held.values()) - 1
    every = intervals.replicated if losses else intervals.alone
    copies = min(1 + intervals.buddies, len({row.node for row in rows})) if every else 0
    return Survey(
        job=job, ranks=tuple(origins), losses=losses, snapshot_every=every, snapshot_nodes=copies, nodes=tuple(alone)
    )


def origin_of(row: Holder, holders: Sequence[Holder]) -> Origin:
    others = [other for other in holders if other.rank != row.rank]
    return Origin(
        rank=row.rank,
        node=row.node,
        shard=row.shard,
        replicas=tuple(other.rank for other in others),
        elsewhere=tuple(other.rank for other in others if other.node != row.node),
    )


def page(told: Survey) -> str:
    heads = ("rank", "node", "state", "would come from")
    rows = [(one.rank, one.node, one.shard, text_of(one, told)) for one in told.ranks]
    return "\n".join([table(heads, rows), "", *summary(told)])


def text_of(one: Origin, told: Survey) -> str:
    if not one.replicas and told.snapshot_every:
        return "its snapshot, " + PLACES[told.snapshot_nodes]
    if not one.replicas:
        return RESTART
    where = "" if one.elsewhere else ", all on the same node"
    return f"rank{'s' * (len(one.replicas) > 1)} {', '.join(map(str, one.replicas))}{where}"


def summary(told: Survey) -> list[str]:
    """What it comes to, in sentences."""
    lost = {0: "no rank may be lost", 1: "any one rank may be lost"}.get(
        told.losses, f"any {told.losses} ranks may be lost"
    )
    if told.nodes:
        nodes = f"no step is lost with a node, unless it is {' or '.join(told.nodes)}"
    else:
        nodes = "so may any one node"
    said = [f"{lost} without a step lost; {nodes}."]
    if told.snapshot_every:
        whom = WHOM[told.snapshot_nodes]
        said.append(f"Snapshots: with any one {whom} at most {told.snapshot_every} steps are made again.")
    return [*said, "Planned moves need no replica: state comes from the rank itself."]
