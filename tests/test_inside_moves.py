"""Things that happen inside the phases of a move, on real processes: the covering subset; all of it is `make soak`."""

from __future__ import annotations

import pytest

from tests import matrix
from tests.acts import IMPOSSIBLE, POSSIBLE, WHENS, WHOS, Act, Inside
from tests.live import Twin
from tests.matrix import Tally, go_through

pytestmark = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.timeout(900)]

# Everybody and everything once, each phase at least once.
FIRST = [
    Inside("target", "restore"),
    Inside("source", "catching up"),
    Inside("untaint", "halt heard"),
    Inside("bystander", "standing"),
    Inside("freeze", "rehearsing"),
    Inside("orchestrator", "resume"),
    Inside("second", "joining"),
    Inside("source's agent", "standing"),
    Inside("target's agent", "reconfigure"),
]


def test_the_covering_subset_has_everybody_and_every_phase() -> None:
    assert {cell.who for cell in FIRST} == set(WHOS)
    assert {cell.when for cell in FIRST} == set(WHENS)


def test_all_cells_are_possible_or_it_is_said_why_not() -> None:
    assert len(POSSIBLE) + len(IMPOSSIBLE) == len(WHOS) * len(WHENS)


@pytest.mark.soak
def test_faults_and_orders_inside_moves_cost_not_a_bit() -> None:
    acts: list[Act] = [*FIRST]
    tally = Tally()
    assert go_through(acts, 7, Twin(), tally) == []
    assert tally.done == len(FIRST)
    assert tally.moves["done"] >= len(FIRST) - 2


def test_a_job_is_drawn_alike_by_the_same_seed() -> None:
    assert matrix.draw(5, 20) == matrix.draw(5, 20)
    assert matrix.draw(5, 20) != matrix.draw(6, 20)
