"""Undisturbed twins of jobs: the same workers on a stage, without agent and orchestrator, once for a test session.

What a fault came to is compared with them, point by point and rank by rank.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from tests.support.jobs import Finished, read_digests
from tests.support.stage import Stage


def undisturbed(script: list[str], *, world: int = 4, timeout_s: float = 240) -> Finished:
    """What the script computes without any fault."""
    return _undisturbed(tuple(script), world, timeout_s)


@functools.cache
def _undisturbed(script: tuple[str, ...], world: int, timeout_s: float) -> Finished:
    with tempfile.TemporaryDirectory(prefix="torchrelay-twin-") as folder:
        stage = Stage(Path(folder) / "calm", script, world=world, spares=0)
        try:
            code = stage.end(timeout_s)
            assert code == 0, stage.all_logs()
            assert stage.job.accounting.incidents == ()
            return Finished(code, stage.all_logs(), stage.folder, read_digests(stage.digests))
        finally:
            stage.close()
