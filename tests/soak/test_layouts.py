"""Models that are spread over the ranks: real faults and moves, and the bits of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix import Tally, go_through, run_cells, run_undisturbed
from tests.support.acts import Act, Inside, Move, Strike
from tests.support.cells import Cell
from tests.support.jobs import differences
from tests.support.live import Twin

pytestmark = pytest.mark.timeout(600)
# With ZeRO parameters are half exchanged when a gather is cut.
GATHERS = [Cell("comm", "gather"), Cell("kill", "update"), Cell("kill", "gather")]
ACTS: list[Act] = [
    Move("migrate two ranks"), Inside("source", "restore"), Strike(Cell("kill", "gate", "reconfigure")),
]  # fmt: skip
MOVES: list[Act] = [Move("migrate one rank"), Move("drain and undrain")]
DRAIN = MOVES[1:]


def test_moves_in_hsdp_and_faults_inside_them_leave_no_trace() -> None:
    tally = Tally()
    assert go_through(ACTS, 3, Twin("hsdp"), tally) == []
    assert tally.done == len(ACTS)


def test_stages_of_a_pipeline_move_and_leave_no_trace() -> None:
    tally = Tally()
    assert go_through(DRAIN, 4, Twin("pp"), tally) == []
    assert tally.done == len(DRAIN)


@pytest.mark.parametrize(("layout", "moves"), [("zero", DRAIN), ("fsdp", DRAIN)])
def test_ranks_without_a_replica_move_and_leave_no_trace(layout: str, moves: list[Act]) -> None:
    tally = Tally()
    assert go_through(moves, 4, Twin(layout), tally) == []
    assert tally.done == len(moves)


def test_a_gather_that_is_cut_is_made_again(tmp_path: Path) -> None:
    """Who breaks its connections goes on with the others; who is killed comes back from its snapshot, as all do."""
    calm = run_undisturbed(GATHERS, seed=5, layout="zero")
    done = run_cells(tmp_path, "disturbed", GATHERS, seed=5, layout="zero")
    assert done.code == 0, done.output
    assert differences(done, calm) == []
    assert [row["resolution"] for row in done.incidents()] == ["clean", "rolled back", "rolled back"]
