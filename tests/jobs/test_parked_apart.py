"""A job on machines that share nothing is parked: each has the files of its own ranks, and all of them are needed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.faults import faulty
from tests.support.jobs import Finished, differences
from tests.support.machines.fleet import CLI, EVIDENCE, RUN_DIR, Fleet, at
from tests.support.machines.harness import Machines
from tests.support.machines.needs import needs_sshd
from tests.support.twins import undisturbed

pytestmark = [pytest.mark.timeout(280), needs_sshd, pytest.mark.soak]

SCRIPT = faulty("--steps", "60", "--pace", "0.1")
PLACE = "/tmp/parked"  # on each machine its own


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Fleet]:
    """Three machines that reach one another by ssh."""
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    with Machines(3, shared={EVIDENCE: evidence}) as machines:
        for machine in machines:
            machine.start_sshd()
        yield Fleet(machines, tmp_path, evidence)


def start(job: Fleet, hosts: str, flags: Sequence[str]) -> None:
    shape = ["--hosts", hosts, "--nproc-per-node", "2", "--export", "TORCHRELAY_DIGESTS"]
    job.start(SCRIPT, [*shape, *flags])


def end(job: Fleet) -> Finished:
    """With what it has left put aside, so that the next one begins in the same place."""
    done = job.end()
    shutil.rmtree(job.folder / "run")
    shutil.rmtree(at(job.head, RUN_DIR))
    return done


def files_at(job: Fleet, name: str) -> set[str]:
    return {path.name.split(".")[1] for path in at(job.machines[name], PLACE).glob("parked-*/*")}


def test_each_machine_has_its_own_files_and_all_are_needed(job: Fleet) -> None:
    start(job, "m1,m2", ["--park-dir", PLACE])
    job.until_steps(6)
    job.head.run([*CLI, "park", "--yes", "--run-dir", RUN_DIR])
    done = end(job)
    assert done.code == 75, done.output[-3000:]
    assert (files_at(job, "m1"), files_at(job, "m2"), files_at(job, "m3")) == ({"0", "1"}, {"2", "3"}, set())

    start(job, "m1,m3", ["--resume", PLACE])
    done = end(job)
    assert done.code == 91, done.output[-3000:]
    assert "of rank 2, 3 there is no file in" in done.output
    assert "(m1, m3)" in done.output

    shutil.copytree(at(job.machines["m2"], PLACE), at(job.machines["m3"], PLACE), dirs_exist_ok=True)
    start(job, "m3,m1", ["--resume", PLACE])  # in another order: ranks come to where their files are
    done = end(job)
    assert done.code == 0, done.output[-3000:]
    assert differences(done, undisturbed(SCRIPT)) == []
