"""Jobs that leave all their nodes: parked, and gone on later to the bits of the undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.jobs import Finished, differences, torchrelay
from tests.support.parked import RANKS, Parked, ask_to_park, holder, kill_all, script, wait_for_phase
from tests.support.twins import undisturbed
from torchrelay.wire.files.snapshot_store import HEADER
from torchrelay.wire.parked.manifest import MANIFEST, NoParking, read_manifest

pytestmark = pytest.mark.timeout(280)


@pytest.fixture
def parked(tmp_path: Path) -> Parked:
    return Parked(tmp_path, script())


def resume(parked: Parked, *flags: str, nodes: int = 1) -> Finished:
    return parked.run("--resume", str(parked.place), *flags, nodes=nodes)


def check(done: Finished, layout: str = "ddp") -> None:
    """It came to its end, and each point of each rank is that of the undisturbed run."""
    assert done.code == 0, done.output[-4000:]
    assert differences(done, undisturbed(script(layout), world=RANKS)) == []


SOAKED = pytest.mark.soak  # the same again, in `make soak`


@pytest.mark.parametrize(
    "layout", ["hsdp", *(pytest.param(layout, marks=SOAKED) for layout in ("ddp", "fsdp", "zero"))]
)
def test_a_parked_job_goes_on_to_the_same_bits(tmp_path: Path, layout: str) -> None:
    parked = Parked(tmp_path, script(layout))
    first = parked.parked_at(8)
    assert "torchrelay run --resume" in first.output
    line = first.incidents()[-1]
    assert (line["resolution"], line["steps_lost"], line["excluded"]) == ("parked", 0, "parked")
    second = resume(parked)
    check(second, layout)
    line = second.incidents()[0]
    assert (line["resolution"], line["steps_lost"], line["eligible"]) == ("clean", 0, False)
    assert line["source"].startswith("the parking after")


def test_it_goes_on_on_other_nodes_and_is_parked_again(parked: Parked) -> None:
    """Two nodes, then two others of which one has a spare, and in between nothing of the first is there any more."""
    parked.parked_at(5, nodes=2)
    process, run_dir = parked.start("--resume", str(parked.place), "--spares", "1", nodes=2)
    former = read_manifest(parked.place).name
    parked.until_step(process, run_dir, 14)
    parked.park(run_dir)
    assert parked.end(process, run_dir).code == 75
    again = read_manifest(parked.place)
    assert again.name != former
    assert not (parked.place / former).exists()
    check(resume(parked, nodes=2))


def test_a_sigterm_parks(parked: Parked) -> None:
    process, run_dir = parked.start("--park-dir", str(parked.place))
    parked.until_step(process, run_dir, 5)
    process.send_signal(signal.SIGTERM)
    done = parked.end(process, run_dir)
    assert done.code == 75, done.output[-3000:]
    check(resume(parked))


def test_a_rank_that_dies_while_all_park_is_replaced_first(parked: Parked) -> None:
    process, run_dir = parked.start("--park-dir", str(parked.place), "--spares", "1")
    parked.until_step(process, run_dir, 5)
    victim = holder(run_dir, 1)
    os.kill(victim, signal.SIGSTOP)  # so that the halt waits for it
    parked.park(run_dir)
    assert wait_for_phase(process, run_dir, ["quiescing"], 10) == "quiescing"
    os.kill(victim, signal.SIGKILL)
    done = parked.end(process, run_dir)
    assert done.code == 75, done.output[-3000:]
    assert [line["cause"].startswith("SIGKILL") for line in done.incidents()].count(True) == 1
    check(resume(parked))


@pytest.mark.parametrize("after_s", [0.1, *(pytest.param(after_s, marks=SOAKED) for after_s in (0.0, 0.3, 0.6))])
def test_what_is_killed_while_it_parks_resumes_whole_or_not_at_all(tmp_path: Path, after_s: float) -> None:
    """It has so much to write that this takes a while."""
    parked = Parked(tmp_path, script(ballast_mb=64))
    process, run_dir = parked.start("--park-dir", str(parked.place))
    parked.until_step(process, run_dir, 5)
    asking = ask_to_park(run_dir)
    wait_for_phase(process, run_dir, ["quiescing", "halting", "parking", "sealing"], 20)
    time.sleep(after_s)
    kill_all(process)
    asking.wait(30)
    try:
        read_manifest(parked.place)
    except NoParking:
        refused = resume(parked)
        assert refused.code == 94
        assert "holds no parking" in refused.output or "is not whole" in refused.output
        parked.parked_at(8)  # the same again, in the same folder
    done = resume(parked)
    assert done.code == 0, done.output[-4000:]
    assert differences(done, undisturbed(script(ballast_mb=64), world=RANKS)) == []


@pytest.mark.soak
def test_a_second_run_goes_on_only_if_that_is_meant(parked: Parked) -> None:
    parked.parked_at(20)
    check(resume(parked))
    again = resume(parked)
    assert again.code == 94
    assert "has gone on from there" in again.output
    check(resume(parked, "--resume-again"))


def test_what_cannot_be_proved_right_is_refused(parked: Parked, tmp_path: Path) -> None:
    parked.parked_at(5)
    refused = {
        "gives 2 ranks": (resume(parked, "--nproc-per-node", "2"), "it is of 4 ranks"),
        "is of another layout": (resume(parked, nodes=2), "4 a node"),
    }
    words = parked.words
    parked.words = [*words, "--steps", "31"]
    refused["has other arguments"] = (resume(parked), "other arguments then")
    parked.words = words
    refused["parks over it"] = (parked.run("--park-dir", str(parked.place)), "holds a parking of")
    path = parked.place / MANIFEST
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"torch":"2', b'"torch":"1'))
    refused["has a damaged manifest"] = (resume(parked), "its digest differs")
    path.write_bytes(whole)
    file = next((parked.place / read_manifest(parked.place).name).iterdir())
    file.rename(tmp_path / "aside")
    refused["lacks a file"] = (resume(parked), "files are missing in")
    for name, (done, why) in refused.items():
        assert done.code == 94, (name, done.output[-2000:])
        assert why in done.output, (name, done.output[-2000:])
    (tmp_path / "aside").rename(file)
    check(resume(parked))


def test_a_file_that_is_damaged_is_found_by_its_digest(parked: Parked) -> None:
    parked.parked_at(5)
    file = next((parked.place / read_manifest(parked.place).name).iterdir())
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    assert len(data) > HEADER
    file.write_bytes(data)
    done = resume(parked)
    assert done.code == 91, done.output[-3000:]
    assert "could not go on from its parking" in done.output
    data[-1] ^= 1
    file.write_bytes(data)
    check(resume(parked))  # it had not gone on


def test_a_disk_that_is_full_costs_nothing(parked: Parked) -> None:
    parked.place.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(parked.place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        process, run_dir = parked.start("--park-dir", str(parked.place))
        parked.until_step(process, run_dir, 5)
        parked.park(run_dir)
        done = parked.end(process, run_dir)
    finally:
        subprocess.run(["umount", str(parked.place)], check=True)
    check(done)
    assert "no room for" in done.output, done.output[-3000:]
    assert {line["resolution"] for line in done.incidents()} == {"called off"}


def test_what_does_not_fit_into_the_time_is_said_at_the_start_and_not_tried(tmp_path: Path) -> None:
    parked = Parked(tmp_path, script(ballast_mb=64))
    process, run_dir = parked.start("--park-dir", str(parked.place), "--grace", "0.02")
    parked.until_step(process, run_dir, 8)
    process.send_signal(signal.SIGTERM)
    done = parked.end(process, run_dir)
    assert "this job could not be parked in time" in done.output
    assert "to write it down takes" in done.output
    assert done.code not in (0, 75), done.output[-2000:]
    assert not (parked.place / MANIFEST).exists()


def test_a_job_without_a_place_says_so(parked: Parked) -> None:
    process, run_dir = parked.start()
    parked.until_step(process, run_dir, 2)
    said = torchrelay("park", "--yes", "--run-dir", str(run_dir))
    assert said.returncode != 0
    assert "--park-dir" in said.stderr
    process.send_signal(signal.SIGKILL)
    process.wait(30)
