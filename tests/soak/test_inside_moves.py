"""Things that happen inside the phases of a move, on real processes: the covering subset; all of it is `make soak`."""

from __future__ import annotations

import pytest

from tests.matrix import Tally, go_through
from tests.support.acts import Act
from tests.support.inside_moves import FIRST
from tests.support.live import Twin

pytestmark = pytest.mark.timeout(900)


def test_faults_and_orders_inside_moves_cost_not_a_bit() -> None:
    acts: list[Act] = [*FIRST]
    tally = Tally()
    assert go_through(acts, 7, Twin(), tally) == []
    assert tally.done == len(FIRST)
    assert tally.moves["done"] >= len(FIRST) - 2
