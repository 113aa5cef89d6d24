"""`torchrelay ranks`: which worker holds each rank, and what it does."""

from __future__ import annotations

import argparse

import msgspec

from torchrelay.api.shown import Ranks, RankStatus
from torchrelay.client.runs import NotPossible, look
from torchrelay.terminal.show import Output, milliseconds, remark, show, show_json, table

HEADS = ("rank", "worker", "node", "pid", "state", "for", "step", "step time", "gen", "process", "heard")


def show_ranks(given: argparse.Namespace) -> None:
    """Print the roster, ranks first, then spares; or one rank. Raises `NotPossible` if there is none of that number."""

    def page() -> str:
        source, note = look(given.run_dir)
        remark(note)
        found = source.view_ranks(given.job)
        if given.rank is not None:
            found = only(found, given.rank)
        return show_json(found) if given.output is Output.JSON else ranks_page(found)

    show(page, watch=given.watch)


def only(found: Ranks, rank: int) -> Ranks:
    """The same with one rank."""
    rows = tuple(row for row in found.ranks if row.rank == rank)
    if not rows:
        last = max(row.rank for row in found.ranks if row.rank is not None)
        raise NotPossible(f"no rank {rank}: the job has ranks 0 to {last}", 2)
    return msgspec.structs.replace(found, ranks=rows)


def ranks_page(found: Ranks) -> str:
    return table(HEADS, [row_of(rank) for rank in found.ranks])


def row_of(one: RankStatus) -> tuple[object, ...]:
    step = None if one.step is None else f"{one.step}+{one.section}" if one.section else str(one.step)
    return (
        "spare" if one.rank is None else one.rank,
        one.worker,
        one.node if one.shares_with is None else f"{one.node} (slot of {one.shares_with})",
        one.pid,
        f"{one.state} (replacement)" if one.replacement else one.state,
        milliseconds(one.in_state_ms),
        step,
        milliseconds(one.step_ms),
        one.generation,
        PROCESS.get(one.process or "", one.process),
        "-" if one.silent_ms is None else f"{milliseconds(one.silent_ms)} ago",
    )


# The kernel's letters for what a process does.
PROCESS = {"R": "running", "S": "sleeping", "D": "in the kernel", "T": "stopped", "t": "traced", "Z": "zombie"}
