"""The example script: the same bits with torchrelay and torchrun; checkpoints; and the demonstration around it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.jobs import run_job
from tests.support.train_gpt import SCRIPT, SHORT, run

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_ranks_that_hold_parts_of_the_model_go_on_from_its_checkpoint(layout: str, tmp_path: Path) -> None:
    script = [str(SCRIPT), *SHORT, "--layout", layout, "--checkpoint", str(tmp_path / "checkpoint.pt")]
    plain = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *script, "--log-every", "1"]
    first = run(*plain, "--epochs", "1")
    assert "step 8 " in first
    done = run_job(tmp_path / "run", [*script, "--log-every", "1"], ["--nproc-per-node", "2"])
    assert done.code == 0, done.output
    assert "step 8 " not in done.output
    assert "step 9 " in done.output
    assert "epoch 2 of 2" in done.output
