"""`torchrelay run` in a batch script of Slurm: it takes the nodes of its job, and loses some of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import faulty
from tests.support.jobs import Finished, differences, wait_until
from tests.support.machines.fleet import EVIDENCE, RUN_DIR, at
from tests.support.machines.harness import Machines
from tests.support.slurm.cluster import Slurm
from tests.support.slurm.conf import Site
from tests.support.slurm.fleet import SlurmFleet
from tests.support.slurm.needs import needs_slurm
from tests.support.twins import undisturbed

pytestmark = [pytest.mark.timeout(300), needs_slurm, pytest.mark.slurm]

SCRIPT = faulty("--steps", "100", "--pace", "0.1")
LONG = faulty("--steps", "240", "--pace", "0.1")  # for what takes several looks at Slurm
FLAGS = ["--spare-nodes", "1", "--nproc-per-node", "1"]


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def fleet(tmp_path: Path, site: Site) -> Iterator[SlurmFleet]:
    """m1 controls; m2 to m6 compute: four ranks, and a spare node in the job or beside it."""
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    evidence.chmod(0o777)
    with Machines(6, shared={EVIDENCE: evidence}) as machines, Slurm(machines, tmp_path, site=site) as slurm:
        yield SlurmFleet(slurm, evidence)


def begun_without_spare(fleet: SlurmFleet, *flags: str, script: list[str] = SCRIPT) -> str:
    """It trains on four of the five nodes; returns the fifth."""
    fleet.start(4, ["--nproc-per-node", "1", *flags], script)
    fleet.until_steps(4)
    return next(name for name in fleet.slurm.nodes if name not in fleet.job.nodes())


def begun(fleet: SlurmFleet, *flags: str, srun: str = "", script: list[str] = SCRIPT) -> None:
    """It trains, with a warm spare, and Slurm's record of the job says who is where."""
    fleet.start(5, [*FLAGS, *flags], script, srun=srun)
    fleet.until_warm(1)
    fleet.until_steps(4)
    wait_until("the roster in the job's comment", lambda: '"roster"' in fleet.job.comment(), deadline_s=20)


def ended_well(fleet: SlurmFleet, tmp_path: Path, script: list[str] = SCRIPT) -> Finished:
    """It has ended with the bits of the undisturbed twin, and nothing is left of it."""
    done = fleet.end(tmp_path)
    assert done.code == 0, done.output
    assert differences(done, undisturbed(script)) == []
    assert {one["resolution"] for one in done.incidents()} <= {"clean"}
    assert {one["steps_lost"] for one in done.incidents()} <= {0}
    wait_until("nothing is left", lambda: fleet.left() == [], deadline_s=30)
    return done


def test_a_node_without_power_is_replaced_and_nothing_is_lost(fleet: SlurmFleet, tmp_path: Path) -> None:
    begun(fleet)
    lost = next(name for name in (fleet.where(rank) for rank in range(4)) if name != fleet.head.name)
    fleet.slurm.cut_power(lost)
    fleet.until("the incident is over", lambda: [one for one in fleet.ask("incidents") or () if one["resolution"]])
    wait_until("the roster without it", lambda: f'"{lost}"' not in fleet.job.comment(), deadline_s=20)
    done = ended_well(fleet, tmp_path)
    assert len(done.incidents()) == 1
    assert "[0] step 100" in done.output


@pytest.mark.parametrize("srun", ["", "srun --no-kill --wait=0 --kill-on-bad-exit=0 --ntasks-per-node=1"])
def test_a_rank_that_is_killed_is_replaced_and_nothing_is_lost(fleet: SlurmFleet, tmp_path: Path, srun: str) -> None:
    """Also under srun, as torchrun is started: one of its tasks sees to all nodes."""
    begun(fleet, srun=srun)
    machine, pid = fleet.rank_process(2)
    machine.run(["kill", "-9", str(pid)])
    assert len(ended_well(fleet, tmp_path).incidents()) == 1


def test_a_drained_node_is_left_and_taken_again_when_it_is_resumed(fleet: SlurmFleet, tmp_path: Path) -> None:
    begun(fleet, "--probation", "0", "--return-home", script=LONG)
    rank = next(rank for rank in range(4) if fleet.where(rank) != fleet.head.name)
    home = fleet.where(rank)
    fleet.slurm.update(home, "DRAIN", "xid 79")
    fleet.until_at(rank, lambda node: node != home)
    assert "xid 79" in fleet.verb("nodes")[1]
    fleet.slurm.update(home, "RESUME")
    fleet.until_at(rank, lambda node: node == home)
    assert "xid 79" not in fleet.verb("nodes")[1]
    ended_well(fleet, tmp_path, LONG)


@pytest.mark.soak
def test_a_slurm_that_does_not_answer_disturbs_nobody(fleet: SlurmFleet, tmp_path: Path) -> None:
    begun(fleet, script=LONG)
    fleet.slurm.controller.freeze()
    machine, pid = fleet.rank_process(1)
    machine.run(["kill", "-9", str(pid)])
    fleet.until("the incident is over", lambda: [one for one in fleet.ask("incidents") or () if one["resolution"]])
    log = at(fleet.head, f"{RUN_DIR}/logs/orchestrator.log")
    fleet.until(
        "it is said", lambda: "Slurm cannot be looked at" in log.read_text() or "could not be" in log.read_text()
    )
    fleet.slurm.controller.thaw()
    assert len(ended_well(fleet, tmp_path, LONG).incidents()) == 1


@pytest.mark.soak
def test_a_floating_spare_comes_from_an_idle_node_and_is_given_back(fleet: SlurmFleet, tmp_path: Path) -> None:
    idle = begun_without_spare(fleet, "--spares", "floating:1")
    rank, lost = next((rank, node) for rank in range(4) if (node := fleet.where(rank)) != fleet.head.name)
    fleet.slurm.cut_power(lost)
    fleet.until_at(rank, lambda node: node == idle)
    assert f"{idle} joins in place of {lost}" in fleet.said()
    assert len(ended_well(fleet, tmp_path).incidents()) == 1
    wait_until("all nodes are given back", lambda: all_given_back(fleet), deadline_s=30)


@pytest.mark.soak
def test_a_floating_spare_for_a_drained_node_is_taken_from_a_job_that_yields(fleet: SlurmFleet, tmp_path: Path) -> None:
    stranger = fleet.slurm.submit("sleep 1000", "-N1", "--exclusive", "--partition=low", "--no-requeue")
    stranger.wait("RUNNING")
    other = begun_without_spare(fleet, "--spares", "floating:1,partition=low", script=LONG)
    assert stranger.nodes() == [other]
    rank, left = next((rank, node) for rank in range(4) if (node := fleet.where(rank)) != fleet.head.name)
    fleet.slurm.update(left, "DRAIN", "xid 79")
    fleet.until_at(rank, lambda node: node == other)
    assert stranger.state() in ("PREEMPTED", "CANCELLED", "")
    ended_well(fleet, tmp_path, LONG)
    wait_until("all nodes are given back", lambda: all_given_back(fleet), deadline_s=30)


@pytest.mark.soak
def test_a_job_whose_time_is_over_soon_parks_and_another_job_goes_on(fleet: SlurmFleet, tmp_path: Path) -> None:
    place = f"{EVIDENCE}/parked"
    fleet.start(4, ["--nproc-per-node", "1", "--park-dir", place], LONG)
    fleet.until_steps(10)
    fleet.slurm.run("scontrol", "update", f"jobid={fleet.job.number}", "TimeLimit=2")
    done = fleet.end(tmp_path)
    assert done.code == 75, done.output
    assert "the time limit of its job" in done.output
    fleet.job.wait("COMPLETED", "")
    fleet.forget()
    shutil.rmtree(tmp_path / "run")
    fleet.start(4, ["--nproc-per-node", "1", "--resume", place], LONG)
    ended_well(fleet, tmp_path, LONG)


def all_given_back(fleet: SlurmFleet) -> bool:
    """No job runs any more, not even one of ours that nobody remembers."""
    return [line for line in fleet.slurm.jobs() if "COMPLETING" not in line] == []


# Slurm's own patience is five minutes. Without slurmdbd no comment is written any more once it has taken a node away.
@pytest.mark.parametrize("site", [Site(lost_after_s=60)], ids=["patient"])
def test_the_batch_node_loses_its_power_and_another_node_decides(fleet: SlurmFleet, tmp_path: Path) -> None:
    """With it the launcher, the orchestrator and a rank are lost. The job goes on, and is given back at its end."""
    begun(fleet, script=LONG)
    wait_until("two copies of the journal", lambda: fleet.copies() == 2, deadline_s=30)
    fleet.slurm.cut_power(fleet.head.name)
    head = wait_until("another head", fleet.heir_that_acts, deadline_s=40)
    wait_until("the roster without it", lambda: f'"{fleet.head.name}"' not in fleet.job.comment(), deadline_s=40)
    done = fleet.end_without_launcher(tmp_path, head)
    assert differences(done, undisturbed(LONG)) == []
    assert [(one["resolution"], one["steps_lost"]) for one in done.incidents()] == [("clean", 0)]
    wait_until("nothing is left", lambda: fleet.left() == [], deadline_s=30)
    wait_until("all nodes are given back", lambda: all_given_back(fleet), deadline_s=30)
