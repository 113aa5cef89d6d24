"""`torchrelay doctor --layout`: where the state of each rank of a running job would come from, if it were lost now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from torchrelay.cli.runs import NotPossible, look
from torchrelay.cli.show import Output, remark, show_json, table
from torchrelay.orchestrator.shown import RankStatus

RESTART = "none: the job begins again, from the checkpoint that its script loads"


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
    nodes: tuple[str, ...]  # the loss of one of these would take all holders of some state with it


def show_layout(run_dir: Path | None, job: str | None, output: Output) -> int:
    """Print it. Returns 0: any one rank and any one node may be lost; 1: not. Raises `NotPossible` if not known yet."""
    source, note = look(run_dir)
    remark(note)
    found = source.view_ranks(job)
    rows = [row for row in found.ranks if row.rank is not None]
    if not rows or any(not row.shard for row in rows):
        raise NotPossible(f"the ranks of job {found.job} have not all called join() yet: ask again when they have", 1)
    told = survey(str(found.job), rows)
    print(show_json(told) if output is Output.JSON else page(told))
    return 0 if told.losses and not told.nodes else 1


def survey(job: str, rows: Sequence[RankStatus]) -> Survey:
    """What the holders of each shard, and the nodes they are on, come to."""
    held: dict[str, list[RankStatus]] = {}
    for row in rows:
        held.setdefault(row.shard, []).append(row)
    origins = [origin_of(row, held[row.shard]) for row in rows]
    on = [{row.node for row in holders} for holders in held.values()]
    alone = sorted({str(node) for nodes in on if len(nodes) == 1 for node in nodes})
    return Survey(
        job=job, ranks=tuple(origins), losses=min(len(holders) for holders in held.values()) - 1, nodes=tuple(alone)
    )


def origin_of(row: RankStatus, holders: Sequence[RankStatus]) -> Origin:
    others = [other for other in holders if other.rank != row.rank]
    return Origin(
        rank=int(row.rank or 0), node=None if row.node is None else str(row.node), shard=row.shard,
        replicas=tuple(int(other.rank or 0) for other in others),
        elsewhere=tuple(int(other.rank or 0) for other in others if other.node != row.node),
    )  # fmt: skip


def page(told: Survey) -> str:
    heads = ("rank", "node", "state", "would come from")
    rows = [(one.rank, one.node, one.shard, text_of(one)) for one in told.ranks]
    return "\n".join([table(heads, rows), "", *summary(told)])


def text_of(one: Origin) -> str:
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
    return [f"{lost} without a step lost; {nodes}.", "Planned moves need no replica: state comes from the rank itself."]
