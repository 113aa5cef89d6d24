"""`torchrelay attach`: follows a run whose launcher is lost, wherever its orchestrator is by now."""

from __future__ import annotations

import argparse


def attach(given: argparse.Namespace) -> int:
    """Follow a run to its end. Returns the job's exit code."""
    from torchrelay.launcher import attaching  # imports a web client: not for the help of other verbs

    return attaching.attach(given.run_dir, given.job, given.patience)
