"""`torchrelay report`: the ledger of a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from msgspec import Struct

from torchrelay.cli.listing import Column, View
from torchrelay.cli.view.guarantee import share_text, show_guarantee
from torchrelay.client.client import Client
from torchrelay.client.ledger_file import jsonl, ledger, write_ledger
from torchrelay.client.runs import NotPossible, find_run, find_source
from torchrelay.goodput.ledger import Line, Totals, total
from torchrelay.terminal.show import Output, clip, milliseconds, remark

OF_GUARANTEE = ("since", "ledger", "target", "check", "exclude")


class Report(Struct, frozen=True):
    """The ledger and what it comes to."""

    lines: tuple[Line, ...]
    totals: Totals


def show_report(given: argparse.Namespace) -> int:
    """Print the ledger, or its guarantee. Returns the exit code."""
    if given.guarantee:
        return show_guarantee(given)
    refuse_flags(given)
    if given.output is Output.JSONL:
        print(jsonl(report_of(given).lines), end="")
    else:
        LEDGER.show(given)
    return 0


def refuse_flags(given: argparse.Namespace) -> None:
    """Raises `NotPossible` for flags of `--guarantee` without it."""
    for name in OF_GUARANTEE:
        if getattr(given, name):
            raise NotPossible(f"--{name} means nothing without --guarantee", 2)


def report_of(given: argparse.Namespace) -> Report:
    """The ledger of a run; with `--write` it is also kept in the run's folder."""
    source, note = find_source(given.run_dir)
    remark(note)
    lines = ledger(source.view_incidents(given.job))
    if given.write:
        remark(f"written to {write_ledger(find_run(given.run_dir), lines)}")
    return Report(lines, total(lines, live=isinstance(source, Client)))


def report_page(lines: Sequence[Line], *, live: bool = True) -> str:
    """The lines as a table, and the totals."""
    return LEDGER.page(Report(tuple(lines), total(lines, live=live)))


def cause_text(line: Line) -> str:
    return clip(line.cause) + (f" (+{len(line.tried)} on the way)" if line.tried else "")


def phases_text(line: Line) -> str | None:
    return " ".join(f"{phase}={span}" for phase, span in line.phases.items()) or None


LEDGER: View[Report, Line] = View(
    "report",
    fetch=report_of,
    rows=lambda found: found.lines,
    columns=(
        Column("id", lambda line: line.id),
        Column("kind", lambda line: f"{line.kind} ({line.move})" if line.move else line.kind),
        Column("ranks", lambda line: ",".join(map(str, line.ranks)) or None),
        Column("cause", cause_text),
        Column("verdict", lambda line: line.verdict or None),
        Column("source", lambda line: line.source or None),
        Column("lost", lambda line: "?" if line.steps_lost is None else str(line.steps_lost)),
        Column("pause", lambda line: milliseconds(line.pause_ms)),
        Column("phases", phases_text),
        Column(
            "resolution", lambda line: line.resolution + ("" if line.eligible else f" (not counted: {line.excluded})")
        ),
    ),
    empty=lambda _: "no incident: nothing to report",
    below=lambda found: ("", totals_text(found.totals)),
)


def totals_text(found: Totals) -> str:
    """What it came to, in a few lines; phases in ms."""
    many = "incident" if found.incidents == 1 else "incidents"
    counted = f"{found.incidents} {many}, {found.eligible} of them eligible, {found.clean} resolved clean"
    if found.clean_ratio is not None:
        counted += f": {share_text(found.clean_ratio)}, with 95 % confidence"
    unknown = f", and those since the script's own checkpoint in {found.steps_unknown}" if found.steps_unknown else ""
    text = [counted, f"steps lost: {found.steps_lost}{unknown}"]
    if found.pause_p50_ms is not None:
        text.append(f"pause: median {milliseconds(found.pause_p50_ms)}, longest {milliseconds(found.pause_max_ms)}")
    if found.phases_p50_ms:
        spans = ", ".join(f"{phase} {milliseconds(span)}" for phase, span in found.phases_p50_ms.items())
        text.append(f"median of each phase: {spans}")
    return "\n".join(text)
