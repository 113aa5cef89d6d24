"""Lists: the table of list views. A list that a run shows is a row here, and a verb in the registry."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import msgspec

from torchrelay.api.shown import (
    Audit,
    AuditEntry,
    Incidents,
    IncidentView,
    Moves,
    MoveView,
    Nodes,
    NodeView,
    Ranks,
    RankStatus,
    SlotView,
    Spares,
    SpareView,
    TaintView,
    root_causes,
    span_text,
)
from torchrelay.cli.listing import Column, View, from_run
from torchrelay.client.runs import NotPossible
from torchrelay.terminal.show import clip, milliseconds

# The kernel's letters for what a process does.
PROCESS = {"R": "running", "S": "sleeping", "D": "in the kernel", "T": "stopped", "t": "traced", "Z": "zombie"}

# ---------------------------------------------------------------- ranks


def chosen_ranks(given: argparse.Namespace) -> Ranks:
    """All ranks, or the one that is asked for. Raises `NotPossible` if there is none of that number."""
    found = from_run(lambda run, job: run.view_ranks(job))(given)
    if given.rank is None:
        return found
    rows = tuple(row for row in found.ranks if row.rank == given.rank)
    if not rows:
        last = max(row.rank for row in found.ranks if row.rank is not None)
        raise NotPossible(f"no rank {given.rank}: the job has ranks 0 to {last}", 2)
    return msgspec.structs.replace(found, ranks=rows)


def step_text(one: RankStatus) -> str | None:
    return None if one.step is None else f"{one.step}+{one.section}" if one.section else str(one.step)


RANKS: View[Ranks, RankStatus] = View(
    "ranks",
    fetch=chosen_ranks,
    rows=lambda found: found.ranks,
    columns=(
        Column("rank", lambda one: "spare" if one.rank is None else one.rank),
        Column("worker", lambda one: one.worker),
        Column("node", lambda one: one.node if one.shares_with is None else f"{one.node} (slot of {one.shares_with})"),
        Column("pid", lambda one: one.pid),
        Column("state", lambda one: f"{one.state} (replacement)" if one.replacement else one.state),
        Column("for", lambda one: milliseconds(one.in_state_ms)),
        Column("step", step_text),
        Column("step time", lambda one: milliseconds(one.step_ms)),
        Column("gen", lambda one: one.generation),
        Column("process", lambda one: PROCESS.get(one.process or "", one.process)),
        Column("heard", lambda one: "-" if one.silent_ms is None else f"{milliseconds(one.silent_ms)} ago"),
    ),
)

# ---------------------------------------------------------------- places


def node_state(node: NodeView) -> str:
    state = "alive" if node.alive else "lost"
    if node.lost_since:
        state += f" since {node.lost_since[11:19]}"
    return f"{state}, {node.silence}" if node.silence else state


def slot_text(slot: SlotView) -> str:
    """A slot in a word: 0:rank3, 1:spare, 2:target3, 3:free, 4:rank1(+1) with a guest."""
    rank = "" if slot.rank is None else str(slot.rank)
    return f"{slot.slot}:{slot.holds}{rank}" + (f"(+{len(slot.guests)})" if slot.guests else "")


def against_places(found: Nodes) -> Iterator[str]:
    """What is held against places."""
    taints = [taint for node in found.nodes for taint in node.taints]
    if taints:
        yield ""
        yield "taints"
        yield from (f"  {taint_text(taint)}" for taint in taints)
    for node in found.nodes:
        for failure in node.failures:
            where = node.node if failure.slot is None else f"{node.node}/{failure.slot}"
            times = ", ".join(at[:16].replace("T", " ") for at in failure.times[-3:])
            often = "once" if len(failure.times) == 1 else f"{len(failure.times)} times"
            yield f"{where} failed {often} within 30 days: {times}"
    yield from (f"frozen by {one.source}{': ' if one.reason else ''}{one.reason}" for one in found.freezes)


def taint_text(taint: TaintView) -> str:
    """A taint with who, since when, and for how long."""
    left = "" if taint.left_s is None else f", {span_text(taint.left_s)} left"
    reason = f": {taint.reason}" if taint.reason else ""
    return f"{taint.text} by {taint.source}, for {span_text(taint.age_s)}{left}{reason}"


def use_text(spare: SpareView) -> str:
    if spare.target_of is None:
        return "spare"
    return f"target of rank {spare.target_of} in {spare.move}, {'prepared' if spare.prepared else 'being prepared'}"


NODES: View[Nodes, NodeView] = View(
    "nodes",
    fetch=from_run(lambda run, _: run.view_nodes()),
    rows=lambda found: found.nodes,
    columns=(
        Column("node", lambda node: node.node),
        Column("state", node_state),
        Column("slots", lambda node: " ".join(slot_text(slot) for slot in node.slots)),
        Column("taints", lambda node: len(node.taints) or None),
        Column("failed", lambda node: sum(len(failure.times) for failure in node.failures) or None),
    ),
    empty=lambda _: "no node has joined",
    below=against_places,
)
SPARES: View[Spares, SpareView] = View(
    "spares",
    fetch=from_run(lambda run, job: run.view_spares(job)),
    rows=lambda found: found.spares,
    columns=(
        Column("worker", lambda spare: spare.worker),
        Column("place", lambda spare: f"{spare.node}/{spare.slot}"),
        Column("state", lambda spare: spare.state),
        Column("use", use_text),
        Column("why not", lambda spare: clip(spare.refused) or None),
    ),
    empty=lambda found: f"{found.job} has no spare ({found.wanted} wanted)",
)

# ---------------------------------------------------------------- moves


def after_moves(found: Moves) -> Iterator[str]:
    last = found.moves[-1]
    yield ""
    yield f"{last.name} {last.why}" if last.open else f"`torchrelay explain {last.name}` tells one of them in full"


MOVES: View[Moves, MoveView] = View(
    "moves",
    fetch=from_run(lambda run, job: run.view_moves(job)),
    rows=lambda found: found.moves,
    columns=(
        Column("id", lambda move: move.name),
        Column("asked", lambda move: move.asked[11:19]),
        Column("kind", lambda move: move.kind),
        Column("state", lambda move: f"{move.state} ({move.tries} tries)" if move.tries else move.state),
        Column("ranks", lambda move: ",".join(map(str, move.ranks))),
        Column("way", lambda move: " ".join(f"{leg.from_text}>{leg.to_text}" for leg in move.legs)),
        Column("pause", lambda move: milliseconds(move.pause_ms)),
        Column("incident", lambda move: move.incident or None),
        Column("reason", lambda move: clip(move.reason)),
    ),
    empty=lambda found: f"no move so far in {found.job}",
    below=after_moves,
    bare=True,
)

# ---------------------------------------------------------------- incidents


def ranks_at_fault(incident: IncidentView) -> str | None:
    ranks = {fault.rank for fault in root_causes(incident.faults) if fault.rank is not None}
    return ",".join(map(str, sorted(ranks))) or None


def cause_text(incident: IncidentView) -> str:
    more = len(root_causes(incident.faults)) - 1
    return clip(incident.cause) + (f" (+{more})" if more > 0 else "")


def first_detector(incident: IncidentView) -> str | None:
    faults = root_causes(incident.faults)
    return faults[0].detector if faults else None


INCIDENTS: View[Incidents, IncidentView] = View(
    "incidents",
    fetch=from_run(lambda run, job: run.view_incidents(job)),
    rows=lambda found: found.incidents,
    columns=(
        Column("id", lambda one: one.name),
        Column("at", lambda one: one.at[11:19]),
        Column("kind", lambda one: f"{one.kind} ({one.move})" if one.move else one.kind),
        Column("ranks", ranks_at_fault),
        Column("cause", cause_text),
        Column("detector", first_detector),
        Column("verdict", lambda one: one.verdict or None),
        Column("pause", lambda one: milliseconds(one.pause_ms)),
        Column("resolution", lambda one: one.resolution if one.eligible else f"{one.resolution} (not counted)"),
    ),
    empty=lambda found: f"no incident so far in {found.job}",
    below=lambda found: ("", f"`torchrelay explain {found.incidents[-1].name}` tells one of them in full"),
    bare=True,
)

# ---------------------------------------------------------------- what was changed

AUDIT: View[Audit, AuditEntry] = View(
    "audit",
    fetch=from_run(lambda run, _: run.view_audit()),
    rows=lambda found: found.calls,
    columns=(
        Column("at", lambda call: call.at[:19].replace("T", " ")),
        Column("who", lambda call: call.who),
        Column("call", lambda call: call.call),
        Column("what", lambda call: call.what),
        Column("event", lambda call: call.seq or None),
    ),
    empty=lambda _: "nobody has changed anything",
    bare=True,
)

VIEWS: dict[str, View[Any, Any]] = {view.verb: view for view in (RANKS, NODES, SPARES, MOVES, INCIDENTS, AUDIT)}


def show_list(given: argparse.Namespace) -> None:
    """Print the list whose verb was given."""
    VIEWS[given.verb].show(given)
