"""What tests of run share."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from tests.support.jobs import SCRIPTS
from tests.support.stage import Stage

WORLD = 2


@functools.cache
def undisturbed(feature: str) -> dict[tuple[int, str], set[str]]:
    """(rank, point) -> digest, of a run without faults."""
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder) / "calm", [script("features"), feature, "--marks", folder], world=WORLD, spares=0)
        try:
            assert stage.end() == 0, stage.all_logs()
            return digests(stage)
        finally:
            stage.close()


def script(name: str) -> str:
    return str(SCRIPTS / f"{name}.py")


def digests(stage: Stage) -> dict[tuple[int, str], set[str]]:
    return {(rank, point): found for rank in range(WORLD) for point, found in stage.points(rank).items()}
