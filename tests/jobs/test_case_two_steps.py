"""Two step functions take turns: a number that an iterator counts is found out when it is used again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import FLAGS, Fate, disturbed, run_case


@pytest.mark.parametrize("mode", ["other", "again"])
def test_a_number_of_the_scripts_own_is_refused(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "two-steps", mode=mode, strike="grad:20:1")
    assert verdict.fate is Fate.REFUSED, verdict
    looked = "numbers of main()[0] is an iterator that is gone on with"  # on a busy machine that look comes later
    assert looked in verdict.reason or "other numbers than its replicas: argument 'seen'" in verdict.reason, verdict


def test_one_that_counts_by_what_was_committed_is_right(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "two-steps", mode="kept", strike="grad:20:1,grad:31:0")
    assert verdict.fate is Fate.EQUAL, verdict


def test_a_rank_that_is_lost_in_the_first_of_two_steps_lacks_nothing(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "left-behind", strike="generator:7:1")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize(("mode", "strike"), [("", "critic:7:1"), ("prints", "after:8:0")])
def test_what_the_first_of_two_steps_left_behind_goes_to_a_replacement(tmp_path: Path, mode: str, strike: str) -> None:
    verdict = disturbed(tmp_path, "left-behind", mode=mode, strike=strike)
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("strike", ["critic:7:1", "after:8:0"])
def test_but_what_is_too_large_is_refused(tmp_path: Path, strike: str) -> None:
    verdict = disturbed(tmp_path, "left-behind", mode="large", strike=strike)
    assert verdict.fate is Fate.REFUSED, verdict
    assert verdict.ran.code == 91, verdict
    assert "'self.fake'" in verdict.reason or "self of Gan.step_generator.fake was kept" in verdict.reason, verdict


def test_what_cannot_stand_for_anything_is_no_error_of_the_scripts(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "left-behind", mode="lock", strike="critic:7:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert verdict.ran.code == 91, verdict
    assert "has no attribute 'lock'" in verdict.reason, verdict
    assert "Make the calls of a turn one step" in verdict.reason, verdict


def test_an_error_of_the_second_step_is_the_scripts_own_also_where_a_replacement_raises_it(tmp_path: Path) -> None:
    ran = run_case(tmp_path, "left-behind", mode="raises", flags=FLAGS)
    assert ran.code == 1, ran.output[-3000:]
    assert "the script's own error, on two workers that held rank 1: ValueError: of the script's own" in ran.reason
