"""What scripts keep where nobody looks at first: variables of loops, hooks, classes, settings, copies of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate

pytestmark = pytest.mark.timeout(240)


def test_what_loops_keep_in_variables_goes_on_after_two_faults(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "own-variables", strike="grad:14:1,after:20:0")
    assert verdict.fate is Fate.EQUAL, verdict


def test_and_after_a_move(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "own-variables", drive=migrate(1, at=14))
    assert verdict.fate is Fate.EQUAL, verdict


def test_hooks_classes_settings_and_counters_go_on(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "own-places", strike="grad:14:1,after:20:0")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize(("mode", "named"), [("teacher", "teacher"), ("average", "average"), ("best", "best")])
def test_copies_of_the_model_that_join_was_not_given_are_refused_at_once(tmp_path: Path, mode: str, named: str) -> None:
    verdict = disturbed(tmp_path, "kept-copies", mode=mode)
    assert verdict.fate is Fate.REFUSED, verdict
    assert f"{named} of main()" in verdict.reason, verdict


def test_and_carried_if_it_was(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "kept-copies", mode="told", strike="grad:14:0")
    assert verdict.fate is Fate.EQUAL, verdict
