"""Things that happen inside the phases of a move, on real processes: the covering subset; all of it is `make soak`."""

from __future__ import annotations

import pytest

from tests import matrix
from tests.support.acts import IMPOSSIBLE, POSSIBLE, WHENS, WHOS
from tests.support.inside_moves import FIRST

pytestmark = pytest.mark.timeout(900)


def test_the_covering_subset_has_everybody_and_every_phase() -> None:
    assert {cell.who for cell in FIRST} == set(WHOS)
    assert {cell.when for cell in FIRST} == set(WHENS)


def test_all_cells_are_possible_or_it_is_said_why_not() -> None:
    assert len(POSSIBLE) + len(IMPOSSIBLE) == len(WHOS) * len(WHENS)


def test_a_job_is_drawn_alike_by_the_same_seed() -> None:
    assert matrix.draw(5, 20) == matrix.draw(5, 20)
    assert matrix.draw(5, 20) != matrix.draw(6, 20)
