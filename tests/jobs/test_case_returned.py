"""A rank that dies in its update has left what its step returns: its replacement goes on with that, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed

pytestmark = pytest.mark.timeout(240)

KNOWN = ["detach", "graph", "item", "all", "own-clip"]


@pytest.mark.parametrize("mode", KNOWN)
def test_a_replacement_returns_what_its_predecessor_would_have(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "returned", mode=mode, strike="update:6:1")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize(("mode", "what"), [("later", "all"), ("rate", "entry 1")])
def test_what_is_computed_after_the_update_is_not_taken_from_another_rank(tmp_path: Path, mode: str, what: str) -> None:
    verdict = disturbed(tmp_path, "returned", mode=mode, strike="update:6:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert verdict.ran.code == 91, verdict
    assert f"{what} of what its step returns is computed after optimizer.step()" in verdict.reason, verdict


def test_in_the_first_update_nothing_is_known_yet(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "returned", mode="detach", strike="update:1:0")
    assert verdict.fate is Fate.REFUSED, verdict
    assert "when it was not known yet what of its result is computed before the update" in verdict.reason, verdict


def test_what_all_others_return_alike_is_taken(tmp_path: Path) -> None:
    flags = ("--nproc-per-node", "3", "--spares", "1")
    verdict = disturbed(tmp_path, "returned", mode="rate", strike="update:6:1", flags=flags)
    assert verdict.fate is Fate.EQUAL, verdict
