"""`torchrelay doctor slurm`: each line that is not well says what to do; without Slurm it says so."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_slurm import FakeSlurm
from torchrelay.cli.main import main


def ended(words: list[str]) -> object:
    """The exit code."""
    with pytest.raises(SystemExit) as end:
        main(["doctor", "slurm", *words])
    return end.value.code


def consulted(
    fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], job: str = "1"
) -> tuple[object, dict[str, dict[str, Any]]]:
    """The exit code, and the rows by name."""
    monkeypatch.setenv("PATH", str(fake.bin))
    monkeypatch.setenv("SLURM_JOB_ID", job)
    code = ended(["-o", "json"])
    return code, {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_all_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = consulted(FakeSlurm(tmp_path, version="24.11.5"), monkeypatch, capsys)
    assert code == 0, rows
    assert "seen in the batch script" in rows["--no-kill"]["found"]
    assert "these yield to train: low" in rows["preemption"]["found"]
    assert rows["parking in low"]["found"].startswith("low: GraceTime 120 s")
    assert "one of 3 idle nodes of train, as a job named gpt+spare.1.*" in rows["replacement"]["found"]


def test_what_is_not_well_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeSlurm(tmp_path, nodes=2)
    with fake.changed() as state:
        state["jobs"]["1"]["end"] = time.time() + 300
        state["low"] = "OFF"
    code, rows = consulted(fake, monkeypatch, capsys)
    assert code == 1
    assert {name for name, row in rows.items() if row["state"] != "ok"} == {"shrinking", "time", "replacement"}
    assert "no node of train is idle, and no partition yields" in rows["replacement"]["found"]
    assert rows["time"]["found"].startswith("5 minutes left; grace: 0 s")
    assert all(bool(row["remedy"]) == (row["state"] != "ok") for row in rows.values())


@pytest.mark.parametrize(
    ("grace", "found", "remedy"),
    [
        (29, "low: GraceTime is only 29 s", "ask for a GraceTime of 30 s or more; until then"),
        (0, "SIGTERM goes to the batch script, too, and SIGKILL follows after 30 s", "`exec torchrelay run`"),
    ],
)
def test_a_partition_whose_jobs_have_no_time_to_park_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    grace: int,
    found: str,
    remedy: str,
) -> None:
    fake = FakeSlurm(tmp_path, version="24.11.5")
    with fake.changed() as state:
        state["grace"] = grace
    code, rows = consulted(fake, monkeypatch, capsys)
    assert code == 1
    assert {name for name, row in rows.items() if row["state"] != "ok"} == {"parking in low"}
    assert found in rows["parking in low"]["found"]
    assert remedy in rows["parking in low"]["remedy"]


def test_a_partition_that_yields_to_nobody_is_not_asked_for_time_to_park(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeSlurm(tmp_path, version="24.11.5")
    with fake.changed() as state:
        state["low"], state["grace"] = "OFF", 0
    _, rows = consulted(fake, monkeypatch, capsys)
    assert not [name for name in rows if "parking" in name]


def test_outside_of_an_allocation_the_site_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = consulted(FakeSlurm(tmp_path, version="26.05.5"), monkeypatch, capsys, job="")
    assert code == 1
    assert "not inside an allocation" in rows["allocation"]["found"]
    code, rows = consulted(FakeSlurm(tmp_path, version="26.05.5"), monkeypatch, capsys, job="99")
    assert code == 1
    assert "Invalid job id" in rows["allocation"]["found"]


def test_without_slurm_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ended([]) == 2
    assert "there is no Slurm to examine here: scontrol is not on PATH" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "told"), [(["more"], "'more' means nothing"), (["-o", "yaml"], "yaml")])
def test_other_words_are_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(words) == 2
    assert told in capsys.readouterr().err
