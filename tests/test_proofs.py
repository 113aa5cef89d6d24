"""No proof of a replacement can be taken out of the worker unnoticed: see `tests.mutants.proofs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.proofs import PROOFS, Mutant, plant, survives


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", PROOFS, ids=str)
def test_its_absence_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    assert not survives(mutant, tmp_path)


def test_a_mutant_of_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 times"):
        plant(Mutant("none", "face.py", "there is no such text", "", ()), tmp_path)
