"""What scripts keep where nobody looks at first: variables of loops, hooks, classes, settings, copies of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate

pytestmark = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.timeout(240)]


def test_what_loops_keep_in_variables_goes_on_after_two_faults(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "own-variables", strike="grad:14:1,after:20:0")
    assert verdict.fate is Fate.EQUAL, verdict


def test_and_after_a_move(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "own-variables", drive=migrate(1, at=14))
    assert verdict.fate is Fate.EQUAL, verdict


def test_hooks_classes_settings_and_counters_go_on(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "own-places", strike="grad:14:1,after:20:0")
    assert verdict.fate is Fate.EQUAL, verdict
