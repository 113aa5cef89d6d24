"""Where Slurm is not installed, its tests are skipped, and say what to install."""

from __future__ import annotations

import shutil

import pytest

from tests.support.slurm import needs


def test_what_is_missing_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **_: None if name == "slurmd" else f"/usr/sbin/{name}")
    assert needs.slurm_obstacle() == f"Slurm is not installed (slurmd is not here): {needs.INSTALL}"
