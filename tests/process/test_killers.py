"""The core as it is passes all that has to notice a mutant of it: else every mutant would seem to be noticed.

`python -m tests.mutants` begins with the same; here each has its own name. `make test` has the tests themselves.
"""

from __future__ import annotations

import pytest

from tests.mutants.killing import KILLERS


@pytest.mark.parametrize("killer", [name for name in KILLERS if not name.startswith("more")])
def test_the_core_as_it_is_passes(killer: str) -> None:
    KILLERS[killer]()
