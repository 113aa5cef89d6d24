"""`torchrelay incidents`: every interruption, and how it was resolved."""

from __future__ import annotations

import argparse

from torchrelay.api.shown import Incidents, IncidentView, causes
from torchrelay.client.runs import look
from torchrelay.terminal.show import Output, clip, milliseconds, remark, show, show_json, table

HEADS = ("id", "at", "kind", "ranks", "cause", "detector", "verdict", "pause", "resolution")


def show_incidents(given: argparse.Namespace) -> None:
    """Print the incidents of a job, oldest first."""

    def page() -> str:
        source, note = look(given.run_dir)
        remark(note)
        found = source.view_incidents(given.job)
        return show_json(found.incidents) if given.output is Output.JSON else incidents_page(found)

    show(page, watch=given.watch)


def incidents_page(found: Incidents) -> str:
    if not found.incidents:
        return f"no incident so far in {found.job}"
    rows = [row_of(incident) for incident in found.incidents]
    return f"{table(HEADS, rows)}\n\n`torchrelay explain {found.incidents[-1].name}` tells one of them in full"


def row_of(incident: IncidentView) -> tuple[object, ...]:
    faults = causes(incident.faults)
    ranks = sorted({fault.rank for fault in faults if fault.rank is not None})
    more = f" (+{len(faults) - 1})" if len(faults) > 1 else ""
    return (
        incident.name,
        incident.at[11:19],
        f"{incident.kind} ({incident.move})" if incident.move else incident.kind,
        ",".join(map(str, ranks)) or None,
        clip(incident.cause) + more,
        faults[0].detector if faults else None,
        incident.verdict or None,
        milliseconds(incident.pause_ms),
        incident.resolution if incident.eligible else f"{incident.resolution} (not counted)",
    )
