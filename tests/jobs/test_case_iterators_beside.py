"""enumerate(), zip() and the like around a tracked loop go on where they were, through generators of the script too.

The fault comes where the numbers are still those of a loop that has just begun; it matters some items later.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate

pytestmark = pytest.mark.timeout(240)

CASE = "iterators-beside"
WAYS = ["generator", "islice", "list", "count", "inner", "map", "progress"]


@pytest.mark.parametrize("mode", WAYS)
def test_a_replacement_goes_on_where_it_was(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, CASE, mode=mode, strike="grad:15:1")
    assert verdict.fate is Fate.EQUAL, verdict


def test_and_the_replacement_of_a_replacement(tmp_path: Path) -> None:
    flags = ("--nproc-per-node", "2", "--spares", "2")
    verdict = disturbed(tmp_path, CASE, mode="generator", strike="grad:14:1,grad:17:1", flags=flags)
    assert verdict.fate is Fate.EQUAL, verdict


def test_and_after_a_move(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, CASE, mode="list", drive=migrate(1, at=14))
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("prefetch", ["`ahead` of prefetch() (train.py:", "is kept from one item", "prefetch_factor"]),
        ("tee", ["gone through by tee()", "train.py:", "Go through the loop once"]),
        ("keep", ["enumerate() counts what keep_odd()", "train.py:", "Let enumerate() go through the tracked loop"]),
        ("sums", ["train.py:", "`self.last` of Sums.__next__()"]),
    ],
)
def test_what_would_begin_anew_is_refused_at_once(tmp_path: Path, mode: str, words: list[str]) -> None:
    verdict = disturbed(tmp_path, CASE, mode=mode)
    assert verdict.fate is Fate.REFUSED, verdict
    assert verdict.ran.code == 93, verdict
    assert all(each in verdict.ran.output for each in words), verdict
