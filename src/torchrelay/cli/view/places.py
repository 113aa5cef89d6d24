"""`torchrelay nodes` and `torchrelay spares`: what the places hold, and what is held against them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from torchrelay.api.shown import Nodes, NodeView, SlotView, Spares, SpareView, TaintView, span
from torchrelay.client.runs import look
from torchrelay.terminal.show import Output, clip, remark, show, show_json, table

NODE_HEADS = ("node", "state", "slots", "taints", "failed")
SPARE_HEADS = ("worker", "place", "state", "use", "why not")


def show_nodes(given: argparse.Namespace) -> None:
    """Print the nodes."""

    def page() -> str:
        source, note = look(given.run_dir)
        remark(note)
        found = source.view_nodes()
        return show_json(found) if given.output is Output.JSON else "\n".join(nodes_page(found))

    show(page, watch=given.watch)


def nodes_page(found: Nodes) -> Iterator[str]:
    """One line a node, and then what is held against places."""
    if not found.nodes:
        yield "no node has joined"
        return
    yield table(NODE_HEADS, [node_row(node) for node in found.nodes])
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


def node_row(node: NodeView) -> tuple[object, ...]:
    state = "alive" if node.alive else "lost"
    if node.lost_since:
        state += f" since {node.lost_since[11:19]}"
    if node.silence:
        state += f", {node.silence}"
    faults = sum(len(failure.times) for failure in node.failures)
    slots = " ".join(slot_text(slot) for slot in node.slots)
    return node.node, state, slots, len(node.taints) or None, faults or None


def slot_text(slot: SlotView) -> str:
    """A slot in a word: 0:rank3, 1:spare, 2:target3, 3:free, 4:rank1(+1) with a guest."""
    rank = "" if slot.rank is None else str(slot.rank)
    return f"{slot.slot}:{slot.holds}{rank}" + (f"(+{len(slot.guests)})" if slot.guests else "")


def taint_text(taint: TaintView) -> str:
    """A taint with who, since when, and for how long."""
    left = "" if taint.left_s is None else f", {span(taint.left_s)} left"
    reason = f": {taint.reason}" if taint.reason else ""
    return f"{taint.text} by {taint.source}, for {span(taint.age_s)}{left}{reason}"


def show_spares(given: argparse.Namespace) -> None:
    """Print the spares of a job."""

    def page() -> str:
        source, note = look(given.run_dir)
        remark(note)
        found = source.view_spares(given.job)
        return show_json(found) if given.output is Output.JSON else spares_page(found)

    show(page, watch=given.watch)


def spares_page(found: Spares) -> str:
    if not found.spares:
        return f"{found.job} has no spare ({found.wanted} wanted)"
    return table(SPARE_HEADS, [spare_row(spare) for spare in found.spares])


def spare_row(spare: SpareView) -> tuple[object, ...]:
    use = "spare"
    if spare.target_of is not None:
        use = f"target of rank {spare.target_of} in {spare.move}, {'prepared' if spare.prepared else 'being prepared'}"
    return spare.worker, f"{spare.node}/{spare.slot}", spare.state, use, clip(spare.refused) or None
