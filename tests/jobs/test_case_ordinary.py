"""What ordinary trainers do between steps and in them: objects with counts, averages, buffers bound anew, and more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("mode", ["meter", "decides", "position", "late", "namespace", "threads"])
def test_what_objects_hold_is_as_it_was_wherever_the_script_asks(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "own-objects", mode=mode, strike="grad:22:1,evaluated:28:0")
    assert verdict.fate is Fate.EQUAL, verdict


def test_a_row_that_grows_by_what_is_not_carried_is_refused(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "own-objects", mode="memory", strike="grad:22:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert "memory.seen grows in the course of the training" in verdict.reason, verdict


@pytest.mark.parametrize("mode", ["module", "object", "dict"])
def test_an_average_that_moves_between_steps_is_right_in_the_end(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "averages", mode=mode, strike="grad:24:1")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", ["module", "object", "dict"])
def test_and_is_not_given_away_where_no_rank_has_it_any_more(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "averages", mode=mode, strike="used:20:0")
    assert verdict.fate is Fate.REFUSED, verdict
    assert "changes between two steps, and is saved or read there" in verdict.reason, verdict


@pytest.mark.parametrize("strike", ["grad:17:0", "evaluated:1:0"])
def test_behind_a_section_it_is_as_it_was_there(tmp_path: Path, strike: str) -> None:
    verdict = disturbed(tmp_path, "averages", mode="sections", strike=strike)
    assert verdict.fate is Fate.EQUAL, verdict


def test_a_forward_pass_between_steps_computes_what_it_would_alone(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "evaluates-between", strike="after:10:1,grad:16:0")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", ["", "own"])
def test_buffers_that_are_bound_anew(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "rebound-buffers", mode=mode, strike="grad:12:1,after:20:0")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", ["", "both"])
def test_sparse_gradients(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "sparse-gradients", mode=mode, strike="grad:4:0,grad:12:1")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("strike", ["grad:16:1", "after:10:0"])
def test_values_after_a_roll_back_are_those_of_the_place(tmp_path: Path, strike: str) -> None:
    verdict = disturbed(tmp_path, "rolled-back", strike=strike)
    assert verdict.fate is Fate.FELL_BACK, verdict
