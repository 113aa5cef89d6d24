"""What scripts do between calls, and with data of their own: equal to the bit on a replacement, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate


@pytest.mark.parametrize("mode", ["full", "lr"])
def test_what_rank_0_saves_between_steps_is_what_its_predecessor_would_have_saved(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "saves-between", mode=mode, strike="grad:10:0,after:15:0")
    assert verdict.fate is Fate.EQUAL, verdict


def test_an_average_that_is_updated_between_steps_is_not_saved_there_by_a_replacement(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "saves-between", mode="ema", strike="grad:10:0")
    assert verdict.fate is Fate.REFUSED, verdict
    assert "state['average'] changes between two steps" in verdict.reason, verdict


def test_parameters_read_between_steps_are_there_on_the_target_of_a_move(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "saves-between", mode="norm", drive=migrate(0))
    assert verdict.fate is Fate.EQUAL, verdict


def test_a_decision_by_what_was_read_before_the_call_is_as_undisturbed(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "outside-decision", mode="scale", strike="grad:20:1,after:21:0,grad:30:1")
    assert verdict.fate is Fate.EQUAL, verdict


def test_a_learning_rate_by_a_counter_of_its_own_is_as_undisturbed(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "outside-decision", mode="counter", strike="grad:20:1,after:30:0")
    assert verdict.fate is Fate.EQUAL, verdict


def test_a_learning_rate_by_an_iterator_of_its_own_is_refused(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "outside-decision", mode="iterator", strike="grad:20:1")
    assert verdict.fate in (Fate.REFUSED, Fate.LATE), verdict
    assert "numbers of main()[0] is an iterator that is gone on with" in verdict.reason, verdict


@pytest.mark.parametrize(
    ("mode", "named"), [("large", "x of <module>() changes"), ("number", "is an iterator that is gone on with")]
)
def test_data_of_its_own_that_a_replacement_has_not_is_refused(tmp_path: Path, mode: str, named: str) -> None:
    verdict = disturbed(tmp_path, "own-data", mode=mode, strike="grad:12:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert named in verdict.reason, verdict


def test_random_numbers_without_a_seed_are_refused(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "own-data", mode="unseeded", strike="grad:12:1")
    assert verdict.fate is Fate.LATE, "no two undisturbed runs are equal"
    assert "'order', which step() reads" in verdict.reason, verdict


@pytest.mark.parametrize("mode", ["carried", "counted", "added", "globals", "count", "noise", "drawn"])
def test_what_is_kept_in_the_state_seen_to_move_or_only_added_to_is_no_matter(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "own-data", mode=mode, strike="grad:12:1,after:20:0")
    assert verdict.fate is Fate.EQUAL, verdict
