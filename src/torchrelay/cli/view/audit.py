"""`torchrelay audit`: every changing call, from the orchestrator or, when that is away, from the journal."""

from __future__ import annotations

import argparse

from torchrelay.api.shown import Audit
from torchrelay.client.runs import look
from torchrelay.terminal.show import Output, remark, show_json, table

HEADS = ("at", "who", "call", "what", "event")


def show_audit(given: argparse.Namespace) -> None:
    """Print who asked for what, oldest first."""
    source, note = look(given.run_dir)
    remark(note)
    found = source.view_audit()
    print(show_json(found.calls) if given.output is Output.JSON else audit_page(found))


def audit_page(found: Audit) -> str:
    if not found.calls:
        return "nobody has changed anything"
    rows = [(one.at[:19].replace("T", " "), one.who, one.call, one.what, one.seq or None) for one in found.calls]
    return table(HEADS, rows)
