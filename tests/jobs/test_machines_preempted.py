"""Slurm preempts a job of ours: it parks within the time that there is, and goes on later, to the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import faulty
from tests.support.jobs import Finished, differences, wait_until
from tests.support.machines.fleet import EVIDENCE
from tests.support.machines.harness import Machines
from tests.support.slurm.cluster import Slurm
from tests.support.slurm.conf import Site
from tests.support.slurm.fleet import SlurmFleet
from tests.support.slurm.needs import needs_slurm
from tests.support.twins import undisturbed

pytestmark = [pytest.mark.timeout(300), needs_slurm, pytest.mark.slurm]

HIGH = faulty("--steps", "200", "--pace", "0.1")
LOW = faulty("--steps", "300", "--pace", "0.1")
ONE_EACH = ["--nproc-per-node", "1"]
PLACE = f"{EVIDENCE}/parked"
PARKED = 75
GRACE_S = 60


@pytest.fixture
def site() -> Site:
    return Site(grace_s=GRACE_S)


@pytest.fixture
def slurm(tmp_path: Path, site: Site) -> Iterator[Slurm]:
    """m1 controls; m2 to m5 compute: two nodes for each of two jobs, and none to spare."""
    evidence = tmp_path / "evidence"
    for folder in (evidence, evidence / "high", evidence / "low"):
        folder.mkdir()
        folder.chmod(0o777)
    with Machines(5, shared={EVIDENCE: evidence}) as machines, Slurm(machines, tmp_path, site=site) as slurm:
        yield slurm


@pytest.fixture
def high(slurm: Slurm, tmp_path: Path) -> SlurmFleet:
    return SlurmFleet(slurm, tmp_path / "evidence/high", f"{EVIDENCE}/high")


@pytest.fixture
def low(slurm: Slurm, tmp_path: Path) -> SlurmFleet:
    return SlurmFleet(slurm, tmp_path / "evidence/low", f"{EVIDENCE}/low")


def as_its_twin(done: Finished, script: list[str]) -> bool:
    """Whether it ended with the bits of the undisturbed twin; shows what differs."""
    assert done.code == 0, done.output
    assert differences(done, undisturbed(script, world=2)) == []
    return True


def goes_on(low: SlurmFleet, folder: Path) -> None:
    """The job that has parked is submitted again, and comes to its end."""
    low.forget()
    low.start(2, [*ONE_EACH, "--resume", PLACE], LOW, "--partition=low")
    assert as_its_twin(low.end(folder / "resumed"), LOW)
    wait_until("nothing is left", lambda: low.left() == [], deadline_s=30)


@pytest.mark.soak
def test_a_job_parks_for_one_of_higher_priority_that_has_lost_a_node(
    high: SlurmFleet, low: SlurmFleet, tmp_path: Path
) -> None:
    low.start(2, [*ONE_EACH, "--park-dir", PLACE], LOW, "--partition=low")
    low.until_steps(4)
    had = low.job.nodes()
    high.start(2, [*ONE_EACH, "--spares", "dedicated:0,floating:1,partition=low"], HIGH)
    high.until_steps(4)
    rank, lost = next((rank, node) for rank in range(2) if (node := high.where(rank)) != high.head.name)
    high.slurm.cut_power(lost)
    parked = low.end(tmp_path / "parked")
    assert parked.code == PARKED, parked.output
    assert "preempted by a job of higher priority" in parked.output
    high.until_at(rank, lambda node: node in had)
    done = high.end(tmp_path / "high")
    assert as_its_twin(done, HIGH)
    assert [(one["resolution"], one["steps_lost"]) for one in done.incidents()] == [("clean", 0)]
    goes_on(low, tmp_path)


# Slurm counts the job as ended from the SIGTERM on, and kills what has outlived it after KillWait. The shell of the
# batch script gets one as well: with a trap it waits for `torchrelay run`.
@pytest.mark.soak
@pytest.mark.parametrize("site", [Site(grace_s=0, kill_wait_s=GRACE_S)], ids=["killwait"])
def test_without_a_grace_time_it_parks_before_slurm_kills(slurm: Slurm, low: SlurmFleet, tmp_path: Path) -> None:
    low.start(2, [*ONE_EACH, "--park-dir", PLACE], LOW, "--partition=low", srun="trap : TERM;")
    low.until_steps(4)
    other = slurm.submit("sleep 1", "-N4", "--exclusive")
    parked = low.end(tmp_path / "parked")
    assert parked.code == PARKED, parked.output
    other.wait("COMPLETED")
    low.slurm.run("scancel", str(low.job.number))  # Slurm has put it into the queue again
    goes_on(low, tmp_path)


@pytest.mark.soak
def test_a_job_of_one_node_parks_too_where_srun_has_started_it(slurm: Slurm, low: SlurmFleet, tmp_path: Path) -> None:
    """The batch script of a job hears of a preemption when its grace time is over; a task of srun's at once."""
    flags = ["--nproc-per-node", "2", "--park-dir", PLACE]
    low.start(1, flags, LOW, "--partition=low", srun="srun --ntasks=1")
    low.until_steps(4)
    other = slurm.submit("sleep 1", "-N4", "--exclusive")
    parked = low.end(tmp_path / "parked")
    assert parked.code == PARKED, parked.output
    assert (tmp_path / "evidence/parked/parked.json").exists()
    other.wait("COMPLETED")
    wait_until("nothing is left", lambda: low.left() == [], deadline_s=30)


@pytest.mark.soak
@pytest.mark.parametrize("site", [Site(kill_wait_s=GRACE_S)], ids=["killwait"])
def test_a_job_that_is_cancelled_parks_as_well(low: SlurmFleet, tmp_path: Path) -> None:
    low.start(2, [*ONE_EACH, "--park-dir", PLACE], LOW, srun="trap : TERM;")
    low.until_steps(4)
    low.slurm.run("scancel", str(low.job.number))
    parked = low.end(tmp_path / "parked")
    assert parked.code == PARKED, parked.output
    assert (tmp_path / "evidence/parked/parked.json").exists()
    wait_until("nothing is left", lambda: low.left() == [], deadline_s=30)
