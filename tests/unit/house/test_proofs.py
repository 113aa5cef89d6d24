"""No proof of a replacement can be taken out of the worker unnoticed: see `tests.mutants.proofs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.proofs import plant
from tests.mutants.taken_out import PROOFS

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "torchrelay"


def test_the_text_that_is_taken_out_is_there_once_and_the_tests_are_there() -> None:
    wrong = {str(each) for each in PROOFS if (SOURCE / each.file).read_text().count(each.old) != 1}
    wrong |= {
        test
        for each in PROOFS
        for test in each.tests
        if test.startswith("tests/") and not (ROOT / test.split("::")[0]).is_file()
    }
    assert wrong == set()


def test_a_mutant_of_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 times"):
        plant(Mutant("none", "face.py", "there is no such text", "", ()), tmp_path)
