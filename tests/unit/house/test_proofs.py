"""No proof of a replacement can be taken out of the worker unnoticed: see `tests.mutants.proofs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.proofs import Mutant, plant


def test_a_mutant_of_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 times"):
        plant(Mutant("none", "face.py", "there is no such text", "", ()), tmp_path)
