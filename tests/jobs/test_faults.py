"""Real faults in real workers, inside collectives: the run with faults ends in the same bits as the run without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix import lost_in, run_cells, run_undisturbed, unclean, verdict
from tests.support.cells import ALL, SECONDS, Cell
from tests.support.faults import faulty, planned
from tests.support.jobs import Finished, differences, run_job
from tests.support.twins import undisturbed
from torchrelay.orchestrator.store.journal import read_history
from torchrelay.protocol.messages.events import WorkerExited
from torchrelay.worker.state.record import decode_private

pytestmark = pytest.mark.timeout(900)

# Every way to break and every phase at least once, in two jobs; `make soak` goes through all cells.
FIRST = [
    Cell("kill", "forward"),
    Cell("raise", "backward"),
    Cell("kill", "gate"),
    Cell("exit", "update"),
    Cell("oom", "between"),
    Cell("comm", "backward"),
    Cell("stop", "backward"),
]
SECOND = [Cell("kill", "section"), Cell("raise", "between"), Cell("kill", "update"), *SECONDS]


@pytest.mark.parametrize(
    "cells", [pytest.param(FIRST, id="first"), pytest.param(SECOND, id="second", marks=pytest.mark.soak)]
)
def test_faults_leave_no_trace_in_the_bits(tmp_path: Path, cells: list[Cell]) -> None:
    calm = run_undisturbed(cells, seed=5)
    done = run_cells(tmp_path, "disturbed", cells, seed=5)
    assert verdict(done, calm) == []
    assert lost_in(done) >= len(cells)


def test_the_covering_subset_meets_every_way_and_every_phase() -> None:
    cells = FIRST + SECOND
    assert {cell.how for cell in cells} == {cell.how for cell in ALL}
    assert {cell.phase for cell in cells} == {cell.phase for cell in ALL}
    assert set(SECONDS) <= set(cells)


def test_two_ranks_lost_at_once_are_one_incident(tmp_path: Path) -> None:
    calm = undisturbed(faulty("--steps", "12"))
    both = {"id": "two", "ranks": [1, 3], "step": 6, "phase": "forward", "how": "kill", "together": True}
    plan = planned(tmp_path, both)
    flags = ["--nproc-per-node", "4", "--spares", "2"]
    done = run_job(tmp_path / "run", faulty("--steps", "12", *plan), flags)
    assert verdict(done, calm) == []
    assert len(done.incidents()) == 1


def test_the_first_calls_of_a_replacement_are_cut_short_and_redone(tmp_path: Path) -> None:
    calm = undisturbed(faulty("--steps", "12"))
    faults = [
        {"id": f"fault {step}", "ranks": [rank], "step": step, "phase": "backward", "how": "kill"}
        for step, rank in ((6, 1), (7, 2), (8, 3), (9, 1))
    ]
    flags = ["--nproc-per-node", "4", "--spares", "3"]
    done = run_job(tmp_path / "run", faulty("--steps", "12", *planned(tmp_path, *faults)), flags)
    assert verdict(done, calm) == []
    assert len(done.incidents()) <= len(faults) <= lost_in(done)
    # The second holder of rank 1 has looked at none of its three calls: it counts on where the first has stopped.
    assert [calls_of(left) for left in left_behind(done)][-1] >= 9


def left_behind(done: Finished) -> list[bytes]:
    """The newest private record of each worker that was lost while it trained, in order."""
    events = [entry.event for entry in read_history(done.run_dir / "journal.db").entries]
    exits = [event for event in events if isinstance(event, WorkerExited) and event.signal is not None]
    return [max(event.private, key=lambda kept: kept.point).data for event in exits if event.private]


def calls_of(record: bytes) -> int:
    return decode_private(record).learned["step"].calls


@pytest.mark.parametrize("forgotten", [pytest.param("rng", marks=pytest.mark.soak), "cursor"])
def test_leaving_a_part_of_the_state_out_is_noticed(tmp_path: Path, forgotten: str) -> None:
    script = faulty("--steps", "20", "--forget", forgotten)
    calm = undisturbed(script)
    plan = planned(tmp_path, {"id": "one", "ranks": [2], "step": 8, "phase": "backward", "how": "kill"})
    done = run_job(tmp_path / "run", [*script, *plan], ["--nproc-per-node", "4", "--spares", "1"])
    assert differences(done, calm) != []


class TestTheScriptsOwnError:
    """A deterministic error ends the job with the script's code, promptly."""

    def end(self, tmp_path: Path, ranks: list[int], how: str) -> Finished:
        fault = {"id": "own", "ranks": ranks, "step": 5, "phase": "forward", "how": how, "always": True}
        script = faulty("--steps", "12", *planned(tmp_path, fault))
        return run_job(tmp_path / "run", script, ["--nproc-per-node", "4", "--spares", "1"], timeout_s=120)

    def test_on_all_ranks_at_once(self, tmp_path: Path) -> None:
        done = self.end(tmp_path, [0, 1, 2, 3], "raise")
        assert done.code == 1
        assert "a planned exception at step 5" in done.output
        row = done.incidents()[-1]
        assert row["resolution"] == "ended"
        assert not row["eligible"]
        assert not any("moves to" in text for text in row["story"]), "a spare was spent on it"

    def test_on_the_same_rank_again(self, tmp_path: Path) -> None:
        done = self.end(tmp_path, [2], "raise")
        assert done.code == 1
        assert "two workers that held rank 2" in done.output


def test_without_a_spare_the_job_waits_and_says_so(tmp_path: Path) -> None:
    plan = planned(tmp_path, {"id": "one", "ranks": [1], "step": 5, "phase": "backward", "how": "kill"})
    flags = ["--nproc-per-node", "4", "--spares", "0", "--no-refill", "--spare-wait", "2"]
    done = run_job(tmp_path / "run", faulty("--steps", "12", *plan), flags, timeout_s=120)
    assert done.code == 90
    assert "no spare for rank 1" in done.output


def test_without_a_spare_the_slot_of_the_dead_is_used_again(tmp_path: Path) -> None:
    calm = undisturbed(faulty("--steps", "12"))
    plan = planned(tmp_path, {"id": "one", "ranks": [1], "step": 5, "phase": "backward", "how": "kill"})
    done = run_job(tmp_path / "run", faulty("--steps", "12", *plan), ["--nproc-per-node", "4"])
    assert verdict(done, calm) == []


def test_when_all_ranks_are_lost_the_job_starts_from_the_scripts_checkpoint_or_ends(tmp_path: Path) -> None:
    plan = planned(
        tmp_path, {"id": "all", "ranks": [0, 1, 2, 3], "step": 5, "phase": "forward", "how": "kill", "together": True}
    )
    done = run_job(tmp_path / "run", faulty("--steps", "12", *plan), ["--nproc-per-node", "4"], timeout_s=120)
    assert done.code == 91
    assert "every rank that held state is lost" in done.output
    for mark in (tmp_path / "marks").iterdir():
        mark.unlink()
    flags = ["--nproc-per-node", "4", "--max-restarts", "1"]
    again = run_job(tmp_path / "again", faulty("--steps", "12", *plan), flags, timeout_s=180)
    assert again.code == 0
    assert [row["resolution"] for row in unclean(again)] == ["fell back"]
