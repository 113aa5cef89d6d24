"""`torchrelay migrate`: ranks that go elsewhere while training goes on."""

from __future__ import annotations

import argparse
from urllib.parse import quote

from torchrelay.cli.operate.changing import ask_and_do, reach_orchestrator


def migrate(given: argparse.Namespace) -> None:
    """Ask for ranks to be moved, or take that back."""
    job = reach_orchestrator(given.run_dir).name_of(given.job)
    body = {"ranks": given.ranks, "reason": given.reason, "cancel": given.cancel, "node": given.node, "to": given.to}
    path = f"/v1/jobs/{quote(job)}/migrate"
    ask_and_do(given.run_dir, path, body, yes=given.yes, dry_run=given.dry_run, output=given.output)
