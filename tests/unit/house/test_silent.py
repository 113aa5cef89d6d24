"""Scripts that break a rule on purpose: some cells of `python -m tests.matrix --silent`, and what that says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, Ran, Verdict
from tests.support import silent
from tests.support.silent import ACTS, ALL, BAD, tell


def row(fate: Fate) -> dict[str, Verdict]:
    ran = Ran(0, "", {}, frozenset(), Path())
    return {act: Verdict(fate, ran, ran) for act in ACTS}


@pytest.mark.parametrize("fate", Fate)
def test_a_table_with_a_bad_cell_is_no_success(fate: Fate, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"time": row(Fate.EQUAL)}
    assert tell(good) == 0
    assert tell(good | {"unseeded": row(fate)}) == (fate in BAD)
    assert f"unseeded{fate:>26}" in capsys.readouterr().out


def test_a_name_that_is_none_is_said() -> None:
    assert silent.main(["no-such-rule"]) == 2
    assert len(set(ALL)) == len(ALL)
