"""`torchrelay park`: the job writes itself down and ends, and goes on later, on any nodes."""

from __future__ import annotations

import argparse
from urllib.parse import quote

from torchrelay.cli.operate.changing import ask_and_do, reach_orchestrator


def park(given: argparse.Namespace) -> None:
    """Ask for it."""
    job = reach_orchestrator(given.run_dir).name_of(given.job)
    path = f"/v1/jobs/{quote(job)}/park"
    body = {"reason": given.reason}
    ask_and_do(given.run_dir, path, body, yes=given.yes, dry_run=given.dry_run, output=given.output)
