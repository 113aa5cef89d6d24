"""`torchrelay simulate`: what it prints, what it refuses and how, and the plots."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli_simulate import SHORT, said
from torchrelay.forecast.presets import COLUMNS, TABLE, cells


def test_a_sweep_has_a_row_for_each_value(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "spares.png"
    code, out, _ = said(
        capsys, *SHORT, "--strategy", "restart,migration", "--sweep", "spares=0,1,4", "--plot", str(plot)
    )
    assert code == 0
    assert [row.split()[0] for row in out.splitlines()[1:]] == ["0", "1", "4"]
    assert plot.read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- published cases


def test_the_published_table_is_met_as_far_as_a_sample_can_be() -> None:
    """Each cell by 0.02, and by 0.01 or less than the error of its sample; and ours by renewal theory."""
    found = cells(runs=400)
    assert len(found) == len(TABLE) * len(COLUMNS) == 45
    assert sum(one.within for one in found) >= 40
    assert max(abs(one.difference) for one in found) <= 0.02
    for one in found:
        assert one.within or abs(one.difference) <= 1.96 * one.published_error + 0.005, one
        # Runs of 60 mean times end with work that nothing has taken yet: up to half an interval more.
        assert one.exact - 0.015 <= one.ours <= one.exact + 0.025, one


def test_the_page_of_the_published_table_says_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "--preset", "ettr-table", "--quick", "--runs", "20")
    assert code == 0
    assert out.count("migration 2 min, 90 %") == 9
    assert "cells within 0.01" in out
    assert "and differ by up to 0.0" in out
    assert "renewal theory" in out
