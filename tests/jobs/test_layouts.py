"""Models that are spread over the ranks: real faults and moves, and the bits of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix import lost_in, run_cells, run_undisturbed, verdict
from tests.support.cells import Cell
from tests.support.jobs import SCRIPTS, Finished, run_job, torchrelay

pytestmark = pytest.mark.timeout(600)

# A main thread that hangs while its peers wait for it in groups of the mesh, and for one another.
STICK = Cell("stick", "forward")
FAULTS = [
    *(Cell("kill", phase) for phase in ("forward", "backward", "gate", "update", "between", "section")),
    Cell("stop", "backward"), Cell("raise", "forward"), Cell("kill", "backward", "restore"), STICK,
]  # fmt: skip
# A pipeline in the middle of a step: one stage computes, the other waits for what it sends. The section, an evaluation,
# has all stages settle anew what travels, and so has the step behind it.
CHUNKS = [
    *(Cell("kill", phase) for phase in ("chunk", "backward", "gate", "update", "section")),
    Cell("raise", "chunk"),
]


@pytest.mark.parametrize(
    ("layout", "faults"),
    [
        ("hsdp", FAULTS), ("pp", CHUNKS),
        pytest.param("tp", [*FAULTS[:4], STICK], marks=pytest.mark.soak),
        pytest.param("pp-interleaved", CHUNKS[:2], marks=pytest.mark.soak),
        pytest.param("hsdp-rich", FAULTS[:4], marks=pytest.mark.soak), ("ddp-rich", FAULTS[:4]),
    ],
)  # fmt: skip
def test_faults_leave_no_trace_in_the_bits(layout: str, faults: list[Cell], tmp_path: Path) -> None:
    calm = run_undisturbed(faults, seed=5, layout=layout)
    done = run_cells(tmp_path, "disturbed", faults, seed=5, layout=layout)
    assert verdict(done, calm) == []
    assert lost_in(done) >= len(faults)


def lose_one(work: Path, layout: str, *more: str) -> Finished:
    plan = work / "plan.json"
    plan.write_text('[{"id": "one", "ranks": [1], "step": 5, "phase": "backward", "how": "kill"}]')
    script = [str(SCRIPTS / "faulty.py"), "--layout", layout, "--steps", "12", "--plan", str(plan), *more]
    return run_job(work / "run", [*script, "--marks", str(work)], ["--nproc-per-node", "4", "--spares", "1"])


def test_a_shard_without_a_replica_is_lost_with_its_rank_as_was_foretold(tmp_path: Path) -> None:
    done = lose_one(tmp_path, "fsdp", "--snapshots", "0")
    assert done.code == 91
    assert "4 ranks hold state that no other rank has" in done.output
    assert "no replica holds the shard of rank 1" in done.output


@pytest.mark.parametrize(
    ("layout", "code", "told"),
    [
        ("hsdp", 0, "any one rank may be lost without a step lost; so may any one node."),
        ("pp", 0, "any one rank may be lost without a step lost; so may any one node."),
        ("fsdp", 0, "Snapshots: with any one rank, or any one node, at most 10 steps are made again."),
    ],
)
def test_the_doctor_foretells_it_before_the_launch(layout: str, code: int, told: str) -> None:
    words = ["--nodes", "2", "--nproc-per-node", "2", str(SCRIPTS / "faulty.py"), "--layout", layout]
    found = torchrelay("doctor", "--layout", *words)
    assert found.returncode == code, found.stderr
    assert told in found.stdout
