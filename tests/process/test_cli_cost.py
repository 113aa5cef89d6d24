"""`torchrelay cost`: what it prints, in tables and in JSON; what it makes of a ledger; what it refuses, and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli_cost import Capsys, refused
from tests.support.cli_views import journal_of_a_recovery, torchrelay  # noqa: F401


def test_a_plot_is_written_and_said_on_stderr(capsys: Capsys, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "cost.png"
    code, out, err = torchrelay(capsys, "cost", "--plot", str(path), "--gpus", "4096")
    assert code == 0
    assert "as published" in out
    assert f"plotted to {path}" in err
    assert path.read_bytes().startswith(b"\x89PNG")
    nowhere = tmp_path / "nowhere" / "x.png"
    assert f"--plot {nowhere}: there is no folder" in refused(capsys, "--plot", str(nowhere))
