"""No proof of a replacement can be taken out of the worker unnoticed: see `tests.mutants.proofs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.proofs import survives
from tests.mutants.taken_out import PROOFS


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", PROOFS, ids=str)
def test_its_absence_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    assert not survives(mutant, tmp_path)
