"""Ranks that do not do what the others do: no hang. The job ends with 91, and says where both of them stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Ran, run_case

pytestmark = [pytest.mark.slow, pytest.mark.jobs]


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


def test_a_barrier_by_a_counter_of_the_scripts_own_is_found_after_a_fault(tmp_path: Path) -> None:
    ran = run(tmp_path, "barrier", strike="grad:5:1")
    assert ran.code == 91, ran.output[-3000:]
    assert "waits in a collective outside of any step or section (barrier, train.py:" in ran.reason, ran.output[-3000:]
    assert "run.section(function, ...)" in ran.reason
