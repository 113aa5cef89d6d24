"""Ranks that do not do what the others do: no hang. The job ends with 91, and says where both of them stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, Ran, disturbed, run_case


def run(work: Path, mode: str, *, strike: str = "", flags: tuple[str, ...] = ()) -> Ran:
    ran = run_case(work, "uneven", mode=mode, strike=strike, flags=("--nproc-per-node", "2", "--spares", "1", *flags))
    assert ran.code is not None, f"it hangs\n{ran.output[-3000:]}"
    return ran


@pytest.mark.parametrize(
    ("mode", "one", "other"),
    [
        ("end", "rank 1 has ended its script (the end of train.py)", "rank 0 is in a step (backward, train.py:"),
        ("zero", "rank 1 has ended its script (train.py:", "rank 0 is in a step (backward, train.py:"),
        ("unlike", "(barrier, train.py:", "(all_reduce, train.py:"),
        ("inside", "rank 0 is in a step (barrier, train.py:", "rank 1 waits at the end of a step (train.py:"),
    ],
)
def test_ranks_that_wait_for_one_another_in_vain_are_found(tmp_path: Path, mode: str, one: str, other: str) -> None:
    ran = run(tmp_path, mode)
    assert ran.code == 91, ran.output[-3000:]
    assert one in ran.reason, ran.output[-3000:]
    assert other in ran.reason, ran.output[-3000:]


def test_so_are_those_of_a_script_that_was_not_changed(tmp_path: Path) -> None:
    ran = run_case(tmp_path, "unchanged", mode="zero")
    assert ran.code == 91, ran.output[-3000:]
    assert "rank 1 has ended its script (train.py:" in ran.reason, ran.output[-3000:]
    assert "rank 0 waits in a backward pass (train.py:" in ran.reason, ran.output[-3000:]


def test_a_barrier_by_a_queue_of_the_scripts_own_is_found_after_a_fault(tmp_path: Path) -> None:
    """Nobody looks into a queue: that the ranks wait for one another in vain is found out."""
    ran = run(tmp_path, "barrier", strike="grad:5:1")
    assert ran.code == 91, ran.output[-3000:]
    assert "waits in a collective outside of any step or section (barrier, train.py:" in ran.reason, ran.output[-3000:]
    assert "run.atomic(function, ...)" in ran.reason


def test_a_counter_is_carried(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "uneven", mode="counted", strike="grad:5:1")
    assert verdict.fate is Fate.EQUAL, verdict


def test_a_section_that_only_some_come_to_ends_the_job_after_two_aborts_of_gloo(tmp_path: Path) -> None:
    ran = run(tmp_path, "eval")
    assert ran.code == 91, ran.output[-3000:]
    assert "the collectives of the ranks do not match: Gloo ended the process" in ran.reason, ran.output[-3000:]
    assert "(train.py:" in ran.reason
    assert "0 resolved clean" in ran.reason


@pytest.mark.parametrize(("mode", "code"), [("code", 7), ("abort", 134)])
def test_a_rank_that_ends_alike_twice_ends_the_job_with_its_code(tmp_path: Path, mode: str, code: int) -> None:
    ran = run(tmp_path, mode)
    assert ran.code == code, ran.output[-3000:]
    assert "on two workers that held rank 1" in ran.reason, ran.output[-3000:]
