"""All processes of a job get SIGTERM, each by itself, as Slurm sends it: they live on, and the job parks or moves.

There is no Slurm here to say how long there is: the job's own grace time counts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import faulty
from tests.support.jobs import differences
from tests.support.machines.fleet import CLI, EVIDENCE, RUN_DIR, Fleet, at, start
from tests.support.machines.harness import Machines
from tests.support.machines.needs import needs_machines
from tests.support.twins import undisturbed

pytestmark = [pytest.mark.timeout(240), needs_machines]

SCRIPT = faulty("--steps", "100", "--pace", "0.1")
PLACE = f"{EVIDENCE}/parked"
INSIDE = {"SLURM_JOB_ID": "4711"}  # by which an agent knows that it is in a job of Slurm's
FLAGS = ["--by-hand", "--nnodes", "2", "--nproc-per-node", "2"]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Four machines: the launcher's, two of ranks, and another one."""
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    with Machines(4, shared={EVIDENCE: evidence}) as machines:
        yield Fleet(machines, tmp_path, evidence)


def begun(fleet: Fleet, *names: str, flags: tuple[str, ...] = (), place: str = "--park-dir") -> None:
    """It trains on these machines."""
    fleet.start(SCRIPT, [*FLAGS, *flags, place, PLACE])
    fleet.join(*names, env=INSIDE)
    fleet.until_steps(8)


def tell(fleet: Fleet, *names: str) -> None:
    """SIGTERM for each process of these machines, twice, as Slurm sends it."""
    for machine in [fleet.machines[name] for name in names] * 2:
        machine.run(["kill", "-TERM", *map(str, machine.pids())])


def end(fleet: Fleet) -> tuple[int, str]:
    """Wait for the end of all processes, and put away what the run has left."""
    done = fleet.end()
    assert set(fleet.agents_end().values()) <= {0}
    shutil.rmtree(fleet.folder / "run")
    shutil.rmtree(at(fleet.head, RUN_DIR))
    return done.code, done.output


def test_a_job_all_of_whose_nodes_are_told_parks_and_goes_on(fleet: Fleet) -> None:
    begun(fleet, "m2", "m3")
    tell(fleet, "m2", "m3")
    code, output = end(fleet)
    assert code == 75, output
    assert "Slurm has told this node's processes to end (SIGTERM)" in output
    begun(fleet, "m2", "m4", place="--resume")
    done = fleet.end()
    assert done.code == 0, done.output
    assert differences(done, undisturbed(SCRIPT)) == []


@pytest.mark.soak
def test_ranks_of_a_node_that_is_told_alone_move_away(fleet: Fleet) -> None:
    begun(fleet, "m2", "m3", "m4", flags=("--spare-nodes", "1"))
    left = fleet.where(0)
    tell(fleet, left)
    fleet.until("they have moved", lambda: left not in {fleet.where(rank) for rank in range(4)})
    done = fleet.end()
    assert done.code == 0, done.output
    assert differences(done, undisturbed(SCRIPT)) == []
    assert {one["steps_lost"] for one in done.incidents()} == {0}


def test_ranks_of_a_job_that_may_not_park_end_by_the_signal(fleet: Fleet) -> None:
    begun(fleet, "m2", "m3")
    at(fleet.head, f"{RUN_DIR}/FREEZE").write_text("somebody looks on\n")
    fleet.until("it is frozen", lambda: (fleet.ask("status") or {}).get("freezes"))
    tell(fleet, "m2", "m3")
    code, output = end(fleet)
    assert code == 130, output
    assert "it cannot be parked: frozen by file" in output
    assert "all ranks have left" in output or "some ranks have left" in output
    assert not at(fleet.head, f"{PLACE}/parked.json").exists()


def begun_here(fleet: Fleet, place: str) -> None:
    """All ranks are on the machine of the launcher."""
    words = [*CLI, "run", "--run-dir", RUN_DIR, "--nproc-per-node", "4", place, PLACE, *SCRIPT]
    with (fleet.folder / "run.out").open("w") as out:
        fleet.process = start(fleet.head, words, out, INSIDE)
    fleet.until_steps(8)


@pytest.mark.soak
def test_a_job_of_one_node_parks_when_all_of_it_is_told_and_goes_on(fleet: Fleet) -> None:
    begun_here(fleet, "--park-dir")
    tell(fleet, "m1")
    code, output = end(fleet)
    assert code == 75, output
    begun_here(fleet, "--resume")
    done = fleet.end()
    assert done.code == 0, done.output
    assert differences(done, undisturbed(SCRIPT)) == []
    assert fleet.head.pids() == []
