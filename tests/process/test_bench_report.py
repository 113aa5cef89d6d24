"""The report of the bench `compare`, and its flat figures: what they say must be true of whatever came out."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.support.bench_compare import World, restarted
from tests.support.bench_report import outcome_of, run_of


def test_who_never_committed_a_step_does_not_spoil_the_plots(tmp_path: Path) -> None:
    plots = pytest.importorskip("compare_plots")
    world = World()
    world.train(0, 1)
    world.lines = {
        rank: [msgspec.structs.replace(row, committed=0) for row in rows] for rank, rows in world.lines.items()
    }
    one, other = outcome_of("torchft-c", world), outcome_of("restart-naive", restarted())
    names = [path.name for path in plots.draw(run_of(one, other), tmp_path)]
    assert names == ["gpt-jct.png", "gpt-progress.png", "gpt-goodput.png", "gpt-phases.png"]
