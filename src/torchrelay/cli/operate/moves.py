"""`torchrelay moves` and `torchrelay migrate`: ranks that go elsewhere while training goes on."""

from __future__ import annotations

import argparse
from urllib.parse import quote

from torchrelay.api.shown import Moves, MoveView
from torchrelay.cli.operate.changing import ask_and_do, reach
from torchrelay.client.runs import look
from torchrelay.terminal.show import Output, clip, milliseconds, remark, show, show_json, table

HEADS = ("id", "asked", "kind", "state", "ranks", "way", "pause", "incident", "reason")


def show_moves(given: argparse.Namespace) -> None:
    """Print the moves of a job, oldest first."""

    def page() -> str:
        source, note = look(given.run_dir)
        remark(note)
        found = source.view_moves(given.job)
        return show_json(found.moves) if given.output is Output.JSON else moves_page(found)

    show(page, watch=given.watch)


def moves_page(found: Moves) -> str:
    if not found.moves:
        return f"no move so far in {found.job}"
    last = found.moves[-1]
    said = f"{last.name} {last.why}" if last.open else f"`torchrelay explain {last.name}` tells one of them in full"
    return f"{table(HEADS, [row_of(move) for move in found.moves])}\n\n{said}"


def row_of(move: MoveView) -> tuple[object, ...]:
    way = " ".join(f"{leg.from_text}>{leg.to_text}" for leg in move.legs)
    ranks = ",".join(map(str, move.ranks))
    state = f"{move.state} ({move.tries} tries)" if move.tries else move.state
    return (
        move.name, move.asked[11:19], move.kind, state, ranks, way, milliseconds(move.pause_ms), move.incident or None,
        clip(move.reason),
    )  # fmt: skip


def migrate(given: argparse.Namespace) -> None:
    """Ask for ranks to be moved, or take that back."""
    job = reach(given.run_dir).name_of(given.job)
    body = {"ranks": given.ranks, "reason": given.reason, "cancel": given.cancel, "node": given.node, "to": given.to}
    path = f"/v1/jobs/{quote(job)}/migrate"
    ask_and_do(given.run_dir, path, body, yes=given.yes, dry_run=given.dry_run, output=given.output)
